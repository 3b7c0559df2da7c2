"""A complete user's backend in sixty lines: one gather, one softmax. It lists only what it supports."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.backends import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    Feature,
    MultipleOf,
    subclass_attention_backend_with_overrides,
)
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from jattn.types import AttentionCGSupport, pytree

CPU = Chip("cpu")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE = KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")


@pytree
class ToyMetadata:
    """Has the fields that the default update_block_table replaces."""

    block_table: jax.Array
    slot_mapping: jax.Array
    req: jax.Array  # i32[T]
    position: jax.Array  # i32[T], -1: a padding token, which sees no key

    @property
    def num_tokens(self) -> int:
        return self.req.shape[0]


@dataclasses.dataclass(frozen=True)
class ToyBuilder(AttentionMetadataBuilder[ToyMetadata]):
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = True

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        return ToyMetadata(
            block_table=jnp.asarray(common.block_table),
            slot_mapping=jnp.asarray(common.slot_mapping),
            req=common.token_to_req(),
            position=jnp.where(common.token_is_live(), common.positions(), -1),
        )


@dataclasses.dataclass(frozen=True)
class ToyImpl(AttentionImpl[ToyMetadata]):
    def forward(self, q, cache, m, params):
        spec, size = self.spec, self.cache_spec.block_size
        pages = jnp.clip(m.block_table[m.req], 0, self.cache_spec.num_blocks - 1)  # [T B]
        k, v = (x[pages].reshape(m.num_tokens, -1, *x.shape[2:]) for x in cache.logical())  # [T B*S K D]
        k, v = (jnp.repeat(x, spec.group_size, axis=2) for x in (k, v))
        seen = jnp.arange(pages.shape[1] * size)[None, :] <= m.position[:, None]
        v = jnp.where(seen[:, :, None, None], v, 0.0)  # slots that were not written may have NaN
        seen = seen[:, None, :]
        logits = jnp.einsum("thd,tchd->thc", q.astype(jnp.float32), k) * spec.scale
        logits = jnp.where(seen, logits, -jnp.inf)
        top = jnp.max(logits, axis=-1, keepdims=True, initial=-1e30)
        weight = jnp.where(seen, jnp.exp(logits - top), 0.0)
        total = weight.sum(-1)
        out = jnp.einsum("thc,tchd->thd", weight, v) / jnp.maximum(total, 1e-30)[..., None]
        return AttentionState(out=out.astype(q.dtype), lse=top[..., 0] + jnp.log(total))


class ToyBackend(AttentionBackend):
    supported_dtypes = ("float32",)
    supported_kv_cache_dtypes = ("auto", "float32")
    supported_head_sizes = (8, 16)
    supported_block_sizes = (MultipleOf(4),)
    features = frozenset({Feature.LSE})

    @classmethod
    def get_name(cls):
        return "toy"

    @classmethod
    def get_impl_cls(cls):
        return ToyImpl

    @classmethod
    def get_builder_cls(cls):
        return ToyBuilder

    @classmethod
    def get_metadata_cls(cls):
        return ToyMetadata


def derived(**overrides) -> type[AttentionBackend]:
    """A backend that differs from the toy in these attributes."""
    return subclass_attention_backend_with_overrides("Other", ToyBackend, overrides)
