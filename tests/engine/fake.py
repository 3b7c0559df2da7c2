"""A fast model for tests: its next token is a hash of all visible tokens, which it reads from the paged cache.

A token that is lost, outdated, misplaced or wrongly visible changes every later token.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

import jattn

MODULUS = 8191  # products are exact in float32
POISON = 1  # a token whose logits are NaN


@dataclasses.dataclass(frozen=True)
class Group:
    layers: tuple[int, ...]
    sliding_window: int | None = None
    chunk_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Layer:
    group: Group

    @property
    def attention(self):
        window, chunk = self.group.sliding_window, self.group.chunk_size
        return jattn.AttentionSpec(num_heads=1, head_dim=1, sliding_window=window, chunk_size=chunk)


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    """One layer for each cache group. It stores (token, position) and sees the keys that its group needs."""

    vocab_size: int = 61
    eos_token_ids: tuple[int, ...] = (0,)
    max_positions: int = 256
    cache_groups: tuple[Group, ...] = (Group((0,)),)
    rope_depends_on_length: bool = False

    @property
    def layers(self):
        return tuple(Layer(group) for group in self.cache_groups)

    def rope_variant(self, final_length):
        return ()

    def cache_specs(self, num_blocks, block_size, dtype):
        counts = (num_blocks,) * len(self.cache_groups) if isinstance(num_blocks, int) else num_blocks
        make = lambda count: jattn.KVCacheSpec(
            num_blocks=count, block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32", layout="NHD"
        )
        return tuple(make(count) for count in counts)

    def make_caches(self, num_blocks, block_size, dtype):
        return tuple(jattn.empty_cache(spec, fill=np.nan) for spec in self.cache_specs(num_blocks, block_size, dtype))


def mix(tokens, positions, xp):
    """A number in 0 .. MODULUS-1 from each (token, position)."""
    return (tokens * 31 + positions * 17 + tokens * positions) % MODULUS


def visible(group, q_pos, kv_pos):
    seen = kv_pos <= q_pos
    if group.sliding_window is not None:
        seen &= kv_pos > q_pos - group.sliding_window
    if group.chunk_size is not None:
        seen &= kv_pos // group.chunk_size == q_pos // group.chunk_size
    return seen


def forward(config, params, token_ids, caches, meta, *, backend="auto", logits_at=None):
    metas = meta if isinstance(meta, tuple) else (meta,)
    positions, req, live = metas[0].positions(), metas[0].token_to_req(), metas[0].token_is_live()
    row = lambda x: x.astype(jnp.float32)[:, None, None]
    total, new = jnp.zeros(token_ids.shape, jnp.float32), []
    for group, cache, m in zip(config.cache_groups, caches, metas, strict=True):
        cache = jattn.write_kv(cache, row(jnp.asarray(token_ids)), row(positions), m.slot_mapping)
        tokens, kept = (
            pool[..., 0, 0][jnp.asarray(m.block_table)[req]].reshape(len(req), -1) for pool in cache.logical()
        )
        kv_pos = jnp.arange(tokens.shape[1])[None]
        seen = visible(group, positions[:, None], kv_pos) & live[:, None]
        right = jnp.where(
            kept == kv_pos, 0.0, 1.0
        )  # a block of another request, or of another place, changes the result
        total += jnp.sum(jnp.where(seen, mix(tokens, kv_pos, jnp) + 1000.0 * right, 0.0), axis=1) % MODULUS
        new.append(cache)
    logits = scores(total, config.vocab_size, jnp) + params["bias"][None]
    logits = jnp.where((jnp.asarray(token_ids) == POISON)[:, None], jnp.nan, logits)
    return tuple(new), logits if logits_at is None else logits[logits_at]


def scores(total, vocab, xp):
    """f32[T vocab]: within about ten units, so that sampling can choose several tokens."""
    return ((total[:, None] + xp.arange(vocab)[None] * 37.0) * 13.0 % 101.0) / 10.0


PARAMS = {"bias": np.where(np.arange(FakeConfig.vocab_size) == POISON, -1000, 0).astype(np.float32)}  # never generated


def next_logits(config, tokens):
    """The model without a cache, in numpy: f32[vocab] after these tokens."""
    q = len(tokens) - 1
    pos = np.arange(len(tokens))
    total = np.float32(0)
    for group in config.cache_groups:
        seen = visible(group, q, pos)
        total += np.float32(np.sum(np.where(seen, mix(np.asarray(tokens), pos, np), 0)) % MODULUS)
    return scores(np.asarray([total], np.float32), config.vocab_size, np)[0] + PARAMS["bias"]


def greedy(config, prompt, max_tokens, limit=10**9):
    """The result of greedy decoding: (tokens, finish reason)."""
    tokens = list(prompt)
    while True:
        tokens.append(int(np.argmax(next_logits(config, tokens))))
        if tokens[-1] in config.eos_token_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) >= max_tokens or len(tokens) >= limit:
            return tokens[len(prompt) :], "length"
