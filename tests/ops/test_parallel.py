"""Several devices, one answer: keys dealt out over ranks, heads dealt out over ranks, and the collectives between."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jattn
from jattn.backends import ContextParallel
from jattn.metadata import with_dcp
from jattn.metadata.parallel import KeyShard
from jattn.models.sharded_attention import ShardedAttention
from jattn.ops import parallel as collectives
from jattn.ops.state import AttentionState
from jattn.parallel import decode_context_parallel, head_partition, tensor_parallel
from tests.cases import FEATURES, Case
from tests.ops import latent
from tests.oracle.mla import latent_attention
from tests.problem import Problem

AXIS = "ranks"
RAGGED = Case("ragged", (1, 5, 0, 9, 1, 2), (19, 7, 0, 26, 1, 3))  # the short ones leave ranks without a key


def mesh(world: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:world]), (AXIS,))


def over(world: int, f, in_specs, out_specs):
    return jax.jit(jax.shard_map(f, mesh=mesh(world), in_specs=in_specs, out_specs=out_specs, check_vma=False))


# ---------------------------------------------------------------------- where a key lies and where it stands


@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_deal_out_every_position_once_and_in_order(world, interleave):
    everything, bounds = np.arange(70), np.arange(-2, 71)
    owner, total = everything // interleave % world, 0
    for rank in range(world):
        shard = KeyShard(rank=rank, world=world, interleave=interleave)
        mine = np.flatnonzero(owner == rank)
        assert shard.positions(everything)[: len(mine)].tolist() == mine.tolist()
        below = np.asarray(shard.count_below(bounds))
        assert below.tolist() == [int((mine < p).sum()) for p in bounds]
        total += below[-1]
    assert total == len(everything)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 2), (4, 4)])
def test_slots_of_all_ranks_cover_the_new_tokens_once(world, interleave):
    size, table = 4, np.array([[7, 3, 9], [5, 1, 0]])
    meta = jattn.CommonAttentionMetadata.from_lengths([9, 2], [20, 2], table, size * world, num_tokens=13)
    slots = [KeyShard(rank=r, world=world, interleave=interleave).slot_mapping(meta, size) for r in range(world)]
    written = np.stack(slots) >= 0
    assert written.sum(axis=0).tolist() == [1] * 11 + [0, 0]
    for t, position in enumerate([*range(11, 20), 0, 1]):
        rank = int(np.argmax(written[:, t]))
        assert rank == position // interleave % world
        block = table[0 if t < 9 else 1, position // (size * world)]
        assert slots[rank][t] // size == block  # every rank's page of one block id holds the same run of positions


def test_a_token_without_a_slot_is_written_by_no_rank():
    meta = jattn.CommonAttentionMetadata.from_lengths([3, 2], [9, 5], np.array([[4, 2], [1, 0]]), 8)
    kept = np.array([True, False, True, False, True])
    meta = meta.replace(slot_mapping=np.where(kept, meta.slot_mapping, -1))
    slots = [KeyShard(rank=rank, world=2).slot_mapping(meta, 4) for rank in range(2)]
    assert (np.stack(slots) >= 0).sum(axis=0).tolist() == kept.tolist()


# ---------------------------------------------------------------------- keys over ranks


def context_parallel(problem: Problem, world: int, interleave: int):
    """(cache, state): all tokens written by the ranks that own them, in two steps, onto poisoned pages."""
    own = -(-max(problem.case.seq_lens) // problem.block_size) + 1
    blocks = own * len(problem.case.seq_lens)
    options = dict(num_blocks=blocks * world, block_size=problem.block_size, num_kv_heads=problem.kv_heads)
    spec = jattn.KVCacheSpec(**options, head_dim=problem.head_dim, dtype="float32")
    table = problem.rng("table").permutation(blocks).reshape(-1, own)
    cache = jattn.empty_cache(spec, float("nan"))
    step = jax.jit(decode_context_parallel(problem.spec, spec, mesh(world), AXIS, interleave=interleave))
    build = functools.partial(
        jattn.CommonAttentionMetadata.from_lengths, block_table=table, block_size=problem.block_size * world,
        **problem.feature.reach_of_batch(problem.lengths),
    )  # fmt: skip
    computed, full = problem.case.computed, problem.case.seq_lens
    old = [
        np.concatenate([x[:n] for x, n in zip(part, computed, strict=True)]) for part in (problem.keys, problem.values)
    ]
    q = np.zeros((len(old[0]), problem.heads, problem.head_dim), np.float32)
    cache, _ = step(q, *old, cache, build(computed, computed, num_reqs=problem.num_reqs), problem.params)
    meta = build(
        problem.case.query_lens,
        full,
        num_tokens=problem.num_tokens,
        num_reqs=problem.num_reqs,
        causal=problem.causal,
    )
    new = problem.new(problem.keys), problem.new(problem.values)
    return step(problem.q, *new, cache, meta, problem.params)


@pytest.mark.parametrize(
    ("world", "interleave", "feature"),
    [
        (1, 1, "plain"),
        (2, 1, "everything"),
        (3, 2, "chunk_alibi_sinks"),
        (4, 4, "everything_two_ways"),
        (4, 1, "per_request_causal_window"),
        (2, 1, "rswa_mm_prefix_sqrt"),
        (2, 4, "window_5"),
    ],
)
def test_context_parallel_attention_is_attention(world, interleave, feature):
    problem = Problem(case=RAGGED, feature=FEATURES[feature])
    problem.numbers.pop("k_scale", None), problem.numbers.pop("v_scale", None)  # the keys are stored as they are
    _, state = context_parallel(problem, world, interleave)
    answer = problem.answer_over(problem.keys, problem.values)  # each rank rounds, and so does the merge
    dataclasses.replace(answer, out_limit=2 * answer.out_limit, lse_limit=2 * answer.lse_limit).check(state)


@pytest.mark.parametrize(("world", "interleave"), [(2, 2), (4, 1)])
def test_latent_rows_over_ranks_are_latent_attention(world, interleave):
    spec, size = latent.SPEC, 4
    cache_spec = jattn.mla_cache_spec(spec, 8 * world, size, dtype="float32")
    case = latent.PLAIN
    (kv_c, k_pe), lens = ([x[3], x[1]] for x in case.rows), [30, 5]
    table, q = np.array([[3, 0, 6, 1, 7, 2, 4, 5], [5, 4, 2, 7, 1, 6, 0, 3]])[:, : 32 // (size * world)], case.q
    table = table[:, :4] if world == 2 else table[:, :2]
    step = jax.jit(decode_context_parallel(spec, cache_spec, mesh(world), AXIS, interleave=interleave))
    cache = jattn.empty_cache(cache_spec, float("nan"))
    done = np.array([0, 0])
    for total in ([28, 4], lens):
        count = np.subtract(total, done)
        rows = [np.concatenate([x[a:b] for x, a, b in zip(part, done, total, strict=True)]) for part in (kv_c, k_pe)]
        meta = jattn.CommonAttentionMetadata.from_lengths(count, total, table, size * world)
        queries = np.resize(q, (sum(count), *q.shape[1:]))
        cache, state = step(queries, *rows, cache, meta, case.params)
        done = np.array(total)
    wanted = latent_attention(queries, kv_c, k_pe, case.params.kv_b_proj, count, nope=spec.qk_nope_head_dim)
    latent.check(state, wanted)


# ---------------------------------------------------------------------- the collectives


def states(world: int, heads: int = 4) -> AttentionState:
    """A state a rank, stacked; some rows empty on some ranks, one row on all."""
    rng = np.random.default_rng(0)
    out = rng.normal(size=(world, 5, heads, 3)).astype(np.float32)
    lse = rng.normal(size=(world, 5, heads)).astype(np.float32) * 3
    lse[0, 1] = -np.inf
    lse[:, 2] = -np.inf
    lse[1:, 3] = np.inf  # as some kernels mark an empty row
    out[np.isinf(lse)] = np.nan
    return AttentionState(out=jnp.asarray(out), lse=jnp.asarray(lse))


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("name", ["cp_lse_ag_out_ar", "cp_lse_ag_out_rs", "dcp_a2a_lse_reduce"])
def test_collectives_are_the_merge(name, base_e):
    world, parts = 4, states(4)
    wanted = jattn.merge(*(jax.tree.map(lambda x, r=r: x[r], parts) for r in range(world)))
    if not base_e:
        parts = AttentionState(out=parts.out, lse=parts.lse / np.float32(np.log(2)))

    def one(state):
        return getattr(collectives, name)(jax.tree.map(lambda x: x[0], state), AXIS, is_lse_base_on_e=base_e)

    kept = PartitionSpec() if name.endswith("ar") else PartitionSpec(None, AXIS)
    got = over(world, one, PartitionSpec(AXIS), kept)(parts)
    np.testing.assert_allclose(got.out, wanted.out, atol=1e-6)
    np.testing.assert_allclose(got.lse, wanted.lse, atol=1e-6)
    assert (got.out[2] == 0).all() and np.isneginf(got.lse[2]).all()


def test_heads_that_cannot_be_shared_evenly_are_refused():
    for name in ("cp_lse_ag_out_rs", "dcp_a2a_lse_reduce"):
        with pytest.raises(ValueError, match="3 heads cannot be shared evenly by 2 ranks"):
            part = lambda state, name=name: getattr(collectives, name)(jax.tree.map(lambda x: x[0], state), AXIS)
            over(2, part, PartitionSpec(AXIS), PartitionSpec(None, AXIS))(states(2, heads=3))


def test_rows_without_keys_on_this_rank_are_emptied():
    state = AttentionState(out=jnp.full((7, 2, 3), jnp.nan), lse=jnp.ones((7, 2)))
    got = collectives.mask_dcp_empty_shards(state, np.array([0, 2, 3, 5]), np.array([4, 0, 1]))
    assert np.isneginf(got.lse[:, 0]).tolist() == [False, False, True, False, False, True, True]
    assert (np.asarray(got.out)[[2, 5, 6]] == 0).all()


# ---------------------------------------------------------------------- heads over ranks


@pytest.mark.parametrize(("world", "feature", "layout"), [(2, "everything_two_ways", "HND"), (4, "everything", "NHD")])
def test_heads_over_ranks_are_attention(world, feature, layout):
    problem = Problem(feature=FEATURES[feature], heads=8, kv_heads=4, layout=layout)
    step = jax.jit(tensor_parallel(problem.spec, problem.cache_spec, mesh(world), AXIS, backend="sdpa"))
    pools = jax.NamedSharding(mesh(world), head_partition(problem.cache_spec, AXIS))
    cache = jax.device_put(problem.cache(new=False), pools)
    new = problem.new(problem.keys), problem.new(problem.values)
    cache, state = step(problem.q, *new, cache, problem.meta, problem.params)
    assert cache.k.sharding.is_equivalent_to(pools, 4)
    problem.answer(cache).check(state)


# ---------------------------------------------------------------------- a call outside jit


@pytest.mark.parametrize("shares_keys", [False, True])
def test_a_call_with_placed_arguments_compiles_nothing_sends_nothing_and_writes_in_place(shares_keys, compiles):
    problem = Problem(case=Case("decodes", (1, 1), (9, 5)), heads=4, kv_heads=2)
    spec = dataclasses.replace(problem.cache_spec, num_blocks=8)
    make, pools = tensor_parallel, head_partition(spec, AXIS)
    if shares_keys:
        make, pools = decode_context_parallel, PartitionSpec(AXIS)
    step = make(problem.spec, spec, mesh(2), AXIS, backend="sdpa", donate=True)
    place = lambda tree, where: jax.device_put(tree, jax.NamedSharding(mesh(2), where))
    size = spec.block_size * (2 if shares_keys else 1)
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1], [9, 5], [[0, 1, 2], [3, 0, 0]], size)
    heads = PartitionSpec() if shares_keys else PartitionSpec(None, AXIS)
    q, k, v = (place(problem.rng(name).normal(size=(2, n, problem.head_dim)).astype(np.float32), heads)
               for name, n in (("q", 4), ("k", 2), ("v", 2)))  # fmt: skip
    cache, meta, params = place(jattn.empty_cache(spec), pools), place(meta, PartitionSpec()), jattn.AttentionParams()
    cache, first = step(q, k, v, cache, meta, params)
    cache, _ = step(q, k, v, cache, meta, params)
    before, parts = cache.k, [shard.data.unsafe_buffer_pointer() for shard in cache.k.addressable_shards]
    with compiles() as seen, jax.transfer_guard("disallow"):
        cache, again = step(q, k, v, cache, meta, params)
    assert seen.names == [] and before.is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in cache.k.addressable_shards] == parts
    np.testing.assert_array_equal(first.out, again.out)


# ---------------------------------------------------------------------- refusals


def test_only_backends_that_can_are_asked():
    spec = jattn.AttentionSpec(num_heads=2, head_dim=8)
    cache_spec = jattn.KVCacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8)
    parallel = ContextParallel(dcp_axis=AXIS, dcp_world_size=2)
    assert jattn.PagedAttention(spec, cache_spec, parallel=parallel).backend_name == "sdpa"
    for name in set(jattn.list_backends()) - {"sdpa"}:
        with pytest.raises(jattn.UnsupportedError, match="DCP"):
            jattn.PagedAttention(spec, cache_spec, backend=name, parallel=parallel)
    with pytest.raises(jattn.UnsupportedError, match="PCP"):
        jattn.PagedAttention(spec, cache_spec, parallel=ContextParallel(pcp_axis="p", pcp_world_size=2))
    with pytest.raises(ValueError, match="must divide"):
        uneven = ContextParallel(dcp_axis=AXIS, dcp_world_size=2, interleave=3)
        jattn.PagedAttention(spec, cache_spec, parallel=uneven).build(Problem().meta.replace(block_size=8))
    with pytest.raises(ValueError, match="this rank has every key"):
        jattn.PagedAttention(spec, cache_spec).build(with_dcp(Problem().meta, 2, 0))


# ---------------------------------------------------------------------- what the two steps are given


def small_step(make, where, **features):
    """A step of a layer with 4 heads, a batch of 3 and 1 tokens, and its arguments."""
    spec = jattn.AttentionSpec(num_heads=4, head_dim=8, **features)
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=2, num_kv_heads=4, head_dim=8, dtype="float32")
    size = 2 * (max(where.shape[AXIS], 1) if make is decode_context_parallel else 1)
    meta = jattn.CommonAttentionMetadata.from_lengths([3, 1], [3, 1], [[1, 0], [2, 0]], size)
    q, k, v = np.random.default_rng(0).normal(size=(3, 4, 4, 8)).astype(np.float32)
    return make(spec, cache_spec, where, AXIS), (q, k, v, jattn.empty_cache(cache_spec), meta)


@pytest.mark.parametrize("make", [tensor_parallel, decode_context_parallel])
def test_a_mesh_of_make_mesh_and_lists_are_taken(make):
    """jax.make_mesh gives Explicit axes; JAX refuses to divide arrays over them, and our message names make_mesh."""
    explicit = jax.make_mesh((2,), (AXIS,))
    step, (q, k, v, cache, meta) = small_step(make, explicit)
    wanted = jattn.attention(q, k, v, jattn.CommonAttentionMetadata.from_lengths([3, 1], [3, 1], None, 2),
                             jattn.AttentionSpec(num_heads=4, head_dim=8), backend="sdpa")  # fmt: skip
    _, state = step(q.tolist(), k.tolist(), v.tolist(), cache, meta)
    np.testing.assert_allclose(state.out, wanted.out, atol=1e-5)
    with jax.set_mesh(explicit), pytest.raises(jattn.UnsupportedError, match="set_mesh.*ranks.*outside"):
        step(q, k, v, cache, meta)


@pytest.mark.parametrize("make", [tensor_parallel, decode_context_parallel])
@pytest.mark.parametrize("devices", [[], [0, 0]])
def test_a_mesh_without_devices_or_with_one_twice_is_refused(make, devices):
    bad = Mesh(np.array([jax.devices()[i] for i in devices], object), (AXIS,))
    with pytest.raises(ValueError, match=r"has the devices \[.*one or more, each once"):
        small_step(make, bad)


def test_params_of_divided_heads_are_refused_by_their_whole_shape():
    step, arguments = small_step(tensor_parallel, mesh(2))
    for name, shape in (("q_scale", (3,)), ("k_scale", (2,)), ("v_scale", (1,))):
        params = jattn.AttentionParams(**{name: np.ones(shape, np.float32)})
        with pytest.raises(ValueError, match=rf"params.{name}.shape=\({shape[0]},\) must be \(\) or \(4,\)"):
            step(*arguments, params)
    step, arguments = small_step(tensor_parallel, mesh(2), has_sinks=True)
    with pytest.raises(ValueError, match=r"params.sinks.shape=\(3,\) must be \(4,\)"):
        step(*arguments, jattn.AttentionParams(sinks=np.zeros(3, np.float32)))


@pytest.mark.parametrize("make", [tensor_parallel, decode_context_parallel])
@pytest.mark.parametrize("params", ["p", {}, jattn.MLAParams()])
def test_params_of_another_kind_are_refused_before_jit(make, params):
    step, arguments = small_step(make, mesh(2))
    with pytest.raises(TypeError, match="params must be AttentionParams, got"):
        step(*arguments, params)


@pytest.mark.parametrize("door", [tensor_parallel, decode_context_parallel])
def test_a_step_takes_lists_and_names_the_sizes_of_the_whole_layer(door):
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, has_sinks=True)
    cache_spec = jattn.KVCacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    step, size = door(spec, cache_spec, mesh(2), AXIS), 4 if door is tensor_parallel else 8
    meta = jattn.CommonAttentionMetadata.from_lengths([2], [2], [[1]], size)
    q, k = np.ones((2, 4, 8), np.float32), np.ones((2, 2, 8), np.float32)
    call = lambda q=q, **params: step(q, k.tolist(), k, jattn.empty_cache(cache_spec), meta,
                                      jattn.AttentionParams(**dict(sinks=np.zeros(4)) | params))  # fmt: skip
    np.testing.assert_array_equal(call(q.tolist(), k_scale=[1.0, 1.0])[1].out, call()[1].out)
    for arguments, words in (
        (dict(sinks=None), r"params.sinks, f32\[4\]"),
        (dict(k_scale=np.ones(3)), r"k_scale.shape=\(3,\) must be \(\) or \(2,\)"),
        (dict(q=q[..., :4]), r"q.shape=\(2, 4, 4\) must be \[T, 4, 8\]"),
        (dict(q=q[:, :2]), r"q.shape=\(2, 2, 8\) must be \[T, 4, 8\]"),
        (dict(q="q"), "q='q' must be an array"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**arguments)


def test_context_parallel_options_that_cannot_hold_are_refused_at_once():
    spec, cache_spec = latent.SPEC, jattn.mla_cache_spec(latent.SPEC, 8, 4)
    with pytest.raises(ValueError, match="interleave=3 must divide cache_spec.block_size=4"):
        decode_context_parallel(spec, cache_spec, mesh(2), AXIS, interleave=3)
    with pytest.raises(ValueError, match="dtype='float16' decides nothing for an MLASpec.*leave it out"):
        decode_context_parallel(spec, cache_spec, mesh(2), AXIS, dtype="float16")


@pytest.mark.parametrize("of_model", [False, True], ids=["one layer", "a model"])
def test_lengths_of_one_rank_are_refused_where_every_rank_gets_the_batch(of_model):
    """Each rank took them for its own, and keys of the others were not seen."""
    meta = with_dcp(jattn.CommonAttentionMetadata.from_lengths([3, 1], [3, 1], [[1, 0], [2, 0]], 4), 2, 1)
    step, arguments = small_step(decode_context_parallel, mesh(2))
    if of_model:
        attn = jattn.PagedAttention(
            jattn.AttentionSpec(num_heads=4, head_dim=8), arguments[3].spec,
            parallel=ContextParallel(dcp_axis=AXIS, dcp_world_size=2),
        )  # fmt: skip
        call = ShardedAttention(attn, arguments[3].spec, mesh(2), PartitionSpec(), ()).build
    else:
        call = functools.partial(step, *arguments[:4])
    with pytest.raises(ValueError, match="meta.dcp_local_seq_lens is of one rank.*leave with_dcp out"):
        call(meta)


@pytest.mark.parametrize("make", ["sdpa", "mla_sdpa"])
def test_an_axis_of_another_number_of_ranks_is_refused(make):
    """The keys of ranks 2 and 3 of 4 were on none of the 2 that there were."""
    parallel = ContextParallel(dcp_axis=AXIS, dcp_world_size=4)
    if make == "sdpa":
        spec = jattn.AttentionSpec(num_heads=2, head_dim=8)
        cache_spec = jattn.KVCacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8)
        attn = jattn.PagedAttention(spec, cache_spec, make, parallel=parallel)
    else:
        attn = jattn.MLAAttention(latent.SPEC, jattn.mla_cache_spec(latent.SPEC, 8, 4), make, parallel=parallel)
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [9], [[1]], 16)
    with pytest.raises(ValueError, match=r"dcp_world_size=4, but the axis 'ranks' has 2 ranks"):
        jax.eval_shape(over(2, attn.build, PartitionSpec(), PartitionSpec()), meta)
