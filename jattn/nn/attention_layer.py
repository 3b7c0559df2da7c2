"""An attention layer as data (AttentionConfig) and a pure function: projections, norms, rotation, attention, output.

It owns neither weights nor cache. The Flax modules and `jattn.models` call it.

    weights  q, k, v [in, heads * dim] and o [heads * dim, out], or qkv fused; each {'kernel': .., 'bias': ..}
             q_norm, k_norm {'scale': [D], [heads * D] or [heads, D]};  sinks f32[H];  k_scale, v_scale of a
             cache;  distance_bias f32[H 2L+1]
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jattn.device import spec_of, with_auto_axes
from jattn.errors.arguments import boolean, check_fields, integer, kind, number, optional, sequence_of
from jattn.nn.norm import Norm
from jattn.nn.rope import Angles, Rope, rotate
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs
from jattn.ops.product import products
from jattn.ops.quantised import is_quantised
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType

Attend = Callable[[jax.Array, "jax.Array | None", "jax.Array | None", AttentionParams, "Angles | None"], tuple]


def check_temperature_tuning(name: str, value) -> tuple[float, float]:
    """The rule of AttentionConfig.temperature_tuning."""
    pair = sequence_of(number())(name, value)
    if len(pair) != 2 or pair[0] <= 0:
        raise ValueError(f"{name}={pair} must be (floor_scale, attn_scale) with floor_scale > 0")
    return pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Static description of an attention layer. It is hashable, so equal layers share one trace."""

    spec: AttentionSpec
    hidden_size: int  # width of the input and of the output
    rope: Rope | None = None
    qk_norm: Norm | None = None  # of q and k, per head
    qk_norm_all_heads: bool = False  # qk_norm over the whole projection (all heads together), not per head
    qk_norm_scale_per_head: bool = False  # qk_norm per head, with a scale [heads, D] instead of one [D] for all heads
    qk_norm_after_rope: bool = False
    v_norm: Norm | None = None  # of v, per head; without weights
    k_is_v: bool = False  # there is no projection of v: it is that of k, before the norm and the rotation of k
    shares_kv: bool = False  # there are no k and v: the layer reads the keys and values that another layer has made
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    clip_qkv: float | None = None  # q, k and v are clipped to [-clip_qkv, clip_qkv], after qk_norm, before the rotation
    alibi_slopes: tuple[float, ...] | None = None
    max_distance: int | None = None  # L of the weight distance_bias f32[H 2L+1], with spec.use_distance_bias
    temperature_tuning: tuple[float, float] | None = None
    """(floor_scale, attn_scale): q *= 1 + attn_scale * log(1 + floor((position + offset) / floor_scale))."""
    temperature_tuning_offset: int = 1  # 1: Llama 4; 0: Ministral 3

    def __post_init__(self):
        norms = ("qk_norm_all_heads", "qk_norm_scale_per_head", "qk_norm_after_rope")
        flags = dict.fromkeys((*norms, "qkv_bias", "out_bias", "fused_qkv", "k_is_v", "shares_kv"), boolean)
        check_fields(
            self, spec=kind(AttentionSpec), hidden_size=integer(1),
            rope=optional(kind(Rope, way_out="make one with jattn.nn.Rope(dim=...)")),
            qk_norm=optional(kind(Norm)), v_norm=optional(kind(Norm)), clip_qkv=optional(number(above=0)), **flags,
            alibi_slopes=optional(sequence_of(number())), temperature_tuning=optional(check_temperature_tuning),
            temperature_tuning_offset=integer(0), max_distance=optional(integer(0)),
        )  # fmt: skip
        if (self.alibi_slopes is not None) != self.spec.has_alibi:
            raise ValueError(
                f"alibi_slopes={self.alibi_slopes!r} must be given if and only if has_alibi={self.spec.has_alibi}"
            )
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.spec.num_heads:
            raise ValueError(f"alibi_slopes={self.alibi_slopes!r} must have one slope per head, {self.spec.num_heads}")
        if (self.max_distance is not None) != self.spec.use_distance_bias:
            raise ValueError(
                f"max_distance={self.max_distance!r} must be given if and only if {self.spec.use_distance_bias=}"
            )
        if self.spec.use_qq_bias:
            raise ValueError(
                "use_qq_bias=True: this layer has no qq_bias, which differs from step to step; call "
                "jattn.PagedAttention with AttentionParams(qq_bias=...)"
            )
        if self.rope is not None and self.rope.dim > self.spec.head_dim:
            raise ValueError(f"{self.rope.dim=} must not exceed head_dim={self.spec.head_dim!r}")
        if self.spec.output_dtype is not None:
            raise ValueError(
                f"output_dtype={self.spec.output_dtype!r} must be None: the output projection needs unquantised outputs"
            )
        if self.rope is not None and self.is_cross:
            raise ValueError(
                "cross attention takes no rotary positions: queries and keys are in two sequences; use rope=None"
            )
        if self.qk_norm is None and any(getattr(self, name) for name in norms):
            raise ValueError(f"{', '.join(norms)} have no effect without qk_norm; pass one, or none of them")
        if self.qk_norm_all_heads and self.qk_norm_scale_per_head:
            raise ValueError("qk_norm_all_heads and qk_norm_scale_per_head are two kinds of norms; pass one of them")

        if self.v_norm is not None and (self.v_norm.has_scale or self.v_norm.has_bias):
            raise ValueError(f"v_norm={self.v_norm!r} must have neither scale nor bias")
        if self.k_is_v and (self.fused_qkv or self.is_cross or self.spec.v_head_dim != self.spec.head_dim):
            raise ValueError("k_is_v needs self-attention with separate projections, and v_head_dim == head_dim")
        if self.shares_kv and (self.fused_qkv or self.is_cross or self.k_is_v or self.v_norm is not None):
            raise ValueError("a layer with shares_kv has no keys: not fused_qkv, cross attention, k_is_v or v_norm")

    @property
    def rotates_last(self) -> bool:
        """True if nothing follows the rotation of q and k. The attention operation then rotates them."""
        return self.rope is not None and not self.qk_norm_after_rope and self.temperature_tuning is None

    @property
    def is_cross(self) -> bool:
        """True if keys and values come from the encoder."""
        return self.spec.attn_type is AttentionType.ENCODER_DECODER

    @property
    def widths(self) -> dict[str, int]:
        """Output width of each projection: heads * head dim."""
        s = self.spec
        return dict(q=s.num_heads * s.head_dim, k=s.num_kv_heads * s.head_dim, v=s.num_kv_heads * s.v_head_dim)

    @property
    def out_width(self) -> int:
        """Input width of the output projection: H * V."""
        return self.spec.num_heads * self.spec.v_head_dim

    def weight_specs(self) -> dict[str, Any]:
        """The tree of its WeightSpecs."""
        hidden, widths = self.hidden_size, self.widths
        axes = dict(q="heads", k="kv_heads", v="kv_heads")
        if self.fused_qkv:
            width = sum(widths.values())
            tree: dict[str, Any] = {"qkv": linear_weight_specs(hidden, width, ("embed", "qkv"), self.qkv_bias)}
        else:
            names = projections(self)
            tree = {n: linear_weight_specs(hidden, widths[n], ("embed", axes[n]), self.qkv_bias) for n in names}
        tree["o"] = linear_weight_specs(self.out_width, hidden, ("heads", "embed"), self.out_bias)
        for name in "q" if self.shares_kv else "qk":
            size = widths[name] if self.qk_norm_all_heads else self.spec.head_dim
            specs = {} if self.qk_norm is None else self.qk_norm.weight_specs(size)
            if self.qk_norm_scale_per_head:
                specs = {n: _per_head(w, widths[name] // size, axes[name]) for n, w in specs.items()}
            tree |= {f"{name}_norm": specs} if specs else {}
        if self.spec.has_sinks:
            tree["sinks"] = WeightSpec((self.spec.num_heads,), ("attention_heads",), 0.0)
        if self.max_distance is not None:
            shape = (self.spec.num_heads, 2 * self.max_distance + 1)
            tree["distance_bias"] = WeightSpec(shape, ("attention_heads", None), 0.0)
        return tree


def _per_head(weight: WeightSpec, heads: int, axis: str) -> WeightSpec:
    """One such weight for each head."""
    return dataclasses.replace(weight, shape=(heads, *weight.shape), axes=(axis, *weight.axes))


Multiply = Callable[[dict, tuple[str, ...], jax.Array], tuple[jax.Array, ...]]
"""(weights of a layer, names, x) -> `linears` of the weights of these names."""


def multiply(weights: dict, names: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, ...]:
    """The Multiply of one device."""
    return linears([weights[name] for name in names], x)


def linear(weights: dict, x: jax.Array) -> jax.Array:
    """x [T, in] @ kernel [in, out] (+ bias), rounded once to the dtype of x."""
    return linears((weights,), x)[0]


def linears(projections: Sequence[dict], x: jax.Array) -> tuple[jax.Array, ...]:
    """`linear` of the same x with the weights of each projection, in one call where the platform has one."""
    result = lambda: tuple(_spec_of_rows(x, weights["kernel"]) for weights in projections)
    return with_auto_axes(_linears, result, projections, x)


def _linears(projections: Sequence[dict], x: jax.Array) -> tuple[jax.Array, ...]:
    has_bias = any("bias" in weights for weights in projections)
    rows = products(x, [weights["kernel"] for weights in projections], dtype=jnp.float32 if has_bias else x.dtype)
    pairs = zip(rows, projections, strict=True)
    return tuple((y + w["bias"][None, :] if "bias" in w else y).astype(x.dtype) for y, w in pairs)


def _spec_of_rows(x: jax.Array, kernel: Any) -> PartitionSpec:
    """How x @ kernel is divided over Explicit axes: rows as x, columns as the kernel where rows leave its axes free."""
    rows, columns = spec_of(x)[0], None if is_quantised(kernel) else spec_of(kernel)[-1]
    axes = lambda names: set(names if isinstance(names, tuple) else (names,))
    return PartitionSpec(rows, columns if axes(rows).isdisjoint(axes(columns)) else None)


def project_and_attend(
    config: AttentionConfig,
    weights: dict,
    x: jax.Array,
    attend: Attend,
    *,
    positions: jax.Array | None = None,
    angles: Angles | None = None,
    keys_from: jax.Array | None = None,
    multiply: Multiply = multiply,
) -> tuple:
    """x [T, hidden] -> (cache, [T, hidden]): q, k, v of x, `attend`, and the output projection.

    attend(q, k, v, params, angles) -> (cache, AttentionState) rotates q and k unless angles is None, and decides where
    keys and values are kept. keys_from: the encoder's tokens of a cross layer, None once they are cached.
    """
    rows = project(config, weights, x, keys_from, multiply)
    cache, out = attend_projected(config, weights, rows, x.dtype, attend, positions=positions, angles=angles)
    return cache, multiply(weights, ("o",), out)[0]


def attend_projected(
    config: AttentionConfig, weights: dict, rows: tuple, dtype: Any, attend: Attend, *, positions: Any, angles: Any
) -> tuple:
    """(cache, [T, H * V] of `dtype`) of `attend` to q, k and v as `project` gives them; see project_and_attend."""
    q, k, v = rows
    assert config.rope is None or angles is not None
    v = None if v is None else _clipped(config, v if config.v_norm is None else config.v_norm({}, v))
    early, late = (None, angles) if config.rotates_last else (angles, None)
    q = _norm_and_rotate(config, weights.get("q_norm", {}), q, early)
    k = None if k is None else _norm_and_rotate(config, weights.get("k_norm", {}), k, early)
    if config.temperature_tuning is not None:
        assert positions is not None
        q = temperature_tuned(q, positions, config.temperature_tuning, config.temperature_tuning_offset)
    cache, state = attend(q, k, v, params_of(config, weights), late)
    return cache, _heads_joined(state, dtype)


def temperature_tuned(q: jax.Array, positions: jax.Array, tuning: tuple[float, float], offset: int) -> jax.Array:
    """q [T H D] times its factor: see AttentionConfig.temperature_tuning."""
    floor_scale, attn_scale = tuning
    counted = positions.astype(jnp.float32) + offset
    factor = 1 + attn_scale * jnp.log1p(jnp.floor(counted / floor_scale))
    return (q * factor[:, None, None]).astype(q.dtype)


def project(
    config: AttentionConfig, weights: dict, x: jax.Array, keys_from: jax.Array | None = None,
    multiply: Multiply = multiply,
) -> tuple:  # fmt: skip
    """(q [T H D], k [Tk K D], v [Tk K V]).

    k and v are None in a cross layer without new encoder tokens, and in a layer with shares_kv.
    """
    if config.fused_qkv:
        return by_heads(config, rows_apart(config, linear(weights["qkv"], x)))
    own = ("q",) if config.is_cross else projections(config)  # projections of x itself
    rows: dict = dict(zip(own, multiply(weights, own, x), strict=True))
    if config.shares_kv:
        rows |= dict.fromkeys("kv")
    if config.k_is_v:
        rows["v"] = rows["k"]
    if config.is_cross:
        keys = (None, None) if keys_from is None else linears([weights[name] for name in "kv"], keys_from)
        rows |= zip("kv", keys, strict=True)
    return by_heads(config, tuple(rows[name] for name in "qkv"))


def projections(config: AttentionConfig) -> tuple[str, ...]:
    """The names of the weights whose outputs, side by side, are the rows of `rows_apart`."""
    if config.fused_qkv:
        return ("qkv",)
    return ("q",) if config.shares_kv else ("q", "k") if config.k_is_v else ("q", "k", "v")


def rows_apart(config: AttentionConfig, rows: jax.Array) -> tuple:
    """Rows [T, width of q, k and v] -> those of q, of k, and of v."""
    edges = (config.widths["q"], config.widths["q"] + config.widths["k"])
    return tuple(jnp.split(rows, edges, axis=-1))


def by_heads(config: AttentionConfig, rows: tuple) -> tuple:
    """The rows [T, width] of q, k and v -> (q [T H D], k [T K D], v [T K V]); None stays None."""
    heads = (config.spec.num_heads, config.spec.num_kv_heads, config.spec.num_kv_heads)
    return tuple(None if y is None else y.reshape(-1, n, y.shape[1] // n) for y, n in zip(rows, heads, strict=True))


def params_of(config: AttentionConfig, weights: dict) -> AttentionParams:
    """The traced parameters of the attention operation: slopes, sinks and cache scales."""
    slopes = None if config.alibi_slopes is None else jnp.asarray(config.alibi_slopes, jnp.float32)
    sinks = weights["sinks"].astype(jnp.float32) if config.spec.has_sinks else None
    bias = weights["distance_bias"].astype(jnp.float32) if config.spec.use_distance_bias else None
    return AttentionParams(
        alibi_slopes=slopes, sinks=sinks, distance_bias=bias, k_scale=weights.get("k_scale"),
        v_scale=weights.get("v_scale"),
    )  # fmt: skip


def _heads_joined(state: AttentionState, dtype) -> jax.Array:
    """The attention output [T H V] as [T, H * V] in the dtype of the hidden states."""
    return state.out.reshape(-1, state.out.shape[1] * state.out.shape[2]).astype(dtype)


def _norm_and_rotate(config: AttentionConfig, norm_weights: dict, x: jax.Array, angles: Angles | None) -> jax.Array:
    """q or k [T heads D], normalised and rotated, in the order that the config asks for. angles None: not rotated."""

    def normed(y):
        if config.qk_norm is None:
            return y
        if config.qk_norm_all_heads:
            return config.qk_norm(norm_weights, y.reshape(-1, y.shape[1] * y.shape[2])).reshape(y.shape)
        if config.qk_norm_scale_per_head:
            return jax.vmap(config.qk_norm, in_axes=(0, 1), out_axes=1)(norm_weights, y)
        return config.qk_norm(norm_weights, y)

    def rotated(y):
        return y if config.rope is None or angles is None else rotate(y, angles)

    if config.qk_norm_after_rope:
        return normed(rotated(_clipped(config, x)))
    return rotated(_clipped(config, normed(x)))


def _clipped(config: AttentionConfig, y: jax.Array) -> jax.Array:
    return y if config.clip_qkv is None else jnp.clip(y, -config.clip_qkv, config.clip_qkv)
