"""What the doors of attention refuse, and the sentence for each: shapes, dtypes and options, at trace time.

Values (ascending starts, block ids inside the pool ...) are `metadata.check_host`'s, before device_put.
"""

import jax.numpy as jnp
import numpy as np

from jattn.backends.backend import AttentionBackend
from jattn.backends.feature import Feature
from jattn.backends.impl import AttentionImpl
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import check_scales
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType
from pallas_kernels.algebra import quant

_CACHE_FIELDS = (
    *("num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim"),
    *("dtype", "physical_layout", "quant"),
)


def check_specs(spec: AttentionSpec, cache_spec: KVCacheSpec) -> None:
    """The layer and its cache speak of the same heads."""
    _kind("spec", spec, AttentionSpec)
    _kind("cache_spec", cache_spec, KVCacheSpec, "jattn.attention(q, k, v, meta, spec) needs no cache")
    for name in ("num_kv_heads", "head_dim", "v_head_dim"):
        layer, cache = getattr(spec, name), getattr(cache_spec, name)
        if layer != cache:
            raise ValueError(f"spec.{name}={layer} but cache_spec.{name}={cache}; they must be equal")


def check_batch(spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The metadata hangs together and has the pages that this kind of layer reads."""
    check_lengths(spec, meta)
    pages = meta.cross if spec.attn_type is AttentionType.ENCODER_DECODER else meta
    if pages is None or pages.block_table is None:
        raise ValueError(
            "attention over a cache needs block_table: pass it to from_lengths (cross_block_table for the encoder's), "
            "or use jattn.attention for packed k, v"
        )
    if jnp.ndim(pages.block_table) != 2 or pages.block_table.shape[0] != meta.max_num_reqs:
        raise ValueError(
            f"{pages.block_table.shape=} must be [R, B] with R={meta.max_num_reqs}, as seq_lens has"
        )


def check_lengths(spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The lengths of the queries and of the keys."""
    _kind("meta", meta, CommonAttentionMetadata, "make one with CommonAttentionMetadata.from_lengths(...)")
    if jnp.ndim(meta.seq_lens) != 1 or jnp.shape(meta.query_start_loc) != (meta.max_num_reqs + 1,):
        raise ValueError(
            f"query_start_loc of shape {jnp.shape(meta.query_start_loc)} must have one entry more than seq_lens of "
            f"shape {jnp.shape(meta.seq_lens)}"
        )
    if spec.attn_type is AttentionType.ENCODER_DECODER and meta.cross is None:
        raise ValueError(
            "Encoder/decoder cross-attention requires setting cross-attention metadata attributes: "
            "give from_lengths encoder_seq_lens (and cross_block_table, where there is a cache)"
        )


def check_causality(
    backend: type[AttentionBackend], spec: AttentionSpec, meta: CommonAttentionMetadata
) -> None:
    """What only the batch tells: a decoder that sees ahead, for all requests or for some."""
    if spec.attn_type is not AttentionType.DECODER:
        return
    needs = []
    if meta.causal_per_request is not None:
        needs.append((Feature.PER_REQUEST_CAUSAL, "causal is an array"))
    elif not meta.is_causal:
        needs.append((Feature.NON_CAUSAL, "causal=False"))
    if needs and spec.window[1] >= 0:
        needs.append(
            (Feature.TWO_SIDED_WINDOW, f"sliding_window={spec.window} in a batch that is not causal")
        )
    lacking = tuple(
        f"{feature} not supported: {seen}" for feature, seen in needs if not backend.supports(feature)
    )
    if lacking:
        raise UnsupportedError(
            "the chosen backend does not take this batch; name another", {backend.get_name(): lacking}
        )


def check_cache(cache: PagedKV, cache_spec: KVCacheSpec) -> None:
    """The cache is one of cache_spec's, whole."""
    _kind("cache", cache, PagedKV, "make one with jattn.empty_cache(cache_spec)")
    if cache.spec != cache_spec:
        values = ((name, getattr(cache.spec, name), getattr(cache_spec, name)) for name in _CACHE_FIELDS)
        different = [f"{name} {a!r} (wanted {b!r})" for name, a, b in values if a != b]
        if different:
            raise ValueError(f"the cache was made for another cache_spec: {', '.join(different)}")
    for name, shape in (("k", cache_spec.shape), ("v", cache_spec.v_shape)):
        if jnp.shape(getattr(cache, name)) != shape:
            raise ValueError(
                f"cache.{name}.shape={jnp.shape(getattr(cache, name))} must be {shape} for {cache_spec}"
            )


def check_query(spec: AttentionSpec, q, num_tokens: int) -> None:
    """q [T H D], one row a token of the batch."""
    _rows("q", q, spec.num_heads, spec.head_dim)
    if q.shape[0] != num_tokens:
        raise ValueError(
            f"q has {q.shape[0]} tokens but the metadata has T={num_tokens}: pad q, or make the metadata with "
            f"num_tokens={q.shape[0]}"
        )


def check_keys(spec: AttentionSpec, k, v, num_tokens: int | None) -> None:
    """k [Tk K D] and v [Tk K V] of equally many tokens; None: as many as they have."""
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(
            f"{given} is given but {missing} is None: pass both, or neither to read what is cached"
        )
    for name, x, dim in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
        _rows(name, x, spec.num_kv_heads, dim)
        if x.dtype.name not in quant.FLOATS:
            raise ValueError(
                f"{name}.dtype={x.dtype} must be one of {', '.join(quant.FLOATS)}; a cache quantises itself"
            )
        if num_tokens is not None and x.shape[0] != num_tokens:
            raise ValueError(f"{name} has {x.shape[0]} tokens but the metadata has slots for {num_tokens}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"{k.shape[0]=} and {v.shape[0]=} must be the same number of tokens")


def check_packing(spec: AttentionSpec, meta: CommonAttentionMetadata, num_keys: int) -> None:
    """On the host, where lengths are values: the packed keys hold every request's."""
    lengths = meta.cross.seq_lens if spec.attn_type is AttentionType.ENCODER_DECODER else meta.seq_lens
    if isinstance(lengths, np.ndarray) and lengths.sum() > num_keys:
        raise ValueError(f"k has {num_keys} tokens but the requests' lengths add up to {lengths.sum()}")


def check_params(spec: AttentionSpec, cache_spec: KVCacheSpec | None, params: AttentionParams) -> None:
    """Each is there exactly when the spec uses it: an option is honoured or refused."""
    _kind("params", params, AttentionParams)
    for name, flag in (("alibi_slopes", "has_alibi"), ("sinks", "has_sinks")):
        value, used = getattr(params, name), getattr(spec, flag)
        if used and value is None:
            raise ValueError(f"spec.{flag}=True needs params.{name}, f32[{spec.num_heads}]")
        if value is not None and not used:
            raise ValueError(f"params.{name} is given but spec.{flag}=False; make the spec with {flag}=True")
        if value is not None and jnp.shape(value) != (spec.num_heads,):
            raise ValueError(
                f"params.{name}.shape={jnp.shape(value)} must be ({spec.num_heads},), one a query head"
            )
    heads = (("q_scale", spec.num_heads), ("k_scale", spec.num_kv_heads), ("v_scale", spec.num_kv_heads))
    for name, count in heads:
        value = getattr(params, name)
        if value is not None and jnp.shape(value) not in ((), (count,)):
            raise ValueError(f"params.{name}.shape={jnp.shape(value)} must be () or ({count},)")
        if isinstance(value, (int, float, np.ndarray, np.generic)):
            AttentionParams(**{name: value}).check_host()
    if cache_spec is not None:
        check_scales(params, cache_spec)


def check_dtype(backend: type[AttentionBackend], impl: AttentionImpl, q, params: AttentionParams) -> None:
    """The query's type, which no spec tells: a quantised one says what it means by q_scale."""
    supported = ", ".join(backend.get_supported_dtypes())
    if q.dtype.name in quant.QUANTISED:
        if params.q_scale is None:
            raise ValueError(
                f"q.dtype={q.dtype} needs params.q_scale (real = stored * scale); else use {supported}"
            )
        if not impl.supports_quant_query_input:
            raise UnsupportedError(
                "the chosen backend does not take this query",
                {
                    backend.get_name(): (
                        f"quantised query not supported: {q.dtype} seen, {supported} supported",
                    )
                },
            )
    elif not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q.dtype={q.dtype} must be one of {supported}")
    elif not backend.supports_dtype(q.dtype):
        raise UnsupportedError(
            "the chosen backend does not take this query; cast it or name another",
            {backend.get_name(): (f"dtype not supported: {q.dtype} seen, {supported} supported",)},
        )


def check_built(m, metadata_cls: type) -> None:
    """m came from this attention's build."""
    _kind("m", m, metadata_cls, "call m = attn.build(meta) first, with the same attn")


def _kind(name: str, value, wanted: type, way_out: str = "") -> None:
    if not isinstance(value, wanted):
        hint = f"; {way_out}" if way_out else ""
        raise TypeError(f"{name} must be {wanted.__name__}, got {type(value).__name__}{hint}")


def _rows(name: str, x, heads: int, dim: int) -> None:
    if x.ndim == 2 and x.shape[1] == heads * dim:
        raise ValueError(f"{name}.shape={x.shape} is flattened; pass {name}.reshape(-1, {heads}, {dim})")
    if x.ndim != 3 or x.shape[1:] != (heads, dim):
        raise ValueError(
            f"{name}.shape={x.shape} must be [T, {heads}, {dim}]: tokens, heads, head dim of the spec"
        )
