"""Gradients for kernels that compute forward only: those of the reference, which is computed in the backward pass."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from jattn.cache.layout import PagedKV
from jattn.errors import UnsupportedError
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.metadata.parallel import KeyShard
from jattn.ops.attend import AttentionCall, differentiable
from jattn.ops.keys import PackedKeys, PagedKeys
from jattn.ops.levels import batch_of
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AnyArray

X = TypeVar("X")


def paged_gradient(
    spec: AttentionSpec,
    common: CommonAttentionMetadata,
    block_table: AnyArray,
    inputs: tuple[jax.Array, PagedKV, AttentionParams],
    cotangent: AttentionState,
    shard: KeyShard | None = None,
) -> tuple[jax.Array, PagedKV, AttentionParams]:
    """(dq, dcache, dparams) of attention over these pages, of this rank's keys; inputs: (q, cache, params)."""
    batch = batch_of(common, spec.attn_type)
    if shard is not None:
        batch = dataclasses.replace(batch, seq_lens=shard.local_lens(common), shard=shard)
    return _gradient(spec, common, batch, lambda cache: PagedKeys.of(cache, block_table), inputs, cotangent)


def packed_gradient(
    spec: AttentionSpec,
    common: CommonAttentionMetadata,
    inputs: tuple[jax.Array, tuple[jax.Array, jax.Array], AttentionParams],
    cotangent: AttentionState,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], AttentionParams]:
    """(dq, (dk, dv), dparams) of attention over packed keys; inputs: (q, (k, v), params)."""
    batch, longest = batch_of(common, spec.attn_type), keys_of(common, spec.attn_type).max_seq_len
    open_keys = lambda kv: PackedKeys.of(kv[0], kv[1], batch.seq_lens, longest)
    return _gradient(spec, common, batch, open_keys, inputs, cotangent)


def _gradient(spec, common, batch, open_keys, inputs, cotangent):
    max_query_len = queries_of(common, spec.attn_type).max_query_len
    call = AttentionCall(spec, common.is_causal, max_query_len, "chunked", cotangent.out.dtype.name)
    forward = lambda q, source, params: differentiable(call, q, open_keys(source), batch, params)
    return jax.vjp(forward, *jax.tree.map(jnp.asarray, inputs))[1](cotangent)


def forward_only(tree: X, who: str, way_out: str = "use backend='sdpa' to differentiate") -> X:
    """The tree unchanged; UnsupportedError if a derivative with respect to one of its leaves is taken."""

    @jax.custom_jvp
    def same(x):
        return x

    @same.defjvp
    def refuse(primals, tangents):
        raise UnsupportedError(f"{who} computes forward only; {way_out}")

    return same(tree)
