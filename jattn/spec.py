"""What a layer asks for: frozen and hashable, so that equal layers share one trace; and its traced numbers."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.core import Tracer

from jattn.errors.arguments import (
    as_array,
    boolean,
    check_fields,
    dtype_name,
    function,
    integer,
    number,
    optional,
    short,
)
from jattn.types import AttentionType, pytree
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule

Window = tuple[int, int]
_FLAGS = dict.fromkeys(
    ("has_alibi", "use_alibi_sqrt", "has_sinks", "use_rswa", "use_mm_prefix", "mm_prefix_clamp_sliding_window",
     "use_qq_bias"), boolean,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer's static description; defaults are filled in, so equal meanings compare equal.

    Order of operations on a logit: q.k * scale -> soft cap -> alibi slope * (kv_pos - q_pos) -> qq_bias -> score_fn ->
    mask -> softmax, with the sink as one more column that is dropped.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None  # becomes num_heads
    v_head_dim: int | None = None  # becomes head_dim
    scale: float | None = None  # becomes head_dim ** -0.5
    attn_type: AttentionType | str = AttentionType.DECODER
    sliding_window: int | Window | None = None  # W: self and W-1 before; (left, right) extra keys; becomes a pair
    chunk_size: int | None = None
    chunk_lookback: int = 0  # whole chunks before the query's own that it sees too
    logits_soft_cap: float | None = None  # 0 becomes None
    has_alibi: bool = False
    use_alibi_sqrt: bool = False  # slope * -sqrt(q_pos - kv_pos), and nothing for keys ahead
    has_sinks: bool = False
    use_rswa: bool = False  # the window hides none of a request's first meta.rswa_prefix_lens keys
    use_mm_prefix: bool = False  # the tokens of each of meta.mm_prefix_ranges see one another, whatever else hides
    mm_prefix_clamp_sliding_window: bool = False  # ... but the window's left edge (Gemma 4)
    use_qq_bias: bool = False  # params.qq_bias on the logits among a request's new tokens: trees, after ALiBi
    mask_fn: Callable | None = None  # (head, q_pos, kv_pos) -> bool, jnp-traceable
    score_fn: Callable | None = None  # (score, head, q_pos, kv_pos) -> score
    output_dtype: str | None = None  # 8 bits: the result is stored so, see params.output_scale; None: the queries' own

    def __post_init__(self):
        fill = lambda **values: [object.__setattr__(self, k, v) for k, v in values.items()]  # noqa: E731
        check_fields(self, num_heads=integer(1), head_dim=integer(1), chunk_lookback=integer(0), **_FLAGS)
        fill(
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            v_head_dim=self.head_dim if self.v_head_dim is None else self.v_head_dim,
            scale=self.head_dim**-0.5 if self.scale is None else number(above=0)("scale", self.scale),
            attn_type=_attention_type(self.attn_type),
            sliding_window=_window(self.sliding_window),
            logits_soft_cap=_soft_cap(self.logits_soft_cap),
            output_dtype=_output_dtype(self.output_dtype),
        )
        check_fields(self, num_kv_heads=integer(1), v_head_dim=integer(1), chunk_size=optional(integer(1)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}: each kv head serves whole groups"
            )
        _check_together(self)
        if self.attn_type is AttentionType.ENCODER_DECODER and (self.sliding_window or self.chunk_size):
            raise ValueError(
                "an encoder_decoder layer sees every encoder token: sliding_window and chunk_size mean nothing; "
                "use mask_fn(head, q_pos, kv_pos) to hide some"
            )
        check_fields(self, mask_fn=optional(function), score_fn=optional(function))

    @property
    def group_size(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> Window:
        """(left, right) extra keys on each side, -1 = unlimited."""
        return self.sliding_window or (-1, -1)

    @property
    def retention(self) -> tuple[int | None, int | None]:
        """(tokens, the query's included; chunk) past which no key is needed again, for caches that give pages back.

        None: as far as there are keys. An image or an R-SWA prefix may lie anywhere before the window.
        """
        left = (
            -1 if self.use_rswa or (self.use_mm_prefix and not self.mm_prefix_clamp_sliding_window) else self.window[0]
        )
        chunk = None if self.chunk_lookback or self.use_mm_prefix else self.chunk_size
        return None if left < 0 else left + 1, chunk

    def mask_rule(self, causal: bool = True) -> MaskRule:
        """The mask of this layer in a batch whose static causality is `causal`; only decoders are ever causal."""
        left, right = self.window
        return MaskRule(
            causal=causal and self.attn_type is AttentionType.DECODER,
            left=left,
            right=right,
            chunk=self.chunk_size or 0,
            lookback=self.chunk_lookback,
            prefix=self.use_rswa,
            spans=self.use_mm_prefix,
            clamp_spans=self.mm_prefix_clamp_sliding_window,
            mask_fn=self.mask_fn,
        )

    def logit_rule(self) -> LogitRule:
        """What happens to this layer's logits between dot product and mask."""
        return LogitRule(self.scale, self.logits_soft_cap, self.has_alibi, self.use_alibi_sqrt, self.score_fn)


@pytree
class AttentionParams:
    """A layer's traced numbers; real value = stored value * scale, and None means exactly 1.

    alibi_slopes f32[H]; sinks f32[H]; q_scale f32[] or [H]; k_scale, v_scale f32[] or [K]; output_scale f32[].
    qq_bias f32[Q Q]: of new token i on new token j of its request, -inf hides it; 0 for those past Q.
    """

    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    q_scale: jax.Array | float | None = None
    k_scale: jax.Array | float | None = None
    v_scale: jax.Array | float | None = None
    output_scale: jax.Array | float | None = None
    qq_bias: jax.Array | None = None

    def check_host(self) -> "AttentionParams":
        """Raise ValueError unless every scale is finite and positive; traced ones have no values to look at."""
        check_positive(self, "q_scale", "k_scale", "v_scale", "output_scale")
        return self


def with_arrays(params: AttentionParams) -> AttentionParams:
    """The same numbers, lists as arrays."""
    lists = {name: x for name, x in vars(params).items() if isinstance(x, (list, tuple))}
    return dataclasses.replace(params, **{name: as_array(f"params.{name}", x) for name, x in lists.items()})


def check_positive(params, *names: str) -> None:
    """Raise ValueError where a scale whose value the host holds is no finite number > 0.

    Looked at: Python's, numpy's and a CPU's; a value on another device would have to be waited for.
    """
    for name in names:
        scale = getattr(params, name)
        if scale is None:
            continue
        x = as_array(f"params.{name}", scale)
        if isinstance(x, jax.Array) and (isinstance(x, Tracer) or not x.is_fully_addressable or not _on_cpu(x)):
            continue
        x = np.asarray(x, np.float32)
        if not (np.isfinite(x) & (x > 0)).all():
            raise ValueError(f"params.{name}={x} must be finite and > 0; pass None for exactly 1")


def _on_cpu(x: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in x.devices())


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


def _check_together(spec: AttentionSpec) -> None:
    """Options that mean something only beside another, or not at all for what is no decoder."""
    left = spec.window[0] >= 0
    wanted = (
        ("chunk_lookback", "chunk_size", spec.chunk_size is not None),
        ("use_alibi_sqrt", "has_alibi=True", spec.has_alibi),
        ("use_rswa", "a sliding_window with a left side, and no chunk_size", left and spec.chunk_size is None),
        ("mm_prefix_clamp_sliding_window", "use_mm_prefix and a sliding_window", spec.use_mm_prefix and left),
        ("use_rswa", "a decoder: nothing else is generated", spec.attn_type is AttentionType.DECODER),
        ("use_qq_bias", "a decoder: nothing else has new tokens", spec.attn_type is AttentionType.DECODER),
        ("use_mm_prefix", "a decoder: an encoder sees both ways", spec.attn_type is AttentionType.DECODER),
    )
    for name, what, there in wanted:
        if getattr(spec, name) and not there:
            raise ValueError(f"{name}={getattr(spec, name)} needs {what}; got {spec}")


def _attention_type(value) -> AttentionType:
    try:
        return AttentionType(value if isinstance(value, str) else "")
    except ValueError:
        names = ", ".join(AttentionType)
        raise ValueError(f"attn_type={short(value)} is not known; use one of {names}") from None


def _window(value) -> Window | None:
    """(left, right) from either spelling; a pair that hides nothing becomes None."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        left, right = (integer(-1)("sliding_window", v) for v in value)
        return None if (left, right) == (-1, -1) else (left, right)
    try:
        return integer(1)("sliding_window", value) - 1, 0
    except ValueError:
        raise ValueError(
            f"sliding_window={short(value)} must be None, an int >= 1 (the query itself counts), or (left, right) "
            "extra keys with -1 = unlimited"
        ) from None


def _soft_cap(value) -> float | None:
    """None and 0 turn it off."""
    return None if value is None else number(least=0)("logits_soft_cap", value) or None


def _output_dtype(value) -> str | None:
    name = value if value is None or isinstance(value, str) else dtype_name("output_dtype", value)
    if name is not None and name not in quant.QUANTISED:
        raise ValueError(f"output_dtype={short(value)} must be one of {', '.join(quant.QUANTISED)}, or None")
    return name
