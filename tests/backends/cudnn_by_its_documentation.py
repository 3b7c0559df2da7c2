"""cuDNN's attention as jax._src.cudnn documents it, in jnp: for machines without a GPU.

Rows that no segment has are neither read nor written: their results are NaN, and NaN in them has no effect.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import MaskType


def dot_product_attention(
    query, key, value, *, q_seqlen=None, kv_seqlen=None, q_offsets=None, kv_offsets=None, scale, mask_type, qkv_layout,
    sliding_window_length, return_residual,
):  # fmt: skip
    """(out [B T H D], logsumexp [B H T]). The second of segments: [segment, head, token of the segment]."""
    assert qkv_layout == "BTNH" and return_residual and query.shape[1] % 2 == key.shape[1] % 2 == 0
    rows, tokens, heads, _ = query.shape
    if mask_type in (MaskType.PADDING, MaskType.PADDING_CAUSAL):
        assert rows == 1 and q_offsets.shape[1] > 2 and q_seqlen.dtype == q_offsets.dtype == jnp.int32
        places = [_places(*x) for x in ((q_offsets, q_seqlen, tokens), (kv_offsets, kv_seqlen, key.shape[1]))]
        rows = q_seqlen.shape[1]
    else:
        assert q_offsets is None
        places = [jnp.divmod(jnp.arange(rows * x.shape[1]), x.shape[1]) for x in (query, key)]
    causal = mask_type in (MaskType.CAUSAL, MaskType.PADDING_CAUSAL)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value)]
    out, lse = _attend(*places, *flat, scale=scale, causal=causal, window=sliding_window_length)
    segment, token = places[0]
    place = jnp.where(segment < 0, rows, segment), slice(None), token
    return out.reshape(query.shape), jnp.full((rows, heads, tokens), jnp.nan).at[place].set(lse, mode="drop")


def _places(offsets, seqlen, tokens: int):
    """(segment of each token or -1, its place in the segment). All that is not -1 is moved to the left first."""
    begin, count = (x[0][jnp.argsort(x[0] < 0, stable=True)] for x in (offsets, seqlen))
    place = jnp.arange(tokens)[:, None] - begin[None, :-1]
    inside = (place >= 0) & (place < count[None])
    return jnp.where(inside.any(1), inside.argmax(1), -1), jnp.where(inside, place, 0).sum(1)


def _attend(q_place, k_place, q, k, v, *, scale, causal, window):
    """(out [T H D], lse [T H]) of q [T H D], k and v [Tk K D]."""
    distance = q_place[1][:, None] - k_place[1][None]
    see = (q_place[0][:, None] == k_place[0][None]) & (q_place[0] >= 0)[:, None]
    see &= (distance >= 0) | (not causal)
    see &= (distance < window) if window is not None else True
    unread = [(segment < 0)[:, None, None] for segment, _ in (q_place, k_place, k_place)]

    def plain(q, k, v):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(jnp.float32) for x in (k, v))
        logits = jnp.where(see, jnp.einsum("thd,shd->hts", q.astype(jnp.float32), k) * scale, -1e30)
        lse = jax.nn.logsumexp(logits, axis=-1)
        return jnp.einsum("hts,shd->thd", jnp.exp(logits - lse[..., None]), v).astype(q.dtype), lse.T

    def live(*arrays):
        return [jnp.where(no, 0, x) for no, x in zip(unread, arrays, strict=False)]

    @jax.custom_vjp
    def attend(q, k, v):
        out, lse = plain(*live(q, k, v))
        return jnp.where(unread[0], jnp.nan, out), lse

    def backward(saved, cotangent):
        (dout,) = live(cotangent[0])
        grads = jax.vjp(lambda *x: plain(*x)[0], *live(*saved))[1](dout)
        return tuple(jnp.where(no, jnp.nan, x) for no, x in zip(unread, grads, strict=True))

    attend.defvjp(lambda *saved: (attend(*saved), saved), backward)
    return attend(q, k, v)
