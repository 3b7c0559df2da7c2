"""What the doors of attention refuse, and the sentence for each: shapes, dtypes and options, at trace time.

Values (ascending starts, block ids inside the pool ...) are `metadata.check_host`'s, before device_put.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backends.backend import AttentionBackend
from jattn.backends.feature import Feature
from jattn.backends.reasons import supports
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import check_scales
from jattn.errors import MissingMetadataError, UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.encoder import keys_of
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType
from pallas_kernels.algebra import quant

C = TypeVar("C")

_CACHE_FIELDS = (
    *("num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim"),
    *("dtype", "physical_layout", "quant"),
)


def check_specs(spec: AttentionSpec, cache_spec: KVCacheSpec) -> None:
    """The layer and its cache speak of the same heads."""
    check_kind("spec", spec, AttentionSpec)
    check_kind("cache_spec", cache_spec, KVCacheSpec, "jattn.attention(q, k, v, meta, spec) needs no cache")
    for name in ("num_kv_heads", "head_dim", "v_head_dim"):
        layer, cache = getattr(spec, name), getattr(cache_spec, name)
        if layer != cache:
            raise ValueError(f"spec.{name}={layer} but cache_spec.{name}={cache}; they must be equal")


def check_batch(spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The metadata hangs together and has the pages that this kind of layer reads."""
    check_lengths(spec, meta)
    table = keys_of(meta, spec.attn_type).block_table
    if table is None:
        raise ValueError(
            "attention over a cache needs block_table: pass it to from_lengths (cross_block_table for the encoder's), "
            "or use jattn.attention for packed k, v"
        )
    if jnp.ndim(table) != 2 or table.shape[0] != meta.max_num_reqs:
        raise ValueError(f"block_table.shape={jnp.shape(table)} must be [R, B] with R={meta.max_num_reqs}, as seq_lens")


def check_lengths(spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The lengths of the queries and of the keys."""
    check_kind("meta", meta, CommonAttentionMetadata, "make one with CommonAttentionMetadata.from_lengths(...)")
    for batch in (meta, keys_of(meta, spec.attn_type)):
        starts, lengths = jnp.shape(batch.query_start_loc), jnp.shape(batch.seq_lens)
        if lengths != (meta.max_num_reqs,) or starts != (meta.max_num_reqs + 1,):
            raise ValueError(f"query_start_loc.shape={starts} must be (R + 1,) and seq_lens.shape={lengths} (R,)")


def check_reach(spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The batch says where the spans and prefixes are that this layer asks about; another layer does not look."""
    for flag, name, axes in (("use_mm_prefix", "mm_prefix_ranges", "R, n, 2"), ("use_rswa", "rswa_prefix_lens", "R")):
        if not getattr(spec, flag):
            continue
        value, dims = getattr(meta, name), axes.count(",") + 1
        if value is None:
            raise MissingMetadataError(f"spec.{flag}=True needs meta.{name}, i32[{axes}]: give from_lengths {name}=")
        shape = jnp.shape(value)
        if len(shape) != dims or shape[0] != meta.max_num_reqs or (dims == 3 and shape[2] != 2):
            raise ValueError(f"meta.{name}.shape={shape} must be [{axes}] with R={meta.max_num_reqs}, as seq_lens")


def check_causality(backend: type[AttentionBackend], spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The backend takes what only the batch tells."""
    needs = causal_needs(spec, meta)
    lacking = tuple(f"{feature} not supported: {seen}" for feature, seen in needs if not supports(backend, feature))
    if lacking:
        raise UnsupportedError(
            "the chosen backend does not take this batch; name another", {backend.get_name(): lacking}
        )


def causal_needs(spec: AttentionSpec, meta: CommonAttentionMetadata) -> list[tuple[Feature, str]]:
    """What a batch whose decoder sees ahead needs, for all requests or for some, and what was seen."""
    if spec.attn_type is not AttentionType.DECODER:
        return []
    needs = []
    if meta.causal_per_request is not None:
        needs.append((Feature.PER_REQUEST_CAUSAL, "causal is an array"))
    elif not meta.is_causal:
        needs.append((Feature.NON_CAUSAL, "causal=False"))
    if needs and spec.window[1] >= 0:
        needs.append((Feature.TWO_SIDED_WINDOW, f"sliding_window={spec.window} in a batch that is not causal"))
    return needs


def check_cache(cache: PagedKV, cache_spec: KVCacheSpec) -> None:
    """The cache is one of cache_spec's, whole."""
    check_kind("cache", cache, PagedKV, "make one with jattn.empty_cache(cache_spec)")
    if cache.spec != cache_spec:
        values = ((name, getattr(cache.spec, name), getattr(cache_spec, name)) for name in _CACHE_FIELDS)
        different = [f"{name} {a!r} (wanted {b!r})" for name, a, b in values if a != b]
        if different:
            raise ValueError(f"the cache was made for another cache_spec: {', '.join(different)}")
    for name, shape in (("k", cache_spec.shape), ("v", cache_spec.v_shape)):
        if jnp.shape(getattr(cache, name)) != shape:
            raise ValueError(f"cache.{name}.shape={jnp.shape(getattr(cache, name))} must be {shape} for {cache_spec}")


def check_query(spec: AttentionSpec, q, num_tokens: int) -> None:
    """q [T H D], one row a token of the batch."""
    _rows("q", q, spec.num_heads, spec.head_dim)
    if q.shape[0] != num_tokens:
        raise ValueError(
            f"q has {q.shape[0]} tokens but the metadata has T={num_tokens}: pad q, or make the metadata with "
            f"num_tokens={q.shape[0]}"
        )


def check_keys(spec: AttentionSpec, k, v, num_tokens: int | None) -> tuple[jax.Array, jax.Array]:
    """k [Tk K D] and v [Tk K V] as arrays, of equally many tokens: num_tokens, if that is known."""
    if k is None or v is None:
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given but {missing} is None: pass both, or neither to read what is cached")
    k, v = jnp.asarray(k), jnp.asarray(v)
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
    return k, v


def check_packing(spec: AttentionSpec, meta: CommonAttentionMetadata, num_keys: int) -> None:
    """On the host, where lengths are values: the packed keys hold every request's."""
    lengths = keys_of(meta, spec.attn_type).seq_lens
    if isinstance(lengths, np.ndarray) and lengths.sum() > num_keys:
        raise ValueError(f"k has {num_keys} tokens but the requests' lengths add up to {lengths.sum()}")


def check_params(
    backend: type[AttentionBackend], spec: AttentionSpec, cache_spec: KVCacheSpec | None, params: AttentionParams
) -> None:
    """Each is there exactly when the spec uses it: an option is honoured or refused."""
    check_kind("params", params, AttentionParams)
    if (params.qq_bias is not None) != spec.use_qq_bias:
        raise ValueError(f"params.qq_bias must be given exactly when {spec.use_qq_bias=}")
    bias = jnp.shape(params.qq_bias) if spec.use_qq_bias else (1, 1)
    if len(bias) != 2 or bias[0] != bias[1] or not bias[0]:
        raise ValueError(f"params.qq_bias.shape={bias} must be [Q Q]: new tokens by new tokens")
    if (params.output_scale is None) != (spec.output_dtype is None):
        raise ValueError(
            f"params.output_scale={params.output_scale!r} but spec.output_dtype={spec.output_dtype!r}: a quantised "
            "result needs both, any other neither"
        )
    if jnp.shape(0.0 if params.output_scale is None else params.output_scale):
        raise ValueError(f"params.output_scale.shape={jnp.shape(params.output_scale)} must be (): one for all heads")
    for name, flag in (("alibi_slopes", "has_alibi"), ("sinks", "has_sinks")):
        value, used = getattr(params, name), getattr(spec, flag)
        if used and value is None:
            raise ValueError(f"spec.{flag}=True needs params.{name}, f32[{spec.num_heads}]")
        if value is not None and not used:
            raise ValueError(f"params.{name} is given but spec.{flag}=False; make the spec with {flag}=True")
        if value is not None and jnp.shape(value) != (spec.num_heads,):
            raise ValueError(f"params.{name}.shape={jnp.shape(value)} must be ({spec.num_heads},), one a query head")
    heads = (("q_scale", spec.num_heads), ("k_scale", spec.num_kv_heads), ("v_scale", spec.num_kv_heads))
    for name, count in heads:
        value = getattr(params, name)
        if value is not None and jnp.shape(value) not in ((), (count,)):
            raise ValueError(f"params.{name}.shape={jnp.shape(value)} must be () or ({count},)")
        if jnp.ndim(0.0 if value is None else value) == 1 and not backend.supports_per_head_quant_scales():
            refusal = f"{Feature.PER_HEAD_QUANT_SCALES} not supported: params.{name} has one a head"
            raise UnsupportedError("the chosen backend does not take these params", {backend.get_name(): (refusal,)})
    if cache_spec is not None:
        check_scales(params, cache_spec)
    known = {name: getattr(params, name) for name in (*(name for name, _ in heads), "output_scale")}
    concrete: dict[str, Any] = {n: x for n, x in known.items() if isinstance(x, (int, float, np.ndarray, np.generic))}
    AttentionParams(**concrete).check_host()


def check_dtype(backend: type[AttentionBackend], q, params: AttentionParams) -> None:
    """The query's type, which no spec tells; a quantised one says what it means by q_scale."""
    supported = ", ".join(backend.get_supported_dtypes())
    known = (*quant.FLOATS, *quant.QUANTISED)
    if q.dtype.name not in known:
        raise ValueError(f"q.dtype={q.dtype} must be one of {', '.join(known)}")
    if q.dtype.name in quant.QUANTISED and params.q_scale is None:
        raise ValueError(f"q.dtype={q.dtype} needs params.q_scale: real value = stored value * scale")
    if not backend.supports_dtype(q.dtype):
        raise UnsupportedError(
            "the chosen backend does not take this query; cast it or name another backend",
            {backend.get_name(): (f"dtype not supported: {q.dtype} seen, {supported} supported",)},
        )


def check_built(m, metadata_cls: type) -> None:
    """m came from this attention's build."""
    check_kind("m", m, metadata_cls, "call m = attn.build(meta) first, with the same attn")


def check_kind(name: str, value: Any, wanted: type[C], way_out: str = "") -> C:
    """The value itself, or TypeError: an object of another class has none of the names that we would ask it for."""
    if not isinstance(value, wanted):
        hint = f"; {way_out}" if way_out else ""
        raise TypeError(f"{name} must be {wanted.__name__}, got {type(value).__name__}{hint}")
    return value


def _rows(name: str, x, heads: int, dim: int) -> None:
    if x.ndim == 2 and x.shape[1] == heads * dim:
        raise ValueError(f"{name}.shape={x.shape} is flattened; pass {name}.reshape(-1, {heads}, {dim})")
    if x.ndim != 3 or x.shape[1:] != (heads, dim):
        raise ValueError(f"{name}.shape={x.shape} must be [T, {heads}, {dim}]: tokens, heads, head dim of the spec")
