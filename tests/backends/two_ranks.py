"""A batch whose keys two ranks share, for any backend: the numbers of two steps beside a witness."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jattn
from jattn.parallel import decode_context_parallel
from tests.oracle.attention import ragged

SIZE, WORLD = 16, 2
QUERIES, TOTALS = (1, 3, 0, 2, 1), (70, 41, 0, 7, 1)  # the last leaves a rank without a key
SLOPES, SINKS = np.linspace(0.1, 0.4, 4), np.linspace(-1, 1, 4)


def check_keys_on_two_ranks(
    backend: str, interleave: int, options: dict[str, Any], interpreted: contextlib.AbstractContextManager, **of_cache
) -> None:
    """The first step only writes, by `sdpa`. Poisoned pages, a padded request and padding tokens.

    options: of the AttentionSpec. interpreted: in which layers are made and the kernel runs. of_cache: of empty_cache.
    """
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, **options)
    cache_spec = jattn.KVCacheSpec(num_blocks=40, block_size=SIZE, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    rng, normal = np.random.default_rng(0), lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)  # noqa: E731
    table = np.full((5, 5), 10**6)
    table[:, :3] = rng.permutation(20)[:15].reshape(5, 3)
    keys = [[normal(total, 2, 64) for total in TOTALS] for _ in range(2)]
    q, count = normal(sum(QUERIES) + 5, 4, 64), sum(QUERIES)
    q[count:] = np.nan
    params = jattn.AttentionParams(
        sinks=jnp.asarray(SINKS, jnp.float32) if spec.has_sinks else None,
        alibi_slopes=jnp.asarray(SLOPES, jnp.float32) if spec.has_alibi else None,
    )
    build = functools.partial(jattn.CommonAttentionMetadata.from_lengths, block_table=table, block_size=SIZE * WORLD)
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("x",))
    k, v = (np.concatenate(x) for x in keys)
    last = [np.concatenate([x[n - m :] for x, n, m in zip(xs, TOTALS, QUERIES, strict=True)]) for xs in keys]
    last = [np.pad(x, ((0, 5), (0, 0), (0, 0))) for x in last]
    with interpreted:
        both = [decode_context_parallel(spec, cache_spec, mesh, "x", interleave=interleave, backend=name)
                for name in ("sdpa", backend)]  # fmt: skip
        cache = jattn.empty_cache(cache_spec, float("nan"), **of_cache)
        nobody = jnp.zeros((len(k), 4, 64), k.dtype)
        written, _ = both[0](nobody, k, v, cache, build(TOTALS, TOTALS), params)
        meta = build(QUERIES, TOTALS, num_tokens=count + 5, num_reqs=6)
        _, state = both[1](q, *last, written, meta, params)
        out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse)
    given: dict[str, Any] = dict(sinks=SINKS) if spec.has_sinks else {}
    given |= dict(slopes=SLOPES) if spec.has_alibi else {}
    given |= dict(window=(options["sliding_window"] - 1, -1)) if "sliding_window" in options else {}
    given |= dict(soft_cap=spec.logits_soft_cap) if spec.logits_soft_cap else {}
    want, want_lse = ragged(q[:count].astype(float), keys[0], keys[1], QUERIES, scale=64**-0.5, **given)
    assert state.out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out[:count], want, atol=2e-2)
    np.testing.assert_allclose(lse[:count], want_lse, atol=1e-4)
    assert (out[count:] == 0).all() and np.isneginf(lse[count:]).all()
