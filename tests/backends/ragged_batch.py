"""One ragged batch with computed tokens, and the oracle's result: for the tests of the public functions."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import CommonAttentionMetadata
from tests.backends.toy import CACHE, SPEC
from tests.oracle import attention as oracle

QUERY, SEQ, TABLE = [3, 1, 0, 2], [3, 6, 0, 2], [[5, 0], [1, 7], [0, 0], [3, 0]]  # all but one request are new
TOKENS = 8  # two pad tokens
CLOSE = dict(rtol=2e-6, atol=2e-6)


def batch(**options):
    return CommonAttentionMetadata.from_lengths(QUERY, SEQ, TABLE, 4, **dict(num_tokens=TOKENS, num_reqs=5) | options)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


Q, K, V = normal(0, TOKENS, 4, 8), normal(1, TOKENS, 2, 8), normal(2, TOKENS, 2, 8)
PAST_K, PAST_V = normal(3, 5, 2, 8), normal(4, 5, 2, 8)  # request 1's five computed tokens


def filled(cache_spec=CACHE, offset=0) -> jattn.PagedKV:
    """A cache with the computed tokens of request 1, and NaN in all other slots."""
    slots = np.asarray([4, 5, 6, 7, 28], np.int32)
    return jattn.write_kv(jattn.empty_cache(cache_spec, fill=jnp.nan), PAST_K, PAST_V, slots + offset)


def witness(**options):
    """Out and lse of the batch, by the oracle."""
    own = np.split(np.arange(6), np.cumsum(QUERY)[:-1])
    keys = [np.asarray(K)[rows] for rows in own]
    values = [np.asarray(V)[rows] for rows in own]
    keys[1], values[1] = np.concatenate([PAST_K, keys[1]]), np.concatenate([PAST_V, values[1]])
    return oracle.ragged(Q, keys, values, QUERY, num_tokens=TOKENS, scale=SPEC.scale, **options)


def assert_state(state, expected):
    np.testing.assert_allclose(state.out, expected[0], **CLOSE)
    np.testing.assert_allclose(state.lse, expected[1], **CLOSE)
