"""Cached rows of MLA as a source of keys: the key is the whole row, the value its latent part."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.cache.latent import is_wide
from jattn.cache.layout import PagedKV
from jattn.mla_spec import MLAParams, MLASpec
from jattn.ops.keys import KVChunk, PagedKeys
from jattn.types import pytree, static


@pytree
class LatentKeys:
    """One kv head: k = [kv_c | k_pe], v = kv_c, both real, since the two parts have scales of their own."""

    pages: PagedKeys
    kv_c_scale: jax.Array | None
    k_pe_scale: jax.Array | None
    kv_lora_rank: int = static()
    wide: bool = static()

    @classmethod
    def of(cls, spec: MLASpec, params: MLAParams, cache: PagedKV, block_table: jax.Array) -> "LatentKeys":
        """The rows that `block_table` names."""
        return cls(
            pages=PagedKeys.of(cache, block_table),
            kv_c_scale=params.kv_c_scale,
            k_pe_scale=params.k_pe_scale,
            kv_lora_rank=spec.kv_lora_rank,
            wide=is_wide(spec, cache.spec),
        )

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def v_head_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def chunk_tokens(self) -> int:
        return self.pages.chunk_tokens

    @property
    def max_chunks(self) -> int:
        return self.pages.max_chunks

    def beside(self, q_dtype: str) -> "LatentKeys":
        return self  # both parts are read real, with scales of their own

    def in_place(self, query_rows: int) -> None:
        return None  # all query heads share one kv head, so there are many rows

    def in_chunks(self, tokens: int) -> "LatentKeys":
        return dataclasses.replace(self, pages=self.pages.in_chunks(tokens))

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        stored = self.pages.read(req, chunk)
        if self.wide:  # the value pool is never read
            row = _real(stored.k, stored.k_scale, self.kv_c_scale)
            return KVChunk(k=row, v=row[..., : self.kv_lora_rank], k_scale=None, v_scale=None)
        kv_c = _real(stored.v, stored.v_scale, self.kv_c_scale)
        k_pe = _real(stored.k, stored.k_scale, self.k_pe_scale)
        return KVChunk(k=jnp.concatenate([kv_c, k_pe], axis=-1), v=kv_c, k_scale=None, v_scale=None)


def _real(rows: jax.Array, token_scale: jax.Array | None, scale: jax.Array | None) -> jax.Array:
    """[P 1 S .] as decoded -> real numbers."""
    if token_scale is not None:
        rows = rows * token_scale[..., None]
    return rows if scale is None else rows * jnp.asarray(scale, jnp.float32).reshape(1, 1, 1, 1)
