"""Packed attention and its gradient by cuDNN, for training: the kernel of `pallas_gpu` computes forward only.

The requests of a batch are segments of cuDNN's packed layout: it computes no pair of tokens of two segments, and
neither reads nor writes rows of padding. If all requests are known to have one length, they are the rows of a dense
batch, which takes about 7 % less time.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backends.capability import Question
from jattn.device import Chip
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from jattn.types import AttentionType, Feature
from pallas_kernels.gpu.zero_rows_sm90 import zero_rows

DTYPES = ("bfloat16", "float16")
FEATURES = (Feature.SLIDING_WINDOW, Feature.LSE, Feature.PACKED)
MAX_HEAD_DIM = 256
MAX_HEAD_DIM_DENSE = 128  # of the GPUs that are not in SEGMENTS_ON
SEGMENTS_ON = (90, 100, 103)
"""Compute capabilities on which cuDNN takes segments. Before Hopper JAX refuses them, and heads above 128. On sm_120
older versions of cuDNN have none, and newer ones other statistics. Elsewhere it takes batches of one length only."""
MAX_STATISTICS = 2**30
"""Bytes. cuDNN keeps 4 for each request, head and token of the batch until the backward pass."""


class Lengths(enum.Enum):
    """What is known of a batch's lengths while its program is traced."""

    UNKNOWN = "unknown"
    ALL_NEW = "all new"  # each request has as many keys as queries
    EQUAL = "equal"  # all requests have one length, an even one, and there is no padding


def takes_segments(chip: Chip) -> bool:
    """Does cuDNN take batches of several lengths on this GPU? An unknown one is taken for Hopper."""
    return chip.compute_capability in (0, *SEGMENTS_ON)


def layer_reasons(spec: AttentionSpec, dtype: str, chip: Chip) -> tuple[str, ...]:
    """Why cuDNN does not compute the gradient of this layer for queries and keys of `dtype`. Empty: it does."""
    found = [option for feature, option in Question.of(spec).needs if feature not in FEATURES]
    if dtype not in DTYPES:
        found.append(f"{dtype} (only {' and '.join(DTYPES)})")
    most = MAX_HEAD_DIM if takes_segments(chip) else MAX_HEAD_DIM_DENSE
    if spec.head_dim % 8 or spec.head_dim > most:
        found.append(f"head_dim={spec.head_dim} (only multiples of 8 up to {most})")
    if spec.sliding_window is not None and spec.attn_type is not AttentionType.DECODER:
        found.append(f"sliding_window={spec.window} without causality")
    return tuple(found)


def batch_reasons(spec: AttentionSpec, meta: CommonAttentionMetadata, queries: int, keys: int) -> tuple[str, ...]:
    """Why cuDNN does not compute the gradient of this batch of `queries` and `keys` tokens. Empty: it does."""
    causal, found = _is_causal(spec, meta), []
    if spec.attn_type is AttentionType.DECODER and meta.causal_per_request is not None:
        found.append("causality by request")
    if spec.sliding_window is not None and not causal:
        found.append(f"sliding_window={spec.window} without causality")
    if causal and queries != keys:
        found.append(f"{queries} queries and {keys} keys in a causal batch")
    if (size := meta.max_num_reqs * spec.num_heads * queries * 4) > MAX_STATISTICS:
        found.append(f"{size} bytes of statistics: at most {MAX_STATISTICS}")
    return tuple(found)


def lengths_known(spec: AttentionSpec, meta: CommonAttentionMetadata) -> Lengths:
    """What the batch's arrays show if they are numpy arrays. Of traced ones, only is_all_new is known."""
    queries, keys = queries_of(meta, spec.attn_type), keys_of(meta, spec.attn_type)
    start, k_lens = queries.query_start_loc, keys.seq_lens
    if not (isinstance(start, np.ndarray) and isinstance(k_lens, np.ndarray) and k_lens.size):
        return Lengths.ALL_NEW if keys.is_all_new and queries is keys else Lengths.UNKNOWN
    q_lens = np.diff(start)
    all_new = np.array_equal(q_lens, k_lens)
    full = q_lens.sum() == queries.num_tokens and k_lens.sum() == keys.num_tokens
    even = not (q_lens[0] % 2 or k_lens[0] % 2) and q_lens[0] > 0 and k_lens[0] > 0
    if full and even and (q_lens == q_lens[0]).all() and (k_lens == k_lens[0]).all():
        return Lengths.EQUAL if all_new or not _is_causal(spec, meta) else Lengths.UNKNOWN
    return Lengths.ALL_NEW if all_new else Lengths.UNKNOWN


def needs_all_new(spec: AttentionSpec, meta: CommonAttentionMetadata) -> bool:
    """Is a request computed rightly only if it has as many keys as queries?

    cuDNN aligns the first query with the first key, and jattn the last with the last.
    """
    return _is_causal(spec, meta)


def forward(spec: AttentionSpec, q, k, v, meta: CommonAttentionMetadata, lengths: Lengths) -> tuple:
    """(state, statistics) of packed q [T H D], k and v [Tk K D]. The statistics are an argument of `backward`."""
    if lengths is Lengths.EQUAL:
        rows = (_rows(x, meta.max_num_reqs) for x in (q, k, v))
        out, statistics = _call(spec, meta)(*rows)
        lse = statistics.swapaxes(1, 2).reshape(q.shape[:2])
        return AttentionState(out=out.reshape(q.shape), lse=lse), statistics
    segments = _Segments(spec, meta, q.shape[0], k.shape[0])
    out, statistics = _call(spec, meta, segments.options())(*(_row(x) for x in (q, k, v)))
    (out,) = zero_rows(_first(out[0], q), used=segments.query_rows)
    return AttentionState(out=out, lse=segments.lse(statistics)), statistics


def backward(
    spec: AttentionSpec, q, k, v, meta: CommonAttentionMetadata, lengths: Lengths, out, statistics, dout
) -> tuple[jax.Array, ...]:
    """(dq, dk, dv), from the results of `forward`."""
    if lengths is Lengths.EQUAL:
        q_, k_, v_, out, dout = (_rows(x, meta.max_num_reqs) for x in (q, k, v, out, dout))
        grads = _pull(_call(spec, meta), (q_, k_, v_), out, statistics, dout)
        return tuple(dx.reshape(x.shape) for dx, x in zip(grads, (q, k, v), strict=True))
    segments = _Segments(spec, meta, q.shape[0], k.shape[0])
    q_, k_, v_, out, dout = (_row(x) for x in (q, k, v, out, dout))
    grads = _pull(_call(spec, meta, segments.options()), (q_, k_, v_), out, statistics, dout)
    dq, dk, dv = (_first(dx[0], x) for dx, x in zip(grads, (q, k, v), strict=True))
    return *zero_rows(dq, used=segments.query_rows), *zero_rows(dk, dv, used=segments.key_rows)


class _Segments:
    """The requests of a batch as segments of one row. A request without queries or without keys is left out."""

    def __init__(self, spec: AttentionSpec, meta: CommonAttentionMetadata, queries: int, keys: int):
        self.q_lens = queries_of(meta, spec.attn_type).query_lens()
        self.k_lens = jnp.asarray(keys_of(meta, spec.attn_type).seq_lens)
        self.used = (self.q_lens > 0) & (self.k_lens > 0)
        self.query_rows, self.query_request = self._rows(self.q_lens, queries)
        self.key_rows, _ = self._rows(self.k_lens, keys)

    def _rows(self, lens: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """(bool[count] is a row in a segment, i32[count] its request)."""
        token = jnp.arange(count, dtype=jnp.int32)
        request = jnp.sum(jnp.cumsum(lens)[None, :] <= token[:, None], axis=1, dtype=jnp.int32)
        return jnp.append(self.used, False)[request], request

    def options(self) -> dict[str, jax.Array]:
        """dot_product_attention's: -1 stands for no segment. One segment alone would be another layout."""
        none = jnp.full(1 if self.used.shape[0] == 1 else 0, -1, jnp.int32)
        found = {}
        for name, lens in (("q", self.q_lens), ("kv", self.k_lens)):
            lens = lens.astype(jnp.int32)
            begins = jnp.where(self.used, jnp.cumsum(lens) - lens, -1)
            found[f"{name}_offsets"] = jnp.concatenate([begins, none, jnp.sum(lens, keepdims=True)])[None]
            found[f"{name}_seqlen"] = jnp.concatenate([jnp.where(self.used, lens, -1), none])[None]
        return found

    def lse(self, statistics: jax.Array) -> jax.Array:
        """f32[T H] of cuDNN's statistics, which lie as [segment, head, token of the segment]."""
        segment = jnp.append(jnp.cumsum(self.used) - 1, 0)[self.query_request]
        begin = jnp.append(jnp.cumsum(self.q_lens) - self.q_lens, 0)[self.query_request]
        token = jnp.arange(self.query_rows.shape[0], dtype=jnp.int32) - begin
        return jnp.where(self.query_rows[:, None], statistics[segment, :, token], -jnp.inf)


def _is_causal(spec: AttentionSpec, meta: CommonAttentionMetadata) -> bool:
    return spec.mask_rule(meta.is_causal).causal


def _call(spec: AttentionSpec, meta: CommonAttentionMetadata, segments: dict[str, jax.Array] | None = None) -> Any:
    """A function of q [B T H D], k and v [B Tk K D] that returns (out [B T H D], statistics)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    causal, left = _is_causal(spec, meta), spec.window[0]
    masks = cudnn.MaskType
    options: dict[str, Any] = dict(scale=spec.scale, sliding_window_length=left + 1 if left >= 0 else None)
    if segments is None:
        options["mask_type"] = masks.CAUSAL if causal else masks.NO_MASK
    else:
        options |= dict(mask_type=masks.PADDING_CAUSAL if causal else masks.PADDING, **segments)
    return lambda q, k, v: cudnn.dot_product_attention(q, k, v, qkv_layout="BTNH", return_residual=True, **options)


def _pull(call, inputs: tuple, out, statistics, dout) -> tuple:
    """The gradient of `call` at `inputs`, where its results were `out` and `statistics`.

    jax.vjp computes them a second time; the copies are exchanged for the first ones, so that XLA removes that.
    """
    (again, statistics_again), pull = jax.vjp(call, *inputs)
    leaves, tree = jax.tree.flatten(pull)
    saved = [out if x is again else statistics if x is statistics_again else x for x in leaves]
    return jax.tree.unflatten(tree, saved)((dout, jnp.zeros_like(statistics)))


def _rows(x: jax.Array, rows: int) -> jax.Array:
    return x.reshape(rows, -1, *x.shape[1:])


def _row(x: jax.Array) -> jax.Array:
    """[1 T . .] with T rounded up to an even number: JAX refuses odd ones where a gradient is taken."""
    return jnp.pad(x, [(0, x.shape[0] % 2), (0, 0), (0, 0)])[None]


def _first(x: jax.Array, like: jax.Array) -> jax.Array:
    """The rows of x that _row did not add."""
    return x[: like.shape[0]]
