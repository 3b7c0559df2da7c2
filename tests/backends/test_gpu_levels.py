"""`pallas_gpu` with keys in levels: its numbers, interpreted, beside a witness; what it refuses; its launches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import device
from jattn.backends import Feature
from jattn.device import Chip
from tests.backends.gpu_interpreted import INTERPRETS, interpreted_warps
from tests.backends.test_pallas_gpu import launches
from tests.oracle.attention import ragged

HOPPER = Chip("gpu", "sm_90")
LAYER: dict[str, Any] = dict(num_heads=4, num_kv_heads=2, head_dim=64, logits_soft_cap=5.0, has_sinks=True)
SIZE, BLOCKS = 16, 40
SHARED, QUERIES, TOTALS = 32, (1, 3, 1, 2), (70, 41, 33, 34)  # the prefix; new tokens and all tokens of each request
TOKENS, ROWS = sum(QUERIES) + 5, 6


class Shared:
    """A batch whose requests share SHARED tokens: queries, a poisoned cache, metadata, and the witness's result."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.spec = jattn.AttentionSpec(**LAYER)
        self.cache_spec = jattn.KVCacheSpec(
            num_blocks=BLOCKS, block_size=SIZE, num_kv_heads=2, head_dim=64, dtype="bfloat16"
        )
        free = list(rng.permutation(BLOCKS))
        common = [free.pop() for _ in range(SHARED // SIZE)]
        table = np.full((len(TOTALS), 7), 10**6)
        slots, keys = [], []
        prefix = self._normal(rng, SHARED)
        for r, total in enumerate(TOTALS):
            pages = common + [free.pop() for _ in range(-(-total // SIZE) - len(common))]
            table[r, : len(pages)] = pages
            places = np.arange(total)
            slots.append(np.array(pages)[places // SIZE] * SIZE + places % SIZE)
            keys.append(
                [np.concatenate([p, own]) for p, own in zip(prefix, self._normal(rng, total - SHARED), strict=True)]
            )
        cache = jattn.empty_cache(self.cache_spec, fill=jnp.nan, platform="cpu")
        for place, (k, v) in zip(slots, keys, strict=True):
            cache = jattn.write_kv(cache, jnp.asarray(k), jnp.asarray(v), jnp.asarray(place, jnp.int32))
        self.cache = cache
        self.meta = jattn.CommonAttentionMetadata.from_lengths(
            QUERIES, TOTALS, table, SIZE, num_tokens=TOKENS, num_reqs=ROWS
        )
        q = rng.standard_normal((TOKENS, 4, 64)).astype(jnp.bfloat16)
        q[sum(QUERIES) :] = np.nan
        self.q, self.sinks = jnp.asarray(q), np.linspace(-1, 1, 4)
        self.params = jattn.AttentionParams(sinks=jnp.asarray(self.sinks, jnp.float32))
        self.want = ragged(
            np.asarray(q, np.float64)[: sum(QUERIES)], [k for k, _ in keys], [v for _, v in keys], QUERIES,
            scale=64**-0.5, soft_cap=5.0, sinks=self.sinks,
        )  # fmt: skip

    def _normal(self, rng, tokens: int) -> list[np.ndarray]:
        """Keys and values that the cache holds exactly."""
        x = rng.standard_normal((2, tokens, 2, 64)).astype(self.cache_spec.dtype)
        return list(x.astype(np.float64))

    def attn(self, chip: Chip = HOPPER, **changes) -> jattn.PagedAttention:
        return jattn.PagedAttention(dataclasses.replace(self.spec, **changes), self.cache_spec, "pallas_gpu", chip)

    def check(self, plan) -> None:
        """Attention by the interpreted kernel with the plan that plan(attn, meta) makes inside jit."""
        with interpreted_warps():
            attn = self.attn(device.detect())
            step = lambda meta: attn.attend(self.q, self.cache, plan(attn, meta), self.params)  # noqa: E731
            state = jax.jit(step)(jax.tree.map(jnp.asarray, self.meta))
            out, lse, count = np.asarray(state.out, np.float64), np.asarray(state.lse), sum(QUERIES)
        assert state.out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out[:count], self.want[0], atol=2e-2)
        np.testing.assert_allclose(lse[:count], self.want[1], atol=1e-4)
        assert (out[count:] == 0).all() and np.isneginf(lse[count:]).all()


def planned(attn: jattn.PagedAttention, meta, **options):
    """The plan of a batch by one program; without jit it would be more than a hundred."""
    return jax.jit(functools.partial(attn.build, **options))(meta)


@INTERPRETS
def test_a_shared_prefix_is_attention_by_its_definition():
    """Of a prefix of 37 tokens the whole blocks are shared."""
    Shared().check(lambda attn, meta: attn.build(meta, common_prefix_len=37))


@pytest.mark.slow
@INTERPRETS
def test_levels_of_groups_are_attention_by_its_definition():
    groups = [16, [(2, 16), (2, 0)]]
    batch = Shared()
    levels = jattn.cascade_levels(batch.meta, groups, SIZE)
    batch.check(lambda attn, meta: attn.build_cascade(jax.tree.map(jnp.asarray, levels)))


@pytest.mark.slow
@INTERPRETS
def test_the_gradient_of_levels_is_that_of_the_reference():
    batch, found = Shared(), []
    weight = np.random.default_rng(1).standard_normal(batch.q.shape).astype(np.float32)
    live = np.arange(TOKENS)[:, None, None] < sum(QUERIES)
    with interpreted_warps():
        for backend in ("pallas_gpu", "sdpa"):
            attn = jattn.PagedAttention(batch.spec, batch.cache_spec, backend)
            plan = attn.build(batch.meta, common_prefix_len=32)

            def loss(q, sinks, attn=attn, plan=plan):
                out = attn.attend(q, batch.cache, plan, jattn.AttentionParams(sinks=sinks)).out
                return jnp.sum(jnp.where(live, out.astype(jnp.float32) * weight, 0))

            q = jnp.where(live, batch.q, 0)
            found.append(jax.jit(jax.grad(loss, (0, 1)))(q, batch.params.sinks))
    for ours, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(wanted, np.float64), atol=4e-2)


def test_the_shared_level_holds_every_query_and_the_rest_its_own_keys():
    batch = Shared()
    plan = batch.attn().build(batch.meta, common_prefix_len=33)
    (first,) = plan.shared
    assert first.common.query_start_loc.tolist() == [0, 7] and first.common.seq_lens.tolist() == [SHARED]
    assert not first.common.is_causal and plan.common.is_causal
    np.testing.assert_array_equal(plan.common.seq_lens[:4], np.subtract(TOTALS, SHARED))
    np.testing.assert_array_equal(plan.block_table[:4, 0], np.asarray(batch.meta.block_table)[:4, 2])


def test_tokens_that_a_request_has_not_computed_are_not_shared():
    """A prefix of 32 tokens of which request 0 computes the last one now: its query must not see later ones."""
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1], [32, 40], [[1, 2, 0], [1, 2, 3]], SIZE)
    plan = planned(Shared().attn(), meta, common_prefix_len=32)
    assert plan.shared[0].common.seq_lens.tolist() == [16]
    np.testing.assert_array_equal(plan.common.seq_lens, [16, 24])


def test_a_batch_says_its_prefix_as_an_array_until_its_blocks_change():
    batch = Shared()
    attn, meta = batch.attn(), batch.meta.replace(common_prefix_len=np.int32(SHARED))
    ours, wanted = planned(attn, meta), planned(attn, batch.meta, common_prefix_len=SHARED)
    for level, other in ((ours, wanted), (ours.shared[0], wanted.shared[0])):
        np.testing.assert_array_equal(level.common.seq_lens, other.common.seq_lens)
        np.testing.assert_array_equal(level.block_table, other.block_table)
    assert ours.common.common_prefix_len is None
    build = jax.jit(attn.build)
    for keys in (0, 16, 32):  # one program
        (first,) = build(meta.replace(common_prefix_len=jnp.int32(keys))).shared
        assert first.common.seq_lens.tolist() == [keys]
    assert build._cache_size() == 1
    assert meta.replace(block_table=meta.block_table).common_prefix_len is None
    assert jax.eval_shape(attn.build, meta.replace(block_table=meta.block_table)).shared == ()
    assert jax.eval_shape(functools.partial(attn.build, fast_build=True), meta).shared == ()
    assert attn.builder.shares_prefixes and not batch.attn(sliding_window=9).builder.shares_prefixes


def test_a_layer_with_positions_computes_the_flat_batch_and_refuses_levels():
    batch = Shared()
    for layer, options in (batch.attn(sliding_window=9), {}), (batch.attn(), dict(fast_build=True)):
        plan = functools.partial(layer.build, common_prefix_len=32, **options)
        assert jax.eval_shape(plan, batch.meta).shared == ()
    spec = dataclasses.replace(batch.spec, sliding_window=9, has_alibi=True)
    with pytest.raises(jattn.UnsupportedError) as refusal:
        jattn.PagedAttention(spec, batch.cache_spec, "pallas_gpu", HOPPER, needs=(Feature.CASCADE,))
    (reason,) = refusal.value.reasons["pallas_gpu"]
    assert "sliding_window=(8, 0)" in reason and "has_alibi=True" in reason
    attn = jattn.PagedAttention(batch.spec, batch.cache_spec, platform=HOPPER, needs=(Feature.CASCADE,))
    assert attn.backend_name == "pallas_gpu"


def test_each_layer_of_a_pool_has_its_blocks_in_every_level_and_tables_are_not_exchanged():
    batch = Shared()
    attn = batch.attn()
    plan = planned(attn, batch.meta, common_prefix_len=32)
    layer = attn.for_layer(plan, 1, 20)
    for ours, old in ((layer, plan), (layer.shared[0], plan.shared[0])):
        np.testing.assert_array_equal(ours.block_table, old.block_table + 20)
    with pytest.raises(ValueError, match="a block table for each level"):
        attn.update_block_table(plan, plan.block_table, plan.slot_mapping)


def test_a_step_with_a_shared_prefix_is_a_launch_for_each_level():
    """Another two merge parts where there are more keys: here each level has too few to be cut."""
    batch = Shared()
    attn = batch.attn()
    step = lambda q, cache, meta: attn.attend(q, cache, attn.build(meta, common_prefix_len=32), batch.params)  # noqa: E731
    cache = jax.eval_shape(lambda: jattn.empty_cache(batch.cache_spec, platform="gpu"))
    assert launches(jax.jit(step), batch.q, cache, batch.meta) == 2
