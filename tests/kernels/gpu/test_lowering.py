"""Every kernel x config lowers for CUDA on a machine with no GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.shards import ShardRule
from pallas_kernels.gpu.config import SMEM_OF_MOSAIC, GpuKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.work_list import build_work_list

BASE = dict(
    num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=16, kv_dtype="bfloat16",
    logits=LogitRule(scale=0.088),
)  # fmt: skip
SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (192, 128), (192, 192), (256, 256)]
CASES = {
    "base": {},
    "window": dict(mask=MaskRule(left=1023)),
    "non causal": dict(mask=MaskRule(causal=False)),
    "both sides": dict(mask=MaskRule(causal=False, left=64, right=32)),
    "chunk": dict(mask=MaskRule(chunk=512)),
    "chunk, lookback": dict(mask=MaskRule(chunk=512, lookback=2)),
    "f32 output": dict(out_dtype="float32"),
    "a rank's keys": dict(shards=ShardRule(4, 2), mask=MaskRule(left=99), out_dtype="float32"),
    "a rank's keys, 8 bits": dict(
        shards=ShardRule(2, 1), kv_dtype="float8_e4m3fn", long_tiles=False, flat_list=True, narrow_rows=8, block_kv=128
    ),
    "per request": dict(per_request_causal=True),
    "mask_fn": dict(mask=MaskRule(mask_fn=lambda h, q, k: (q + k + h) % 3 != 0)),
    "score_fn": dict(logits=LogitRule(scale=0.1, score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q))),
    "soft cap": dict(logits=LogitRule(scale=0.1, soft_cap=30.0)),
    "fixed max": dict(logits=LogitRule(scale=0.1, soft_cap=50.0), fixed_max=True),
    "flat list": dict(long_tiles=False, flat_list=True),
    "alibi": dict(logits=LogitRule(scale=0.1, has_alibi=True)),
    "sinks": dict(has_sinks=True),
    "whole units": dict(whole_units=True),
    "spans": dict(mask=MaskRule(left=99, spans=True)),
    "spans, narrow": dict(mask=MaskRule(spans=True), kv_dtype="int8", rows=8),
    "qq bias": dict(qq_bias=True),
    "qq bias, narrow": dict(qq_bias=True, kv_dtype="int8", rows=8),
    "all": dict(
        logits=LogitRule(scale=0.1, soft_cap=30.0, has_alibi=True), has_sinks=True, mask=MaskRule(left=99, chunk=256),
        layout="NHD", kv_dtype="int8",
    ),
    "f16": dict(dtype="float16", kv_dtype="float16"),
    "NHD": dict(layout="NHD"),
    "decode only": dict(long_tiles=False),
    "queries loaded by those who compute": dict(q_buffers=1),
    "decode, queries loaded by them too": dict(q_buffers=1, long_tiles=False, flat_list=True, whole_units=True),
    **{f"group {h}/{k}": dict(num_heads=h, num_kv_heads=k) for h, k in ((8, 8), (14, 2), (64, 1))},
    **{f"page {s}": dict(page_size=s) for s in (8, 24, 48, 64, 128, 256)},
    **{f"kv {t}": dict(kv_dtype=t) for t in ("float8_e4m3fn", "float8_e5m2", "int8")},
    "8-bit products": dict(kv_dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn"),
    "8-bit products, few rows": dict(
        kv_dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn", rows=4, layout="NHD", mask=MaskRule(left=99),
        logits=LogitRule(scale=0.1, soft_cap=30.0, has_alibi=True), has_sinks=True, head_dim=192, out_dtype="float32",
    ),
    "token scales": dict(kv_dtype="float8_e4m3fn", token_scales=True),
    "token scales, f16": dict(kv_dtype="float8_e5m2", token_scales=True, dtype="float16"),
    "token scales, NHD, window": dict(
        kv_dtype="int8", token_scales=True, layout="NHD", page_size=64, mask=MaskRule(left=99), has_sinks=True
    ),
    **{f"D {d} V {v}": dict(head_dim=d, v_head_dim=v) for d, v in SIZES},
}  # fmt: skip


def lower(config: GpuKernelConfig, num_tokens=64, num_reqs=8):
    shape = jax.ShapeDtypeStruct
    order = (config.num_kv_heads, config.page_size)
    pool = (32, *(order if config.layout == "HND" else order[::-1]))
    f32 = shape((config.num_heads,), jnp.float32)

    def step(q, k, v, table, starts, seqs, causal, slopes, sinks, k_token, v_token):
        own = dict(rank=starts[0], local_lens=seqs) if config.shards.world > 1 else {}
        own |= dict(ranges=jnp.zeros((num_tokens, 2), jnp.int32)) if config.mask.spans else {}
        work = build_work_list(starts, seqs, num_tokens, config, causal if config.per_request_causal else None, **own)
        extra = dict(alibi_slopes=slopes) if config.logits.has_alibi else {}
        extra |= dict(sinks=sinks) if config.has_sinks else {}
        extra |= dict(qq_bias=jnp.zeros((9, 9))) if config.qq_bias else {}
        extra |= dict(k_token_scale=k_token, v_token_scale=v_token) if config.token_scales else {}
        return ragged_paged_attention(q, k, v, table, work, config, **extra)

    args = (
        shape((num_tokens, config.num_heads, config.head_dim), jnp.dtype(config.dtype)),
        shape((*pool, config.head_dim), jnp.dtype(config.kv_dtype)),
        shape((*pool, config.v_head_dim), jnp.dtype(config.kv_dtype)),
        shape((num_reqs, 16), jnp.int32),
        shape((num_reqs + 1,), jnp.int32),
        shape((num_reqs,), jnp.int32),
        shape((num_reqs,), jnp.bool_),
        f32,
        f32,
        *(shape(pool, jnp.float32),) * 2,
    )
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    return jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=[check])(*args)


QUICK = (
    "base",
    "window",
    "per request",
    "fixed max",
    "flat list",
    "all",
    "group 14/2",
    "kv float8_e4m3fn",
    "8-bit products",
    "8-bit products, few rows",
    "D 192 V 128",
    "NHD",
    "token scales",
)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_lowers_for_cuda(name):
    config = default_config(**(BASE | CASES[name]))
    assert len(lower(config).mlir_module_serialized) > 10_000


REFUSED = {
    "f32": dict(dtype="float32", kv_dtype="float32"),
    "page 12": dict(page_size=12),
    "page 4": dict(page_size=4),
    "wide values": dict(head_dim=64, v_head_dim=128),
    "D 80 in 8 bits": dict(head_dim=80, v_head_dim=80, kv_dtype="int8"),
    "D 72": dict(head_dim=72, v_head_dim=72),
    "D 512": dict(head_dim=512, v_head_dim=512),
    "other 16 bits": dict(kv_dtype="float16"),
    "fixed max, cap 60": dict(logits=LogitRule(scale=0.1, soft_cap=60.0), fixed_max=True),
    "fixed max in float16": dict(
        logits=LogitRule(scale=0.1, soft_cap=30.0), fixed_max=True, dtype="float16", kv_dtype="float16"
    ),
    "fixed max and ALiBi": dict(logits=LogitRule(scale=0.1, soft_cap=30.0, has_alibi=True), fixed_max=True),
    "flat list of long tiles": dict(flat_list=True),
    "8-bit products of 16 bits": dict(compute_dtype="float8_e4m3fn"),
    "8-bit products of int8": dict(compute_dtype="float8_e4m3fn", kv_dtype="int8"),
    "8-bit products in int8": dict(compute_dtype="int8", kv_dtype="int8"),
    "8-bit products of wide values": dict(
        compute_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", head_dim=256, v_head_dim=256
    ),
    "8-bit products with token scales": dict(
        compute_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", token_scales=True
    ),
    "token scales of 16 bits": dict(token_scales=True),
    "token scales in blocks of 32": dict(token_scales=True, kv_dtype="int8", block_kv=32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    reasons = supports(default_config(**(BASE | REFUSED[name])))
    assert any(re.search("wanted|take|larger", reason) for reason in reasons), reasons


def test_supports_lists_every_reason():
    config = GpuKernelConfig(**(BASE | dict(dtype="float32", page_size=12, token_scales=True)))
    assert len(supports(config, chip="sm_80")) >= 4


def test_the_door_checks_shapes_and_options():
    config = default_config(**BASE)
    q, pool = jnp.zeros((4, 32, 128), jnp.bfloat16), jnp.zeros((2, 8, 16, 128), jnp.bfloat16)
    table = jnp.zeros((1, 2), jnp.int32)
    work = jax.jit(build_work_list, static_argnums=(2, 3))(jnp.array([0, 4]), jnp.array([4]), 4, config)
    with pytest.raises(ValueError, match="k_pages is"):
        ragged_paged_attention(q, pool[:, :4], pool, table, work, config)
    with pytest.raises(ValueError, match="sinks given"):
        ragged_paged_attention(q, pool, pool, table, work, config, sinks=jnp.zeros(32))
    with pytest.raises(ValueError, match="per_request_causal"):
        build_work_list(jnp.array([0, 4]), jnp.array([4]), 4, config, causal=jnp.array([True]))


ALIBI = LogitRule(scale=0.1, has_alibi=True)
SCALED = dict(kv_dtype="float8_e4m3fn", token_scales=True, logits=ALIBI, q_buffers=1)


@pytest.mark.parametrize(
    "fields",
    [
        dict(SCALED, head_dim=192, v_head_dim=64, block_kv=64, stages=4),
        dict(SCALED, head_dim=96, v_head_dim=96, rows=32768, requests=34),
        dict(SCALED, head_dim=32, v_head_dim=32, block_kv=128, stages=8),
        dict(SCALED, token_scales=False),
        dict(logits=ALIBI),
    ],
)
def test_shared_memory_is_no_more_than_is_counted(fields):
    """Mosaic takes the device's limit, which a machine without a GPU lacks, and refuses a byte more."""
    every: dict = BASE | fields
    config = default_config(**every)
    with artificial_shared_memory_limit(config.smem_bytes + SMEM_OF_MOSAIC):
        lower(config)
