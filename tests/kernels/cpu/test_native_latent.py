"""Latent rows in the native kernel: each is key and value. The witness has the same rows as keys and values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.native import ops
from tests.kernels.cpu.native_setup import ISAS, needs_library
from tests.oracle import attention
from tests.tolerances import rounded

pytestmark = needs_library

LIMIT = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 2**-7}
"""Products with a bfloat16 query round weights to 8 bits; float32 sums over 2600 keys."""


class Rows:
    """A ragged batch over permuted pages. What no request refers to is NaN; unused table columns hold anything."""

    def __init__(self, lengths, latent, rope, page, dtype, form, seed=0):
        rng = np.random.default_rng(seed)
        pages = [-(-n // page) for n in lengths]
        order = rng.permutation(sum(pages) + 2)
        self.table = rng.integers(-9, 10**6, (len(lengths), max(pages) + 2)).astype(np.int32)
        pool = np.full((sum(pages) + 2, page, latent + rope), np.nan, np.float32)
        self.rows = [rounded(rng.standard_normal((n, latent + rope)), dtype) for n in lengths]
        for r, n in enumerate(lengths):
            mine, order = order[: pages[r]], order[pages[r] :]
            self.table[r, : pages[r]] = mine
            padded = np.full((pages[r] * page, latent + rope), np.nan, np.float32)
            padded[:n] = self.rows[r]
            pool[mine] = padded.reshape(-1, page, latent + rope)
        self.heads_first = form != "split, slots first"
        pool = jnp.asarray(pool[:, None] if self.heads_first else pool[:, :, None]).astype(dtype)
        whole = form == "whole"
        self.k, self.v = (pool, pool) if whole else (pool[..., latent:], pool[..., :latent])
        self.latent = latent


def attend(rows: Rows, q, queries, lengths, **options):
    lens = np.array(lengths, np.int32)
    batch = ops.NativeBatch(
        query_start_loc=np.cumsum([0, *queries]), seq_lens=lens, kv_lens=lens, block_table=rows.table,
        causal=np.ones(len(lens)),
    )  # fmt: skip
    config = ops.NativeConfig(
        **dict(scale=0.1, kv_dtype=rows.k.dtype.name, out_dtype="float32", latent_dim=rows.latent,
               heads_first=rows.heads_first) | options
    )  # fmt: skip
    return tuple(np.asarray(x) for x in ops.attend(config, q, rows.k, rows.v, batch))


def witness(rows: Rows, q, queries, **options):
    keys = [x[:, None] for x in rows.rows]
    return attention.ragged(
        q, keys, [x[..., : rows.latent] for x in keys], queries, num_tokens=len(q), **dict(scale=0.1) | options
    )


def check(seen, wanted, limit):
    for got, right in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=limit)


QUERIES, LENGTHS = [1, 4, 0, 9, 1], [70, 4, 5, 33, 2600]  # decode, a prompt, none, a chunk, splits
FORMS = ("split", "whole", "split, slots first")


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("isa", ISAS)
def test_latent_rows_are_keys_and_values(isa, dtype):
    """Heads of which a request's rows run the decode kernel, in whole and broken groups of four, or the prefill one."""
    sizes = ((1, 24, 8), (3, 33, 7), (16, 64, 16), (72, 40, 24))
    for (heads, latent, rope), form, page in zip(sizes, itertools.cycle(FORMS), (16, 3, 1, 128), strict=False):
        rows = Rows(LENGTHS, latent, rope, page, dtype, form)
        q = rounded(np.random.default_rng(1).standard_normal((sum(QUERIES) + 3, heads, latent + rope)), dtype)
        wanted = witness(rows, q, QUERIES)
        seen = attend(rows, q.astype(jnp.dtype(dtype)), QUERIES, LENGTHS, isa=isa)
        check(seen, wanted, LIMIT[dtype] * 4)
        assert (seen[0][sum(QUERIES) :] == 0).all() and np.isneginf(seen[1][sum(QUERIES) :]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepseeks_sizes(dtype):
    for heads, queries in ((16, [2, 1]), (128, [1, 0])):
        rows = Rows([2100, 40], 512, 64, 16, dtype, "split")
        q = rounded(np.random.default_rng(2).standard_normal((sum(queries), heads, 576)), dtype)
        seen = attend(rows, q.astype(jnp.dtype(dtype)), queries, [2100, 40], scale=192**-0.5)
        check(seen, witness(rows, q, queries, scale=192**-0.5), 4 * LIMIT[dtype])


def test_masks_and_the_soft_cap_apply_to_latent_rows():
    rows = Rows(LENGTHS, 24, 8, 16, "float32", "whole")
    q = np.random.default_rng(3).standard_normal((sum(QUERIES), 5, 32)).astype(np.float32)
    for mine, theirs in (
        (dict(window_left=20, window_right=0), dict(window=(20, 0))),
        (dict(chunk_size=16, soft_cap=2.0), dict(chunk_size=16, soft_cap=2.0)),
    ):
        check(attend(rows, q, QUERIES, LENGTHS, **mine), witness(rows, q, QUERIES, **theirs), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_the_batch_nor_on_the_threads(dtype):
    lengths = [70, 2600, 5000]
    rows = Rows(lengths, 64, 16, 16, dtype, "split")
    q = np.random.default_rng(4).standard_normal((3, 16, 80)).astype(jnp.dtype(dtype))
    together = attend(rows, q, [1, 1, 1], lengths)
    for threads in (1, 2, 3):
        for a, b in zip(together, attend(rows, q, [1, 1, 1], lengths, threads=threads), strict=True):
            np.testing.assert_array_equal(a, b)
    for r, n in enumerate(lengths):
        alone = Rows(lengths, 64, 16, 16, dtype, "split")
        alone.table = rows.table[r : r + 1]
        for a, b in zip(together, attend(alone, q[r : r + 1], [1], [n]), strict=True):
            np.testing.assert_array_equal(a[r : r + 1], b)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(latent_dim=600), "latent_dim is 600"),
        (dict(latent_dim=30), "k is"),
        (dict(latent_dim=32), "head_dim without latent_dim is 0"),
    ],
)
def test_wrong_latent_shapes_are_refused(changes, sentence):
    rows = Rows([5], 24, 8, 4, "float32", "split")
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        attend(rows, np.zeros((1, 2, 32), np.float32), [1], [5], **changes)
