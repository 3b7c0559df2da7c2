"""The TPU kernel that writes keys and values, in the interpreter: values, untouched slots, races and waits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import kv_write
from pallas_kernels.tpu.kv_write import KvWriteConfig
from tests.kernels.tpu.interpreted import judged
from tests.oracle import cache as witness

CONFIG = KvWriteConfig(num_kv_heads=2, head_dim=128, v_head_dim=256, page_size=32, kv_dtype="bfloat16")
BLOCKS = 9
TURNS = np.random.default_rng(3).permutation(BLOCKS * 32)
SLOTS = {
    # a pack filled by consecutive tokens, parts of two packs, slots that are nowhere, and two rows for one slot
    "mixed": [*range(64, 80), *range(91, 99), -1, 7, 10**6, -(2**31), 2**31 - 1, 5, 7, 6, BLOCKS * 32 - 1, BLOCKS * 32],
    "decodes": [32 * block + 3 * block for block in (4, 0, 8, 2, 6, 1, 7)],
    "any order": list(TURNS[:40]),
    "backwards": list(range(47, 15, -1)),
    "a whole pack but one, which is written twice": [*range(0, 5), *range(6, 16), 4, *range(16, 32), 31],
    "nothing": [-1, -1, -5],
    "one": [40],
}


def bits_of(rng, shape, dtype):
    """Any numbers of a dtype, NaN included, and their bits."""
    bits = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return jnp.asarray(bits.view(f"u{bits.shape[-1]}")[..., 0]).view(dtype)


def as_pages(pool, c, dim):
    """The bits of a pool as [N S K dim]."""
    bits = np.asarray(pool.view(f"uint{8 * pool.dtype.itemsize}"))
    return np.swapaxes(bits.reshape(bits.shape[0], c.num_kv_heads, c.page_size, dim), 1, 2)


def check(config=CONFIG, slots="mixed", mode="on_wait", blocks=BLOCKS):
    rng, c = np.random.default_rng(1), config
    slots = np.array(SLOTS[slots] if isinstance(slots, str) else slots, np.int64).astype(np.int32)
    pools = [bits_of(rng, (blocks, c.num_kv_heads, c.page_rows, dim), c.kv_dtype) for dim in c.dims]
    dims = c.head_dim, c.v_head_dim
    rows = [bits_of(rng, (len(slots), c.num_kv_heads, dim), c.kv_dtype) for dim in dims]
    assert not kv_write.supports_write(c, len(slots))
    with judged(mode):
        got = jax.jit(lambda *given: kv_write.write_rows(*given, c))(rows, jnp.asarray(slots), pools)
        jax.block_until_ready(got)
    for new, old, row, dim in zip(got, pools, rows, dims, strict=True):
        wanted = witness.write(as_pages(old, c, dim), np.asarray(row.view(f"uint{8 * row.dtype.itemsize}")), slots)
        np.testing.assert_array_equal(as_pages(new, c, dim), wanted)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("slots", SLOTS)
def test_rows_are_where_the_witness_puts_them_and_nothing_else_changes(slots, mode):
    check(slots=slots, mode=mode)


CONFIGS = [
    dict(kv_dtype="float32"),
    dict(kv_dtype="float8_e4m3fn"),
    dict(kv_dtype="int8", page_size=64, num_kv_heads=1),
    dict(kv_dtype="int8", page_size=16),
    dict(page_size=16, num_kv_heads=9),
    dict(layout="HND128", head_dim=64, v_head_dim=64, page_size=64),
    dict(layout="HND128", head_dim=32, v_head_dim=32, page_size=64),
    dict(layout="HND128", head_dim=64, v_head_dim=64, kv_dtype="float32"),
    dict(layout="HND128", head_dim=64, v_head_dim=64, kv_dtype="int8", page_size=128),
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_each_dtype_and_layout(changes):
    config = dataclasses.replace(CONFIG, **changes)
    group = config.pack_tokens
    slots = [*range(group, 3 * group - 1), 5, 3, 1, 3, -1, *range(4 * group - 1, 5 * group), 6]
    check(config, slots, blocks=1 + 6 * group // config.page_size)
