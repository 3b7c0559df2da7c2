"""`pallas_tpu` with a request's keys on several ranks: its numbers, interpreted, beside a witness; what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

import jattn
from jattn.backends import ContextParallel
from jattn.parallel import decode_context_parallel
from tests.backends.test_pallas_tpu import V6E
from tests.oracle.attention import ragged

SIZE, WORLD = 16, 2
QUERIES, TOTALS = (1, 3, 0, 2, 1), (70, 41, 0, 7, 1)  # the last leaves a rank without a key
SLOPES, SINKS = np.linspace(0.1, 0.4, 4), np.linspace(-1, 1, 4)
OPTIONS = {
    "ALiBi, eager": ("eager", 1, dict(has_alibi=True), dict(slopes=SLOPES)),
    "window, soft cap, sinks": (
        "on_wait", 8, dict(sliding_window=20, logits_soft_cap=5.0, has_sinks=True),
        dict(window=(19, -1), soft_cap=5.0, sinks=SINKS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_keys_on_two_ranks_are_attention_by_its_definition(name, monkeypatch):
    """The first step only writes; poisoned pages, a padded request and padding tokens."""
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    mode, interleave, options, witness = OPTIONS[name]
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, **options)
    cache_spec = jattn.KVCacheSpec(num_blocks=40, block_size=SIZE, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    rng, normal = np.random.default_rng(0), lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)  # noqa: E731
    table = np.full((5, 5), 10**6)
    table[:, :3] = rng.permutation(20)[:15].reshape(5, 3)
    keys = [[normal(total, 2, 64) for total in TOTALS] for _ in range(2)]
    q, count = normal(sum(QUERIES) + 5, 4, 64), sum(QUERIES)
    q[count:] = np.nan
    given = lambda name, x: jnp.asarray(x, jnp.float32) if name in witness else None  # noqa: E731
    params = jattn.AttentionParams(sinks=given("sinks", SINKS), alibi_slopes=given("slopes", SLOPES))
    build = functools.partial(jattn.CommonAttentionMetadata.from_lengths, block_table=table, block_size=SIZE * WORLD)
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("x",))
    both = [decode_context_parallel(spec, cache_spec, mesh, "x", interleave=interleave, backend=backend)
            for backend in ("sdpa", "pallas_tpu")]  # fmt: skip
    cache = jattn.empty_cache(cache_spec, float("nan"), storage="native")
    k, v = (np.concatenate(x) for x in keys)
    written = jax.jit(both[0])(jnp.zeros((len(k), 4, 64), k.dtype), k, v, cache, build(TOTALS, TOTALS), params)[0]
    last = [np.concatenate([x[n - m :] for x, n, m in zip(xs, TOTALS, QUERIES, strict=True)]) for xs in keys]
    last = [np.pad(x, ((0, 5), (0, 0), (0, 0))) for x in last]
    meta = build(QUERIES, TOTALS, num_tokens=count + 5, num_reqs=6)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode)):
        _, state = jax.jit(both[1])(q, *last, written, meta, params)
        out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse)
    want, want_lse = ragged(q[:count].astype(float), *keys, QUERIES, scale=64**-0.5, **witness)
    assert state.out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out[:count], want, atol=2e-2)
    np.testing.assert_allclose(lse[:count], want_lse, atol=1e-4)
    assert (out[count:] == 0).all() and np.isneginf(lse[count:]).all()


def test_auto_takes_the_kernel_and_refuses_a_tree():
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=128)
    layer = functools.partial(jattn.AttentionSpec, num_heads=8, num_kv_heads=2, head_dim=128)
    two = ContextParallel(dcp_axis="x", dcp_world_size=2)
    make = functools.partial(jattn.PagedAttention, cache_spec=cache_spec, platform=V6E, parallel=two)
    assert make(layer(sliding_window=99, has_sinks=True, has_alibi=True)).backend_name == "pallas_tpu"
    with pytest.raises(jattn.UnsupportedError) as refusal:
        make(layer(use_qq_bias=True), backend="pallas_tpu")
    (reason,) = refusal.value.reasons["pallas_tpu"]
    assert reason == "DCP not supported with use_qq_bias=True"
