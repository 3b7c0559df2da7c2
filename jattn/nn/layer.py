"""An attention layer as data and one pure function: projections, norms, rotary turn, attention, output.

It owns neither weights nor cache; the Flax modules and the models are thin around it.

    weights  q, k, v [in, heads * dim] and o [heads * dim, out], or qkv fused; each {'kernel': .., 'bias': ..}
             q_norm, k_norm {'scale': [D]};  sinks f32[H];  k_scale, v_scale of a quantised cache
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.errors.arguments import boolean, check_fields, integer, kind, number, optional, sequence_of
from jattn.nn.norm import Norm
from jattn.nn.rope import Angles, Rope, rotate
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType

Attend = Callable[[jax.Array, "jax.Array | None", "jax.Array | None", AttentionParams], tuple]


def _growth(name: str, value) -> tuple[float, float]:
    pair = sequence_of(number())(name, value)
    if len(pair) != 2 or pair[0] <= 0:
        raise ValueError(f"{name}={pair} must be (every, weight) with every > 0")
    return pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Static description of a layer: hashable, so equal layers share one trace."""

    spec: AttentionSpec
    hidden_size: int  # numbers in, and out
    rope: Rope | None = None
    qk_norm: Norm | None = None  # of every head of q and k
    norm_after_rope: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    clip_qkv: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    query_growth: tuple[float, float] | None = None  # (every, weight): q *= 1 + weight * log(1 + (pos + 1) // every)

    def __post_init__(self):
        flags = dict.fromkeys(("norm_after_rope", "qkv_bias", "out_bias", "fused_qkv"), boolean)
        check_fields(
            self, spec=kind(AttentionSpec), hidden_size=integer(1), rope=optional(kind(Rope)),
            qk_norm=optional(kind(Norm)), clip_qkv=optional(number(above=0)), **flags,
            alibi_slopes=optional(sequence_of(number())), query_growth=optional(_growth),
        )  # fmt: skip
        if (self.alibi_slopes is not None) != self.spec.has_alibi:
            raise ValueError(f"{self.alibi_slopes=} must be given exactly when {self.spec.has_alibi=}")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.spec.num_heads:
            raise ValueError(f"{self.alibi_slopes=} must be one a head, {self.spec.num_heads}")
        if self.rope is not None and self.rope.dim > self.spec.head_dim:
            raise ValueError(f"{self.rope.dim=} must not exceed {self.spec.head_dim=}")
        if self.spec.output_dtype is not None:
            raise ValueError(
                f"{self.spec.output_dtype=}: the output projection of a layer reads real numbers; use None"
            )
        if self.rope is not None and self.is_cross:
            raise ValueError("cross attention has no rotary positions: decoder and encoder count their own")

    @property
    def is_cross(self) -> bool:
        """Do keys come from the encoder?"""
        return self.spec.attn_type is AttentionType.ENCODER_DECODER

    @property
    def widths(self) -> dict[str, int]:
        """Numbers that each projection makes of a token."""
        s = self.spec
        return dict(q=s.num_heads * s.head_dim, k=s.num_kv_heads * s.head_dim, v=s.num_kv_heads * s.v_head_dim)

    @property
    def out_width(self) -> int:
        """Numbers of all heads' outputs together."""
        return self.spec.num_heads * self.spec.v_head_dim


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [T, in] @ kernel [in, out], summed in float32: f32[T, out].

    XLA:CPU multiplies bf16 for a float32 result up to five times faster than for a bf16 one (JAX 0.10), and a single
    bf16 row ten times slower than two: a row alone is computed twice.
    """
    alone = x.shape[0] == 1 and x.dtype == jnp.bfloat16
    y = jnp.dot(jnp.concatenate([x, x]) if alone else x, kernel, preferred_element_type=jnp.float32)
    return y[:1] if alone else y


def linear(weights: dict, x: jax.Array) -> jax.Array:
    """x [T, in] @ kernel [in, out] (+ bias), rounded once to the dtype of x."""
    y = product(x, weights["kernel"])
    return (y + weights["bias"][None, :] if "bias" in weights else y).astype(x.dtype)


def run(
    layer: AttentionLayer,
    weights: dict,
    x: jax.Array,
    attend: Attend,
    *,
    positions: jax.Array | None = None,
    angles: Angles | None = None,
    keys_from: jax.Array | None = None,
) -> tuple:
    """x [T, hidden] -> (what `attend` says of the cache, [T, hidden]).

    attend(q, k, v, params) -> (cache, AttentionState) decides where keys live. keys_from: the encoder's tokens of a
    cross layer, None once they are cached.
    """
    q, k, v = project(layer, weights, x, keys_from)
    q, k = _turned(layer, weights, q, angles), None if k is None else _turned(layer, weights, k, angles, "k_norm")
    if layer.query_growth is not None:
        every, weight = layer.query_growth
        growth = 1 + weight * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + 1) / every))
        q = (q * growth[:, None, None]).astype(x.dtype)
    cache, state = attend(q, k, v, params_of(layer, weights))
    return cache, linear(weights["o"], out_of(state, x))


def project(layer: AttentionLayer, weights: dict, x: jax.Array, keys_from: jax.Array | None = None) -> tuple:
    """(q [T H D], k [Tk K D], v [Tk K V]); k and v are None in a cross layer without new encoder tokens."""
    if layer.fused_qkv:
        edges = (layer.widths["q"], layer.widths["q"] + layer.widths["k"])
        parts = jnp.split(linear(weights["qkv"], x), edges, axis=-1)
        rows: dict = dict(zip("qkv", parts, strict=True))
    else:
        source = keys_from if layer.is_cross else x
        rows = {"q": linear(weights["q"], x)}
        rows |= {name: None if source is None else linear(weights[name], source) for name in "kv"}
    heads = dict(q=layer.spec.num_heads, k=layer.spec.num_kv_heads, v=layer.spec.num_kv_heads)
    return tuple(None if y is None else _clipped(layer, y).reshape(y.shape[0], heads[n], -1) for n, y in rows.items())


def params_of(layer: AttentionLayer, weights: dict) -> AttentionParams:
    """The traced numbers of attention itself."""
    slopes = None if layer.alibi_slopes is None else jnp.asarray(layer.alibi_slopes, jnp.float32)
    sinks = weights["sinks"].astype(jnp.float32) if layer.spec.has_sinks else None
    return AttentionParams(
        alibi_slopes=slopes, sinks=sinks, k_scale=weights.get("k_scale"), v_scale=weights.get("v_scale")
    )


def out_of(state: AttentionState, x: jax.Array) -> jax.Array:
    """[T H V] -> [T, H * V] in the dtype of the stream."""
    return state.out.reshape(state.out.shape[0], -1).astype(x.dtype)


def _turned(layer: AttentionLayer, weights: dict, x: jax.Array, angles: Angles | None, norm: str = "q_norm"):
    """q or k normalised and turned, in the layer's order."""

    def normed(y):
        return y if layer.qk_norm is None else layer.qk_norm(weights.get(norm, {}), y)

    def turned(y):
        return y if layer.rope is None else rotate(y, angles)

    return normed(turned(x)) if layer.norm_after_rope else turned(normed(x))


def _clipped(layer: AttentionLayer, y: jax.Array) -> jax.Array:
    return y if layer.clip_qkv is None else jnp.clip(y, -layer.clip_qkv, layer.clip_qkv)
