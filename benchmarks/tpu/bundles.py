"""Bundles from the listing of a compiled kernel: for each key of a decode, a short sequence, and prefill.

In this package's kernel the loop over tiles is the largest loop and the loop over blocks the largest in it; a block of
few rows is either straight code or a loop over masked parts. Of JAX's kernel the innermost loop with a matrix product
is counted. benchmarks.tpu.measure times the kernel on a TPU.
"""

from benchmarks.tpu.llo import Program, Span
from pallas_kernels.tpu.config import TOKENS_TOGETHER, TpuKernelConfig
from pallas_kernels.tpu.row_order import query_order

PAGES_OF_200 = 2  # a context of 200 tokens in pages of 128


def decode(program: Program, config: TpuKernelConfig) -> dict:
    """Bundles for each key where every key is visible, with the fetch of the next block; and for 200 keys in all."""
    tile, block = _tile_and_block(program)
    parts = [loop for loop in _products(program, program.loops) if block.holds(loop)]
    bodies = [s for s in _products(program, program.skipped) if block.holds(s)]
    masked = max((s for s in bodies if any(s.holds(p) for p in parts)), key=lambda s: s.size)
    plain = min((s for s in bodies if not any(s.holds(p) or p == s for p in parts)), key=lambda s: s.size)
    # two loops clear the values of pages before the range and past its end; in 200 keys the second runs once
    clear = [s for s in program.inside(block, program.loops) if s not in parts and program.count(s, "vsel")]
    assert len(clear) == 2, "the loops that clear values were not found"
    long = program.path(block, _pages(program, config.block_pages), (masked, *clear))
    short = program.path(block, _pages(program, PAGES_OF_200), (plain, clear[0]))
    around = program.path(tile, lambda loop: 0 if loop == block else 1)
    along = lambda word: program.count_along(block, word, _pages(program, config.block_pages), (masked,))
    return dict(
        keys=config.block_keys, bundles_per_key=round(long / config.block_keys, 3), bundles_at_200=around + short,
        body=plain.size, spills=program.count(plain, "spill"),
        descriptors=along("dma.hbm_to_vmem"), waits=along("dma.done.wait"),
    )  # fmt: skip


def prefill(program: Program, config: TpuKernelConfig) -> dict:
    """1e-3 bundles for each pair of query and key, all heads, of the three bodies of many rows and of two prompts."""
    products = lambda loop: program.count(loop, "vmatmul")
    loops = sorted(innermost(program), key=products)[-3:]  # the ones before are bodies of few rows
    step = loops.pop()
    part, masked = sorted(loops, key=lambda loop: program.count(loop, "vcmp"))
    assert products(step) == config.step_parts * products(part) == config.step_parts * products(masked)
    sizes = [loop.size * config.num_kv_heads // config.staged_heads for loop in (step, part, masked)]
    pairs = config.chunk_rows / config.group * config.part_keys
    milli = lambda size, parts=1: round(1e3 * size / pairs / parts, 1)
    short, long = (prompt(tokens, config, sizes) for tokens in (512, 8192))
    return dict(
        milli_bundles=milli(sizes[0], config.step_parts), part=milli(sizes[1]), masked=milli(sizes[2]),
        prompt_512=short["computed"], prompt_512_visible=short["visible"],
        prompt_8k=long["computed"], prompt_8k_visible=long["visible"], order=order_of_rows(program, config),
        spills=program.count(step, "spill"),
        spills_of_parts=[program.count(loop, "spill") for loop in (part, masked)],
    )  # fmt: skip


def order_of_rows(program: Program, config: TpuKernelConfig) -> float:
    """Bundles for each token that put queries into the order of rows and outputs out of it, once a tile."""
    if config.in_place:
        return 0.0
    words = f"ss:${query_order(config).pitch} "
    loops = [x for x in program.loops if program.count(x, words) and not any(x.holds(y) for y in program.loops)]
    assert len(loops) == 2, "the loops over the tokens of a tile were not found"
    return round(sum(loop.size for loop in loops) / TOKENS_TOGETHER, 1)


def prompt(tokens: int, config: TpuKernelConfig, sizes) -> dict:
    """1e-3 bundles in the bodies for each pair that is computed, and for each that is visible, of a causal prompt."""
    c, queries = config, config.chunk_rows // config.group
    bundles = parts = 0
    for first in range(0, tokens, queries):
        for start in range(0, first + queries, c.block_keys):
            full = min(first + 1 - start, c.block_keys) // c.part_keys if first + 1 > start else 0
            edge = -(-min(first + queries - start, c.block_keys) // c.part_keys) - full
            steps, rest = divmod(full, c.step_parts)
            bundles += sum(n * size for n, size in zip((steps, rest, edge), sizes, strict=True))
            parts += full + edge
    computed = parts * c.part_keys * queries
    return dict(
        computed=round(1e3 * bundles / computed, 1), visible=round(2e3 * bundles / (tokens * (tokens + 1)), 1)
    )  # fmt: skip


def jax_kernel(program: Program, keys: int, queries: int) -> dict:
    """The same for a kernel whose innermost loop takes `keys` keys for `queries` queries of all heads."""
    size = max(loop.size for loop in innermost(program))
    return dict(keys=keys, bundles_per_key=round(size / keys, 3), milli_bundles=round(1e3 * size / keys / queries, 1))


def innermost(program: Program) -> list[Span]:
    """Loops with a matrix product and no further such loop."""
    loops = _products(program, program.loops)
    return [loop for loop in loops if not any(loop.holds(other) for other in loops)]


def _products(program: Program, spans: list[Span]) -> list[Span]:
    return [span for span in spans if program.count(span, "vmatmul")]


def _tile_and_block(program: Program) -> tuple[Span, Span]:
    tile = max(program.loops, key=lambda loop: loop.size)
    return tile, max(program.inside(tile, program.loops), key=lambda loop: loop.size)


def _pages(program: Program, pages: int):
    """Trips of a nested loop: pages that are fetched or waited for, else one."""
    moves = lambda loop: program.count(loop, "dma.hbm_to_vmem") or program.count(loop, "dma.done.wait")
    return lambda loop: pages if moves(loop) else 1
