"""An attention layer over a batch, with a paged cache (serving) or without one (training, encoders)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.attention import PagedAttention, attention
from jattn.cache import PagedKV
from jattn.errors.arguments import as_array, check_kind, kind, takes
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import BATCH
from jattn.nn.attention_layer import Attend, AttentionConfig, project_and_attend
from jattn.nn.rope import Angles, Rope, rotate
from jattn.spec import AttentionParams, AttentionSpec
from pallas_kernels.algebra import quant


@takes(config=kind(AttentionConfig), weights=kind(dict), meta=BATCH)
def apply_attention(
    config: AttentionConfig,
    weights: dict[str, Any],
    x: jax.Array,
    meta: CommonAttentionMetadata,
    cache: PagedKV | None = None,
    *,
    plan: Any = None,
    keys_from: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[PagedKV | None, jax.Array]:
    """x [T, hidden] of the batch's packed tokens -> (cache, [T, hidden]). The Flax modules call this.

    cache None: no cache is written and all keys come from x (or keys_from); differentiable if the backend is.
    plan: jattn.PagedAttention(spec, cache.spec).build(meta), built once for all layers with that spec.
    keys_from [Te, hidden]: the encoder's packed tokens, for the first step of a cross layer.
    """
    batch = queries_of(meta, config.spec.attn_type)
    attend = attend_over(config.spec, meta, cache, plan, backend, x)
    if config.is_cross and cache is None and keys_from is None:
        raise ValueError("a cross layer without a cache needs the encoder's tokens in every call: pass keys_from=")
    if keys_from is not None and not config.is_cross:
        raise ValueError(f"keys_from is for cross layers (attn_type 'encoder_decoder'), not {config.spec.attn_type}")
    _check_weights(config, weights)
    _check_tokens("x", x, config.hidden_size, batch.num_tokens)
    if keys_from is not None:
        _check_tokens("keys_from", keys_from, config.hidden_size, keys_of(meta, config.spec.attn_type).num_tokens)
    angles = None if config.rope is None else angles_of(config.rope, batch)
    return project_and_attend(
        config, weights, x, attend, positions=batch.positions(), angles=angles, keys_from=keys_from
    )


def _check_weights(config: AttentionConfig, weights: dict) -> None:
    """ValueError unless every entry of config.weight_specs() is there."""
    missing = [name for name in config.weight_specs() if name not in weights]
    if missing:
        raise ValueError(f"weights lacks {', '.join(missing)}; config.weight_specs() lists all that the layer needs")


def _check_tokens(name: str, x, hidden: int, tokens: int) -> None:
    """ValueError or TypeError unless x is [tokens, hidden] of floats."""
    _float_of(name, x)
    if x.shape != (tokens, hidden):
        raise ValueError(f"{name}.shape={x.shape} must be [T, hidden] = {(tokens, hidden)}")


def _float_of(name: str, x) -> Any:
    """The dtype of x, which must be an array of floats."""
    check_kind(name, x, (jax.Array, np.ndarray))
    if as_array(name, x).dtype.name not in quant.FLOATS:
        raise ValueError(f"{name}.dtype={x.dtype} must be one of {', '.join(quant.FLOATS)}")
    return x.dtype


def attend_over(
    spec: AttentionSpec, meta: CommonAttentionMetadata, cache, plan: Any, backend: str, x: jax.Array
) -> Attend:
    """`attend` of project_and_attend: through the cache, or over this batch's keys alone. q has the dtype of x."""
    if cache is None:
        if plan is not None:
            raise ValueError("plan is built for a paged cache: pass cache= too, or leave out plan")

        def packed(q: jax.Array, k: Any, v: Any, params: AttentionParams, angles: Angles | None) -> tuple:
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            return None, attention(q, k, v, meta, spec, params, backend=backend)  # raises if k or v is None

        return packed
    attn = PagedAttention(spec, check_kind("cache", cache, PagedKV).spec, backend, dtype=_float_of("x", x))
    plan = attn.build(meta) if plan is None else plan
    return lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)


def angles_of(rope: Rope, batch: CommonAttentionMetadata) -> Angles:
    """Rotary angles of a batch's tokens; they depend only on each token's position and its request's final length."""
    batch = batch if batch.max_num_reqs else batch.padded(batch.num_tokens, 1)
    lengths = jnp.asarray(batch.final_lens())[batch.token_to_req()] if rope.scaling.needs_lengths else None
    return rope.angles(batch.positions(), lengths)
