"""The TPU work list: every live query is in one row of one tile, and its output comes back; sizes and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.tpu import supports, tile_policy, work_list
from pallas_kernels.tpu.config import PACK, TpuKernelConfig
from pallas_kernels.tpu.paged_attention import ragged_paged_attention
from pallas_kernels.tpu.work_list import FIELDS
from tests.cases import CASES

SHAPE = dict(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=16, dtype="float32")
RULES = dict(kv_dtype="float32", out_dtype="float32", mask=MaskRule(), logits=LogitRule(1.0))


def work_of(case, config: TpuKernelConfig, pad: int = 3):
    """(work list, packed tokens, fields [name] -> i32[tiles])."""
    starts = np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32)
    tokens = case.num_tokens + pad
    build = jax.jit(work_list.build_work_list, static_argnums=(2, 3))  # one program, not a hundred
    work = build(starts, np.asarray(case.seq_lens, np.int32), tokens, config)
    items = np.asarray(work.items).reshape(len(FIELDS), -1)[:, : int(work.count[0])]
    return work, tokens, dict(zip(FIELDS, items, strict=True))


@pytest.mark.parametrize(("name", "ratio"), [("mixed", 1), ("empty_in_the_middle", 3), ("speculative", 4)])
def test_the_lse_of_rows_comes_back_to_tokens_and_padding_gets_minus_infinity(name, ratio):
    config = TpuKernelConfig(**SHAPE | dict(num_heads=2 * ratio), **RULES, tile_rows=32, chunk_rows=16)
    work, tokens, fields = work_of(CASES[name], config)
    packs, pack, lanes = work_list.lse_shape(work, config)
    written = np.full((packs * pack, lanes), np.nan, np.float32)
    want = np.random.default_rng(0).standard_normal((tokens, 2 * ratio)).astype(np.float32)
    for token, number, first in zip(*(fields[key] for key in ("token", "tokens", "pack")), strict=True):
        rows = want[token : token + number].reshape(number, 2, ratio).swapaxes(1, 2).reshape(-1, 2)
        written[first * pack :][: len(rows), :2] = rows
    back = jax.jit(work_list.lse_of_tokens, static_argnums=2)(
        jnp.asarray(written).reshape(packs, pack, lanes), work, config
    )
    live = CASES[name].num_tokens
    np.testing.assert_array_equal(back[:live], want[:live])
    assert np.isneginf(back[live:]).all()


@pytest.mark.parametrize("name", ["mixed_unsorted", "empty_in_the_middle", "cached_but_idle"])
def test_tiles_hold_every_row_once_and_their_packs_do_not_meet(name):
    config = TpuKernelConfig(**SHAPE, **RULES, tile_rows=32, chunk_rows=16)
    case = CASES[name]
    _, _, fields = work_of(case, config)
    rows = fields["tokens"] * config.group
    assert rows.sum() == case.num_tokens * config.group
    np.testing.assert_array_equal(fields["token"], np.cumsum(fields["tokens"]) - fields["tokens"])
    assert (rows <= config.rows).all() and (fields["packs"] * PACK >= rows).all()
    np.testing.assert_array_equal(fields["pack"], np.cumsum(fields["packs"]) - fields["packs"])
    assert (fields["full_end"] <= np.asarray(case.seq_lens)[fields["req"]]).all()
    assert (fields["page"] * 16 <= fields["kv_start"]).all()


def test_sizes_follow_the_batch_and_stay_within_their_share():
    decode = tile_policy.default_config(**SHAPE, **RULES, longest=1)
    assert not decode.long_tiles and decode.tile_tokens == 1 and decode.rows == PACK
    few = tile_policy.default_config(**SHAPE, **RULES, longest=4)
    assert few.long_tiles and (few.rows, few.chunk_rows) == (16, 16)
    wide = tile_policy.default_config(
        **SHAPE | dict(num_heads=64, num_kv_heads=64, head_dim=256, v_head_dim=256), **RULES, chip="v5e"
    )
    assert (wide.block_kv, wide.tile_rows) == (128, 128)


def test_rows_are_read_in_place_where_they_are_whole_packs_or_windows_known_when_the_kernel_is_compiled():
    sizes = RULES | dict(head_dim=64, v_head_dim=64, page_size=16, dtype="float32", longest=1)
    in_place = lambda heads, kv_heads, **more: (
        tile_policy.default_config(**sizes | more, num_heads=heads, num_kv_heads=kv_heads).in_place
    )
    assert in_place(32, 8) and in_place(16, 8) and in_place(32, 2) and in_place(128, 1)
    assert not in_place(32, 32), "a loop over heads: tpu7x takes no half pack from a place that it does not know"
    assert not in_place(12, 4) and not in_place(28, 4), "parts of packs"
    assert not in_place(32, 8, longest=4) and in_place(32, 1, longest=4), "tiles of several tokens"
    assert not in_place(48, 1, longest=100), "a chunk of 128 rows ends within a token"
    assert not in_place(16, 1, longest=100, layout="HND128"), "copies of a query lie side by side in a row"


def test_what_does_not_fit_is_named_with_value_limit_and_chip():
    config = tile_policy.default_config(**SHAPE, **RULES)
    large = dataclasses.replace(config, num_heads=128, num_kv_heads=128, head_dim=256, v_head_dim=256)
    (reason,) = supports.supports(large, chip="TPU v5 lite")
    assert "VMEM" in reason and "v5e" in reason and str(128 << 20) in reason
    assert supports.supports(config, chip="TPU v4") == ["chip TPU v4: compiled for v5e, v6e, v5p, tpu7x only"]
    assert not supports.supports_batch(512, 64, 512, config)
    (reason,) = supports.supports_batch(512, 256, 4096, config)
    assert "256 x 4096" in reason and "SMEM" in reason


def test_the_door_says_which_argument_does_not_fit():
    config = tile_policy.default_config(**SHAPE, **RULES)
    work, tokens, _ = work_of(CASES["mixed"], config)
    q, pages = jnp.zeros((tokens, 6, 64)), jnp.zeros((4, 2, 16, 64))
    table = jnp.zeros((5, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"v_pages is \(4, 2, 16, 128\)"):
        ragged_paged_attention(q, pages, jnp.zeros((4, 2, 16, 128)), table, work, config)
    with pytest.raises(ValueError, match="sinks given is True"):
        ragged_paged_attention(q, pages, pages, table, work, config, sinks=jnp.zeros(6))
    with pytest.raises(NotImplementedError, match="head_dim 40"):
        ragged_paged_attention(q, pages, pages, table, work, dataclasses.replace(config, head_dim=40))
