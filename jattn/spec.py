"""What a layer asks for: frozen and hashable, so that equal layers share one trace; and its traced numbers."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.types import AttentionType, pytree
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule

Window = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer's static description; defaults are filled in, so equal meanings compare equal.

    Order of operations on a logit: q.k * scale -> soft cap -> alibi slope * (kv_pos - q_pos) -> score_fn -> mask ->
    softmax, with the sink as one more column that is dropped.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None  # becomes num_heads
    v_head_dim: int | None = None  # becomes head_dim
    scale: float | None = None  # becomes head_dim ** -0.5
    attn_type: AttentionType | str = AttentionType.DECODER
    sliding_window: int | Window | None = None  # W: self and W-1 before; (left, right) extra keys; becomes a pair
    chunk_size: int | None = None
    logits_soft_cap: float | None = None  # 0 becomes None
    has_alibi: bool = False
    has_sinks: bool = False
    mask_fn: Callable | None = None  # (head, q_pos, kv_pos) -> bool, jnp-traceable
    score_fn: Callable | None = None  # (score, head, q_pos, kv_pos) -> score
    output_dtype: str | None = None  # 8 bits: the result is stored so, see params.output_scale; None: the queries' own

    def __post_init__(self):
        fill = lambda **values: [object.__setattr__(self, k, v) for k, v in values.items()]  # noqa: E731
        _positive_int(self, "num_heads", "head_dim")
        fill(
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            v_head_dim=self.head_dim if self.v_head_dim is None else self.v_head_dim,
            scale=self.head_dim**-0.5 if self.scale is None else float(self.scale),
            attn_type=_attention_type(self.attn_type),
            sliding_window=_window(self.sliding_window),
            logits_soft_cap=_soft_cap(self.logits_soft_cap),
            output_dtype=_output_dtype(self.output_dtype),
        )
        _positive_int(self, "num_kv_heads", "v_head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}: each kv head serves whole groups"
            )
        if not math.isfinite(self.scale):
            raise ValueError(f"{self.scale=} must be finite; leave it None for head_dim ** -0.5")
        if self.chunk_size is not None:
            _positive_int(self, "chunk_size")
        if self.attn_type is AttentionType.ENCODER_DECODER and (self.sliding_window or self.chunk_size):
            raise ValueError(
                "an encoder_decoder layer sees every encoder token: sliding_window and chunk_size mean nothing; "
                "use mask_fn(head, q_pos, kv_pos) to hide some"
            )
        for name in ("mask_fn", "score_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be callable or None")

    @property
    def group_size(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> Window:
        """(left, right) extra keys on each side, -1 = unlimited."""
        return self.sliding_window or (-1, -1)

    def mask_rule(self, causal: bool = True) -> MaskRule:
        """The mask of this layer in a batch whose static causality is `causal`; only decoders are ever causal."""
        left, right = self.window
        return MaskRule(
            causal=causal and self.attn_type is AttentionType.DECODER,
            left=left,
            right=right,
            chunk=self.chunk_size or 0,
            mask_fn=self.mask_fn,
        )

    def logit_rule(self) -> LogitRule:
        """What happens to this layer's logits between dot product and mask."""
        return LogitRule(self.scale, self.logits_soft_cap, self.has_alibi, self.score_fn)


@pytree
class AttentionParams:
    """A layer's traced numbers; real value = stored value * scale, and None means exactly 1.

    alibi_slopes f32[H]; sinks f32[H]; q_scale f32[] or [H]; k_scale, v_scale f32[] or [K]; output_scale f32[].
    """

    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    q_scale: jax.Array | float | None = None
    k_scale: jax.Array | float | None = None
    v_scale: jax.Array | float | None = None
    output_scale: jax.Array | float | None = None

    def check_host(self) -> "AttentionParams":
        """Raise ValueError unless every scale is finite and positive; needs concrete values. Returns self."""
        for name in ("q_scale", "k_scale", "v_scale", "output_scale"):
            scale = getattr(self, name)
            if scale is not None and not (np.isfinite(scale).all() and (np.asarray(scale) > 0).all()):
                raise ValueError(f"{name}={np.asarray(scale)} must be finite and > 0; pass None for exactly 1")
        return self


@dataclasses.dataclass(frozen=True)
class PerLayerParameters:
    """The hyper-parameters that a plan shared by several layers depends on."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec) -> "PerLayerParameters":
        """Those of one layer."""
        return cls(spec.window[0], spec.logits_soft_cap, spec.scale, spec.has_sinks)


def _positive_int(spec, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")


def _attention_type(value) -> AttentionType:
    try:
        return AttentionType(value)
    except ValueError:
        names = ", ".join(AttentionType)
        raise ValueError(f"attn_type={value!r} is not known; use one of {names}") from None


def _window(value) -> Window | None:
    """(left, right) from either spelling; a pair that hides nothing becomes None."""
    if value is None:
        return None
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"sliding_window={value} must be >= 1 (the query itself counts); use None for no window")
        return (int(value) - 1, 0)
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, (int, np.integer)) for v in value):
        left, right = (int(v) for v in value)
        if left >= -1 and right >= -1:
            return None if (left, right) == (-1, -1) else (left, right)
    raise ValueError(
        f"sliding_window={value!r} must be None, an int >= 1, or (left, right) extra keys with -1 = unlimited"
    )


def _soft_cap(value) -> float | None:
    if value is None or value == 0:
        return None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"logits_soft_cap={value} must be > 0; use None or 0 to turn it off")
    return float(value)


def _output_dtype(value) -> str | None:
    name = value if value is None or isinstance(value, str) else jnp.dtype(value).name
    if name is not None and name not in quant.QUANTISED:
        raise ValueError(f"output_dtype={value!r} must be one of {', '.join(quant.QUANTISED)}; None: the queries' own")
    return name
