"""Tokens as the layer has them, [tokens H D], and rows as the products take them, [K tokens*G D]: one into the other.

Both orders are moved in VMEM as words of 32 bits by loads and stores with strides, 8 tokens at a time, by way of a
buffer in which the words of a token are 2 apart and those of the next token an odd number: strides that are no multiple
of 8 take one access, 8 takes two and 16 four. Mosaic has such accesses for arrays of 128 lanes only, so wider heads are
cut into pieces.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, TOKENS_TOGETHER, TpuKernelConfig


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The queries or the outputs of a tile."""

    num_heads: int
    num_kv_heads: int
    dim: int  # numbers of a head in `tokens`
    dtype: str  # of `tokens`
    beside: int = 1  # copies of a head in a row

    @property
    def in_pairs(self) -> bool:
        """Does a word hold two heads? Where they would be of two kv heads, every head has words of its own."""
        return jnp.dtype(self.dtype).itemsize == 2 and self.num_heads // self.num_kv_heads % 2 == 0

    @property
    def words(self) -> int:
        """Words of a token, a lane."""
        return self.num_heads // (1 + self.in_pairs)

    @property
    def pieces(self) -> int:
        """Pieces of 128 lanes of a row."""
        return cdiv(self.dim * self.beside, LANES)

    @property
    def pitch(self) -> int:
        """From a token's first word to that of the next."""
        return 2 * self.words + 1

    def scratch(self, rows: int) -> tuple[Any, Any]:
        """(words [pieces 8*pitch 128], rows [pieces K rows*words/H 128])."""
        dtype = jnp.uint32 if self.in_pairs else jnp.float32
        of_rows = (self.pieces, self.num_kv_heads, rows * self.words // self.num_heads, LANES)
        return pltpu.VMEM((self.pieces, TOKENS_TOGETHER * self.pitch, LANES), dtype), pltpu.VMEM(of_rows, dtype)

    def to_rows(self, tokens, words, rows, count):
        """Puts `count` tokens, and what lies behind them up to a multiple of 8, into the order of rows."""

        def some(i, _):
            for t in range(TOKENS_TOGETHER):
                for piece, x in enumerate(self._cut(self._as_words(tokens[i * TOKENS_TOGETHER + t]))):
                    words[piece, self._of_token(t)] = x
            for word, row in self._moves(i):
                rows[row] = words[word]
            return ()

        lax.fori_loop(0, _groups(count), some, ())

    def to_tokens(self, rows, words, tokens, count):
        """The inverse."""

        def some(i, _):
            for word, row in self._moves(i):
                words[word] = rows[row]
            for t in range(TOKENS_TOGETHER):
                x = self._joined([words[piece, self._of_token(t)] for piece in range(self.pieces)])
                tokens[i * TOKENS_TOGETHER + t] = self._as_numbers(x).astype(tokens.dtype)
            return ()

        lax.fori_loop(0, _groups(count), some, ())

    def read(self, rows, head, first, count: int):
        """[count dim*beside] rows of a kv head."""
        at = self._words_of(first, count)
        return self._as_numbers(self._joined([rows[piece, head, at] for piece in range(self.pieces)]))

    def write(self, rows, head, first, x):
        """Stores x [rows dim] as rows of a kv head."""
        at = self._words_of(first, x.shape[0])
        for piece, words in enumerate(self._cut(self._as_words(x))):
            rows[piece, head, at] = words

    def _moves(self, i):
        """(place in `words`, place in `rows`) of each word of 8 tokens, which are moved at once."""
        each = self.words // self.num_kv_heads
        first = pl.multiple_of(i * (TOKENS_TOGETHER * each), TOKENS_TOGETHER)
        for piece in range(self.pieces):
            for j in range(self.words):
                word = pl.ds(2 * j, TOKENS_TOGETHER, stride=self.pitch)
                yield (piece, word), (piece, j // each, pl.ds(first + j % each, TOKENS_TOGETHER, stride=each))

    def _of_token(self, t: int):
        return pl.ds(t * self.pitch, self.words, stride=2)

    def _words_of(self, first, rows: int):
        """The words of rows first .. first + rows - 1; first is a multiple of 16."""
        if not self.in_pairs:
            return pl.ds(first, rows)
        return pl.ds(first // 2 if isinstance(first, int) else pl.multiple_of(first >> 1, 8), rows // 2)

    def _as_words(self, x):
        """[rows dim] numbers -> [words dim]."""
        if self.in_pairs:
            return pltpu.bitcast(x.astype(self.dtype), jnp.uint32)
        return x.astype(jnp.float32)

    def _as_numbers(self, x):
        return pltpu.bitcast(x, jnp.dtype(self.dtype)) if self.in_pairs else x

    def _cut(self, x):
        """[words dim] -> [words 128] for each piece."""
        parts, missing = [x] * self.beside, self.pieces * LANES - self.dim * self.beside
        if missing:
            parts.append(jnp.zeros((x.shape[0], missing), x.dtype))
        x = jnp.concatenate(parts, axis=1) if len(parts) > 1 else x
        return [x[:, i * LANES : (i + 1) * LANES] for i in range(self.pieces)]

    def _joined(self, pieces):
        """[words 128] of each piece -> [words dim*beside]."""
        x = jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
        return x[:, : self.dim * self.beside]


def query_order(c: TpuKernelConfig) -> RowOrder:
    """Of the queries."""
    return RowOrder(c.num_heads, c.num_kv_heads, c.head_dim, c.dtype, c.beside)


def output_order(c: TpuKernelConfig) -> RowOrder:
    """Of the outputs."""
    return RowOrder(c.num_heads, c.num_kv_heads, c.v_head_dim, c.out_dtype)


def _groups(count):
    return lax.div(count + (TOKENS_TOGETHER - 1), jnp.int32(TOKENS_TOGETHER))
