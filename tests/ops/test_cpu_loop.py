"""The loop tuned for CPUs: steps of every size read every key once, and keys in place give what copied ones give."""

import jax
import numpy as np
import pytest

import jattn
from jattn.ops.cpu_loop import CHUNKS
from jattn.ops.cpu_storage import PlacedChunk, for_cpu_loop, in_place
from jattn.ops.keys import KeySource, PackedKeys, PagedKeys
from jattn.ops.ragged import TILE_CLASSES
from tests.cases import FEATURES, Case, Feature
from tests.ops.test_paths import compute
from tests.problem import Problem

LADDERS = Case("ladders", (1, 1, 1, 2, 300, 5, 140), (100, 500, 1300, 640, 700, 513, 140))
"""Contexts that end in a long chunk and in short ones, and a last tile that would stick out of the batch."""


@pytest.mark.parametrize("form", ["cpu_loop", "differentiable"])
@pytest.mark.parametrize("block_size", [16, 48, 64, 600])  # chunks of 8 to 32 pages, of 2 to 8, of 4 in place, of one
@pytest.mark.parametrize(
    "feature", [FEATURES["plain"], Feature("window_300", dict(sliding_window=300)), FEATURES["rswa_mm_prefix_sqrt"]]
)
def test_every_key_is_read_once_whatever_the_sizes_of_chunks(form, block_size, feature):
    problem = Problem(case=LADDERS, feature=feature, block_size=block_size, pad_tokens=0)
    state, cache = compute(problem, form)
    problem.answer(cache).check(state)


@pytest.mark.parametrize("parts", [1, 2, 3])  # 3: of 1, 1 and 2 heads
def test_parts_of_the_heads_give_what_all_give_together(parts, monkeypatch):
    monkeypatch.setattr("jattn.ops.cpu_loop.head_parts", lambda rows, num_kv: parts)
    of_four = dict(heads=8, kv_heads=4, cache_dtype="int8", quant="per_token_head")
    problem = Problem(case=LADDERS, feature=FEATURES["chunk_alibi_sinks"], **of_four)
    state, cache = compute(problem, "cpu_loop")
    problem.answer(cache).check(state)


def test_every_class_of_tiles_has_chunks_and_each_divides_the_one_before():
    assert set(CHUNKS) == {kind.rows for kind in TILE_CLASSES}
    for sizes in CHUNKS.values():
        assert all(large % small == 0 for large, small in zip(sizes, sizes[1:], strict=False))


def keys_of(**changed) -> KeySource:
    """Two requests of four pages, float32 in pages of 64, as the loop takes them beside float32 queries."""
    options = dict(num_blocks=8, block_size=64, num_kv_heads=2, head_dim=32, dtype="float32") | changed
    cache = jattn.empty_cache(jattn.KVCacheSpec(**options))
    return for_cpu_loop(PagedKeys.of(cache, np.zeros((2, 4), np.int32)), "float32")


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
    keys = in_place(keys_of(**changed), rows)
    assert (keys is not None) == placed
    if keys is not None:
        assert isinstance(keys.read(np.int32(0), np.int32(0)), PlacedChunk)


def test_packed_keys_are_never_read_in_place():
    x = np.zeros((4, 2, 32), np.float32)
    assert in_place(for_cpu_loop(PackedKeys.of(x, x, np.array([4])), "float32"), 1) is None


def test_a_dot_holds_one_key_and_ids_out_of_range_read_some_page():
    draw = np.random.default_rng(0)
    pool, q = draw.standard_normal((3, 2, 64, 40)), draw.standard_normal((2, 4, 40))
    poisoned = pool.astype(np.float32)
    poisoned[1, 0, 5] = np.nan
    pages = np.array([2, 1, 99, -7])
    values = jax.numpy.zeros((4, 2, 64, 8))
    keys = PlacedChunk(pool=jax.numpy.asarray(poisoned), pages=jax.numpy.asarray(pages), v=values)
    got = np.asarray(jax.jit(PlacedChunk.dots)(keys, q.astype(np.float32)))
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
