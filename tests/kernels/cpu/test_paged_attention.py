"""The portable Pallas kernel against the numpy oracle, called directly, without jattn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra import quant
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.cpu import tiles
from pallas_kernels.cpu.paged_attention import KernelConfig, KernelParams, PagedBatch, PagePool, paged_attention
from tests.oracle import attention
from tests.tolerances import assert_within

QUERY, SEQ = (1, 0, 5, 2), (9, 0, 5, 11)
SLOTS, PAGES = 4, 14


@dataclasses.dataclass
class Setup:
    """A small ragged batch over a NaN-poisoned pool, and the arguments of the oracle."""

    q: np.ndarray
    keys: list
    values: list
    pool: PagePool
    batch: PagedBatch
    starts: np.ndarray

    def call(self, config, params=KernelParams(), rows=4, **changes):  # noqa: B008
        fixed = tiles.make_tiles(self.starts, len(self.q), rows)
        batch = self.batch._replace(**changes)
        state = paged_attention(self.q, self.pool, batch, fixed, params, config=config, interpret=True)
        return [np.asarray(x) for x in state]

    def judge(self, got, causal=True, **options):
        """float32 arithmetic over at most 11 keys."""
        options = dict(scale=self.q.shape[-1] ** -0.5) | options
        want = attention.ragged(
            self.q[: sum(QUERY)], self.keys, self.values, QUERY, num_tokens=len(self.q), causal=causal, **options
        )
        for mine, exact, what in zip(got, want, ("out", "lse"), strict=True):
            assert_within(mine, exact, 1e-5 * max(1.0, np.abs(exact[np.isfinite(exact)]).max()), what)


def setup(heads=4, kv_heads=2, dim=8, v_dim=6, layout="HND", pad=3) -> Setup:
    normal = lambda seed, *shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    keys = [normal(10 + r, n, kv_heads, dim) for r, n in enumerate(SEQ)]
    values = [normal(20 + r, n, kv_heads, v_dim) for r, n in enumerate(SEQ)]
    table = np.full((len(SEQ), 4), 2**31 - 1, np.int32)
    ids = iter(np.random.default_rng(3).permutation(PAGES))
    pools = [np.full((PAGES, SLOTS, kv_heads, d), np.nan, np.float32) for d in (dim, v_dim)]
    for r, n in enumerate(SEQ):
        for j in range(-(-n // SLOTS)):
            table[r, j] = next(ids)
            for pool, rows in zip(pools, (keys, values), strict=True):
                part = rows[r][j * SLOTS : (j + 1) * SLOTS]
                pool[table[r, j], : len(part)] = part
    if layout == "HND":
        pools = [np.swapaxes(pool, 1, 2) for pool in pools]
    lens = [np.asarray(x, np.int32) for x in (QUERY, SEQ)]
    return Setup(
        q=np.concatenate([normal(1, sum(QUERY), heads, dim), np.full((pad, heads, dim), np.nan, np.float32)]),
        keys=keys,
        values=values,
        pool=PagePool(*map(jnp.asarray, pools)),
        batch=jax.tree.map(jnp.asarray, PagedBatch(lens[0], lens[1], lens[1] - lens[0], table)),
        starts=np.cumsum([0, *QUERY]),
    )


def config(dim=8, *, soft_cap=None, has_alibi=False, score_fn=None, layout="HND", **rule) -> KernelConfig:
    logits = LogitRule(dim**-0.5, soft_cap, has_alibi, score_fn=score_fn)
    return KernelConfig(mask=MaskRule(**rule), logits=logits, kv_dtype="float32", out_dtype="float32", layout=layout)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "layout"), [(3, 3, 8, 8, "HND"), (7, 1, 5, 9, "NHD"), (6, 2, 8, 3, "HND")]
)
def test_equals_the_witness(heads, kv_heads, dim, v_dim, layout):
    case = setup(heads, kv_heads, dim, v_dim, layout)
    case.judge(case.call(config(dim, layout=layout)))


@pytest.mark.parametrize("rows", [1, 8])
def test_any_tile_height_gives_the_same_numbers(rows):
    case = setup()
    case.judge(case.call(config(), rows=rows))


def test_all_features_at_once():
    case = setup()
    slopes, sinks = (np.random.default_rng(s).normal(size=4).astype(np.float32) for s in (5, 6))
    q_scale, k_scale = np.float32([0.7, 1.1, 0.9, 1.3]), np.float32([0.8, 1.2])
    mask_fn = lambda head, q, k: (q + k + head) % 3 != 0
    score_fn = lambda x, head, q, k: x - 0.05 * (q - k) * (1 + head % 2)
    cfg = config(soft_cap=1.5, has_alibi=True, score_fn=score_fn, left=5, right=2, chunk=8, mask_fn=mask_fn)
    causal = np.array([True, True, False, True])
    got = case.call(cfg, KernelParams(q_scale, k_scale, np.float32(1.4), slopes, sinks), causal=jnp.asarray(causal))
    case.judge(
        got, causal, soft_cap=1.5, slopes=slopes, sinks=sinks, window=(5, 2), chunk_size=8, mask_fn=mask_fn,
        score_fn=score_fn, q_scale=q_scale, k_scale=k_scale, v_scale=1.4,
    )  # fmt: skip


def test_user_functions_may_close_over_arrays():
    allowed = np.random.default_rng(8).random((16, 16)) < 0.6
    bias = np.random.default_rng(9).normal(size=4).astype(np.float32)
    case, device = setup(), jnp.asarray(allowed)
    mask_fn = lambda head, q, k: device[q, k]
    score_fn = lambda x, head, q, k: x + jnp.asarray(bias)[head]
    got = case.call(config(score_fn=score_fn, mask_fn=mask_fn))
    case.judge(got, mask_fn=lambda h, q, k: allowed[q, k], score_fn=lambda x, h, q, k: x + bias[h])


def test_pages_before_the_window_are_not_read():
    """They may have been freed: here their table entries are invalid and their bytes NaN."""
    case = setup()
    table = np.array(case.batch.block_table)
    table[[0, 3], 0] = [-1, 2**31 - 1]  # queries at 8, and at 9 and 10: with a window of 5, no query sees a key below 4
    case.judge(case.call(config(left=4), block_table=jnp.asarray(table)), window=(4, -1))


@pytest.mark.parametrize(
    ("dtype", "per_token", "bits"), [("float8_e4m3fn", False, True), ("int8", True, False), ("bfloat16", False, True)]
)
def test_stored_numbers_are_decoded(dtype, per_token, bits):
    case, scales = setup(), [None, None]
    stored = quant.storage_dtype(dtype, bits)
    pools = [np.nan_to_num(np.asarray(x)) for x in case.pool[:2]]
    if per_token:
        scales = [np.asarray(quant.token_head_scale(jnp.asarray(x), dtype)) for x in pools]
    encoded = [quant.encode(jnp.asarray(x), dtype, stored, s) for x, s in zip(pools, scales, strict=True)]
    token = [None if s is None else jnp.asarray(s[..., 0]) for s in scales]
    real = [np.asarray(quant.decode(x, dtype)) * (1 if s is None else s) for x, s in zip(encoded, scales, strict=True)]
    case.pool = PagePool(*encoded, *token)
    table = np.asarray(case.batch.block_table)
    for pages, rows in zip(real, (case.keys, case.values), strict=True):
        for r, n in enumerate(SEQ):
            rows[r] = np.stack([pages[table[r, t // SLOTS], :, t % SLOTS] for t in range(n)]) if n else rows[r]
    case.judge(case.call(dataclasses.replace(config(), kv_dtype=dtype)))


def test_tiles_hold_every_live_token_once_and_never_mix_requests():
    lens = np.array([3, 0, 9, 1, 4, 0])
    starts = np.cumsum([0, *lens])
    cut = tiles.make_tiles(starts, 20, 4)
    token, req = np.asarray(cut.token), np.asarray(cut.req)
    assert sorted(token[token < 20]) == list(range(17))
    owner = np.repeat(np.arange(6), lens)
    for row, r, first in zip(token, req, np.asarray(cut.first_row), strict=True):
        live = row[row < 20]
        assert (owner[live] == r).all()
        assert not len(live) or live[0] == starts[r] + first
    q = np.arange(20 * 6 * 2, dtype=np.float32).reshape(20, 6, 2)
    back = tiles.scatter(tiles.gather(jnp.asarray(q), cut, 3), cut, 20, -1.0)
    np.testing.assert_array_equal(back[:17], q[:17])
    assert (np.asarray(back[17:]) == -1).all()


def test_wrong_shapes_are_refused_by_name():
    case = setup()
    for params, words in ((KernelParams(sinks=np.ones(3)), "sinks"), (KernelParams(k_scale=np.ones(4)), "k_scale")):
        with pytest.raises(ValueError, match=rf"{words}.shape=.* must be"):
            case.call(config(), params)
    with pytest.raises(ValueError, match="causal.shape"):
        case.call(config(), causal=jnp.ones(2, bool))
    with pytest.raises(ValueError, match=r"q.shape=.* must be \[T, a multiple of"):
        setup(heads=3).call(config())
    with pytest.raises(ValueError, match="layout='HDN' must be one of NHD, HND"):
        dataclasses.replace(config(), layout="HDN")
