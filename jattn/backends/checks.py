"""The checks of the public attention functions: shapes, dtypes and options. They also run inside jit.

`metadata.check_host` checks the values of a batch on the host: ascending starts, block ids inside the pool, and so on.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backends.base import AttentionBackend
from jattn.backends.capability import supports_feature
from jattn.backends.registry import name_of
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.layout import check_alive, check_scales
from jattn.errors import MissingMetadataError, UnsupportedError
from jattn.errors.arguments import as_array, check_kind, integer, integers, is_float, kind
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.attention_type import keys_of
from jattn.metadata.batch import PER_REQUEST
from jattn.metadata.batch_checks import check_block_size
from jattn.metadata.check import check_per_request
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType, Feature
from pallas_kernels.algebra import quant

_INDICES = integers()
_INDEX_FIELDS = (
    *("query_start_loc", "slot_mapping", "num_reqs", "num_actual_tokens", "logits_indices", "common_prefix_len"),
    *(name for name in PER_REQUEST if name != "causal_per_request"),
)
_CACHE_FIELDS = (
    *("num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim"),
    *("dtype", "physical_layout", "quant"),
)


def check_specs(spec: AttentionSpec, cache_spec: KVCacheSpec) -> None:
    """The layer and its cache must agree on heads and head dims."""
    check_kind("spec", spec, AttentionSpec, "jattn.MLAAttention takes an MLASpec")
    check_kind("cache_spec", cache_spec, KVCacheSpec, "jattn.attention(q, k, v, meta, spec) needs no cache")
    for name in ("num_kv_heads", "head_dim", "v_head_dim"):
        layer, cache = getattr(spec, name), getattr(cache_spec, name)
        if layer != cache:
            raise ValueError(f"spec.{name}={layer} but cache_spec.{name}={cache}; they must be equal")


def check_batch(
    spec: AttentionSpec | MLASpec, cache_spec: KVCacheSpec, meta: CommonAttentionMetadata, ranks: int = 1
) -> CommonAttentionMetadata:
    """Check that the parts of a batch fit together and that it has the blocks that this layer reads; return the batch.

    Its integers become int32. A batch of R = 0 rows is returned with one row of padding. ranks: how many ranks have a
    part of each block's tokens; the batch's block_size is cache_spec.block_size * ranks.
    """
    meta = check_lengths(spec, meta)
    keys = keys_of(meta, spec.attn_type)
    table = keys.block_table
    if table is None:
        raise ValueError(
            "attention over a cache needs block_table: pass it to from_lengths (cross_block_table for the encoder's), "
            "or use jattn.attention for packed k, v"
        )
    _TABLE("meta.block_table", table)
    if table.shape[0] != meta.max_num_reqs:
        raise ValueError(f"block_table.shape={jnp.shape(table)} must be [R, B] with R={meta.max_num_reqs}, as seq_lens")
    _VECTOR("meta.slot_mapping", keys.slot_mapping)
    name = "cache_spec.block_size" if ranks == 1 else f"cache_spec.block_size * {ranks} ranks"
    check_block_size(keys, cache_spec.block_size * ranks, name)
    return meta if meta.max_num_reqs else with_padding_row(meta)


def check_common_prefix(
    spec: AttentionSpec | MLASpec,
    cache_spec: KVCacheSpec,
    meta: CommonAttentionMetadata,
    prefix_len: int,
    ranks: int = 1,
) -> int:
    """Return prefix_len; ValueError if the live requests do not share so many tokens. Checks batches on the host only.

    A prefix is read through the blocks of one request. ranks: as in `check_batch`.
    """
    if meta.common_prefix_len is not None:
        _SCALAR("meta.common_prefix_len", meta.common_prefix_len)
    prefix_len, keys = _COUNT("common_prefix_len", prefix_len), keys_of(meta, spec.attn_type)
    starts, lens, table = meta.query_start_loc, keys.seq_lens, keys.block_table
    if not (isinstance(starts, np.ndarray) and isinstance(lens, np.ndarray) and isinstance(table, np.ndarray)):
        return prefix_len  # values of a device would have to be waited for
    live = np.flatnonzero(np.diff(starts))
    if (lens[live] < prefix_len).any():
        r = int(live[np.argmin(lens[live])])
        raise ValueError(f"common_prefix_len={prefix_len} is more than the {lens[r]} keys of request {r}")
    pages = table[live, : prefix_len // (cache_spec.block_size * ranks)]
    if (other := np.flatnonzero((pages != pages[:1]).any(axis=1))).size:
        raise ValueError(
            f"common_prefix_len={prefix_len}: requests {live[0]} and {live[other[0]]} have different blocks"
        )
    return prefix_len


def with_padding_row(meta: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A batch of R = 0 rows with one row of padding: kernels and plans need at least one."""

    def column(batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        table = batch.block_table
        return batch if table is None or table.shape[1] else batch.replace(block_table=np.zeros((0, 1), np.int32))

    meta = column(meta) if meta.cross is None else column(meta).replace(cross=column(meta.cross))
    return meta.padded(meta.num_tokens, 1)


def check_lengths(spec: AttentionSpec | MLASpec, meta: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the batch with integers of int32; its lengths of queries and keys must be vectors of matching sizes."""
    check_kind("meta", meta, CommonAttentionMetadata, "make one with CommonAttentionMetadata.from_lengths(...)")
    meta = _in_int32(meta)
    for batch in (meta, keys_of(meta, spec.attn_type)):
        _VECTOR("meta.query_start_loc", batch.query_start_loc)
        _VECTOR("meta.seq_lens", batch.seq_lens)
        starts, lengths = jnp.shape(batch.query_start_loc), jnp.shape(batch.seq_lens)
        if lengths != (meta.max_num_reqs,) or starts != (meta.max_num_reqs + 1,):
            raise ValueError(f"query_start_loc.shape={starts} must be (R + 1,) and seq_lens.shape={lengths} (R,)")
    check_per_request(meta)
    return meta


def check_mask_metadata(spec: AttentionSpec, meta: CommonAttentionMetadata) -> None:
    """The batch must have the ranges of use_mm_prefix and the prefixes of use_rswa, if the layer uses them."""
    for flag, name, axes in (("use_mm_prefix", "mm_prefix_ranges", "R, n, 2"), ("use_rswa", "rswa_prefix_lens", "R")):
        if not getattr(spec, flag):
            continue
        value, dims = getattr(meta, name), axes.count(",") + 1
        if value is None:
            raise MissingMetadataError(f"spec.{flag}=True needs meta.{name}, i32[{axes}]: give from_lengths {name}=")
        shape = jnp.shape(value)
        if len(shape) != dims or shape[0] != meta.max_num_reqs or (dims == 3 and shape[2] != 2):
            raise ValueError(f"meta.{name}.shape={shape} must be [{axes}] with R={meta.max_num_reqs}, as seq_lens")


def check_causality(
    backend: type[AttentionBackend], spec: AttentionSpec | MLASpec, meta: CommonAttentionMetadata
) -> None:
    """The backend must support the batch's causality, which the spec does not show."""
    needs = causal_needs(spec, meta)
    lacking = tuple(
        f"{feature} not supported: {seen}" for feature, seen in needs if not supports_feature(backend, feature)
    )
    if lacking:
        raise UnsupportedError(
            "the chosen backend does not support this batch; name another", {name_of(backend): lacking}
        )


def causal_needs(spec: AttentionSpec | MLASpec, meta: CommonAttentionMetadata) -> list[tuple[Feature, str]]:
    """(feature, the option that needs it) for each feature that a decoder's batch needs if it is not causal."""
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
    """The cache must have cache_spec and its shapes, and must not be deleted."""
    check_alive(cache)
    if cache.spec != cache_spec:
        values = ((name, getattr(cache.spec, name), getattr(cache_spec, name)) for name in _CACHE_FIELDS)
        different = [f"{name} {a!r} (wanted {b!r})" for name, a, b in values if a != b]
        if different:
            raise ValueError(f"the cache was made for another cache_spec: {', '.join(different)}")
    for name, shape in (("k", cache_spec.shape), ("v", cache_spec.v_shape)):
        if jnp.shape(getattr(cache, name)) != shape:
            raise ValueError(f"cache.{name}.shape={jnp.shape(getattr(cache, name))} must be {shape} for {cache_spec}")


def check_query(spec: AttentionSpec, q, num_tokens: int) -> jax.Array:
    """q [T H D] as an array; T must be that of the batch."""
    q = jnp.asarray(as_array("q", q))
    _rows("q", q, spec.num_heads, spec.head_dim)
    if q.shape[0] != num_tokens:
        raise ValueError(
            f"q has {q.shape[0]} tokens but the metadata has T={num_tokens}: pad q, or make the metadata with "
            f"num_tokens={q.shape[0]}"
        )
    query_dtype(q)
    return q


def query_dtype(q) -> str:
    """The name of the queries' dtype after conversion to a JAX array."""
    name = jnp.asarray(as_array("q", q)).dtype.name
    if name not in (*quant.FLOATS, *quant.QUANTISED):
        raise ValueError(f"q.dtype={name} must be one of {', '.join((*quant.FLOATS, *quant.QUANTISED))}")
    return name


def check_keys(spec: AttentionSpec, k, v, num_tokens: int | None) -> tuple[jax.Array, jax.Array]:
    """k [Tk K D] and v [Tk K V] as arrays; Tk must be equal, and num_tokens if that is given."""
    if k is None or v is None:
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given but {missing} is None: pass both, or neither to read only the cache")
    k, v = jnp.asarray(as_array("k", k)), jnp.asarray(as_array("v", v))
    for name, x, dim in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
        _rows(name, x, spec.num_kv_heads, dim)
        if x.dtype.name not in quant.FLOATS:
            raise ValueError(
                f"{name}.dtype={x.dtype} must be one of {', '.join(quant.FLOATS)}; write_kv quantises them"
            )
        if num_tokens is not None and x.shape[0] != num_tokens:
            raise ValueError(f"{name} has {x.shape[0]} tokens but the metadata has slots for {num_tokens}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"{k.shape[0]=} and {v.shape[0]=} must be the same number of tokens")
    return k, v


def as_one_dtype(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packed k and v in the smallest dtype that holds the values of both exactly."""
    dtype = jnp.promote_types(k.dtype, v.dtype)
    return k.astype(dtype), v.astype(dtype)


def check_packing(spec: AttentionSpec, meta: CommonAttentionMetadata, num_keys: int) -> None:
    """There must be at least as many packed keys as the sum of the lengths; checked if the lengths are numpy arrays."""
    lengths = keys_of(meta, spec.attn_type).seq_lens
    if isinstance(lengths, np.ndarray) and lengths.sum() > num_keys:
        raise ValueError(
            f"k has {num_keys} tokens but the requests' lengths add up to {lengths.sum()}: without a cache, k and v "
            "must have all tokens of every request; pass a cache that has the computed ones"
        )


def may_lack_keys(spec: AttentionSpec, meta: CommonAttentionMetadata, num_keys: int) -> bool:
    """Could the lengths add up to more than num_keys? False if check_packing has seen them, or all keys are new."""
    keys = keys_of(meta, spec.attn_type)
    is_known = isinstance(keys.seq_lens, np.ndarray) or (keys.is_all_new and keys.num_tokens <= num_keys)
    return not is_known


def check_params(
    backend: type[AttentionBackend], spec: AttentionSpec, cache_spec: KVCacheSpec | None, params: AttentionParams
) -> None:
    """A parameter must be given if the spec uses it, and must be None if not; shapes must fit."""
    check_kind("params", params, AttentionParams)
    if (params.qq_bias is not None) != spec.use_qq_bias:
        raise ValueError(f"params.qq_bias must be given exactly when {spec.use_qq_bias=}")
    if (params.distance_bias is not None) != spec.use_distance_bias:
        raise ValueError(f"params.distance_bias must be given exactly when {spec.use_distance_bias=}")
    for name in ("alibi_slopes", "sinks", "qq_bias", "distance_bias", "q_scale", "output_scale"):
        if getattr(params, name) is not None:
            as_array(f"params.{name}", getattr(params, name))
    bias = (1, 1) if params.qq_bias is None else jnp.shape(params.qq_bias)
    if len(bias) != 2 or bias[0] != bias[1] or not bias[0]:
        raise ValueError(f"params.qq_bias.shape={bias} must be [Q Q]: new tokens by new tokens")
    bias = (spec.num_heads, 1) if params.distance_bias is None else jnp.shape(params.distance_bias)
    if len(bias) != 2 or bias[0] != spec.num_heads or bias[1] % 2 == 0:
        raise ValueError(
            f"params.distance_bias.shape={bias} must be [{spec.num_heads}, 2L + 1]: heads by distances from -L to L"
        )
    if (params.output_scale is None) != (spec.output_dtype is None):
        raise ValueError(
            f"params.output_scale={params.output_scale!r} but spec.output_dtype={spec.output_dtype!r}: a quantised "
            "result needs both, any other neither"
        )
    if params.output_scale is not None and jnp.shape(params.output_scale):
        raise ValueError(f"params.output_scale.shape={jnp.shape(params.output_scale)} must be (): one for all heads")
    for name, flag in (("alibi_slopes", "has_alibi"), ("sinks", "has_sinks")):
        value, used = getattr(params, name), getattr(spec, flag)
        if used and value is None:
            raise ValueError(f"spec.{flag}=True needs params.{name}, f32[{spec.num_heads}]")
        if value is not None and not used:
            raise ValueError(f"params.{name} is given but spec.{flag}=False; make the spec with {flag}=True")
        if value is not None and jnp.shape(value) != (spec.num_heads,):
            raise ValueError(
                f"params.{name}.shape={jnp.shape(value)} must be ({spec.num_heads},), one for each query head"
            )
    heads = (("q_scale", spec.num_heads), ("k_scale", spec.num_kv_heads), ("v_scale", spec.num_kv_heads))
    for name, count in heads:
        value = getattr(params, name)
        if value is not None and as_array(f"params.{name}", value).shape not in ((), (count,)):
            raise ValueError(f"params.{name}.shape={jnp.shape(value)} must be () or ({count},)")
        if jnp.ndim(0.0 if value is None else value) == 1 and not backend.supports_per_head_quant_scales():
            refusal = f"{Feature.PER_HEAD_QUANT_SCALES} not supported: params.{name} has one per head"
            raise UnsupportedError("the chosen backend does not support these params", {name_of(backend): (refusal,)})
    if cache_spec is not None:
        check_scales(params, cache_spec)
    params.check_host()


def check_dtype(backend: type[AttentionBackend], q, params: AttentionParams) -> None:
    """The backend must support the queries' dtype; quantised queries need q_scale."""
    supported = ", ".join(backend.get_supported_dtypes())
    if q.dtype.name in quant.QUANTISED and params.q_scale is None:
        raise ValueError(f"q.dtype={q.dtype} needs params.q_scale: real value = stored value * scale")
    if not backend.supports_dtype(q.dtype):
        raise UnsupportedError(
            "the chosen backend does not support this query; cast it, name another backend, or construct the attention "
            f"with dtype={q.dtype.name!r}",
            {name_of(backend): (f"dtype not supported: {q.dtype} seen, {supported} supported",)},
        )


def check_plan(m, metadata_cls: type) -> None:
    """m must be a plan by the builder of the chosen backend."""
    check_kind("m", m, metadata_cls, "call m = attn.build(meta) first, with the same attn")


def check_functions(spec) -> None:
    """mask_fn and score_fn must return the right dtype and shape; they are traced here once, by eval_shape."""
    index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 1, 1), (1, 3, 1), (1, 1, 5))]
    score = jax.ShapeDtypeStruct((2, 3, 5), jnp.float32)
    wanted = (
        ("mask_fn", "(head, q_pos, kv_pos) -> bool", index, lambda dtype: dtype == jnp.bool_),
        ("score_fn", "(score, head, q_pos, kv_pos) -> a float score", [score, *index], is_float),
    )
    for name, meaning, arguments, fits in wanted:
        function = getattr(spec, name)
        if function is None:
            continue
        try:
            got = jax.eval_shape(lambda *x, f=function: jnp.asarray(f(*x)), *arguments)
        except Exception as error:  # any error of a user's function is reported to its author
            raised = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name} must be {meaning}; called with traced arrays, it raised {raised}") from error
        if not fits(got.dtype) or not _broadcasts(got.shape, score.shape):
            raise ValueError(
                f"{name} must be {meaning} in a shape that broadcasts to its arguments'; for head [2 1 1], "
                f"q_pos [1 3 1], kv_pos [1 1 5] it gave {got.dtype}{list(got.shape)}"
            )


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    fits = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, most) for size, most in fits)


_TABLE, _VECTOR, _SCALAR, _COUNT = integers(2), integers(1), integers(0), integer(0)
FEATURE = kind(Feature, way_out="e.g. (jattn.backends.Feature.NON_CAUSAL,)")


def _rows(name: str, x, heads: int, dim: int) -> None:
    if x.ndim == 2 and x.shape[1] == heads * dim:
        raise ValueError(f"{name}.shape={x.shape} is flattened; pass {name}.reshape(-1, {heads}, {dim})")
    if x.ndim != 3 or x.shape[1:] != (heads, dim):
        raise ValueError(f"{name}.shape={x.shape} must be [T, {heads}, {dim}]: tokens, heads, head dim of the spec")


def _in_int32(meta: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with int32 in place of other integers: `replace` takes any, and with jax_enable_x64 JAX makes int64."""
    changed: dict[str, Any] = {}
    for name in _INDEX_FIELDS:
        value = getattr(meta, name)
        if value is not None and getattr(value, "dtype", None) != np.int32:
            changed[name] = _INDICES(f"meta.{name}", value)
    if meta.cross is not None and (cross := _in_int32(meta.cross)) is not meta.cross:
        changed["cross"] = cross
    return dataclasses.replace(meta, **changed) if changed else meta
