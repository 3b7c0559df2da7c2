"""AttentionSpec, a layer's static description, and AttentionParams, its traced parameters."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import jax
import numpy as np
from jax.core import Tracer

from jattn.errors.arguments import (
    as_array,
    asked,
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
from pallas_kernels.algebra import quant, rounding
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule

Window = tuple[int, int]
_FLAGS = dict.fromkeys(
    ("has_alibi", "use_alibi_sqrt", "has_sinks", "use_rswa", "use_mm_prefix", "mm_prefix_clamp_sliding_window",
     "use_qq_bias", "use_distance_bias"), boolean,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer's static description. Hashable: equal layers share one trace.

    Defaults are replaced by their values at construction, so two spellings of one layer are equal.

    Order of operations on a logit: q.k * scale -> soft cap -> alibi slope * (kv_pos - q_pos) -> qq_bias and
    distance_bias -> score_fn -> mask -> softmax, with the sink as one more column that is dropped.
    """

    num_heads: int  # H, query heads
    head_dim: int  # D, elements of a query or key of one head
    num_kv_heads: int = cast(int, None)  # K, key/value heads; divides num_heads. None: num_heads
    v_head_dim: int = cast(int, None)  # V, elements of a value of one head. None: head_dim
    scale: float = cast(float, None)  # factor on q.k. None: head_dim ** -0.5
    attn_type: AttentionType = AttentionType.DECODER  # which tokens are queries and which are keys
    sliding_window: Window | None = None  # int W: the query and W - 1 keys before it; or (left, right) keys, -1: all
    chunk_size: int | None = None  # tokens of a chunk: a query sees only keys of its own aligned chunk. None: off
    chunk_lookback: int = 0  # whole chunks before the query's own chunk that are visible too
    logits_soft_cap: float | None = None  # cap of cap * tanh(logit / cap). None or 0: off
    has_alibi: bool = False  # params.alibi_slopes are added, times kv_pos - q_pos
    use_alibi_sqrt: bool = False  # ALiBi with -sqrt(q_pos - kv_pos), and 0 for keys after the query
    has_sinks: bool = False  # params.sinks are one more logit per head in the softmax's denominator
    use_rswa: bool = False  # the window's left side does not hide the first meta.rswa_prefix_lens keys
    use_mm_prefix: bool = False  # tokens of one span of meta.mm_prefix_ranges see each other in both directions
    mm_prefix_clamp_sliding_window: bool = False  # ... but not past the left edge of the window (Gemma 4)
    use_qq_bias: bool = False  # params.qq_bias is added between a request's new tokens (token trees), after ALiBi
    use_distance_bias: bool = False  # params.distance_bias is added by kv_pos - q_pos (T5), after ALiBi
    mask_fn: Callable | None = None  # mask_fn(head, q_pos, kv_pos) -> bool, True: visible; traceable by JAX
    score_fn: Callable | None = None  # score_fn(score, head, q_pos, kv_pos) -> score; traceable by JAX
    output_dtype: str | None = None  # 8-bit dtype of the result, scaled by params.output_scale. None: the query's dtype
    compute_dtype: str | None = None  # "float8_e4m3fn": queries and weights are rounded to it. None: exact products

    if TYPE_CHECKING:  # the constructor also accepts None, an int as a window, and names of types

        def __init__(
            self,
            *,
            num_heads: int,
            head_dim: int,
            num_kv_heads: int | None = None,
            v_head_dim: int | None = None,
            scale: float | None = None,
            attn_type: AttentionType | str = AttentionType.DECODER,
            sliding_window: int | Window | None = None,
            chunk_size: int | None = None,
            chunk_lookback: int = 0,
            logits_soft_cap: float | None = None,
            has_alibi: bool = False,
            use_alibi_sqrt: bool = False,
            has_sinks: bool = False,
            use_rswa: bool = False,
            use_mm_prefix: bool = False,
            mm_prefix_clamp_sliding_window: bool = False,
            use_qq_bias: bool = False,
            use_distance_bias: bool = False,
            mask_fn: Callable | None = None,
            score_fn: Callable | None = None,
            output_dtype: str | None = None,
            compute_dtype: str | None = None,
        ) -> None: ...

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
            compute_dtype=_compute_dtype(self.compute_dtype),
        )
        check_fields(self, num_kv_heads=integer(1), v_head_dim=integer(1), chunk_size=optional(integer(1)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        _check_together(self)
        if self.attn_type is AttentionType.ENCODER_DECODER and (self.sliding_window or self.chunk_size):
            raise ValueError(
                "an encoder_decoder layer takes no sliding_window or chunk_size: it sees every encoder token; "
                "use mask_fn(head, q_pos, kv_pos) to hide some"
            )
        check_fields(self, mask_fn=optional(function), score_fn=optional(function))

    @property
    def group_size(self) -> int:
        """G, the query heads of one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> Window:
        """(left, right): how many keys before and after the query's own are visible; -1: all."""
        return self.sliding_window or (-1, -1)

    @property
    def retention(self) -> tuple[int | None, int | None]:
        """(sliding window in tokens, chunk size) of the keys that later queries can see; a cache can free the others.

        The window counts the query. None: no limit. An image span or an R-SWA prefix may lie before the window, so with
        them all keys are kept.
        """
        keeps_all = self.use_rswa or (self.use_mm_prefix and not self.mm_prefix_clamp_sliding_window)
        left = -1 if keeps_all else self.window[0]
        chunk = None if self.chunk_lookback or self.use_mm_prefix else self.chunk_size
        return None if left < 0 else left + 1, chunk

    def mask_rule(self, causal: bool = True) -> MaskRule:
        """The layer's mask in a batch that is causal, or not; only a decoder's layer is ever causal."""
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
        """The operations on this layer's logits between the dot product and the mask."""
        return LogitRule(self.scale, self.logits_soft_cap, self.has_alibi, self.use_alibi_sqrt, self.score_fn)


@pytree
class AttentionParams:
    """A layer's traced parameters. For each scale: real value = stored value * scale; None means exactly 1."""

    alibi_slopes: jax.Array | None = None  # f32[H], with spec.has_alibi
    sinks: jax.Array | None = None  # f32[H] logits of the sinks, with spec.has_sinks
    q_scale: jax.Array | float | None = None  # f32[] or f32[H], of quantised queries
    k_scale: jax.Array | float | None = None  # f32[] or f32[K], of cached keys
    v_scale: jax.Array | float | None = None  # f32[] or f32[K], of cached values
    output_scale: jax.Array | float | None = None  # f32[] of the result, with spec.output_dtype
    qq_bias: jax.Array | None = None  # f32[Q Q] added for new tokens i, j < Q of one request, with spec.use_qq_bias
    distance_bias: jax.Array | None = None  # f32[H 2L+1] by clip(kv_pos - q_pos, -L, L) + L, with use_distance_bias

    def check_host(self) -> "AttentionParams":
        """Raise ValueError unless every scale is finite and positive. Traced scales are not checked."""
        check_positive(self, "q_scale", "k_scale", "v_scale", "output_scale")
        return self


def with_arrays(params: AttentionParams) -> AttentionParams:
    """The same params, with arrays in place of lists."""
    lists = {name: x for name, x in vars(params).items() if isinstance(x, (list, tuple))}
    return dataclasses.replace(params, **{name: as_array(f"params.{name}", x) for name, x in lists.items()})


def check_positive(params, *names: str) -> None:
    """Raise ValueError for a scale that is not finite and > 0.

    Only values in the host's memory are checked: reading those of another device would wait for it.
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
    """The parameters of a layer that a plan for several layers depends on."""

    window_left: int  # visible keys before the query's own; -1: all
    logits_soft_cap: float | None  # None: off
    sm_scale: float  # factor on q.k
    has_sinks: bool = False  # see AttentionSpec

    @classmethod
    def of(cls, spec: AttentionSpec) -> "PerLayerParameters":
        """The parameters of one layer."""
        return cls(spec.window[0], spec.logits_soft_cap, spec.scale, spec.has_sinks)


def _check_together(spec: AttentionSpec) -> None:
    """Raise ValueError for an option that needs another one, or a decoder, and does not have it."""
    left = spec.window[0] >= 0
    wanted = (
        ("chunk_lookback", "chunk_size", spec.chunk_size is not None),
        ("use_alibi_sqrt", "has_alibi=True", spec.has_alibi),
        ("use_rswa", "a sliding_window with a left side, and no chunk_size", left and spec.chunk_size is None),
        ("mm_prefix_clamp_sliding_window", "use_mm_prefix and a sliding_window", spec.use_mm_prefix and left),
        ("use_rswa", "attn_type='decoder'", spec.attn_type is AttentionType.DECODER),
        ("use_qq_bias", "attn_type='decoder'", spec.attn_type is AttentionType.DECODER),
        ("use_mm_prefix", "attn_type='decoder'", spec.attn_type is AttentionType.DECODER),
    )
    for name, needed, has_it in wanted:
        if getattr(spec, name) and not has_it:
            raise ValueError(f"{name}={getattr(spec, name)} needs {needed}; got {asked(spec)}")


def _attention_type(value) -> AttentionType:
    try:
        return AttentionType(value if isinstance(value, str) else "")
    except ValueError:
        names = ", ".join(AttentionType)
        raise ValueError(f"attn_type={short(value)} is not known; use one of {names}") from None


def _window(value) -> Window | None:
    """(left, right) from an int or a pair; None if it hides no key."""
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
    """A positive number, or None for None and 0."""
    return None if value is None else number(least=0)("logits_soft_cap", value) or None


def _output_dtype(value) -> str | None:
    name = value if value is None or isinstance(value, str) else dtype_name("output_dtype", value)
    if name is not None and name not in quant.QUANTISED:
        raise ValueError(f"output_dtype={short(value)} must be one of {', '.join(quant.QUANTISED)}, or None")
    return name


def _compute_dtype(value) -> str | None:
    name = value if value is None or isinstance(value, str) else dtype_name("compute_dtype", value)
    if name not in (None, rounding.FP8):
        raise ValueError(f"compute_dtype={short(value)} must be {rounding.FP8}, or None for exact products")
    return name
