"""A large pool, allocated on 2 MiB pages, holds the same values as a small one."""

import jax
import numpy as np
import pytest

import jattn
from jattn.cache import pool

LARGE = dict(num_blocks=260, block_size=64, num_kv_heads=4, head_dim=64)


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [("bfloat16", "none"), ("float32", "none"), ("float8_e4m3fn", "per_tensor"), ("int8", "per_token_head")],
)
@pytest.mark.parametrize("fill", [0.0, 1.5, np.nan])
def test_every_slot_is_filled(dtype, quant, fill, monkeypatch):
    monkeypatch.setattr(pool, "MIN_LARGE_BYTES", 2**20)
    spec = jattn.KVCacheSpec(**LARGE, dtype=dtype, quant=quant)
    small = jattn.KVCacheSpec(**{**LARGE, "num_blocks": 1}, dtype=dtype, quant=quant)
    for large, one in zip(
        jattn.empty_cache(spec, fill).logical(), jattn.empty_cache(small, fill).logical(), strict=True
    ):
        wanted = np.asarray(one)[0, 0, 0, 0]
        np.testing.assert_array_equal(np.asarray(large), np.full(large.shape, wanted))


def test_keys_and_values_never_share_memory():
    cache = jattn.empty_cache(jattn.KVCacheSpec(**LARGE, dtype="float32"))
    assert cache.k.nbytes >= pool.MIN_LARGE_BYTES and cache.k.unsafe_buffer_pointer() != cache.v.unsafe_buffer_pointer()


def test_a_pool_may_be_made_in_a_compiled_program():
    spec = jattn.KVCacheSpec(**LARGE, dtype="float32")
    made = jax.jit(lambda: jattn.empty_cache(spec, 2.0))()
    assert (np.asarray(made.k) == 2).all() and (np.asarray(made.v) == 2).all()
