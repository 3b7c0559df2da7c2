"""The reader of libtpu's listings, on a listing small enough to count by hand."""

from benchmarks.tpu import llo

LISTING = """
= control target key start
   0x0   :  { %1 = smov }
   0x1   :  { %2 = sbr.rel (%p1) target = $region9  ;;  %3 = sadd }
   0x2 LB: > { %4 = vld }
   0x3   : > { %5 = sbr.rel (%p2) target = $region5 }
   0x4   : > { %6 = vmatmul } /* Start region 4 */
     continued vmatmul
   0x5   : >  { %7 = vmatmul }
   0x6 LB: >> { %8 = dma.hbm_to_vmem }
   0x7   : >> { %9 = sbr.rel (!%p3) target = $region6 }
   0x8   :  { }
   0x9   : > { %10 = vst } /* Start/End empty region 5 */
   0xa   :  { %11 = nop } /* Start/End empty region 9 */
"""


def test_loops_and_what_branches_skip():
    program = llo.parse(LISTING)
    assert len(program.texts) == 11
    assert program.loops == [llo.Span(2, 10), llo.Span(6, 9)], "an empty delay slot belongs to the loop before it"
    assert program.skipped == [llo.Span(2, 10), llo.Span(4, 9)]
    assert program.count(llo.Span(2, 10), "vmatmul") == 3


def test_a_path_leaves_code_out_and_repeats_nested_loops():
    program = llo.parse(LISTING)
    outer, inner = program.loops
    assert program.path(outer, lambda loop: 1) == outer.size
    assert program.path(outer, lambda loop: 4) == 5 + 4 * inner.size
    assert program.path(outer, lambda loop: 4, without=(llo.Span(4, 9),)) == outer.size - 5


FETCH = """
   0x0   :  { %1 = smov }
   0x1 LB: > { %2 = sld } /* Start region 7 :: Start region 8 */
   0x2   :  { %3 = sbr.rel (!%p1) target = $region7 }
   0x3   : > { %4 = sshll }
   0x4   :  {}
   0x5   : > { %5 = dma.hbm_to_vmem }
   0x6   : > { %6 = dma.hbm_to_vmem }
   0x7 PF:  { %7 = smul }
"""


def test_a_loop_ends_behind_the_delay_slots_of_its_branch_back():
    """The branch is printed less deep. Pages that are fetched in its delay slots count once each, not once in all."""
    program = llo.parse(FETCH)
    (loop,) = program.loops
    assert loop == llo.Span(1, 7)
    whole = llo.Span(0, 8)
    assert program.path(whole, lambda loop: 12) == 2 + 12 * 6
    assert program.count_along(whole, "dma.hbm_to_vmem", lambda loop: 12) == 24
