"""The covering set: each feature, case, size, dtype, block size and head ratio at least once, mostly combined.

The full product would be a million runs. Each group below has all values of one axis, combined with changing values
of the others (a block size with a window, a head size with a quantised cache ...).
"""

import itertools

import pytest

from tests.cases import CASES, COMBINED, FEATURES, SINGLE, Case
from tests.problem import Problem

FLOATS = ("float32", "bfloat16", "float16")
LAYOUTS = ("NHD", "HND")
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8", "float8_e4m3fnuz")
MODES = ("per_tensor", "per_head", "per_token_head")
PAGES = (1, 3, 16, 48, 128)
HEAD_DIMS = (
    (8, None),
    (40, None),
    (64, None),
    (80, None),
    (96, None),
    (128, None),
    (192, None),
    (256, None),
    (192, 128),
    (512, None),
    (576, 512),
)
RATIOS = (1, 3, 4, 5, 7, 8, 16, 17, 71)
RICH = itertools.cycle(
    FEATURES[name] for name in ("cap_sinks_window", "per_request_causal", "chunk_alibi_sinks", "plain")
)


def rows():
    """(name, Problem) of the whole set."""
    layout = itertools.cycle(LAYOUTS)
    for name, feature in FEATURES.items():
        yield f"feature-{name}", Problem(case=CASES["mixed_unsorted"], feature=feature, layout=next(layout))
    for name in ("window_alibi", "cap_alibi_non_causal", "everything", "everything_two_ways"):
        yield f"bf16-{name}", Problem(feature=FEATURES[name], dtype="bfloat16", layout=next(layout))
    for q, held in itertools.product(FLOATS, FLOATS):
        if (q, held) != ("float32", "float32"):
            yield f"dtype-{q}-{held}", Problem(feature=next(RICH), dtype=q, cache_dtype=held, layout=next(layout))
    q = itertools.cycle(FLOATS)
    for held, mode in itertools.product(QUANTISED, MODES):
        diagonal = QUANTISED.index(held) == MODES.index(mode)
        for feature in (SINGLE["plain"], COMBINED["everything"])[: 1 + diagonal]:
            yield (
                f"quant-{held}-{mode}-{feature.name}",
                Problem(feature=feature, dtype=next(q), cache_dtype=held, quant=mode, layout=next(layout)),
            )
    for name, case in CASES.items():
        yield f"case-{name}", Problem(case=case, feature=COMBINED["cap_sinks_window"], layout=next(layout))
    for page, case in [*((page, "mixed") for page in PAGES), (3, "page_edges"), (16, "page_edges")]:
        yield f"page-{page}-{case}", Problem(case=CASES[case], feature=next(RICH), block_size=page, layout=next(layout))
    for dim, v_dim in HEAD_DIMS:
        size = dict(heads=2, kv_heads=1, head_dim=dim, v_head_dim=v_dim, block_size=16)
        yield f"head_dim-{dim}-{v_dim or dim}", Problem(feature=next(RICH), dtype=next(q), layout=next(layout), **size)
    for ratio in RATIOS:
        kv = 1 if ratio > 8 else 2
        size = dict(case=CASES["speculative"], heads=ratio * kv, kv_heads=kv, head_dim=8)
        yield f"ratio-{ratio}", Problem(feature=next(RICH), layout=next(layout), **size)


LONG = Case("long", (1, 1, 130, 5, 200, 3), (1500, 257, 700, 300, 200, 515))


def chip_rows():
    """(name, Problem) for kernels of accelerators: 16-bit queries, blocks of 8 tokens and more, head dims from 64.

    The same axes as above in those sizes, and sequences that are longer than any tile.
    """
    layout, q = itertools.cycle(LAYOUTS), itertools.cycle(("bfloat16", "float16"))
    base = Problem(heads=8, kv_heads=2, head_dim=64, block_size=16)

    def like(**changes):
        return base.replace(dtype=next(q), layout=next(layout), **changes)

    for name, feature in FEATURES.items():
        yield f"feature-{name}", like(case=CASES["mixed_unsorted"], feature=feature)
    for name in (
        "plain",
        "window_5",
        "chunk_alibi_sinks",
        "cap_sinks_window",
        "per_request_causal_window",
        "non_causal",
    ):
        yield f"long-{name}", like(case=LONG, feature=FEATURES[name])
    for held, mode in itertools.product(QUANTISED, MODES):
        for feature in (SINGLE["plain"], COMBINED["everything"]):
            yield f"quant-{held}-{mode}-{feature.name}", like(feature=feature, cache_dtype=held, quant=mode)
    for name, case in CASES.items():
        yield f"case-{name}", like(case=case, feature=COMBINED["cap_sinks_window"], head_dim=128)
    for page in (8, 16, 32, 64, 128, 256):
        yield f"page-{page}", like(case=LONG, feature=next(RICH), block_size=page)
    for dim, v_dim in (*HEAD_DIMS[2:6], (112, None), *HEAD_DIMS[6:]):
        yield f"head_dim-{dim}-{v_dim or dim}", like(feature=next(RICH), head_dim=dim, v_head_dim=v_dim)
    for ratio in RATIOS:
        kv = 1 if ratio > 8 else 2
        yield f"ratio-{ratio}", like(case=CASES["speculative"], heads=ratio * kv, kv_heads=kv, feature=next(RICH))


CHIP_ROWS = [pytest.param(problem, id=name) for name, problem in chip_rows()]
ROWS = [pytest.param(problem, id=name) for name, problem in rows()]
