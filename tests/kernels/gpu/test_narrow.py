"""Narrow tiles: their transposed logits against algebra/logits.py, and that every variant lowers for CUDA."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.logits import LogitRule, shape_logits
from pallas_kernels.algebra.mask import MaskRule, visible
from pallas_kernels.gpu import narrow_sm90 as narrow
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config
from tests.kernels.gpu.test_lowering import BASE, lower

NARROW = dict(kv_dtype="float8_e4m3fn", block_kv=128, stages=4, long_tiles=False, narrow_rows=8)
EVERYTHING = dict(
    logits=LogitRule(scale=0.3, soft_cap=5.0, has_alibi=True, score_fn=lambda s, h, q, k: s + 0.01 * (k - q) * (h + 1)),
    mask=MaskRule(left=70, chunk=96, mask_fn=lambda h, q, k: (q + k + h) % 3 != 0),
)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_transposed_logits_are_those_of_the_algebra(options, monkeypatch):
    """kv0 64, rows 0..7 of kv head 1 with G = 4: two new tokens at positions 100 and 101 of 102."""
    cfg = default_config(**(BASE | NARROW | options))
    monkeypatch.setattr(narrow, "_keys", lambda _: jnp.broadcast_to(jnp.arange(64)[:, None], (64, 8)))
    monkeypatch.setattr(narrow, "_columns", lambda _: jnp.arange(8))
    monkeypatch.setattr(narrow, "gather", lambda array, index, _: array.reshape(-1)[index])
    monkeypatch.setattr(narrow.plgpu, "layout_cast", lambda x, _: x)
    dots = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)
    slopes = jnp.linspace(0.1, 0.5, 32)
    piece = {narrow.wl.ROW0: 0, narrow.wl.QPOS0: 100, narrow.wl.SEQ: 102, narrow.wl.CAUSAL: 1, narrow.HEAD: 1}
    refs = types.SimpleNamespace(per_head=jnp.stack([slopes, slopes], 1))
    column = narrow.query_bounds(cfg, refs, {key: jnp.int32(x) for key, x in piece.items()})
    x, factor = narrow.logits(cfg, column, dots, 64, jnp.float32(cfg.logits.scale), masked=True)
    key, row = 64 + np.arange(64)[:, None], np.arange(8)[None]
    q_pos, head = 100 + row // 4, 4 + row % 4
    want = shape_logits(cfg.logits, dots, head, q_pos, key, slopes[head])
    seen = visible(cfg.mask, head, q_pos, key) & (key < 102)
    assert seen.any() and not seen.all()
    np.testing.assert_allclose(x * factor, jnp.where(seen, want, -jnp.inf) * narrow.LOG2E, rtol=2e-5)


CASES = {
    "fp8": {},
    "bf16": dict(kv_dtype="bfloat16", stages=2),
    "bf16, two pipelines": dict(kv_dtype="bfloat16", pipelines=2, block_kv=64),
    "fp8, two pipelines, everything": EVERYTHING | dict(pipelines=2, block_kv=64),
    "int8, 16 rows, D 192 V 128, sinks": dict(
        kv_dtype="int8", narrow_rows=16, head_dim=192, v_head_dim=128, stages=2, has_sinks=True
    ),
    "token scales": dict(token_scales=True),
    "token scales, f16, 16 rows": dict(token_scales=True, dtype="float16", narrow_rows=16),
    "everything": EVERYTHING
    | dict(token_scales=True, kv_dtype="float8_e5m2", per_request_causal=True, layout="NHD", page_size=64),
}


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name):
    assert len(lower(default_config(**(BASE | NARROW | CASES[name]))).mlir_module_serialized) > 10_000


REFUSED = {
    "blocks of 64": dict(block_kv=64),
    "blocks of 128 in two pipelines": dict(pipelines=2),
    "beside long tiles, two buffers of queries": dict(long_tiles=True, stages=2, q_buffers=2),
    "beside long tiles, 16 bits": dict(long_tiles=True, kv_dtype="bfloat16", stages=2, q_buffers=1),
    "beside long tiles of three warpgroups": dict(long_tiles=True, computing=3, stages=2, q_buffers=1),
    "12 rows": dict(narrow_rows=12),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    reasons = supports(default_config(**(BASE | NARROW | REFUSED[name])))
    assert any(re.search("narrow_rows .* wanted", reason) for reason in reasons), reasons
