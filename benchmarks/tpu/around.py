"""What XLA does around the TPU kernel: queries, outputs, the write of keys and values, and the rows of top-k lists.

    python -m benchmarks.tpu.around [--write | --out DIR] [--chips v5e,v6e]

decode, prefill              an attention call of 256 decodes; of two prompts of 2048; the work list is given
decode_lse, prefill_lse      the same where the caller takes the lse, not the output
kv_write                     keys and values of 256 new tokens put into the pools
listed_rows                  256 x 2048 rows of 512 + 64 of a latent cache, as `topk_indices` names them

32 query and 8 kv heads of 128, bf16, pages of 128. `cycles` is XLA's own estimate of all operations, without those of
a loop's further trips; `us` is by the clock of benchmarks.tpu.limits, and `memory_us` what the bytes take that must be
moved. sparse_core: operations that XLA gives to a SparseCore; there is no estimate of these. Nothing was timed.
"""

import contextlib
import os
import pathlib
import re
import sys
import tempfile

from benchmarks.tpu import aot, command, hlo
from benchmarks.tpu.limits import CHIPS

TOKENS, LISTED = 256, 2048
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


def programs(chip: str) -> dict[str, tuple]:
    """(bytes that must be moved, function, donated arguments, arguments as shapes) of each case."""
    import jax
    import jax.numpy as jnp

    import jattn
    from jattn.cache.write import write_by_head

    shape = lambda *dims, dtype="bfloat16": jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    def attention(batch: aot.Shape, result: str):
        _, (q, cache, meta, params) = aot.call(batch, chip)
        attn = jattn.PagedAttention(aot.layer_of(batch), cache.spec, "pallas_tpu", jattn.device.Chip("tpu", chip))
        plan = jax.eval_shape(attn.build, meta)
        return 0, lambda *args: getattr(attn.attend(*args), result), (), (q, cache, plan, params)

    def write(cache, k, v, slots):
        return write_by_head(cache, k, v, slots)

    new = shape(TOKENS, 8, 128)
    pools = shape(4096 * 128, 64), shape(4096 * 128, 512)
    listed = lambda ropes, latents, rows: (ropes[rows], latents[rows])
    _, (_, cache, _, _) = aot.call(aot.DECODE, chip)
    return dict(
        decode=attention(aot.DECODE, "out"),
        prefill=attention(aot.PREFILL, "out"),
        decode_lse=attention(aot.DECODE, "lse"),
        prefill_lse=attention(aot.PREFILL, "lse"),
        kv_write=(2 * 2 * new.size * 2, write, (0,), (cache, new, new, shape(TOKENS, dtype="int32"))),
        listed_rows=(2 * TOKENS * LISTED * 576 * 2, listed, (), (*pools, shape(TOKENS, LISTED, dtype="int32"))),
    )  # fmt: skip


def row_of(chip: str, case: str, moved: int, function, donated, arguments) -> dict:
    """The row of one case."""
    import jax

    def program(*arguments):
        return function(*arguments)

    program.__name__ = case
    with tempfile.TemporaryDirectory() as folder:
        compiled = aot.compile_for(chip, program, *arguments, donated=donated, options=hlo.options(folder))
        (path,) = pathlib.Path(folder).glob(f"*jit_{case}.*after_optimizations.txt")
        listing = hlo.Listing(path.read_text())
    limits, cycles = CHIPS[chip], None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # where an operation of a SparseCore cannot be printed
        cycles = sum(int(number) for number in ESTIMATE.findall(compiled.as_text()))
    return dict(
        chip=chip, case=case, cycles=cycles, us=None if cycles is None else round(cycles / limits.clock * 1e6, 2),
        memory_us=round(moved / limits.hbm * 1e6, 2),
        sparse_core=sum("offload_async_start" in op.label and "update" not in op.label for op in listing.around),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Compile, print and keep the rows."""
    args = command.parser("benchmarks.tpu.around", str(__doc__)).parse_args(argv)
    os.environ.update(aot.environment())
    found = (row_of(chip, case, *program) for chip in args.chips.split(",") for case, program in programs(chip).items())
    return command.exit_code(command.print_and_keep("around", args, found))


if __name__ == "__main__":
    sys.exit(main())
