"""Multi-head latent attention (DeepSeek, Kimi): MLASpec, a layer's static description, and MLAParams, its weights.

A token is cached as one row that all heads share: kv_c, its normed latent (kv_lora_rank), and k_pe, its rotated key
(qk_rope_head_dim). kv_b_proj holds per head W_UK, latent -> key, and W_UV, latent -> value. Two ways to compute
give the same result:

    materialised   k = [kv_c W_UK | k_pe]    v = kv_c W_UV       H heads of qk_head_dim; for long prompts
    absorbed       q = [q_nope W_UK^T | q_pe]  against the rows themselves, then out W_UV: 1 kv head; for decoding
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp

from jattn.errors.arguments import as_array, check_fields, integer, kind, optional, takes
from jattn.spec import AttentionSpec, Window, check_positive
from jattn.types import AttentionType, pytree

FEATURES = (
    *("sliding_window", "chunk_size", "logits_soft_cap"),
    *("has_alibi", "has_sinks", "mask_fn", "score_fn"),
)
"""Fields of an MLASpec that mean the same in an AttentionSpec."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec:
    """One latent attention layer's static description. Hashable: equal layers share one trace."""

    num_heads: int  # H, query heads
    q_lora_rank: int | None = None  # rank of the projection that makes q; attention itself does not use it
    kv_lora_rank: int  # L, elements of a token's latent kv_c
    qk_nope_head_dim: int  # elements of a query or key of one head that are not rotated
    qk_rope_head_dim: int  # R, elements of a query or key that are rotated; the key's are shared by all heads
    v_head_dim: int  # V, elements of a value of one head
    scale: float = cast(float, None)  # factor on q.k. None: qk_head_dim ** -0.5
    sliding_window: Window | None = None  # this and the fields below: see AttentionSpec
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    mask_fn: Callable | None = None
    score_fn: Callable | None = None

    if TYPE_CHECKING:  # the constructor also accepts None as a scale and an int as a window

        def __init__(
            self,
            *,
            num_heads: int,
            q_lora_rank: int | None = None,
            kv_lora_rank: int,
            qk_nope_head_dim: int,
            qk_rope_head_dim: int,
            v_head_dim: int,
            scale: float | None = None,
            sliding_window: int | Window | None = None,
            chunk_size: int | None = None,
            logits_soft_cap: float | None = None,
            has_alibi: bool = False,
            has_sinks: bool = False,
            mask_fn: Callable | None = None,
            score_fn: Callable | None = None,
        ) -> None: ...

    def __post_init__(self):
        sizes = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_fields(self, **dict.fromkeys(sizes, integer(1)), q_lora_rank=optional(integer(1)))
        if self.scale is None:
            object.__setattr__(self, "scale", self.qk_head_dim**-0.5)
        checked = self.absorbed
        for name in ("scale", *FEATURES):
            object.__setattr__(self, name, getattr(checked, name))

    @functools.cached_property
    def absorbed(self) -> AttentionSpec:
        """Multi-query attention over the cached rows: one kv head, whose values are the rows' latents."""
        return self._attention(num_kv_heads=1, head_dim=self.head_dim, v_head_dim=self.kv_lora_rank)

    @functools.cached_property
    def materialised(self) -> AttentionSpec:
        """Multi-head attention over projected keys and values."""
        return self._attention(head_dim=self.qk_head_dim, v_head_dim=self.v_head_dim)

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query of one head: [nope | rope]."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """Elements of a cached row: [kv_c | k_pe], L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mha_threshold(self) -> int:
        """The longest query (new tokens of a request) for which the absorbed form takes fewer multiplications.

        Per head, a pair of query and key takes 2L + R of them absorbed and nope + R + V materialised. The materialised
        form also takes L (nope + V) for each key, to project it.
        """
        absorbed = self.head_dim + self.kv_lora_rank
        materialised = self.qk_head_dim + self.v_head_dim
        projection = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return projection // (absorbed - materialised) if absorbed > materialised else 2**31 - 1

    @property
    def num_kv_heads(self) -> int:
        """1: all heads share the rows of the cache."""
        return 1

    @property
    def group_size(self) -> int:
        """G, the query heads of one kv head: all of them."""
        return self.num_heads

    @property
    def window(self) -> Window:
        """(left, right): how many keys before and after the query's own are visible; -1: all."""
        return self.sliding_window or (-1, -1)

    @property
    def retention(self) -> tuple[int | None, int | None]:
        """(sliding window in tokens, chunk size) of the rows that later queries can see: see AttentionSpec."""
        return self.absorbed.retention

    @property
    def attn_type(self) -> AttentionType:
        """Always a decoder's."""
        return AttentionType.DECODER

    def _attention(self, **dims) -> AttentionSpec:
        features = {name: getattr(self, name) for name in ("scale", *FEATURES)}
        return AttentionSpec(num_heads=self.num_heads, **dims, **features)


@pytree
class MLAParams:
    """A layer's weights and traced parameters: either kv_b_proj, or w_uk and w_uv, which `absorb` makes of it.

    For each scale: real value = stored value * scale; None means exactly 1.
    """

    kv_b_proj: jax.Array | None = None  # [L, H * (nope + V)] or [L H nope+V], input dimension first
    w_uk: jax.Array | None = None  # [H nope L] of latent and key
    w_uv: jax.Array | None = None  # [H L V] of latent and value
    alibi_slopes: jax.Array | None = None  # f32[H], with spec.has_alibi
    sinks: jax.Array | None = None  # f32[H] logits of the sinks, with spec.has_sinks
    kv_c_scale: jax.Array | float | None = None  # f32[] scale of the cached latents
    k_pe_scale: jax.Array | float | None = None  # f32[] scale of the cached rotated keys


@takes(spec=kind(MLASpec), params=kind(MLAParams))
def absorb(spec: MLASpec, params: MLAParams) -> MLAParams:
    """Params with kv_b_proj split into w_uk and w_uv, in the layout that the absorbed form multiplies by."""
    if params.kv_b_proj is None:
        return params
    shape = (spec.kv_lora_rank, spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim)
    w = jnp.asarray(params.kv_b_proj).reshape(shape)
    w_uk, w_uv = w[..., : spec.qk_nope_head_dim], w[..., spec.qk_nope_head_dim :]
    return dataclasses.replace(
        params, kv_b_proj=None, w_uk=jnp.transpose(w_uk, (1, 2, 0)), w_uv=jnp.transpose(w_uv, (1, 0, 2))
    )


def check_mla_params(spec: MLASpec, params: MLAParams) -> None:
    """Raise ValueError unless weights are given in one form, with the parameters that the spec uses and no others."""
    if not isinstance(params, MLAParams):
        raise TypeError(f"params must be MLAParams, got {type(params).__name__}: MLA needs kv_b_proj, or w_uk and w_uv")
    latent, heads = spec.kv_lora_rank, spec.num_heads
    nope, value = spec.qk_nope_head_dim, spec.v_head_dim
    split = params.w_uk is not None or params.w_uv is not None
    if split == (params.kv_b_proj is not None):
        raise ValueError("give MLAParams either kv_b_proj, or w_uk and w_uv as prepare_params made them")
    wanted = dict(w_uk=((heads, nope, latent),), w_uv=((heads, latent, value),))
    if not split:
        wanted = dict(kv_b_proj=((latent, heads * (nope + value)), (latent, heads, nope + value)))
    wanted |= dict(alibi_slopes=((heads,),), sinks=((heads,),), kv_c_scale=((), (1,)), k_pe_scale=((), (1,)))
    for name, shapes in wanted.items():
        given = getattr(params, name)
        if given is None and name in ("w_uk", "w_uv"):
            raise ValueError(f"params.{name} is missing; give kv_b_proj, or both w_uk and w_uv")
        shape = None if given is None else as_array(f"params.{name}", given).shape
        if shape is not None and shape not in shapes:
            raise ValueError(f"params.{name}.shape={shape} must be {' or '.join(map(str, shapes))}")
    for name, flag in (("alibi_slopes", "has_alibi"), ("sinks", "has_sinks")):
        if (getattr(params, name) is not None) != getattr(spec, flag):
            raise ValueError(f"params.{name} is {getattr(params, name)!r} but spec.{flag}={getattr(spec, flag)}")
    check_positive(params, "kv_c_scale", "k_pe_scale")
