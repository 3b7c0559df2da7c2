"""The latent attention kernel: its config's reasons, its lowering, and its numbers in JAX's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.mla_config import MlaKernelConfig, heads_of_unit, supports_mla
from pallas_kernels.gpu.mla_sm90 import latent_attention
from pallas_kernels.gpu.work_list import build_work_list
from tests.oracle.attention import ragged

INTERPRETS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)
BASE = dict(num_heads=16, group=16, page_size=64, logits=LogitRule(scale=0.07))
REFUSED = {
    "f32": dict(dtype="float32"),
    "latent 320": dict(latent_dim=320),
    "latent 640": dict(latent_dim=640),
    "rope 32": dict(rope_dim=32),
    "rope 128 of 512": dict(rope_dim=128),
    "page 48": dict(page_size=48),
    "page 4": dict(page_size=4),
    "group 3": dict(group=3),
    "group 128": dict(num_heads=128, group=128),
    "window": dict(mask=MaskRule(left=99)),
    "soft cap": dict(logits=LogitRule(scale=0.07, soft_cap=30.0)),
    "sinks": dict(has_sinks=True),
    "4 bits": dict(kv_dtype="int4"),
    "listed keys of 8 bits": dict(listed=True, kv_dtype="int8"),
}
LOWERED = {
    "decode": {},
    "128 heads": dict(num_heads=128, group=64),
    "whole rows, f16, page 16": dict(whole_rows=True, dtype="float16", page_size=16),
    "latent 256, rope 128, page 128": dict(latent_dim=256, rope_dim=128, page_size=128),
    "per request": dict(per_request_causal=True),
    "latent 384": dict(latent_dim=384),
    "e4m3": dict(kv_dtype="float8_e4m3fn"),
    "e4m3, at most 16 rows": dict(kv_dtype="float8_e4m3fn", dtype="float16", max_rows=16),
    "int8, at most 16 rows, whole rows, page 16": dict(
        kv_dtype="int8", dtype="float16", max_rows=16, whole_rows=True, page_size=16
    ),
    "int8 for f16, latent 384, rope 128": dict(latent_dim=384, rope_dim=128, dtype="float16", kv_dtype="int8"),
    "listed": dict(num_heads=128, group=64, listed=True),
    "e5m2, 128 heads, whole rows, page 16": dict(
        num_heads=128, group=64, whole_rows=True, page_size=16, kv_dtype="float8_e5m2"
    ),
}
NARROW = dict(latent_dim=256, dtype="float16")
BATCHES = {  # name -> (query length, total length) of each request, fields of the config, padding tokens
    "decode": (((1, 65), (1, 0), (1, 200), (1, 64), (1, 1), (1, 63)), dict(page_size=16), 0),
    "two units of heads": (((1, 300), (1, 129)), dict(num_heads=128, num_ctas=2), 3),
    "prediction of 4 tokens": (((4, 300), (2, 67), (3, 3), (0, 0), (4, 2)), dict(page_size=128), 70),
    "8 tokens, 24 heads": (((8, 90), (5, 64), (8, 200)), dict(num_heads=24, num_ctas=4), 0),
    "whole rows of 576, f16": (((1, 300), (2, 64)), dict(latent_dim=512, whole_rows=True, dtype="float16"), 0),
    "not causal": (((3, 70), (2, 130)), dict(mask=MaskRule(causal=False)), 0),
    "CTAs without a piece": (((1, 1), (0, 0), (1, 0), (0, 0)), dict(num_ctas=6), 2),
    "a piece of one block each": (((1, 64), (1, 1), (1, 40)), {}, 0),
    "a block after pieces without one": (((0, 0), (1, 0), (0, 9), (1, 70), (0, 0)), dict(num_ctas=1), 0),
    "padding tokens alone": (((0, 0), (0, 0)), {}, 3),
    "five parts, more tokens than few": (((1, 900),), dict(num_heads=64, num_ctas=5), 40),  # merge_parts merges them
    "long beside short, more tokens than few": (
        ((1, 20), (1, 1500), (1, 30), (1, 64)), dict(num_heads=64, num_ctas=5), 40,
    ),
    "three parts of a half, even cuts": (((1, 200), (2, 70)), dict(latent_dim=384, num_ctas=4), 1),
    "e4m3, blocks of many pieces": (
        ((1, 300), (1, 0), (1, 65), (1, 1)), dict(kv_dtype="float8_e4m3fn", page_size=16, num_ctas=2), 3,
    ),
    "int8 for f16, whole rows": (
        ((4, 129), (0, 0), (2, 64)), dict(kv_dtype="int8", dtype="float16", whole_rows=True), 70,
    ),
    "e5m2, 64 heads": (((1, 200), (1, 130)), dict(kv_dtype="float8_e5m2", num_heads=64, page_size=128), 0),
    "maxima that rise by more than the slack and by less": (
        ((1, 400), (3, 330)), dict(logits=LogitRule(scale=0.6), num_ctas=2), 0,
    ),
    "e4m3, 16 rows": (
        ((1, 300), (1, 0), (1, 65), (1, 1)), dict(kv_dtype="float8_e4m3fn", page_size=16, num_ctas=2) | NARROW, 3,
    ),
    "e5m2, 8 heads of 2 tokens, whole rows": (
        ((2, 129), (1, 2), (0, 0), (2, 500), (2, 1)),
        dict(kv_dtype="float8_e5m2", num_heads=8, whole_rows=True, rope_dim=128) | NARROW, 70,
    ),
    "int8, 4 heads, maxima that rise": (
        ((4, 700), (3, 64)), dict(kv_dtype="int8", num_heads=4, logits=LogitRule(scale=0.6)) | NARROW, 0,
    ),
    "e4m3, CTAs without a piece": (((1, 1), (0, 0), (1, 70)), dict(kv_dtype="float8_e4m3fn", num_ctas=6), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    reasons = supports_mla(MlaKernelConfig(**(BASE | REFUSED[name])))
    assert reasons and all("wanted" in r or "not in" in r or "there are" in r for r in reasons)


def test_a_unit_takes_the_most_heads_that_fit():
    assert [heads_of_unit(h, n) for h, n in ((128, 1), (16, 4), (16, 5), (128, 8), (24, 4), (8, 8))] == [
        64, 16, 8, 8, 12, 8,
    ]  # fmt: skip


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name):
    config, shape = MlaKernelConfig(**(BASE | LOWERED[name])), jax.ShapeDtypeStruct
    assert not supports_mla(config)

    def step(q, latents, ropes, table, starts, seqs, causal):
        work = build_work_list(
            starts, seqs, 8, config.list_of(len(seqs)), causal if config.per_request_causal else None
        )
        return latent_attention(q, latents, None if config.whole_rows else ropes, table, work, config)

    dtype, page = jnp.dtype(config.cache_dtype), config.page_size
    args = (
        shape((8, config.num_heads, config.head_dim), jnp.dtype(config.dtype)),
        shape((32, page, config.head_dim if config.whole_rows else config.latent_dim), dtype),
        shape((32, page, config.rope_dim), dtype),
        shape((8, 64), jnp.int32),
        shape((9,), jnp.int32),
        shape((8,), jnp.int32),
        shape((8,), jnp.bool_),
    )
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=[check])(*args)
    assert len(exported.mlir_module_serialized) > 10_000


def make_batch(lengths, config, pads, seed=0):
    """(kernel's arguments, starts and lengths, rows f64 of each request): pages permuted, NaN where no token lives.

    Integers have no NaN: there, such a place holds the largest one. Integers are up to 10 times as large as floats.
    """
    rng, page = np.random.default_rng(seed), config.page_size
    counts = [-(-total // page) for _, total in lengths]
    order, used = rng.permutation(sum(counts) + 5), 0
    table = np.full((len(lengths), max(counts) + 2), 10**6, np.int32)
    dtype, requests = jnp.dtype(config.cache_dtype), []
    poison, size = (127, 10) if dtype.name == "int8" else (np.nan, 1)
    pool = np.full((len(order), page, config.head_dim), poison, np.float32)
    for r, (_, total) in enumerate(lengths):
        rows = (size * rng.standard_normal((total, config.head_dim))).astype(dtype).astype(np.float32)
        table[r, : counts[r]] = order[used : used + counts[r]]
        for i in range(counts[r]):
            part = rows[i * page : (i + 1) * page]
            pool[table[r, i], : len(part)] = part
        used += counts[r]
        requests.append(rows.astype(np.float64))
    starts = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
    q = rng.standard_normal((starts[-1] + pads, config.num_heads, config.head_dim)) / size
    q = q.astype(jnp.dtype(config.dtype))
    latents, ropes = (pool, None) if config.whole_rows else np.split(pool, [config.latent_dim], axis=-1)
    ropes = None if ropes is None else jnp.asarray(ropes, dtype)
    seqs = np.array([total for _, total in lengths], np.int32)
    args = (jnp.asarray(q), jnp.asarray(latents, dtype), ropes, jnp.asarray(table))
    return args, (starts, seqs), requests


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize("fields", [dict(whole_rows=True), dict(num_heads=128, group=64)], ids=["whole rows", "split"])
def test_listed_rows_alone_are_keys(fields):
    from tests.kernels.gpu.interpreter import interpreted

    config = MlaKernelConfig(**(BASE | dict(latent_dim=128, num_ctas=3, listed=True, page_size=16) | fields))
    rng, counts, width = np.random.default_rng(0), [130, 0, 1, 64], 192
    pool = rng.standard_normal((20, 16, 192)).astype(jnp.bfloat16)
    lists = np.full((4, width), -1, np.int32)
    for t, n in enumerate(counts):
        lists[t, :n] = rng.permutation(320)[:n]
    lists[0, [0, 70, 129]] = -1
    pool.reshape(320, 192)[np.setdiff1d(np.arange(320), lists)] = np.nan
    q = rng.standard_normal((4, config.num_heads, 192)).astype(jnp.bfloat16)
    split = (pool, None) if config.whole_rows else np.split(pool, [128], axis=-1)
    latents, ropes = (None if x is None else jnp.asarray(x) for x in split)
    with interpreted():
        work = build_work_list(jnp.arange(5), jnp.asarray(counts), 4, config.attention)
        out, lse = latent_attention(jnp.asarray(q), latents, ropes, jnp.asarray(lists), work, config)
    keys = [pool.reshape(320, 1, 192)[row[row >= 0]].astype(np.float64) for row in lists]
    values, scale = [rows[..., :128] for rows in keys], config.logits.scale
    want, want_lse = ragged(np.asarray(q, np.float64), keys, values, [1] * 4, scale=scale, causal=False)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=2e-2)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize("name", BATCHES)
def test_is_attention_over_the_rows(name):
    from tests.kernels.gpu.interpreter import interpreted

    lengths, fields, pads = BATCHES[name]
    fields = dict(latent_dim=128, num_ctas=3, logits=LogitRule(scale=0.07), page_size=64, num_heads=16) | fields
    longest = max(n for n, _ in lengths)
    group = heads_of_unit(fields["num_heads"], longest)
    config = MlaKernelConfig(group=group, max_rows=group * longest, **fields)
    assert config.is_narrow == (config.latent_dim == 256)
    args, (starts, seqs), requests = make_batch(lengths, config, pads)
    queries = np.asarray(args[0], np.float64)
    with interpreted():
        work = build_work_list(jnp.asarray(starts), jnp.asarray(seqs), args[0].shape[0], config.list_of(len(seqs)))
        factors = None
        if config.is_decoded:  # powers of two: queries divided by them are exact
            factors = np.exp2(np.arange(args[0].shape[0] * config.num_heads) % 5 - 2).reshape(args[0].shape[:2])
            args = (args[0] / jnp.asarray(factors, args[0].dtype)[..., None], *args[1:])
            factors = jnp.asarray(factors, jnp.float32)
        out, lse = (np.asarray(x, np.float64) for x in latent_attention(*args, work, config, factors))
    q, end = queries[: starts[-1]], starts[-1]
    keys = [rows[:, None] for rows in requests]
    values = [rows[:, None, : config.latent_dim] for rows in requests]
    scale = config.logits.scale
    want, want_lse = ragged(q, keys, values, np.diff(starts), scale=scale, causal=config.mask.causal)
    size = 10 if config.kv_dtype == "int8" else 1
    np.testing.assert_allclose(out[:end], want, atol=size * (2e-2 if config.dtype == "bfloat16" else 2e-3))
    np.testing.assert_allclose(lse[:end], want_lse, atol=1e-5)
    assert (out[end:] == 0).all() and np.isneginf(lse[end:]).all()
