"""The TPU kernel, interpreted, beside the witness: poisoned pages, garbage columns, padding (tests/problem.py).

Each row turns several axes; between them every option that the backend declares is on at least once.
"""

import itertools

import pytest

import jattn
from jattn.device import Chip
from pallas_kernels.tpu.tile_policy import tuned_sizes
from tests.cases import CASES, FEATURES, Case, Feature
from tests.kernels.tpu.interpreted import SMALL, V6E, judge

LONG = Case("long", (1, 40, 1, 3), (1100, 300, 40, 20))
ENDS = Case("no tile is whole", (1, 0, 137, 2, 0, 9, 1), (40, 30, 150, 2, 0, 80, 1))
ALL = Feature(
    "all",
    dict(sliding_window=(40, 3), chunk_size=37, logits_soft_cap=1.5, has_alibi=True, has_sinks=True, scale=0.3),
    ("alibi_slopes", "sinks", "q_scale[]", "k_scale", "v_scale"),
    causal="alternate",
)
QUANTISED = Feature(
    "quantised",
    dict(output_dtype="float8_e4m3fn", has_alibi=True, use_alibi_sqrt=True),
    ("alibi_slopes", "output_scale"),
)
ROWS = {
    "decode": ("on_wait", dict(case=CASES["decode"], head_dim=128)),
    "decode, eager": ("eager", dict(case=CASES["page_edges"], heads=8, kv_heads=1)),
    "queries in place, four heads to a window": (
        "on_wait",
        dict(case=CASES["decode"], heads=16, kv_heads=8, feature=FEATURES["everything_two_ways"], dtype="float32"),
    ),
    "queries in place, spans, a head to a window": (
        "eager", dict(case=CASES["single_token"], heads=32, kv_heads=2, feature=FEATURES["mm_prefix_chunk_mask_fn"]),
    ),
    "mixed": ("on_wait", dict(case=LONG)),
    "mixed, eager, int8": ("eager", dict(case=LONG, cache_dtype="int8", quant="per_head")),
    "everything, per request": ("on_wait", dict(case=CASES["mixed_unsorted"], feature=ALL)),
    "everything, float32": ("eager", dict(case=CASES["empty_in_the_middle"], feature=ALL, dtype="float32")),
    "ratio 3, fp8, D 80": (
        "on_wait",
        dict(case=CASES["speculative"], heads=6, head_dim=80, cache_dtype="float8_e4m3fn", quant="per_tensor"),
    ),
    "lookback, D 32": ("on_wait", dict(case=CASES["mixed"], feature=FEATURES["chunk_lookback"], head_dim=32)),
    "quantised output, square-root distances": ("eager", dict(case=CASES["mixed_unsorted"], feature=QUANTISED)),
    "functions of the user": ("on_wait", dict(case=LONG, feature=FEATURES["everything"])),
    "functions, alternating, ratio 3": (
        "eager",
        dict(case=CASES["mixed_unsorted"], heads=6, feature=FEATURES["everything_two_ways"]),
    ),
    "non-causal, D 192, V 128": (
        "eager",
        dict(case=CASES["chunked_prefill"], feature=FEATURES["non_causal"], head_dim=192, v_head_dim=128),
    ),
    "spans and a prefix, NHD": (
        "on_wait", dict(case=CASES["mixed_unsorted"], feature=FEATURES["rswa_mm_prefix_sqrt"], layout="NHD"),
    ),
    "clamped spans, eager": ("eager", dict(case=CASES["mixed_unsorted"], feature=FEATURES["mm_prefix_clamped"])),
    "spans, chunks, mask_fn, int8 in NHD": (
        "on_wait",
        dict(
            case=CASES["mixed"], feature=FEATURES["mm_prefix_chunk_mask_fn"], layout="NHD", cache_dtype="int8",
            quant="per_head",
        ),
    ),
    "tree, ALiBi, score_fn, float16 over bf16": (
        "eager",
        dict(
            case=CASES["speculative"], feature=FEATURES["qq_bias_alibi_score_fn"], dtype="float16",
            cache_dtype="bfloat16",
        ),
    ),
    "scales of tokens": (
        "on_wait", dict(case=CASES["mixed_unsorted"], cache_dtype="int8", quant="per_token_head"),
    ),
    "scales of tokens, page 128, eager": (
        "eager", dict(case=CASES["decode"], cache_dtype="float8_e4m3fn", quant="per_token_head", block_size=128),
    ),
    "four keys side by side": (
        "on_wait",
        dict(
            case=CASES["mixed_unsorted"], feature=FEATURES["everything_two_ways"], layout="HND128", head_dim=32,
            block_size=32,
        ),
    ),
    "two keys side by side, int8, eager": (
        "eager",
        dict(
            case=CASES["mixed"], feature=FEATURES["mm_prefix_window"], layout="HND128", cache_dtype="int8",
            quant="per_head",
        ),
    ),
    "tiles that end anywhere, pairs of heads in three pieces of lanes": (
        "on_wait",
        dict(case=ENDS, heads=8, kv_heads=2, head_dim=256, v_head_dim=80, feature=FEATURES["mm_prefix_window"]),
    ),
    "the same, eager, rows in place": ("eager", dict(case=ENDS, heads=16, kv_heads=1)),
    "the same, a head of its own to a word, output in float32": (
        "eager", dict(case=ENDS, heads=5, kv_heads=5, head_dim=16, feature=QUANTISED),
    ),
    "no new tokens": ("on_wait", dict(case=Case("no new tokens", (0, 0), (5, 9)))),
    "132 kv heads": ("on_wait", dict(case=CASES["single_token"], heads=132, kv_heads=132, head_dim=16)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_a_tpu(monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)


@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_agrees_with_the_witness(name):
    mode, changes = ROWS[name]
    judge(SMALL.replace(**changes), mode)


@pytest.mark.parametrize(("chip", "page"), [("v5e", 16), ("v5e", 48), ("v6e", 16)])
def test_a_step_agrees_with_the_witness_in_the_order_of_each_table(chip, page, monkeypatch):
    """v5e stores half of the weights, and of a part of 240 keys none; v6e takes one head's values before others."""
    monkeypatch.setattr(jattn.device, "detect", lambda: Chip("tpu", chip))
    assert tuned_sizes("v5e") == dict(values_behind=0) and tuned_sizes("v6e") == dict(early_heads=1)
    judge(SMALL.replace(case=Case("a chunk behind 970 keys", (30,), (1000,)), head_dim=128, block_size=page))


OF_CASES = FEATURES["cap_sinks_window"]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mode"), list(zip(CASES, itertools.cycle(["on_wait", "eager"]))))
def test_every_case(case, mode):
    judge(SMALL.replace(case=CASES[case], feature=OF_CASES), mode)


REFUSED = {"use_distance_bias"}
ELSEWHERE = [OF_CASES, *(changes["feature"] for _, changes in ROWS.values() if "feature" in changes)]
OTHERS = [name for name, f in FEATURES.items() if not REFUSED & set(f.spec) and f not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_feature_that_is_not_refused(name):
    judge(SMALL.replace(case=CASES["mixed_unsorted"], feature=FEATURES[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "page"),
    [
        *zip([16, 48, 64, 80, 96, 112, 128, 192, 256], itertools.cycle([16, 32, 48, 256])),
        (16, 256), (64, 16), (80, 48), (256, 48), (256, 256),
    ],
)  # fmt: skip
def test_every_head_dim_and_page(dim, page):
    judge(SMALL.replace(case=CASES["mixed"], head_dim=dim, block_size=page))
