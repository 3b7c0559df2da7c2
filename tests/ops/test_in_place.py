"""Keys that are multiplied where they lie: which ones are, and that strangers among them reach nothing."""

import jax
import numpy as np
import pytest

import jattn
from jattn.ops.in_place import PlacedKeys
from jattn.ops.keys import PackedKeys, PagedKeys
from tests.cases import FEATURES, Case, Feature
from tests.problem import Problem


def keys_of(**changed) -> PagedKeys:
    """Two requests of four pages, float32 in pages of 64."""
    options = dict(num_blocks=8, block_size=64, num_kv_heads=2, head_dim=32, dtype="float32") | changed
    cache = jattn.empty_cache(jattn.KVCacheSpec(**options))
    return PagedKeys.of(cache, np.zeros((2, 4), np.int32))


@pytest.mark.parametrize(
    "changed, rows, placed",
    [
        ({}, 1, True),
        ({}, 8, True),
        ({}, 9, False),
        (dict(block_size=32), 1, False),
        (dict(head_dim=20), 1, False),
        (dict(layout="NHD"), 1, False),
        (dict(dtype="bfloat16"), 1, False),
        (dict(dtype="int8", quant="per_tensor"), 1, False),
    ],
)
def test_float32_keys_in_large_pages_are_read_in_place_by_few_rows(changed, rows, placed):
    keys = keys_of(**changed).in_place(rows)
    assert (keys is not None) == placed
    if keys is not None:
        assert isinstance(keys.read(np.int32(0), np.int32(0)).k, PlacedKeys)


def test_packed_keys_are_never_read_in_place():
    x = np.zeros((4, 2, 32), np.float32)
    assert PackedKeys.of(x, x, np.array([4]), bits=True).in_place(1) is None


def test_a_dot_holds_one_key_and_ids_out_of_range_read_some_page():
    draw = np.random.default_rng(0)
    pool, q = draw.standard_normal((3, 2, 64, 40)), draw.standard_normal((2, 4, 40))
    poisoned = pool.astype(np.float32)
    poisoned[1, 0, 5] = np.nan
    pages = np.array([2, 1, 99, -7])
    keys = PlacedKeys(pool=jax.numpy.asarray(poisoned), pages=jax.numpy.asarray(pages))
    got = np.asarray(jax.jit(PlacedKeys.dots)(keys, q.astype(np.float32)))
    want = np.einsum("kmd,pksd->kmps", q, pool[[2, 1, 2, 0]]).reshape(2, 4, -1)
    hit = np.isnan(got)
    assert hit[0, :, 64 + 5].all() and hit.sum() == 4
    np.testing.assert_allclose(got[~hit], want[~hit], atol=2e-5)


LONG = Case("long", (1, 1, 1, 1, 1), (1024, 1100, 2300, 60, 3600))
"""Contexts that end with a step, in a chunk, in a chunk after two steps, and before one is full."""
WINDOWS = [Feature(f"window_{size}", dict(sliding_window=size)) for size in (300, 1500)]
"""The longer one begins amid a chunk and fills a step from there."""


@pytest.mark.parametrize("block_size", [64, 128, 256, 2048])
@pytest.mark.parametrize("feature", [FEATURES["plain"], *WINDOWS, FEATURES["chunk_alibi_sinks"]])
def test_decode_of_long_contexts_gives_the_witness_answer(block_size, feature):
    problem = Problem(case=LONG, feature=feature, block_size=block_size)
    cache = problem.cache()
    attn = jattn.PagedAttention(problem.spec, cache.spec, backend="sdpa")
    state = jax.jit(lambda q, cache, meta, params: attn.attend(q, cache, attn.build(meta), params))(
        problem.q, cache, problem.meta, problem.params
    )
    problem.answer(cache).check(state)
