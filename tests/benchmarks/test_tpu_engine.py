"""The engine's program for a TPU slice: the reader of XLA's listings, and one program compiled, if libtpu is here."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.tpu import aot, hlo
from benchmarks.tpu.limits import CHIPS
from tests.rooms import tree

HEADER = (
    "HloModule jit_dispatch, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1}: (3, {}, may-alias) }"
    ", entry_computation_layout={(bf16[4]{0})->bf16[4]{0}}\n"
)
LISTING = """
%greedy (p: f32[8]) -> s32[8] {
  ROOT %all-gather.1 = s32[4,8]{1,0:T(4,128)} all-gather(%p), dimensions={0}
}

%drawn (p: f32[8]) -> s32[8] {
  %all-reduce.9 = f32[8]{0:T(128)} all-reduce(%p), to_apply=%sum
}

%body (p: (bf16[4])) -> (bf16[4]) {
  %copy.1 = bf16[9,2,16,64]{3,2,1,0:T(8,128)(2,1)} copy(%p)
  %kernel.1 = (bf16[2,16]{1,0:T(8,128)(2,1)}, f32[2]{0}) custom-call(%copy.1), custom_call_target="tpu_custom_call"
  %all-reduce.1 = bf16[64,256]{1,0:T(8,128)(2,1)} all-reduce(%kernel.1), to_apply=%sum
  %conditional.1 = s32[8]{0} conditional(%i, %p, %p), branch_computations={%greedy, %drawn}
}

ENTRY %main (p: bf16[4]) -> bf16[4] {
  %copy.2 = bf16[9,2,16,64]{0,3,2,1:T(8,128)(2,1)} copy(%p)
  %while.1 = (bf16[4]) while(%p), condition=%more, body=%body
}
"""


def test_the_step_is_the_body_with_the_branch_of_greedy_rows():
    listing = hlo.Listing(HEADER + LISTING)
    assert listing.donated == [2, 3] and hlo.kernels(listing.step) == 1
    assert [(op.kind, op.bytes) for op in hlo.collectives(listing.step)] == [
        ("all-reduce", 64 * 256 * 2),
        ("all-gather", 4 * 128 * 4),
    ]


def test_copies_of_a_pool_are_counted_with_the_bytes_of_their_tiles():
    listing, pool = hlo.Listing(LISTING), (9, 2, 16, 64)
    (inside,), (outside,) = (hlo.copies(part, pool) for part in (listing.step, listing.around))
    assert inside.bytes == 9 * 2 * 16 * 128 * 2, "rows of 64 are padded to 128"
    assert outside.bytes == 128 * 2 * 16 * 64 * 2, "9 blocks are padded to 128"
    assert not hlo.copies(listing.step, (9, 2, 16, 128))


def test_what_the_sparse_cores_do_counts_once():
    """Lines of a program for tpu7x."""
    lines = """
    %body (p: (bf16[4])) -> (bf16[4]) {
      %all-reduce.6.cloned.1.call-start = ((), (), (s32[40]{0:T(1024)})) async-start(), calls=%async
      %all-reduce.6.cloned.1.call-update = ((bf16[8,128]{1,0}), bf16[8,128]{1,0}) async-update(%all-reduce.6)
      %all-reduce.6.cloned.1.call-done = bf16[8,128]{1,0:T(8,128)(2,1)} async-done(%all-reduce.6.cloned.1.call-update)
      %sparse-core-data-format-call.3.cloned.1.call-done = bf16[9,1,64,64]{3,2,1,0:T(8,128)(2,1)} async-done(%x)
      %kernel.1 = bf16[2,16]{1,0} custom-call(%p), custom_call_target="tpu_custom_call"
    }"""
    step = hlo.Listing(lines.replace("\n    ", "\n")).step
    assert [op.bytes for op in hlo.collectives(step)] == [8 * 128 * 2]
    assert len(hlo.copies(step, (9, 1, 64, 64))) == 1


def test_a_listing_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="0 computations call a kernel"):
        hlo.Listing(LISTING.replace("tpu_custom_call", "other")).step  # noqa: B018


def test_the_time_of_a_ring_of_four_chips():
    assert CHIPS["v6e"].collective_seconds("all-reduce", 10**6, 4) == pytest.approx(2 * 0.75e6 / 2e11)
    assert CHIPS["tpu7x"].collective_seconds("all-gather", 10**6, 8) == pytest.approx(0.75e6 / 2e11)


@pytest.mark.slow
@pytest.mark.timeout(840)
@pytest.mark.skipif(not aot.available(), reason="the libtpu wheel is not installed: pip install libtpu")
@pytest.mark.parametrize(("chip", "case", "layers"), [("v6e", "decode_1b_r64", 2), ("v5e", "prefill_1b_2048", 1)])
def test_the_engines_program_compiles_for_a_slice(chip, case, layers):
    """Each pool is donated, and XLA copies none between the write and the kernel, to VMEM neither."""
    command = [sys.executable, "-m", "benchmarks.tpu.engine", "--chips", chip, "--cases", case]
    done = subprocess.run([*command, "--layers", str(layers)], env=os.environ | aot.environment(), cwd=tree.ROOT,
                          capture_output=True, text=True)  # fmt: skip
    (row,) = map(json.loads, done.stdout.splitlines())
    assert "error" not in row, row
    assert row["kernels"] == 2 * layers, "in each layer a write and attention"
    assert row["pools"] == row["pools_donated"] == 2 * layers
    assert row["pool_copies_in_step"] == row["pool_copies_in_dispatch"] == 0, "heads of 64 fill the lanes"
    assert row["collectives"] == 1 + 2 * layers + 2, "the embedding, two in each layer, greedy sampling"
    assert 0 < row["memory_ms"] < row["step_ms"]
