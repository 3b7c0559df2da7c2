"""Compiles the TPU kernel with its options together, for each generation.

    python -m benchmarks.tpu.options [--chips v5e,v6e] [--only TEXT] [--again] [--write | --out DIR]

A cell is a layer, a cache and a batch: one value of each of FACTORS. All of their products would be billions; these are
TOGETHER, with all options that are possible at once, and as many more as it takes until every two values that CONFLICTS
allows are together in a cell (benchmarks.tpu.covering), with other cells on each generation. Two thirds of an hour of
one core. A row is one cell on one chip: "compiled", "refused: " with the backend's reasons, or "failed: " with the
compiler's; the run exits with 1 if one is not compiled. Rows that are kept are not compiled again, so a run that was
stopped goes on where it was; --again compiles all, after a change of the kernel. --only: cells whose name has TEXT.

Blocks and tiles are small: this asks whether the compiler takes the operations. benchmarks.tpu.aot compiles a choice of
shapes with the sizes that are taken by default. Several cells are compiled as one program; if it fails, each by itself.
"""

import os
import sys
from unittest import mock

from benchmarks import records
from benchmarks.tpu import aot, command
from benchmarks.tpu.aot import Shape
from benchmarks.tpu.covering import Cell, covering

OFF = "off"
FACTORS: dict[str, dict[str, dict]] = {
    "head_dim": {str(dim): dict(spec=dict(head_dim=dim)) for dim in (128, 16, 32, 64, 80, 96, 112, 192, 256)},
    "page": {str(size): dict(cache=dict(block_size=size)) for size in (128, 16, 32, 48, 64, 256)},
    "dtype": {
        "bfloat16": {},
        "float32": dict(dtype="float32", cache=dict(dtype="float32")),
        "float16": dict(dtype="float16"),  # over a cache of bfloat16
        "float8_e4m3fn": dict(cache=dict(dtype="float8_e4m3fn", quant="per_tensor")),
        "float8_e5m2": dict(cache=dict(dtype="float8_e5m2", quant="per_tensor")),
        "int8": dict(cache=dict(dtype="int8", quant="per_tensor")),
    },
    "heads": {
        f"{heads}/{kv}": dict(spec=dict(num_heads=heads, num_kv_heads=kv))
        for heads, kv in ((4, 2), (21, 3), (16, 1), (32, 8), (32, 32))
    },
    "range": {
        OFF: {},
        "window": dict(spec=dict(sliding_window=300)),
        "two_sided": dict(spec=dict(sliding_window=(100, 30))),
        "chunk": dict(spec=dict(chunk_size=1000)),
        "lookback": dict(spec=dict(chunk_size=1000, chunk_lookback=1)),
    },
    "causal": {
        "causal": {}, "not": dict(causal=False), "each": dict(causal="each"),
        "encoder": dict(spec=dict(attn_type="encoder_only")),
    },
    "layout": {layout: dict(cache=dict(layout=layout)) for layout in ("HND", "NHD", "HND128")},
    "job": {"mixed": {}, "decodes": dict(query_lens=(1,) * 16), "tree": dict(query_lens=(24,) * 16)},
    "scales": {"one": {}, "per_head": dict(cache=dict(quant="per_head")),
               "per_token_head": dict(cache=dict(quant="per_token_head"))},
    "slopes": {OFF: {}, "alibi": dict(spec=dict(has_alibi=True)),
               "alibi_sqrt": dict(spec=dict(has_alibi=True, use_alibi_sqrt=True))},
    "mm_prefix": {OFF: {}, "whole": dict(spec=dict(use_mm_prefix=True)),
                  "clamped": dict(spec=dict(use_mm_prefix=True, mm_prefix_clamp_sliding_window=True))},
    "ranks": {"1 rank": {}, "2 ranks": dict(ranks=2, interleave=4)},
} | {
    name: {OFF: {}, name: given}
    for name, given in dict(
        soft_cap=dict(spec=aot.CAP),
        sinks=dict(spec=dict(has_sinks=True)),
        mask_fn=dict(spec=dict(mask_fn=aot.two_thirds)),
        score_fn=dict(spec=dict(score_fn=aot.faded)),
        rswa=dict(spec=dict(use_rswa=True)),
        qq_bias=dict(spec=dict(use_qq_bias=True)),
        output_dtype=dict(spec=dict(output_dtype="float8_e4m3fn")),
        v_head_dim={},  # another than head_dim, see shape_of
        q_scale=dict(q_scale=True),
    ).items()
}  # fmt: skip
"""Values of each factor and the arguments of Shape that they stand for. The first value is that of a plain layer."""

FLOATS = ("bfloat16", "float16", "float32")
CHUNKS = (OFF, "chunk", "lookback")
CONFLICTS: tuple[dict[str, tuple[str, ...]], ...] = (
    dict(dtype=FLOATS, scales=("per_head", "per_token_head")),
    dict(layout=("HND128",), head_dim=("80", "96", "112", "128", "192", "256")),
    dict(layout=("HND128",), head_dim=("16",), page=("16", "32", "48")),  # pages of whole 8 rows of 128 numbers
    dict(layout=("HND128",), head_dim=("32",), page=("16", "48")),
    dict(layout=("HND128",), v_head_dim=("v_head_dim",)),
    dict(layout=("HND128", "NHD"), scales=("per_token_head",)),
    dict(layout=("HND128",), qq_bias=("qq_bias",)),
    dict(rswa=("rswa",), range=CHUNKS),
    dict(mm_prefix=("clamped",), range=CHUNKS),
    dict(causal=("encoder",), rswa=("rswa",)),
    dict(causal=("encoder",), qq_bias=("qq_bias",)),
    dict(causal=("encoder",), mm_prefix=("whole", "clamped")),
    dict(causal=("encoder",), ranks=("2 ranks",)),
    dict(ranks=("2 ranks",), qq_bias=("qq_bias",)),
)
"""Values that are refused together, by AttentionSpec, KVCacheSpec or the backend."""

PLAIN: Cell = {name: next(iter(values)) for name, values in FACTORS.items()}
ALL = dict(
    slopes="alibi_sqrt", soft_cap="soft_cap", sinks="sinks", mask_fn="mask_fn", score_fn="score_fn", mm_prefix="whole",
    output_dtype="output_dtype",
)  # fmt: skip
WINDOW = ALL | dict(range="window", mm_prefix="clamped", rswa="rswa", q_scale="q_scale")
TREE = ALL | dict(range="window", qq_bias="qq_bias", job="tree")
TOGETHER: list[Cell] = [
    PLAIN | given | job
    for given in (
        WINDOW | dict(head_dim="80", dtype="int8", scales="per_head"),
        WINDOW | dict(head_dim="256", dtype="float32", page="256"),
        TREE | dict(head_dim="96", dtype="float8_e4m3fn", scales="per_token_head"),
        TREE | dict(head_dim="192", dtype="float16", layout="NHD"),
        ALL | dict(range="lookback", layout="NHD", page="48", causal="each", dtype="float8_e5m2"),
        ALL | dict(range="chunk", layout="HND128", head_dim="64", page="64", ranks="2 ranks"),
        ALL | dict(range="chunk", layout="HND128", head_dim="16", page="64", ranks="2 ranks", dtype="float32"),
    )
    for job in ({}, dict(heads="32/8", job="decodes"), dict(heads="32/32", job="decodes"))
]
"""All options that are possible at once, for prompts or token trees, and for decodes whose queries the kernel takes as
they are."""


def possible(cell: Cell) -> bool:
    """May these values of some factors be together?"""
    return not any(all(cell.get(name) in values for name, values in conflict.items()) for conflict in CONFLICTS)


def cells(chip: str) -> list[Cell]:
    """The cells of a generation."""
    turn = list(aot.TOPOLOGIES).index(chip)
    return covering({name: list(values) for name, values in FACTORS.items()}, possible, TOGETHER, turn)


def name_of(cell: Cell) -> str:
    """Its head dim, page size, dtype and heads, then what a plain layer has not."""
    return " ".join(cell[name] for i, name in enumerate(FACTORS) if i < 4 or cell[name] != PLAIN[name])


def shape_of(cell: Cell) -> Shape:
    """The layer and batch of a cell."""
    spec, cache, more = {}, dict(num_blocks=64), {}
    for factor, value in cell.items():
        given = FACTORS[factor][value]
        spec, cache = spec | given.get("spec", {}), cache | given.get("cache", {})
        more |= {name: x for name, x in given.items() if name not in ("spec", "cache")}
    if cell["v_head_dim"] != OFF:
        spec["v_head_dim"] = 64 if spec["head_dim"] == 128 else 128
    return Shape(name_of(cell), spec, cache, **more)


def small_sizes(shape: Shape) -> dict:
    """Fields of TpuKernelConfig: blocks of two parts."""
    beside = 128 // shape.spec["head_dim"] if shape.cache["layout"] == "HND128" else 1
    keys = dict(part_kv=128 * beside, block_kv=256 * beside)
    if max(shape.query_lens) == 1:
        return keys
    return keys | dict(step_kv=256 * beside, tile_rows=32, chunk_rows=16, short_heads=1, long_heads=2)


def launches(cell: Cell, chip: str) -> list[tuple]:
    """(config, arguments as shapes) of each launch of the kernel in a cell's call of the backend."""
    import jax
    import jax.numpy as jnp

    from jattn.backends import pallas_tpu
    from pallas_kernels.tpu import paged_attention, work_list

    found, default, shape = [], pallas_tpu.default_config, shape_of(cell)
    small = lambda **fields: default(**fields | small_sizes(shape))

    def seen(config, *arguments, interpret):
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        found.append((config, given))
        q, work = arguments[0], arguments[4]
        out = jnp.zeros((*q.shape[:-1], config.v_head_dim), config.out_dtype)
        return out, jnp.zeros(work_list.lse_shape(work, config), jnp.float32)

    jax.clear_caches()  # a call that was traced before, for another cell with the same launch, is not traced again
    with mock.patch.multiple(paged_attention, _launch=seen), mock.patch.multiple(pallas_tpu, default_config=small):
        function, arguments = aot.call(shape, chip)
        with jax.set_mesh(aot.mesh_of(chip, shape.ranks)):
            jax.eval_shape(function, *arguments)
    assert found, "the call has no launch"
    return found


def compile_together(chip: str, some: list[tuple]) -> None:
    """One program of these launches."""
    from pallas_kernels.tpu import paged_attention

    def program(*arguments):
        return [
            paged_attention._launch(config, *given, interpret=False)
            for (config, _), given in zip(some, arguments, strict=True)
        ]

    aot.compile_for(chip, program, *(arguments for _, arguments in some))


def results(chip: str, group: list[Cell]) -> list[str]:
    """'compiled', 'refused: ...' or 'failed: ...' of each cell, which are compiled as one program if that works."""
    import jattn

    found: list[str] = []
    traced: dict[int, list] = {}
    for i, cell in enumerate(group):
        found.append("compiled")
        try:
            traced[i] = launches(cell, chip)
        except jattn.UnsupportedError as error:
            found[i] = f"refused: {'; '.join(x for reasons in error.reasons.values() for x in reasons)}"
        except Exception as error:  # a fault of the layer's trace is an answer, too
            found[i] = f"failed: {type(error).__name__}: {error}"[:600]
    try:
        if traced:
            compile_together(chip, [launch for some in traced.values() for launch in some])
    except Exception as error:  # the compiler raises many kinds
        for i in traced:
            found[i] = f"failed: {error}"[:600] if len(group) == 1 else results(chip, [group[i]])[0]
    return found


def main(argv: list[str] | None = None) -> int:
    """Compile, print and keep the rows; 1 if a cell was not compiled."""
    parser = command.parser("benchmarks.tpu.options", str(__doc__))
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name has it")
    parser.add_argument("--again", action="store_true", help="compile the cells of rows that are kept, too")
    parser.add_argument("--together", type=int, default=8, help="cells of one program, at most")
    args = parser.parse_args(argv)
    chips = args.chips.split(",")
    if not any(args.only in name_of(cell) for chip in chips for cell in cells(chip)):
        parser.error(f"--only: no cell of {', '.join(chips)} has {args.only!r} in its name")
    os.environ.update(aot.environment())
    origin, folder = command.origin(), command.folder_of(args)
    kept = [] if folder is None or args.again else records.read(folder / "options.jsonl")
    done = {(row["chip"], row["case"]) for row in kept if row.get("result") == "compiled"}
    bad = 0
    for chip in chips:
        by_name = {name_of(cell): cell for cell in cells(chip)}
        todo = [name for name in by_name if args.only in name and (chip, name) not in done]
        for first in range(0, len(todo), args.together):
            names = todo[first : first + args.together]
            seen = dict(zip(names, results(chip, [by_name[name] for name in names]), strict=True))
            rows = [origin | dict(chip=chip, case=name, result=result) for name, result in seen.items()]
            records.write(rows, "options", folder)
            wrong = {name: x for name, x in seen.items() if x != "compiled"}
            bad += len(wrong)
            print(*(f"{chip} {name}: {result}" for name, result in wrong.items()), sep="\n", end="\n" * bool(wrong))
            print(f"{chip}: {first + len(names)} of {len(todo)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
