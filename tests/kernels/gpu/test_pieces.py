"""What the interpreter does not see: buffers of a piece's numbers and queries, which many threads share."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu import paged_attention_sm90 as attention
from pallas_kernels.gpu import pieces_sm90 as pieces
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu.pieces_sm90 import WARPS, OwnCopies, Piece
from pallas_kernels.gpu.tile_policy import default_config


class Anything:
    """Stands for references and barriers."""

    def __getattr__(self, name):
        return self

    def __getitem__(self, index):
        return self


@pytest.mark.parametrize(
    "fields", [{}, dict(kv_dtype="int8", head_dim=128, v_head_dim=128)]
)  # the second has two rings
def test_a_piece_is_not_read_after_its_box_was_given_back(fields):
    """compute-sanitizer found it on a card: the blocks were counted after the arrival."""
    seen, nothing = [], lambda *args: None

    def column(number):
        seen.append("read")
        return jnp.int32(number)

    fakes = dict(
        narrow_tile=nothing, short_tile=nothing, long_tile=nothing, blank_tile=nothing,
        receive_piece=lambda *args: Piece(column, jnp.int32(0)), count_pieces=lambda *args: jnp.int32(2),
    )  # fmt: skip
    sizes = dict(
        computing=2, num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=64, kv_dtype="bfloat16"
    )
    with (
        mock.patch.object(attention.plgpu, "barrier_arrive", lambda barrier: seen.append("given back")),
        mock.patch.object(attention.lax, "axis_index", lambda name: jnp.int32(0)),
        mock.patch.multiple(attention, **fakes),
    ):
        jax.make_jaxpr(lambda: attention._compute(default_config(**sizes | fields), Anything(), jnp.int32(0)))()
    assert "read" in seen and seen.index("given back") == len(seen) - 1


def test_a_warpgroup_meets_before_it_loads_its_queries_and_after_they_have_come():
    """The interpreter runs a warpgroup as one thread, and a copy of rows at once."""
    seen = []
    says = lambda name: lambda *args, **kwargs: seen.append(name)
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=64, kv_dtype="bfloat16")
    with (
        mock.patch.multiple(tiles.rows, sync_warpgroup=says("sync"), await_rows=says("await")),
        mock.patch.object(tiles, "load_queries", says("load")),
        mock.patch.object(tiles.plgpu, "commit_smem", says("commit")),
    ):
        tiles._queries(default_config(q_buffers=1, **sizes), Anything(), Anything(), 0, "stage", 0)
    assert seen == ["sync", "load", "await", "commit"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8, 16, 18])
def test_each_copy_of_a_tile_is_begun_by_one_warp_with_its_own_page(count, monkeypatch):
    monkeypatch.setattr(pieces, "when_in_warp", lambda condition: lambda begin: begin() if condition else None)
    begun = {}
    for tile in range(2):
        for warp in range(WARPS):
            own, numbers = OwnCopies(count, jnp.int32(warp), tile), []
            own.each(
                [10 * number for number in own.numbers], lambda n, page, to=numbers: to.append((int(n), int(page)))
            )
            assert bool(own.has_one) == bool(numbers)
            begun[tile, warp] = numbers
        together = sorted(pair for warp in range(WARPS) for pair in begun[tile, warp])
        assert together == [(n, 10 * n) for n in range(count)]
    if count <= 2:
        assert not any(begun[0, warp] and begun[1, warp] for warp in range(WARPS))
