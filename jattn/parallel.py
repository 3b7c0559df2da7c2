"""One layer on several devices: its heads, or its keys, are distributed over an axis of a mesh.

    step = tensor_parallel(spec, cache_spec, mesh, "x")                  each rank: some kv heads, all keys
    step = decode_context_parallel(spec, cache_spec, mesh, "x")          each rank: all heads, some keys
    cache, state = step(q, k, v, cache, meta, params)                    global arrays in, global arrays out

A step is jitted. A call sends nothing to a device if its arguments are there: place the cache as below, and a batch on
every device by jax.device_put(meta, NamedSharding(mesh, PartitionSpec())), once for all layers. With donate=True a call
writes into the cache that it is given; in a jitted function of yours, its own donate_argnames decide.

Inside a model's own shard_map, use PagedAttention with `rank_spec` and `rank_cache_spec`, or with `parallel=`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from jattn import device
from jattn.attention import PagedAttention
from jattn.backends import checks
from jattn.backends.parallel import ContextParallel
from jattn.cache import KVCacheSpec, PagedKV
from jattn.errors.arguments import as_array, boolean, check_kind, integer, kind, sequence_of, short, takes, text
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.attention_type import queries_of
from jattn.metadata.batch import BATCH
from jattn.metadata.host import is_traced
from jattn.mla import MLAAttention
from jattn.mla_spec import MLAParams, MLASpec
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec, with_arrays

Step = Callable[..., tuple[PagedKV, AttentionState]]


def put_local(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """jax.device_put of arrays that every process has whole, without communication between the processes.

    For a sharding over several processes, jax.device_put would first compare the arrays of all of them.
    """
    is_placed = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding is None or sharding.is_fully_addressable or any(map(is_placed, jax.tree.leaves(tree))):
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree)


def _ranks(mesh: Mesh, axis: str) -> tuple[Mesh, int]:
    """The mesh with axes that shard_map divides, and the number of ranks (devices) of the axis.

    jax.make_mesh may give axes of the type Explicit, over which shard_map takes only arrays that are divided already.
    """
    names = check_kind("mesh", mesh, Mesh, "make one with jax.sharding.Mesh or jax.make_mesh").axis_names
    if not isinstance(axis, str) or axis not in names:
        raise ValueError(f"axis={short(axis)} must be one of the mesh's axes {names}")
    ids = [device.id for device in mesh.devices.flat]
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"the mesh has the devices {ids}, but it must have one or more, each once")
    return Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names)), mesh.shape[axis]


def _axes(name: str, value: Any) -> str | tuple[str, ...]:
    """The rule of an axis name, or of a list of names, outermost first."""
    return text(name, value) if isinstance(value, str) else sequence_of(text)(name, value)


def _jitted(donate: bool) -> Callable[[Callable], Any]:
    """jax.jit of a step. Without it, JAX compiles and runs the operations inside shard_map one by one."""
    return functools.partial(jax.jit, donate_argnums=3 if donate else ())


def _arrays(**given: Any) -> tuple[Any, ...]:
    """Each as an array; numpy's stay numpy's, which jit places on the devices of all processes. None stays None."""
    return tuple(None if x is None else as_array(name, x) for name, x in given.items())


_SPECS = dict(spec=kind(AttentionSpec), cache_spec=kind(KVCacheSpec))


@takes(spec=kind(AttentionSpec), axis=_axes, world=integer(1))
def rank_spec(spec: AttentionSpec, axis: str | tuple[str, ...], world: int) -> AttentionSpec:
    """The layer with one rank's heads. mask_fn and score_fn still get the number of the head in the whole layer.

    axis: the axis of the `world` ranks, or several axes, outermost first.
    """
    kv_heads, rest = divmod(spec.num_heads // spec.group_size, world)
    if rest:
        raise ValueError(f"{spec.num_kv_heads=} must be a multiple of the {world=} ranks of axis {axis!r}")
    heads = spec.num_heads // world

    def global_head(head):
        return head + jax.lax.axis_index(axis) * heads

    mask_fn, score_fn = spec.mask_fn, spec.score_fn
    return dataclasses.replace(
        spec,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mask_fn=mask_fn and (lambda head, q_pos, kv_pos: mask_fn(global_head(head), q_pos, kv_pos)),
        score_fn=score_fn and (lambda score, head, q_pos, kv_pos: score_fn(score, global_head(head), q_pos, kv_pos)),
    )


@takes(cache_spec=kind(KVCacheSpec), world=integer(1))
def rank_cache_spec(cache_spec: KVCacheSpec, world: int) -> KVCacheSpec:
    """The cache with one rank's kv heads."""
    if cache_spec.num_kv_heads % world:
        raise ValueError(f"{cache_spec.num_kv_heads=} must be a multiple of the {world=} ranks")
    return dataclasses.replace(cache_spec, num_kv_heads=cache_spec.num_kv_heads // world)


@takes(cache_spec=kind(KVCacheSpec), axis=_axes)
def head_partition(cache_spec: KVCacheSpec, axis: str | tuple[str, ...]) -> PartitionSpec:
    """The PartitionSpec of a cache's arrays when its heads are distributed over `axis`, or several axes."""
    return PartitionSpec(None, axis) if cache_spec.heads_first else PartitionSpec(None, None, axis)


@takes(**_SPECS, donate=boolean)
def tensor_parallel(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec,
    mesh: Mesh,
    axis: str,
    *,
    backend: str = "auto",
    dtype: Any = None,
    donate: bool = False,
) -> Step:
    """step(q, k, v, cache, meta, params) with the heads distributed over `axis`; ranks do not communicate.

    dtype: of the queries, see PagedAttention. donate: see above. The step takes and returns global arrays: q [T H D],
    and the cache of `cache_spec`. Place the cache once with jattn.parallel.head_partition; every step keeps that
    placement.
    """
    mesh, world = _ranks(mesh, axis)
    local_spec, local = rank_spec(spec, axis, world), rank_cache_spec(cache_spec, world)
    checks.check_specs(spec, cache_spec)
    attn = PagedAttention(local_spec, local, backend, dtype=dtype)
    heads, pools = PartitionSpec(None, axis), head_partition(cache_spec, axis)

    def body(q, k, v, cache, meta, params):
        cache, state = attn(q, k, v, dataclasses.replace(cache, spec=local), attn.build(meta), params)
        return dataclasses.replace(cache, spec=cache_spec), state

    @_jitted(donate)
    def mapped(q, k, v, cache, meta, params):
        per_head = jax.tree.map(lambda x: PartitionSpec(*[axis] * jnp.ndim(x)), params)
        if params.qq_bias is not None:  # a bias between tokens: the same for every head
            per_head = dataclasses.replace(per_head, qq_bias=PartitionSpec())
        if params.distance_bias is not None:
            per_head = dataclasses.replace(per_head, distance_bias=PartitionSpec(axis))
        specs = (heads, heads, heads, pools, PartitionSpec(), per_head)
        on_ranks = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(pools, heads), check_vma=False)
        return on_ranks(q, k, v, cache, meta, params)

    def step(q, k, v, cache, meta: CommonAttentionMetadata, params: AttentionParams | None = None):
        device.check_context("the step divides its arguments")
        params = AttentionParams() if params is None else with_arrays(check_kind("params", params, AttentionParams))
        checks.check_cache(cache, cache_spec)
        checks.check_params(attn.chosen, spec, cache_spec, params)
        q, k, v = _arrays(q=q, k=k, v=v)
        checks.check_query(spec, q, queries_of(BATCH("meta", meta), spec.attn_type).num_tokens)
        if k is not None or v is not None:
            checks.check_keys(spec, k, v, None)
        return mapped(q, k, v, cache, meta, params)

    return step


@takes(spec=kind(AttentionSpec, MLASpec), cache_spec=kind(KVCacheSpec), interleave=integer(1), donate=boolean)
def decode_context_parallel(
    spec: AttentionSpec | MLASpec,
    cache_spec: KVCacheSpec,
    mesh: Mesh,
    axis: str,
    *,
    interleave: int = 1,
    backend: str = "auto",
    dtype: Any = None,
    donate: bool = False,
) -> Step:
    """step(q, k, v, cache, meta, params) with each request's keys distributed over `axis`.

    `interleave` consecutive keys lie on one rank, the next ones on the next rank. Every rank has all queries and the
    whole result. cache_spec.num_blocks counts the blocks of all ranks together: each has num_blocks // world of them.
    Make the batch with from_lengths(..., block_size * world): a block id then names one block on every rank. For an
    MLASpec, k and v are kv_c and k_pe. dtype: of the queries, see PagedAttention. donate: see above.
    """
    mesh, world = _ranks(mesh, axis)
    if cache_spec.num_blocks % world:
        raise ValueError(f"{cache_spec.num_blocks=} must be a multiple of the {world} ranks of axis {axis!r}")
    local = dataclasses.replace(cache_spec, num_blocks=cache_spec.num_blocks // world)
    parallel = ContextParallel(dcp_axis=axis if world > 1 else None, dcp_world_size=world, interleave=interleave)
    parallel.check_interleave(local)
    if isinstance(spec, MLASpec) and dtype is not None:
        raise ValueError(f"dtype={short(dtype)} decides nothing for an MLASpec, whose backends take any; leave it out")

    def mapped_with(parallel: ContextParallel) -> Callable:
        attn: Any
        if isinstance(spec, MLASpec):
            attn = MLAAttention(spec, local, backend, parallel=parallel)
        else:
            attn = PagedAttention(spec, local, backend, dtype=dtype, parallel=parallel)

        def body(q, k, v, cache, meta, params):
            cache, state = attn(q, k, v, dataclasses.replace(cache, spec=local), attn.build(meta), params)
            return dataclasses.replace(cache, spec=cache_spec), state

        replicated, pools = PartitionSpec(), PartitionSpec(axis)
        specs = (replicated, replicated, replicated, pools, replicated, replicated)
        on_ranks = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(pools, replicated), check_vma=False)
        return _jitted(donate)(on_ranks)

    # In a program of the caller's, XLA tells the ranks one another's addresses once for all layers of a batch.
    mapped = mapped_with(parallel)
    one_memory = world == mesh.size > 1 and device.are_peers(tuple(mesh.devices.flat))
    in_program = mapped_with(dataclasses.replace(parallel, one_memory=True)) if one_memory else mapped

    def step(q, k, v, cache, meta: CommonAttentionMetadata, params: AttentionParams | MLAParams | None = None):
        device.check_context("the step divides its arguments")
        names = ("q", "kv_c", "k_pe") if isinstance(spec, MLASpec) else ("q", "k", "v")
        checks.check_cache(cache, cache_spec)
        if params is not None:
            check_kind("params", params, MLAParams if isinstance(spec, MLASpec) else AttentionParams)
        params = with_arrays(params) if isinstance(params, AttentionParams) else params
        run = in_program if is_traced(q) else mapped
        parallel.check_of_all_ranks(BATCH("meta", meta))
        return run(*_arrays(**dict(zip(names, (q, k, v), strict=True))), cache, meta, params)

    return step
