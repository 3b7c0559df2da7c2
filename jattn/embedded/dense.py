"""A decoder without a cache, with dense causal attention over texts of equal length: for training, and as reference.

`models.uncached_logits` is not used here for two reasons. A training step with packed attention takes 19 times as long
on CPU (1.8 s instead of 0.1 s for 48 texts of 39 tokens). And a reference must not share its attention with the code
that it checks.
"""

import functools

import jax
import jax.numpy as jnp

from jattn.models import ModelConfig
from jattn.models.layers import Stream, embed_tokens, head, last_hidden, whole_layer
from jattn.nn.attention_layer import AttentionConfig, project_and_attend
from jattn.nn.rope import rotate
from jattn.ops.state import AttentionState


def dense_logits(config: ModelConfig, params, token_ids):
    """token_ids i32[B L] -> logits f32[B L vocab]; differentiable."""
    batch, length = token_ids.shape
    flat = token_ids.reshape(-1)
    positions = jnp.tile(jnp.arange(length), batch)
    stream = Stream(embed_tokens(config, params, flat, positions))
    attend = functools.partial(_causal, batch)
    for layer, weights in zip(config.layers, params["layers"], strict=True):
        assert isinstance(layer.self_attn, AttentionConfig)
        angles = None if layer.rope is None else layer.rope.angles(positions)
        attention = functools.partial(
            project_and_attend, layer.self_attn, weights["attn"], attend=attend, positions=positions, angles=angles
        )
        _, stream = whole_layer(layer, weights, stream, attention)
    return head(config, params, last_hidden(config, params, stream.x)).reshape(batch, length, -1)


def _causal(batch: int, q, k, v, params, angles):
    """`attend` of project_and_attend: causal attention within each of the `batch` texts."""
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    q, k, v = (x.reshape(batch, -1, *x.shape[1:]) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    logits = jnp.where(seen[None, None], logits, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), v)
    return None, AttentionState(
        out=out.reshape(-1, *out.shape[2:]),
        lse=jax.nn.logsumexp(logits, axis=-1).swapaxes(1, 2).reshape(-1, q.shape[2]),
    )
