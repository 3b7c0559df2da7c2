"""Hopper's attention kernel in JAX's interpreter: each tile, with one and two pipelines, two and three warpgroups."""

import dataclasses

import jax
import pytest

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config
from tests.kernels.gpu.test_warp_attention import DECODES, MIXED, TWO_TOKENS, compare_config

INTERPRETS = jax.__version_info__ >= (0, 12)
WHY = "JAX 0.11 wants each warpgroup to have seen every phase of a barrier; its last stages are freed for nobody"
SHAPE = dict(
    num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=8, num_ctas=3, logits=LogitRule(scale=0.1)
)
ONE = dict(pipelines=1, block_kv=128, stages=2)
TWO = dict(pipelines=2, block_kv=64, stages=4)
THREE = dict(computing=3, block_kv=64, stages=3)
WGMMA = dict(narrow_rows=0)
BESIDE = dict(narrow_rows=8, q_buffers=1)
INSIDE = dict(merges_inside=True)
BACKWARD = dict(last_block_first=True, weights_first=True, logits=LogitRule(scale=0.1, has_alibi=True))
INT8 = dict(kv_dtype="int8", page_size=16)
CASES = {  # name -> (query length, total length) of each request, fields of the config, the oracle's options
    "narrow": (DECODES, ONE, {}),
    "narrow, two pipelines": (DECODES, TWO, {}),
    "two pipelines, whole units": (DECODES, TWO | dict(whole_units=True), {}),
    "two pipelines of one stage, D 256": (DECODES, TWO | dict(stages=2, head_dim=256, v_head_dim=256, q_buffers=1), {}),
    "two pipelines by wgmma, 16 rows": (TWO_TOKENS, TWO | WGMMA | dict(num_heads=16), {}),
    "two pipelines by wgmma, D 112 V 48, NHD": (
        DECODES, TWO | WGMMA | dict(num_heads=14, head_dim=112, v_head_dim=48, layout="NHD"), {}
    ),
    "one long request in parts": (((1, 700),), TWO, {}),
    "in waves, longest first": (
        ((1, 65), (1, 3), (0, 0), (1, 300), (2, 40), (1, 41), (1, 130), (1, 299)), TWO | dict(in_waves=True), {}
    ),
    "in waves, one pipeline, by wgmma": (DECODES, ONE | WGMMA | dict(in_waves=True), {}),
    "in waves, one pipeline": (
        ((1, 65), (1, 3), (0, 0), (1, 300), (2, 40), (1, 130), (1, 299)), ONE | dict(in_waves=True), {}
    ),
    "in waves, a long one in parts": (((1, 30), (1, 1700), (1, 20)), TWO | dict(in_waves=True), {}),
    "equal pieces": (((1, 1500), (1, 700)), ONE | dict(piece_blocks=2, num_ctas=8), {}),
    "equal pieces by wgmma": (((2, 1500), (1, 700)), ONE | WGMMA | dict(piece_blocks=2, num_ctas=8), {}),
    "parts merged inside": (((1, 700), (1, 300)), ONE | INSIDE, {}),
    "parts merged inside, two pipelines, sinks": (
        ((1, 700), (1, 300)), TWO | INSIDE | dict(has_sinks=True), dict(sinks=None)
    ),
    "parts merged inside, by wgmma": (((2, 700), (1, 300)), ONE | WGMMA | INSIDE | dict(num_heads=12), {}),
    "a CTA more than work": (((1, 65), (1, 3)), TWO | dict(num_ctas=5), {}),
    "int8": (DECODES, TWO | INT8 | dict(has_sinks=True), dict(sinks=None)),
    "int8, 16 rows, f16": (TWO_TOKENS, TWO | INT8 | dict(num_heads=16, dtype="float16"), {}),
    "e4m3, one pipeline, merged inside": (
        ((1, 700), (1, 300)), ONE | INSIDE | dict(kv_dtype="float8_e4m3fn"), {}
    ),
    "window": (((1, 300), (1, 20), (2, 150)), TWO | dict(mask=MaskRule(left=70)), dict(window=(70, -1))),
    "every option": (
        ((1, 300), (1, 20), (2, 150)),
        TWO | dict(logits=LogitRule(scale=0.1, soft_cap=5.0, has_alibi=True), has_sinks=True, layout="NHD",
                   mask=MaskRule(left=50), dtype="float16", kv_dtype="float16", v_head_dim=32),
        dict(soft_cap=5.0, slopes=None, sinks=None, window=(50, -1)),
    ),
    "not causal, mask_fn": (
        TWO_TOKENS, TWO | dict(mask=MaskRule(causal=False, mask_fn=lambda h, q, k: (q + k + h) % 3 != 0)),
        dict(causal=False, mask_fn=lambda h, q, k: (q + k + h) % 3 != 0),
    ),
    "score_fn": (
        TWO_TOKENS, TWO | dict(logits=LogitRule(scale=0.1, score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q))),
        dict(score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q)),
    ),
    "float32 output": (DECODES, TWO | dict(out_dtype="float32"), {}),
    "mixed": (MIXED, ONE, {}),
    "mixed, two pipelines": (MIXED, TWO, {}),
    "mixed, two pipelines, window, sinks, NHD": (
        MIXED, TWO | dict(num_heads=8, mask=MaskRule(left=50), has_sinks=True, layout="NHD"),
        dict(window=(50, -1), sinks=None),
    ),
    "mixed, soft cap without a maximum": (
        MIXED, ONE | dict(logits=LogitRule(scale=0.1, soft_cap=5.0)), dict(soft_cap=5.0)
    ),
    "mixed, int8": (MIXED, ONE | INT8 | dict(q_buffers=1), {}),
    "mixed, int8, narrow beside long": (MIXED, ONE | INT8 | BESIDE, {}),
    "mixed, e4m3, narrow beside long, in parts, every option": (
        ((70, 300), (1, 700), (9, 30), (1, 3), (40, 100), (2, 500), (0, 0), (1, 400)),
        ONE | BESIDE | dict(kv_dtype="float8_e4m3fn", num_ctas=4, layout="NHD", page_size=16, mask=MaskRule(left=250),
                            logits=LogitRule(scale=0.1, soft_cap=60.0, has_alibi=True), has_sinks=True),
        dict(soft_cap=60.0, slopes=None, sinks=None, window=(250, -1)),
    ),
    "mixed, e5m2 with token scales, narrow of 16 rows beside long": (
        ((1, 700), (70, 300), (1, 300), (1, 3), (2, 500), (9, 30), (1, 400)),
        ONE | BESIDE | dict(kv_dtype="float8_e5m2", token_scales=True, num_heads=24, narrow_rows=16, num_ctas=2,
                            page_size=128), {}
    ),
    "decodes only, int8, narrow beside long": (
        DECODES, ONE | INT8 | BESIDE | dict(long_tiles=True, flat_list=False), {}
    ),
    "narrow, loading its queries": (DECODES, ONE | dict(q_buffers=1), {}),
    "narrow, two pipelines, loading their queries": (DECODES, TWO | dict(q_buffers=1), {}),
    "mixed, two pipelines, loading their queries": (MIXED, TWO | dict(q_buffers=1), {}),
    "mixed in short tiles, e4m3": (
        ((6, 100), (3, 200), (0, 0), (9, 9)), ONE | dict(kv_dtype="float8_e4m3fn", block_kv=64, v_head_dim=32), {}
    ),
    "mixed, f16, e5m2 with token scales, NHD": (
        MIXED, ONE | dict(kv_dtype="float8_e5m2", token_scales=True, dtype="float16", layout="NHD", page_size=16), {}
    ),
    "prefill in parts, bf16, int8 with token scales, D 192 V 160": (
        ((70, 300),),
        ONE | INT8 | dict(token_scales=True, head_dim=192, v_head_dim=160, block_kv=64, q_buffers=1, num_ctas=4), {}
    ),
    "mixed, three compute, in parts": (MIXED, THREE | dict(num_ctas=4), {}),
    "mixed, three compute, e4m3, NHD, window": (
        MIXED, THREE | dict(kv_dtype="float8_e4m3fn", q_buffers=1, layout="NHD", page_size=16, mask=MaskRule(left=50)),
        dict(window=(50, -1)),
    ),
    "mixed, three compute, e4m3 with token scales": (
        MIXED, THREE | dict(kv_dtype="float8_e4m3fn", token_scales=True, q_buffers=1, has_sinks=True), dict(sinks=None)
    ),
    "mixed, three compute, every option": (
        MIXED, THREE | dict(logits=LogitRule(scale=0.1, soft_cap=60.0, has_alibi=True), has_sinks=True, num_heads=6),
        dict(soft_cap=60.0, slopes=None, sinks=None),
    ),
    "rows that do not divide 192, three compute, maxima first": (
        ((40, 100), (28, 28), (9, 70)), THREE | dict(num_heads=14, weights_first=False, out_dtype="float32"), {}
    ),
    "short tiles, three compute": (
        ((6, 100), (3, 200), (0, 0), (9, 9), (1, 700)), THREE | dict(long_tiles=True, flat_list=False), {}
    ),
    "mixed, weights first": (MIXED, ONE | dict(weights_first=True), {}),
    "mixed, weights first, int8, sinks": (
        MIXED, ONE | INT8 | dict(weights_first=True, q_buffers=1, has_sinks=True), dict(sinks=None)
    ),
    "mixed, last block first, in parts": (
        ((40, 300), (1, 400), (9, 30), (0, 0), (70, 300)),
        ONE | BACKWARD | dict(num_ctas=4), dict(slopes=None)
    ),
    "mixed, last block first, window, sinks, NHD, f16": (
        MIXED, ONE | BACKWARD | dict(mask=MaskRule(left=50), has_sinks=True, layout="NHD", dtype="float16",
                                     kv_dtype="float16", block_kv=64), dict(slopes=None, window=(50, -1), sinks=None)
    ),
    "mixed, last block first, three compute": (MIXED, THREE | BACKWARD, dict(slopes=None)),
    "last block first, two pipelines, maxima first": (
        MIXED, TWO | BACKWARD | dict(weights_first=False), dict(slopes=None)
    ),
    "last block first, pages longer than blocks": (
        MIXED, ONE | BACKWARD | dict(page_size=256, block_kv=64), dict(slopes=None)
    ),
    "last block first, pages of 48": (MIXED, ONE | BACKWARD | dict(page_size=48), dict(slopes=None)),
    "last block first, e4m3": (
        MIXED, ONE | BACKWARD | dict(kv_dtype="float8_e4m3fn", q_buffers=1, page_size=16, weights_first=False),
        dict(slopes=None)
    ),
    "short tiles, last block first": (
        ((6, 100), (3, 200), (0, 0), (9, 9), (1, 700)),
        ONE | BACKWARD | dict(long_tiles=False, flat_list=True, weights_first=False, narrow_rows=0), dict(slopes=None)
    ),
    "large logits, weights first": (MIXED, ONE | dict(weights_first=True, logits=LogitRule(scale=9.0)), {}),
    "large logits, maxima first": (MIXED, ONE | dict(weights_first=False, logits=LogitRule(scale=9.0)), {}),
    "prefill in parts, two pipelines, D 128": (
        ((70, 300),), TWO | dict(head_dim=128, v_head_dim=128, num_ctas=4, page_size=64), {}
    ),
}  # fmt: skip
QUICK = ("narrow, two pipelines", "parts merged inside, two pipelines, sinks")


def config_of(lengths, fields):
    """The config, with narrow tiles where the rows are few enough for them."""
    fields = SHAPE | fields
    rows = fields["num_heads"] // fields["num_kv_heads"] * max(n for n, _ in lengths)
    most = 16 if fields.get("kv_dtype", "bfloat16") not in ("bfloat16", "float16") else 8
    inside = fields.pop("merges_inside", False)
    narrow = fields.pop("narrow_rows", 0 if rows > most else 8 if rows <= 8 else 16)
    config = default_config(**fields, narrow_rows=narrow, rows=rows)
    return dataclasses.replace(config, merges_inside=inside)


def compare(lengths, fields, options, pads=5, **interpreter):
    """Compares Hopper's kernel with the oracle."""
    config = config_of(lengths, fields)
    assert not supports(config)
    compare_config(config, lengths, options, pads, **interpreter)


@pytest.mark.skipif(not INTERPRETS, reason=WHY)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_is_attention(name):
    compare(*CASES[name])


@pytest.mark.skipif(not INTERPRETS, reason=WHY)
@pytest.mark.slow
def test_a_tile_of_padding_has_more_rows_than_those_of_any_request():
    compare(*CASES["narrow, two pipelines"], pads=70)


RACES = {
    "two rings in one memory": BESIDE | dict(kv_dtype="float8_e5m2", token_scales=True, page_size=16, stages=1),
    "warpgroups that load their queries": dict(q_buffers=1),
    "two pipelines": TWO | dict(q_buffers=1),
    "queries loaded for them": dict(kv_dtype="int8", page_size=16),
}


@pytest.mark.skipif(not INTERPRETS, reason=WHY)
@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_no_two_warpgroups_use_memory_that_one_of_them_writes(name):
    """Pieces in the order of their lengths: long, narrow or short, long, narrow or short, short, by one CTA."""
    lengths = (40, 200), (1, 300), (40, 90), (1, 130), (10, 20)
    small = dict(num_heads=2, num_kv_heads=1, head_dim=32, v_head_dim=32, num_ctas=1, whole_units=True)
    compare(lengths, ONE | small | RACES[name], {}, detect_races=True)
