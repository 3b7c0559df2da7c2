"""Bundles from the listing of a compiled kernel: for each key of a decode, a short sequence, and prefill.

In this package's kernel the loop over tiles is the largest loop and the loop over blocks the largest in it; a block of
few rows is either straight code or a loop over masked parts. Of JAX's kernel the innermost loop with a matrix product
is counted. As a program it times the kernel on a TPU: see benchmarks.tpu.timed.
"""

import sys

from benchmarks.tpu.llo import Program, Span
from pallas_kernels.tpu.config import TpuKernelConfig

PAGES_OF_200 = 2  # a context of 200 tokens in pages of 128


def decode(program: Program, config: TpuKernelConfig) -> dict:
    """Bundles for each key where every key is visible, with the fetch of the next block; and for 200 keys in all."""
    tile, block = _tile_and_block(program)
    parts = [loop for loop in _products(program, program.loops) if block.holds(loop)]
    bodies = [s for s in _products(program, program.skipped) if block.holds(s)]
    masked = max((s for s in bodies if any(s.holds(p) for p in parts)), key=lambda s: s.size)
    plain = min((s for s in bodies if not any(s.holds(p) or p == s for p in parts)), key=lambda s: s.size)
    long = program.path(block, _pages(program, config.block_pages), (masked,))
    short = program.path(block, _pages(program, PAGES_OF_200), (plain,))
    around = program.path(tile, lambda loop: 0 if loop == block else 1)
    along = lambda word: program.count_along(block, word, _pages(program, config.block_pages), (masked,))
    return dict(
        keys=config.block_keys, bundles_per_key=round(long / config.block_keys, 3), bundles_at_200=around + short,
        body=plain.size, spills=program.count(plain, "spill"),
        descriptors=along("dma.hbm_to_vmem"), waits=along("dma.done.wait"),
    )  # fmt: skip


def prefill(program: Program, config: TpuKernelConfig) -> dict:
    """1e-3 bundles for each pair of query and key, all heads: blocks that every row sees, and masked ones."""
    heads = next(n for n in range(config.long_heads, 0, -1) if config.num_kv_heads % n == 0)
    queries = config.chunk_rows / config.group * heads / config.num_kv_heads
    loops = sorted(innermost(program), key=lambda loop: loop.size)[-2:]  # the smaller ones are bodies of few rows
    masked, seen = (
        round(1e3 * loop.size / queries / keys, 1)
        for loop, keys in zip(loops, (config.part_keys, config.block_keys), strict=True)
    )
    spills = program.count(loops[1], "spill")
    return dict(keys=config.block_keys, milli_bundles=seen, milli_bundles_masked=masked, spills=spills)


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


if __name__ == "__main__":
    from benchmarks.tpu import timed

    sys.exit(timed.main())
