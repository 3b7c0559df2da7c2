"""The table of a generation: a file that is none is refused by name, and a size that is too large refuses no layer."""

import json

import pytest

from pallas_kernels import tuning
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.tpu import tile_policy
from pallas_kernels.tpu.supports import SPILL, supports

LAYER = dict(
    v_head_dim=128, head_dim=128, page_size=128, dtype="bfloat16", kv_dtype="bfloat16", out_dtype="bfloat16",
    mask=MaskRule(), logits=LogitRule(0.1),
)  # fmt: skip


@pytest.fixture
def config_with(tmp_path, monkeypatch):
    """config_with(text of v5p's table, heads of every kind) -> the config that is chosen."""

    def config_of(text: str, heads: int = 8):
        (tmp_path / "tpu_v5p.json").write_text(text)
        tile_policy.tuned_sizes.cache_clear()
        return tile_policy.default_config(chip="TPU v5p", num_heads=heads, num_kv_heads=heads, **LAYER)

    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "__init__.py"))
    yield config_of
    tile_policy.tuned_sizes.cache_clear()


def table(**sizes) -> str:
    return json.dumps(dict(rows=[dict(kind="prefill", sizes=sizes)]))


BROKEN = [
    "", "{", "[]", "{}", '{"rows": 3}', '{"rows": [3]}', '{"rows": [{}]}', '{"rows": [{"sizes": [1]}]}',
    table(values_behind="two"), table(values_behind=-1), table(long_heads=0), table(chunk_rows=8), table(head_dim=64),
    table(page_size=16), table(step=512), table(early_heads=True),
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_is_no_table_is_refused_by_name(config_with, text):
    with pytest.raises(ValueError, match="tpu_v5p.json is not a table of tile sizes .*benchmarks.tpu.sweep --tables"):
        config_with(text)


@pytest.mark.parametrize("sizes", [dict(chunk_rows=72), dict(values_behind=0, early_heads=1)], ids=str)
def test_sizes_that_the_kernel_cannot_have_are_refused_by_name(config_with, sizes):
    with pytest.raises(ValueError, match="tpu_v5p.json: chunk_rows must be whole packs of 16, and early_heads 0"):
        config_with(table(**sizes))


LARGE = [dict(chunk_rows=256), dict(block_kv=2048), dict(part_kv=512), dict(tile_rows=512)]


@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_a_size_of_the_table_that_is_too_large_for_a_layer_does_not_refuse_it(config_with, sizes):
    """They were chosen for 8 kv heads; 'auto' would take another backend in silence."""
    ((name, value),) = sizes.items()
    assert getattr(config_with(table(**sizes)), name) == value
    many = config_with(table(**sizes), heads=200)
    assert not supports(many, chip="v5p") and getattr(many, name) < value


def test_the_rows_of_one_token_may_be_too_many():
    """The search for smaller tiles never ended there: a tile has at least the rows of a token."""
    config = tile_policy.default_config(num_heads=24 * 64, num_kv_heads=64, **LAYER)
    assert config.tile_rows == 16 and config.rows == 32
    assert [reason.split(":")[0] for reason in supports(config)] == [
        f"{config.vmem_bytes() + SPILL} bytes of VMEM (64 kv heads); the smallest chip"
    ]


def test_smaller_tiles_are_whole_packs():
    """Half of 112 rows, of 20 tokens with 5 heads, are not."""
    config = tile_policy.default_config(
        longest=20, num_heads=5 * 24, num_kv_heads=24, **LAYER | dict(head_dim=256, v_head_dim=256)
    )
    assert config.tile_rows == config.chunk_rows == 48 and not supports(config)
