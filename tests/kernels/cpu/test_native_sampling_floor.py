"""The tokens from the native floor on are those of the definition in float64; each row's floor depends on it alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.cpu.native import ops
from tests.kernels.cpu.native_setup import ISAS, needs_library

pytestmark = needs_library

ROUNDING = 2.0**-21
"""Of a sum of exponentials in float32, relative: an exponential has an error of about 2**-23."""
TOP_K = (0, 0, 1, 2, 3, 20, 100, 5000, -1, -(2**31), 2**31 - 1)
TOP_P = (1.0, 1.0, 0.95, 0.5, 0.1, 1e-30, 0.0, 1.0 - 2.0**-24, 1e-44, -1.0, 2.0, np.nan)
VOCABS = (1, 2, 31, 32, 33, 255, 1021, 9000, 33000)


def ordered(x) -> np.ndarray:
    """The order of float32 as int64, smallest first; -0 and 0 are equal."""
    values = np.asarray(x, np.float32)
    bits = np.where(values == 0, np.float32(0), values).view(np.uint32).astype(np.int64)
    return np.where(bits >> 31, 0xFFFFFFFF - bits, bits + 0x80000000)


def kept_by_definition(x, top_k: int, top_p: float) -> np.ndarray:
    """bool[V]: the top_k largest, of these the fewest that reach top_p of their sum, and what equals one of them."""
    exact = np.asarray(x, np.float64)
    order = np.argsort(-exact, kind="stable")
    first = order[: top_k if 0 < top_k < len(x) else len(x)]
    if top_p < 1:
        reached = np.cumsum(np.exp(exact[first])) >= top_p * np.exp(exact[first]).sum()
        first = first[: 1 + (int(np.argmax(reached)) if reached.any() else len(first))]
    return exact >= exact[first[-1]]


def check(x, top_k, top_p, floor) -> None:
    """The kept tokens are those of the definition; with a top_p that differs by rounding in either direction."""
    for row, k, p, at in zip(x, top_k, top_p, np.asarray(floor).astype(np.int64), strict=True):
        kept = ordered(row) >= at
        exact = np.float64(p)
        if not exact < 1:
            np.testing.assert_array_equal(kept, kept_by_definition(row, k, 1.0))
            continue
        fewest = kept_by_definition(row, k, exact * (1 - ROUNDING))
        most = kept_by_definition(row, k, min(exact * (1 + ROUNDING), 1.0))
        assert kept[fewest].all() and not kept[~most].any(), (len(row), k, p, kept.sum(), fewest.sum(), most.sum())


def random_rows(vocab: int, rows: int, seed: int):
    """(x, top_k, top_p): rows of any spread, many with ties, zeros of both signs and -inf; the maximum is 0."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, vocab)) * rng.choice([0, 0.1, 1, 3, 20], (rows, 1))).astype(np.float32)
    x = np.where(rng.random((rows, 1)) < 0.3, np.round(x), x)
    x[rng.random((rows, vocab)) < rng.choice([0, 0, 0.3, 1], (rows, 1))] = -np.inf
    x[:, rng.integers(vocab)] = 30.0
    x -= x.max(axis=-1, keepdims=True)
    x = np.where((x == 0) & (rng.random(x.shape) < 0.5), np.float32(-0.0), x)
    top_k = rng.choice([*TOP_K, vocab - 1, vocab, vocab + 1], rows).astype(np.int32)
    return x, top_k, rng.choice(TOP_P, rows).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_kept_tokens_are_those_of_the_definition(vocab, isa):
    for seed in range(4):
        x, top_k, top_p = random_rows(vocab, 40, seed)
        check(x, top_k, top_p, ops.sampling_floor(x, top_k, top_p, isa=isa))


def test_a_cut_far_from_every_sum_is_exact():
    """0.4, 0.3, 0.2, 0.1; then with a tie: of 0.4, 0.2, 0.2 and 0.2 the first two sum to 0.6, and 0.4 is less than 0.7
    of it, so all of the tie is kept; 0.4 is more than 0.6 of it."""
    shares = np.array([[0.4, 0.3, 0.2, 0.1]] * 5 + [[0.4, 0.2, 0.2, 0.2]] * 3)
    top_k, top_p = [0, 0, 0, 3, 3, 2, 2, 2], [0.35, 0.65, 0.85, 1.0, 0.75, 1.0, 0.7, 0.6]
    x = np.log(shares / shares.max(axis=-1, keepdims=True)).astype(np.float32)
    floor = np.asarray(ops.sampling_floor(x, np.array(top_k), np.array(top_p)))
    kept = ordered(x) >= floor.astype(np.int64)[:, None]
    assert kept.sum(axis=-1).tolist() == [1, 2, 3, 3, 2, 4, 4, 1]


def test_rows_without_a_cut_keep_all():
    x, _, _ = random_rows(100, 6, 0)
    top_k, top_p = np.array([0, -1, 100, 101, 0, 0]), np.array([1, 1, 1, 1, 2, np.nan])
    assert not np.asarray(ops.sampling_floor(x, top_k, top_p)).any()


@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_a_row_depend_on_that_row_only(isa):
    """Neither on its neighbours, with NaNs in every second one, nor on its place, nor on the number of threads."""
    x, top_k, top_p = random_rows(9001, 24, 7)  # rows of an odd length have all alignments
    call = functools.partial(ops.sampling_floor, isa=isa)
    floor = np.asarray(call(x, top_k, top_p))
    for threads in (1, 2, 17):
        np.testing.assert_array_equal(call(x, top_k, top_p, threads=threads), floor)
    np.testing.assert_array_equal(call(x[::-1], top_k[::-1], top_p[::-1])[::-1], floor)
    for r in range(len(x)):
        assert call(x[r : r + 1], top_k[r : r + 1], top_p[r : r + 1])[0] == floor[r]
    x[::2, ::5] = np.nan
    np.testing.assert_array_equal(call(x, top_k, top_p)[1::2], floor[1::2])


@pytest.mark.parametrize("nan", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], ids=hex)
def test_top_k_takes_nans_in_the_order_of_their_bits(nan):
    """The row ends with BAD_TOKEN, whatever is kept."""
    x, _, _ = random_rows(3000, 10, 3)
    x[:, 7::11] = np.uint32(nan).view(np.float32)
    top_k = np.array([1, 2, 3, 50, 100, 271, 272, 273, 274, 2999])
    wanted = np.sort(ordered(x), axis=-1)[np.arange(10), 3000 - top_k]
    for top_p in (1.0, 0.5):
        floor = np.asarray(ops.sampling_floor(x, top_k, np.full(10, top_p, np.float32)))
        if top_p == 1.0:
            np.testing.assert_array_equal(floor.astype(np.int64), wanted)
        assert (floor.astype(np.int64) >= wanted).all()


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan, -np.nan, -1e30, 5.0, 3e38, 1e-45])
def test_rows_that_are_no_logits_end(value):
    """Rows of one number, of which the maximum is not 0."""
    for vocab in (1, 100, 9000):
        x = np.full((len(TOP_K) * len(TOP_P), vocab), value, np.float32)
        top_k, top_p = (grid.ravel() for grid in np.meshgrid(TOP_K, TOP_P))
        floor = np.asarray(ops.sampling_floor(x, top_k, top_p)).astype(np.int64)
        assert (floor <= ordered(x[:, 0])).all(), "a row without any token"


def test_no_row_and_no_vocabulary():
    empty = lambda rows, vocab: ops.sampling_floor(jnp.zeros((rows, vocab)), jnp.full(rows, 3), jnp.full(rows, 0.5))
    assert empty(0, 50).shape == (0,)
    assert np.asarray(empty(3, 0)).tolist() == [0, 0, 0]


def test_under_vmap_and_on_rows_of_several_devices():
    x, top_k, top_p = random_rows(333, 24, 5)
    wanted = np.asarray(ops.sampling_floor(x, top_k, top_p))
    parts = [each.reshape(4, 6, *each.shape[1:]) for each in (x, top_k, top_p)]
    np.testing.assert_array_equal(jax.jit(jax.vmap(ops.sampling_floor))(*parts).ravel(), wanted)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    by_rows = jax.shard_map(ops.sampling_floor, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"), check_vma=False)
    np.testing.assert_array_equal(jax.jit(by_rows)(x, top_k, top_p), wanted)
