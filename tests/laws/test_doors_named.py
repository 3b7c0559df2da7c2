"""Arguments of the attention functions that were once ignored or raised an unclear error: now each has its message."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import metadata
from jattn.compat import vllm
from tests.backends.ragged_batch import K, Q, V, batch, filled
from tests.backends.toy import CACHE, SPEC

BUILD = jattn.CommonAttentionMetadata.from_lengths
HERE = ("sdpa", "cpu_native", "pallas_cpu", "split")
SCALES = [0.0, -1.0, np.nan, np.inf]


# ---------------------------------------------------------------------- empty batches


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(("tokens", "requests"), [(None, None), (3, None), (None, 2), (3, 2)])
def test_no_request_is_a_batch_like_another(backend, tokens, requests):
    sizes = dict(num_tokens=tokens, num_reqs=requests)
    width = tokens or 0
    empty = jnp.zeros((width, 4, 8)), jnp.zeros((width, 2, 8)), jnp.zeros((width, 2, 8))
    for table in ([], np.zeros((0, 3), np.int32)):
        meta = BUILD([], [], table, 4, **sizes)
        assert meta.num_reqs == 0 and meta.num_tokens == width and jattn.check_host(meta, CACHE) is meta
        attn = jattn.PagedAttention(SPEC, CACHE, backend)
        before = filled()
        cache, state = attn(*empty, before, attn.build(meta))
        assert state.out.shape == (width, 4, 8) and not np.asarray(state.out).any()
        assert np.isneginf(state.lse).all()
        for new, old in zip(cache.logical(), before.logical(), strict=True):
            np.testing.assert_array_equal(new, old)
    state = jattn.attention(*empty, BUILD([], [], None, 4, **sizes), SPEC, backend=backend)
    assert not np.asarray(state.out).any() and np.isneginf(state.lse).all()


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_request_passes_through_the_batch_s_utilities(tokens):
    meta = BUILD([], [], np.zeros((0, 2), np.int32), 4, num_tokens=tokens)
    assert jattn.split_decodes_and_prefills(meta) == (0, 0, 0, 0)
    assert vllm.split_prefill_chunks([], 4) == [] and metadata.compute_mm_prefix_range_tensor([]).shape == (0, 0, 2)
    assert jattn.reorder_batch_to_split_decodes_and_prefills(meta)[0].shape == (0,)
    assert meta.padded(4, 2).max_num_reqs == 2 and meta.positions().shape == meta.token_to_req().shape == (tokens,)
    assert meta.advanced(4) is vllm.draft_metadata(meta, 1, 4) is meta
    assert vllm.apply_permutation(meta, []).num_tokens == tokens
    batches, tables = jattn.make_local_attention_virtual_batches(4, meta, 4)
    assert batches.num_reqs == 0 and not tables(meta.block_table).any()
    assert not jattn.get_scheduler_metadata(meta, SPEC).num_items
    assert all((x == -1).all() for x in vllm.get_batch_indices_positions([0], [], tokens))
    (level,) = jattn.cascade_levels(meta, 4, 4)
    assert not np.asarray(jattn.cascade_attention(jnp.ones((tokens, 4, 8)), filled(), [level], SPEC).out).any()
    assert jattn.get_dcp_local_seq_lens([], 2).shape == (0, 2)
    assert jattn.merge(jattn.AttentionState.empty(0, 2, 4)).out.shape == (0, 2, 4)
    assert jattn.copy_blocks(filled(), np.zeros((0, 2), np.int32)).k.shape == filled().k.shape


# ---------------------------------------------------------------------- lengths and pages


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(seq_lens=[2**31, 5]), "seq_lens holds 2147483648, which is outside int32"),
        (
            dict(query_lens=[2**31 - 1, 2**31 - 1], seq_lens=[2**31 - 1] * 2, block_table=None),
            "add up to 4294967294 tokens",
        ),
        (dict(query_lens=[True, False]), "query_lens.dtype=bool must be an integer type"),
        (dict(seq_lens=[4.0, 5.0]), "seq_lens.dtype=float64 must be an integer type"),
        (dict(block_table=[[0, -1], [2, 3]], seq_lens=[5, 5]), r"block_table\[0, 1\]=-1 must be a block id >= 0"),
        (dict(block_table=[[2**29, 1], [2, 3]]), "its slots are outside int32"),
        (dict(query_lens=[1, 6], causal=np.bool_(True)), "seq_len=5 is less than query_len=6"),
        (dict(block_size=4.0), "block_size=4.0 must be a positive integer"),
        (dict(causal="no"), "causal='no' must be an array of bools"),
    ],
)
def test_lengths_that_are_none_are_refused_before_they_wrap(change, sentence):
    good = dict(query_lens=[1, 2], seq_lens=[4, 5], block_table=[[0, 1], [2, 3]], block_size=4)
    BUILD(**good)
    with pytest.raises(ValueError, match=sentence):
        BUILD(**{**good, **change})


def test_lengths_inside_jit_are_sent_to_from_traced():
    with pytest.raises(ValueError, match="query_lens is traced.*from_traced"):
        jax.jit(lambda q: BUILD(q, q, None, 4).seq_lens)(np.ones(2, np.int32))


def test_a_batch_knows_its_block_size_and_refuses_another_cache():
    """The same 32 slots in blocks of 8: other blocks, so other keys, and no other check would see it."""
    wide = dataclasses.replace(CACHE, num_blocks=4, block_size=8)
    meta = batch()
    for call in (
        lambda: jattn.PagedAttention(SPEC, wide).build(meta),
        lambda: jattn.paged_attention(Q, jattn.empty_cache(wide), meta, SPEC),
        lambda: jattn.check_host(meta, wide),
        lambda: jattn.cascade_levels(meta, 8, 8),
        lambda: vllm.next_decode(meta, 8),
        lambda: jattn.make_local_attention_virtual_batches(8, meta, 8),
    ):
        with pytest.raises(ValueError, match="meta.block_size=4 tokens"):
            call()
    jattn.PagedAttention(SPEC, wide).build(meta.replace(block_size=None))  # not known: not checked


# ---------------------------------------------------------------------- states


def test_one_state_obeys_the_rule_of_empty_rows():
    state = jattn.AttentionState(
        out=jnp.full((3, 1, 2), jnp.nan).at[2].set(5), lse=jnp.float32([[jnp.inf], [-jnp.inf], [1]])
    )
    merged = jattn.merge(state)
    np.testing.assert_array_equal(merged.out, np.float32([[[0, 0]], [[0, 0]], [[5, 5]]]))
    np.testing.assert_array_equal(merged.lse, np.float32([[-np.inf], [-np.inf], [1]]))
    with pytest.raises(ValueError, match="merge needs at least one state"):
        jattn.merge()


def test_states_of_two_dtypes_merge_into_one_that_holds_both_in_any_order():
    half = jattn.AttentionState(out=jnp.ones((1, 1, 2), jnp.bfloat16), lse=jnp.zeros((1, 1)))
    other = jattn.AttentionState(out=jnp.full((1, 1, 2), 1.001, jnp.float16), lse=jnp.zeros((1, 1)))
    one, two = jattn.merge(half, other), jattn.merge(other, half)
    assert one.out.dtype == two.out.dtype == jnp.float32
    np.testing.assert_array_equal(one.out, two.out)
    with pytest.raises(ValueError, match=r"states\[1\]: out .* and lse bfloat16"):
        jattn.merge(half, dataclasses.replace(half, lse=half.lse.astype(jnp.bfloat16)))


# ---------------------------------------------------------------------- numbers and functions


@pytest.mark.parametrize("bad", SCALES)
@pytest.mark.parametrize("form", [float, np.float32, lambda x: np.full(2, x), jnp.float32])
@pytest.mark.parametrize("backend", HERE)
def test_a_scale_that_cannot_be_is_refused_wherever_the_host_holds_it(backend, form, bad):
    attn = jattn.PagedAttention(SPEC, CACHE, backend)
    params = jattn.AttentionParams(k_scale=form(bad))
    with pytest.raises(ValueError, match="params.k_scale=.* must be finite and > 0"):
        attn.attend(Q, filled(), attn.build(batch()), params)
    with pytest.raises(ValueError, match="params.k_scale=.* must be finite and > 0"):
        jattn.write_kv(filled(), K, V, np.arange(8), params)
    jax.eval_shape(lambda p: attn.attend(Q, filled(), attn.build(batch()), p), params)  # traced: not checked


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(has_alibi="no"), "has_alibi='no' must be True or False"),
        (dict(has_sinks=1), "has_sinks=1 must be True or False"),
        (dict(scale=-1.0), "scale=-1.0 must be > 0"),
        (dict(scale=float("nan")), "scale=nan must be finite"),
        (dict(scale=1j), "scale=1j must be a number"),
        (dict(logits_soft_cap=-1), "logits_soft_cap=-1 must be >= 0"),
        (dict(num_heads=4.0), "num_heads=4.0 must be a positive integer"),
    ],
)
def test_a_layer_that_cannot_be_says_why(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        jattn.AttentionSpec(**dict(num_heads=4, head_dim=8) | options)


def test_complex_slopes_are_refused():
    spec, slopes = dataclasses.replace(SPEC, has_alibi=True), jnp.ones(4, jnp.complex64)
    with pytest.raises(ValueError, match="params.alibi_slopes.dtype=complex64 must be a type of real numbers"):
        jattn.paged_attention(Q, filled(), batch(), spec, jattn.AttentionParams(alibi_slopes=slopes))


def raising(*args):
    raise KeyError("mine")


@pytest.mark.parametrize("backend", ("sdpa", "pallas_cpu", "split"))
@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        (dict(mask_fn=lambda h, q, k: q - k), r"mask_fn must be .* -> bool.*it gave int32\[1, 3, 5\]"),
        (dict(mask_fn=lambda h, q, k: (q > k)[:, :2]), r"mask_fn must be .*it gave bool\[1, 2, 5\]"),
        (dict(mask_fn=lambda q, k: q > k), "mask_fn must be .*it raised TypeError"),
        (dict(mask_fn=raising), "mask_fn must be .*it raised KeyError: 'mine'"),
        (dict(mask_fn=lambda h, q, k: bool((q > k).all())), "mask_fn must be .*it raised TracerBoolConversionError"),
        (dict(score_fn=lambda s, h, q, k: s > 0), r"score_fn must be .*it gave bool\[2, 3, 5\]"),
        (dict(score_fn=lambda s, h, q, k: s + 1j), r"score_fn must be .*it gave complex64"),
        (dict(score_fn=lambda s: s), "score_fn must be .*it raised TypeError"),
        (dict(score_fn=lambda s, h, q, k: None), "score_fn must be .*it raised ValueError: None"),
    ],
)
def test_what_a_user_s_function_gives_is_looked_at_once_a_trace(backend, functions, sentence):
    attn = jattn.PagedAttention(dataclasses.replace(SPEC, **functions), CACHE, backend)
    with pytest.raises(ValueError, match=sentence):
        attn.attend(Q, filled(), attn.build(batch()))


def test_a_donated_cache_is_not_used_again():
    attn = jattn.PagedAttention(SPEC, CACHE)
    old, m = filled(), attn.build(batch())
    jax.jit(lambda cache: attn(Q, K, V, cache, m)[0], donate_argnums=0)(old)
    for call in (
        lambda: attn.attend(Q, old, m),
        lambda: attn(Q, K, V, old, m),
        lambda: jattn.write_kv(old, K, V, np.arange(8)),
        lambda: jattn.copy_blocks(old, [[0, 1]]),
        lambda: old.logical(),
        lambda: jattn.paged_attention(Q, old, batch(), SPEC),
    ):
        with pytest.raises(ValueError, match="cache was donated to an earlier call"):
            call()
