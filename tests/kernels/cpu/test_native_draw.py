"""A draw keeps the tokens of the definition in float64 and takes the one with the largest sum of logit and noise; its
results depend on the row alone."""

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
SUM_ROUNDING = 4e-6
"""Of sums of a logit and noise in float32, of which both are below 32, and of logarithms that differ by an ulp."""
VOCABS = (1, 2, 31, 32, 33, 255, 1021, 9000, 33000)


def draw(x, top_k, top_p, temperature=1.0, min_p=0.0, keys=None, **options):
    """(tokens i32[R], floors f32[R]) of rows x; each rule for all rows or for each."""
    each = lambda rule, dtype: np.broadcast_to(np.asarray(rule, dtype), len(x))
    keys = np.zeros((len(x), 2), np.uint32) if keys is None else keys
    rules = each(temperature, np.float32), each(top_k, np.int32), each(top_p, np.float32), each(min_p, np.float32)
    return tuple(map(np.asarray, ops.draw(jnp.asarray(x), *rules, keys, **options)))


def floors_of(x, top_k, top_p, **options) -> np.ndarray:
    """As ordered bits, with which the floor of a GPU is checked too."""
    return ordered(draw(x, top_k, top_p, **options)[1])


def random_keys(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**32, size=(rows, 2)).astype(np.uint32)


def uniform(keys, vocab: int) -> np.ndarray:
    """f64[R vocab] jax.random.uniform of each key: threefry2x32 of (0, token), both words xor, the first 23 bits."""
    first, second = (word[:, None] for word in keys.T)
    schedule = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    x, y = first + np.zeros(vocab, np.uint32), second + np.arange(vocab, dtype=np.uint32)
    for block in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y
            y = x ^ (y << np.uint32(by) | y >> np.uint32(32 - by))
        x, y = x + schedule[(block + 1) % 3], y + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return ((x ^ y) >> np.uint32(9)) / 2.0**23


def noise_of(keys, vocab: int) -> np.ndarray:
    return -np.log(-np.log(np.maximum(uniform(keys, vocab), np.finfo(np.float32).tiny)))


def check_tokens(scaled, floors, keys, tokens) -> None:
    """Each token is kept, and the sum of its scaled logit and its noise is the largest up to rounding."""
    kept = scaled >= floors[:, None]
    sums = np.where(kept, np.asarray(scaled, np.float64) + noise_of(keys, scaled.shape[1]), -np.inf)
    np.testing.assert_array_less(sums.max(axis=1) - SUM_ROUNDING, sums[np.arange(len(sums)), tokens])


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
        check(x, top_k, top_p, floors_of(x, top_k, top_p, isa=isa))


def test_a_cut_far_from_every_sum_is_exact():
    """0.4, 0.3, 0.2, 0.1; then with a tie: of 0.4, 0.2, 0.2 and 0.2 the first two sum to 0.6, and 0.4 is less than 0.7
    of it, so all of the tie is kept; 0.4 is more than 0.6 of it."""
    shares = np.array([[0.4, 0.3, 0.2, 0.1]] * 5 + [[0.4, 0.2, 0.2, 0.2]] * 3)
    top_k, top_p = [0, 0, 0, 3, 3, 2, 2, 2], [0.35, 0.65, 0.85, 1.0, 0.75, 1.0, 0.7, 0.6]
    x = np.log(shares / shares.max(axis=-1, keepdims=True)).astype(np.float32)
    kept = ordered(x) >= floors_of(x, top_k, top_p)[:, None]
    assert kept.sum(axis=-1).tolist() == [1, 2, 3, 3, 2, 4, 4, 1]


def test_rows_without_a_cut_keep_all():
    x, _, _ = random_rows(100, 6, 0)
    top_k, top_p = np.array([0, -1, 100, 101, 0, 0]), np.array([1, 1, 1, 1, 2, np.nan])
    assert (draw(x, top_k, top_p)[1] == -np.inf).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_token_is_kept_and_its_sum_is_the_largest(vocab, isa):
    for seed in range(4):
        x, top_k, top_p = random_rows(vocab, 40, seed)
        keys = random_keys(40, seed)
        tokens, floors = draw(x, top_k, top_p, keys=keys, isa=isa)
        check_tokens(x, floors, keys, tokens)


@pytest.mark.parametrize("isa", ISAS)
def test_many_unlikely_tokens_are_drawn_as_often_as_they_should_be(isa):
    """One token at 0 and 33000 at -9: four of five draws are one of these, whose noise is above 9."""
    x = np.full((200, 33000), -9.0, np.float32)
    x[:, 20000] = 0.0
    keys = random_keys(200, 1)
    tokens, floors = draw(x, 0, 1.0, keys=keys, isa=isa)
    check_tokens(x, floors, keys, tokens)
    assert 140 < np.sum(tokens != 20000) < 180 and len(set(tokens)) > 140


@pytest.mark.parametrize("isa", ISAS)
def test_of_equal_sums_the_first_token_is_drawn(isa):
    """With this key the noise of tokens 1 and 44 is equal and the largest. -1e-8 is lost when it is added."""
    x, keys = np.zeros((1, 64), np.float32), np.array([[0, 119161]], np.uint32)
    x[:, :32] = -1e-8
    assert np.flatnonzero(uniform(keys, 64) == uniform(keys, 64).max()).tolist() == [1, 44]
    assert draw(x, 0, 1.0, keys=keys, isa=isa)[0].tolist() == [1]


def test_the_noise_is_that_of_jax():
    """The same bits and the same shape: every draw of the call is one of the largest sums of JAX's own noise."""
    keys, x = random_keys(300, 2), np.random.default_rng(2).normal(size=(300, 3001)).astype(np.float32)
    x -= x.max(axis=1, keepdims=True)
    gumbel = jax.vmap(lambda key: jax.random.gumbel(jax.random.wrap_key_data(key), (3001,), jnp.float32))(keys)
    tokens, _ = draw(x, 0, 1.0, keys=keys)
    sums = x + np.asarray(gumbel)
    assert (sums[np.arange(300), tokens] >= sums.max(axis=1) - SUM_ROUNDING).all()
    np.testing.assert_allclose(gumbel, noise_of(keys, 3001), atol=SUM_ROUNDING)


def test_temperature_and_min_p():
    """The logits are scaled before the cuts; min_p comes first, and what it leaves out is not in the sum of top_p."""
    logits = 7 + np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    kept = lambda **rules: set(draw(np.repeat(logits, 400, 0), keys=random_keys(400, 3), **rules)[0].tolist())
    assert kept(top_k=0, top_p=1.0, min_p=0.45) == {0, 1, 2}
    assert kept(top_k=0, top_p=1.0, min_p=0.55) == {0, 1}
    assert kept(top_k=0, top_p=1.0, min_p=0.55, temperature=2.0) == {0, 1, 2}
    assert kept(top_k=0, top_p=0.6) == {0, 1}
    assert kept(top_k=0, top_p=0.56, min_p=0.55) == {0}, "0.4 is 0.57 of 0.7"
    assert kept(top_k=0, top_p=0.5, temperature=0.5) == {0}, "0.16 is 0.53 of the squares"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan])
def test_a_greedy_row_takes_the_first_of_the_largest(isa, temperature):
    for vocab in VOCABS:
        x = np.round(np.random.default_rng(vocab).normal(size=(30, vocab)) * 2).astype(np.float32)
        tokens, floors = draw(x, 3, 0.5, temperature=temperature, isa=isa)
        np.testing.assert_array_equal(tokens, x.argmax(axis=1))
        np.testing.assert_array_equal(ops.first_largest(jnp.asarray(x), isa=isa), tokens)
        assert (floors == -np.inf).all()


@pytest.mark.parametrize("isa", ISAS)
def test_the_results_of_a_row_depend_on_that_row_only(isa):
    """Neither on its neighbours, with NaNs in every second one, nor on its place, nor on the number of threads."""
    x, top_k, top_p = random_rows(9001, 24, 7)  # rows of an odd length have all alignments
    keys = random_keys(24, 7)
    call = lambda at, x=x, **options: np.stack(draw(x[at], top_k[at], top_p[at], keys=keys[at], isa=isa, **options))
    every = np.arange(24)
    wanted = call(every)
    for threads in (1, 2, 17):
        np.testing.assert_array_equal(call(every, threads=threads), wanted)
    np.testing.assert_array_equal(call(every[::-1])[:, ::-1], wanted)
    for r in every:
        np.testing.assert_array_equal(call(every[r : r + 1])[:, 0], wanted[:, r])
    ruined = x.copy()
    ruined[::2, ::5] = np.nan
    np.testing.assert_array_equal(call(every, ruined)[:, 1::2], wanted[:, 1::2])


def test_all_instruction_sets_draw_the_same_token_where_they_keep_the_same():
    x, top_k, top_p = random_rows(5000, 60, 11)
    keys = random_keys(60, 11)
    tokens, floors = zip(*(draw(x, top_k, top_p, keys=keys, isa=isa) for isa in ISAS), strict=True)
    same = (np.stack(floors) == floors[0]).all(axis=0)
    assert same.sum() > 50 and (np.stack(tokens) == tokens[0])[:, same].all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_a_row_with_nan_or_infinity_gives_no_token(value):
    for vocab in (1, 31, 100, 9000):
        for place in {0, vocab // 2, vocab - 1}:
            x = np.zeros((6, vocab), np.float32)
            x[:, place] = value
            tokens, floors = draw(x, [0, 3, 0, 5, 0, 0], [1, 1, 0.5, 0.5, 1, 0.9], [1, 1, 1, 1, 0, 1])
            assert (tokens == -1).all() and (floors == -np.inf).all()


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan, -np.nan, -1e30, 5.0, 3e38, 1e-45])
def test_rows_of_one_number_keep_all_and_draw_a_token(value):
    for vocab in (1, 100, 9000):
        x = np.full((len(TOP_K) * len(TOP_P), vocab), value, np.float32)
        top_k, top_p = (grid.ravel() for grid in np.meshgrid(TOP_K, TOP_P))
        tokens, floors = draw(x, top_k, top_p, keys=random_keys(len(x), vocab))
        assert (floors <= 0.0).all(), "a row without any token"
        assert (tokens < vocab).all() and (np.isfinite(value) == (tokens >= 0)).all() and (tokens >= -1).all()
        assert np.isfinite(value) == (len(set(tokens)) > 1) or vocab == 1


def test_no_row_and_no_vocabulary():
    empty = lambda rows, vocab: draw(np.zeros((rows, vocab), np.float32), 3, 0.5)
    assert [result.shape for result in empty(0, 50)] == [(0,), (0,)]
    assert [result.tolist() for result in empty(3, 0)] == [[-1, -1, -1], [-np.inf] * 3]


def test_under_vmap_and_on_rows_of_several_devices():
    x, top_k, top_p = random_rows(333, 24, 5)
    rules = np.ones(24, np.float32), top_k, top_p, np.zeros(24, np.float32), random_keys(24, 5)
    wanted = ops.draw(jnp.asarray(x), *rules)
    parts = [each.reshape(4, 6, *each.shape[1:]) for each in (x, *rules)]
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    by_rows = jax.shard_map(ops.draw, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"), check_vma=False)
    for got in (jax.jit(jax.vmap(ops.draw))(*parts), jax.jit(by_rows)(x, *rules)):
        for result, right in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(np.ravel(result), right)
