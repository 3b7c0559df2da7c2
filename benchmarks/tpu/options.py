"""Compiles the TPU kernel with every option, alone and all together, for every head dim, dtype and generation.

    python -m benchmarks.tpu.options [--sample [TURN]] [--chips v5e,v6e] [--options alibi,nhd] [--write | --out DIR]

A cell is one option, head dim, dtype and chip: "compiled", "refused" by the backend, with its reason, or "failed". A
row has the cells of an option and a chip; a table of all rows ends the run, which exits with 1 if a cell failed. Rows
that are kept are read again, so a run that was stopped goes on where it was. A cell takes 1 to 2 s of one core, all of
them more than an hour; --sample takes each pair of option and head dim once, with dtypes and chips in turn; other
turns than 0 have other cells.

Layers have 4 query and 2 kv heads, blocks and tiles are small: this asks whether the compiler takes the operations.
benchmarks.tpu.aot compiles a choice of shapes with all heads and the sizes that are taken by default. Launches that
differ in the option alone are compiled as one program; if it fails, each by itself.
"""

import dataclasses
import functools
import itertools
import os
import sys
from unittest import mock

from benchmarks import records
from benchmarks.tpu import aot, command
from benchmarks.tpu.aot import Shape

HEADS = dict(num_heads=4, num_kv_heads=2)
SIZES = dict(block_kv=256, part_kv=128, step_kv=256, tile_rows=32, chunk_rows=16, short_heads=1, long_heads=2)
BESIDE = dict(block_kv=512, part_kv=256, step_kv=512)  # where keys lie side by side
DIMS = (64, 80, 96, 112, 128, 192, 256)
DTYPES = {
    "bfloat16": dict(dtype="bfloat16"),
    "float32": dict(dtype="float32", cache=dict(dtype="float32")),
    "float16": dict(dtype="float16"),  # over bfloat16
    "float8_e4m3fn": dict(cache=dict(dtype="float8_e4m3fn", quant="per_tensor")),
    "int8": dict(cache=dict(dtype="int8", quant="per_tensor")),
}
"""Of queries and cache."""

WINDOW, CHUNK, ALIBI = dict(sliding_window=300), dict(chunk_size=1000), dict(has_alibi=True)
TREE = dict(query_lens=(24,) * 16)  # of as many new tokens as the biases of aot
MANY = dict(
    **ALIBI, **aot.CAP, use_alibi_sqrt=True, has_sinks=True, mask_fn=aot.two_thirds, score_fn=aot.faded,
    use_mm_prefix=True, output_dtype="float8_e4m3fn",
)  # fmt: skip
DECODES = (1,) * 16
IN_PLACE = dict(spec=dict(num_heads=32, num_kv_heads=8), query_lens=DECODES)  # see TpuKernelConfig.in_place
OPTIONS: dict[str, dict] = {
    "none": {},
    "sliding_window": dict(spec=WINDOW),
    "two_sided": dict(spec=dict(sliding_window=(100, 30))),
    "chunk_size": dict(spec=CHUNK),
    "chunk_lookback": dict(spec=CHUNK | dict(chunk_lookback=1)),
    "alibi": dict(spec=ALIBI),
    "alibi_sqrt": dict(spec=ALIBI | dict(use_alibi_sqrt=True)),
    "soft_cap": dict(spec=aot.CAP),
    "sinks": dict(spec=dict(has_sinks=True)),
    "mask_fn": dict(spec=dict(mask_fn=aot.two_thirds)),
    "score_fn": dict(spec=dict(score_fn=aot.faded)),
    "mm_prefix": dict(spec=dict(use_mm_prefix=True)),
    "rswa": dict(spec=WINDOW | dict(use_rswa=True)),
    "qq_bias": dict(spec=dict(use_qq_bias=True), **TREE),
    "output_dtype": dict(spec=dict(output_dtype="float8_e4m3fn")),
    "v_head_dim": {},  # another than head_dim, see shape_of
    "not_causal": dict(causal=False),
    "causal_each": dict(causal="each"),
    "encoder": dict(spec=dict(attn_type="encoder_only")),
    "q_scale": dict(q_scale=True),
    "head_scales": dict(cache=dict(quant="per_head")),
    "token_scales": dict(cache=dict(quant="per_token_head")),
    "nhd": dict(cache=dict(layout="NHD")),
    "hnd128": dict(cache=dict(layout="HND128")),
    "page_16": dict(cache=dict(block_size=16)),
    "page_48": dict(cache=dict(block_size=48)),
    "page_256": dict(cache=dict(block_size=256)),
    "ranks": dict(ranks=2, interleave=4),
    "together_window": dict(
        spec=MANY | WINDOW | dict(mm_prefix_clamp_sliding_window=True, use_rswa=True), cache=dict(quant="per_head"),
        q_scale=True,
    ),
    "together_tree": dict(spec=MANY | WINDOW | dict(use_qq_bias=True), cache=dict(quant="per_token_head"), **TREE),
    "together_chunk": dict(
        spec=MANY | CHUNK | dict(chunk_lookback=1), cache=dict(layout="NHD", block_size=48), causal="each",
    ),
    "together_ranks": dict(spec=MANY | CHUNK, cache=dict(layout="HND128", block_size=64), ranks=2, interleave=4),
}  # fmt: skip
OPTIONS |= {
    "decode": IN_PLACE,
    "decode_mha": dict(spec=dict(num_heads=32, num_kv_heads=32), cache=dict(num_blocks=256), query_lens=DECODES),
    "decode_mqa": dict(spec=dict(num_heads=16, num_kv_heads=1), query_lens=DECODES),
} | {
    f"decode_{name}": OPTIONS[name] | IN_PLACE | dict(spec=OPTIONS[name]["spec"] | IN_PLACE["spec"])
    for name in ("together_window", "together_tree", "together_ranks")
}  # fmt: skip
"""Arguments of Shape beside head dim and dtype. together_: all that are possible at once, in four layers. decode_:
batches of decodes, whose queries the kernel takes as they are."""

NEEDS_8_BITS = ("per_head", "per_token_head")


def shape_of(option: str, dim: int, dtype: str) -> Shape | None:
    """The layer and batch of a cell; None: there is no such cell."""
    given, stored = OPTIONS[option], DTYPES[dtype].get("cache", {})
    spec, cache = HEADS | dict(head_dim=dim) | given.get("spec", {}), stored | given.get("cache", {})
    if cache.get("quant") in NEEDS_8_BITS and "quant" not in stored:
        if "together" not in option:
            return None
        del cache["quant"]
    if option == "v_head_dim":
        spec["v_head_dim"] = 64 if dim == 128 else 128
    if cache.get("layout") == "HND128" and dim != 64:
        if option == "hnd128":
            return None
        del cache["layout"]
    more = {name: value for name, value in (DTYPES[dtype] | given).items() if name not in ("spec", "cache")}
    return Shape(option, spec, cache, **more)


def cells(options, chips, turn: int | None = None) -> list[tuple[str, int, str, str]]:
    """Every (option, head dim, dtype, chip); of a turn each option and head dim once, dtypes and chips in turn."""
    if turn is None:
        return [x for x in itertools.product(options, DIMS, DTYPES, chips) if shape_of(*x[:3])]
    found = []
    for i, option in enumerate(options):
        for j, dim in enumerate(DIMS):
            if able := [dtype for dtype in DTYPES if shape_of(option, dim, dtype)]:
                at = i + j + turn
                found.append((option, dim, able[at % len(able)], chips[at % len(chips)]))
    return found


@functools.cache
def launches(option: str, dim: int, dtype: str, chip: str = "v6e") -> list[tuple]:
    """(config, arguments as shapes) of each launch of the kernel in a cell's call of the backend."""
    import jax
    import jax.numpy as jnp

    from jattn.backends import pallas_tpu
    from pallas_kernels.tpu import paged_attention, work_list

    found, default, shape = [], pallas_tpu.default_config, shape_of(option, dim, dtype)
    assert shape is not None

    def seen(config, *arguments, interpret):
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        found.append((config, given))
        q, work = arguments[0], arguments[4]
        out = jnp.zeros((*q.shape[:-1], config.v_head_dim), config.out_dtype)
        return out, jnp.zeros(work_list.lse_shape(work, config), jnp.float32)

    def small(**fields):
        sizes = SIZES | (BESIDE if fields["layout"] == "HND128" else {})
        if max(shape.query_lens) == 1:
            sizes = {name: size for name, size in sizes.items() if name in ("block_kv", "part_kv")}
        return default(**fields | sizes)

    with mock.patch.multiple(paged_attention, _launch=seen), mock.patch.multiple(pallas_tpu, default_config=small):
        function, arguments = aot.call(shape, chip)
        with jax.set_mesh(aot.mesh_of(chip)):
            jax.eval_shape(function, *arguments)
    if not found:
        raise RuntimeError("the call has no launch: was it traced before?")
    return found


def compile_together(chip: str, some: list[tuple]) -> None:
    """One program of these launches, with the sizes of the chip's table."""
    from pallas_kernels.tpu import paged_attention
    from pallas_kernels.tpu.tile_policy import tuned_sizes

    configs = [dataclasses.replace(config, **tuned_sizes(chip)) for config, _ in some]

    def program(*arguments):
        return [
            paged_attention._launch(config, *given, interpret=False)
            for config, given in zip(configs, arguments, strict=True)
        ]

    aot.compile_for(chip, program, *(arguments for _, arguments in some))


def results(chip: str, group: list[tuple[str, int, str]]) -> dict[tuple, str]:
    """'compiled', 'refused: ...' or 'failed: ...' of each cell, which are compiled as one program if that works."""
    import jattn

    found: dict[tuple, str] = {}
    traced: dict[tuple, list] = {}
    for cell in group:
        try:
            traced[cell] = launches(*cell)
        except jattn.UnsupportedError as error:
            found[cell] = f"refused: {'; '.join(x for reasons in error.reasons.values() for x in reasons)}"
        except Exception as error:  # a fault of the layer's trace is an answer, too
            found[cell] = f"failed: {type(error).__name__}: {error}"[:600]
    try:
        if traced:
            compile_together(chip, [launch for some in traced.values() for launch in some])
        return found | dict.fromkeys(traced, "compiled")
    except Exception:  # the compiler raises many kinds
        if len(traced) == 1:
            cell, error = next(iter(traced)), sys.exc_info()[1]
            return found | {cell: f"failed: {error}"[:600]}
    for cell in traced:
        found |= results(chip, [cell])
    return found


def row_of(chip: str, option: str, seen: dict[str, str]) -> dict:
    """The row of an option on a chip; seen: the result of each 'dtype dim'."""
    refused: dict[str, list[str]] = {}
    for cell, result in seen.items():
        if result.startswith("refused: "):
            refused.setdefault(result.removeprefix("refused: "), []).append(cell)
    failed = {cell: result for cell, result in seen.items() if result.startswith("failed")}
    compiled = [cell for cell, result in seen.items() if result == "compiled"]
    return dict(chip=chip, case=option, compiled=compiled, refused=refused, failed=failed)


def seen_of(row: dict) -> dict[str, str]:
    """The inverse of row_of, without what failed."""
    refused = {cell: f"refused: {reason}" for reason, some in row["refused"].items() for cell in some}
    return dict.fromkeys(row["compiled"], "compiled") | refused


def known(rows: dict[tuple[str, str], dict], option: str, chip: str) -> dict[str, str]:
    """The results of an option on a chip so far."""
    return seen_of(rows[option, chip]) if (option, chip) in rows else {}


def table(rows: list[dict]) -> str:
    """Cells that were compiled, of each option and chip; r: refused, F: failed."""
    chips = list(dict.fromkeys(row["chip"] for row in rows))
    by_cell = {(row["case"], row["chip"]): row for row in rows}
    lines = [f"{'compiled':18}" + "".join(f"{chip:>12}" for chip in chips)]
    for option in dict.fromkeys(row["case"] for row in rows):
        lines.append(f"{option:18}" + "".join(f"{_cell(by_cell.get((option, chip))):>12}" for chip in chips))
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    refused, failed = sum(map(len, row["refused"].values())), len(row["failed"])
    return f"{len(row['compiled'])}" + f" r{refused}" * bool(refused) + f" F{failed}" * bool(failed)


def main(argv: list[str] | None = None) -> int:
    """Compile, print and keep the rows; 1 if a cell failed."""
    parser = command.parser("benchmarks.tpu.options", str(__doc__))
    parser.add_argument(
        "--sample", type=int, nargs="?", const=0, metavar="TURN",
        help="each option and head dim once, dtypes and chips in turn",
    )  # fmt: skip
    parser.add_argument("--options", default=",".join(OPTIONS))
    parser.add_argument("--together", type=int, default=16, help="cells of one program, at most")
    args = parser.parse_args(argv)
    os.environ.update(aot.environment())
    origin, folder = command.origin(), command.folder_of(args)
    kept = [] if folder is None else records.read(folder / "options.jsonl")
    rows = {(row["case"], row["chip"]): row for row in kept if row["libtpu"] == origin["libtpu"]}
    chips = args.chips.split(",")
    wanted = cells(args.options.split(","), chips, args.sample)
    for dim, dtype, chip in itertools.product(DIMS, DTYPES, chips):
        cell = f"{dtype} {dim}"
        todo = [x[:3] for x in wanted if x[1:] == (dim, dtype, chip) and cell not in known(rows, x[0], chip)]
        for first in range(0, len(todo), args.together):
            group = todo[first : first + args.together]
            for (option, *_), result in results(chip, group).items():
                seen = known(rows, option, chip) | {cell: result}
                rows[option, chip] = origin | row_of(chip, option, seen)
                if not result.startswith("compiled"):
                    print(f"{chip} {option} {cell}: {result}", flush=True)
            records.write(list(rows.values()), "options", folder)
        if todo:
            print(f"{chip} {cell}: {len(todo)} cells", flush=True)
    print(table(list(rows.values())))
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
