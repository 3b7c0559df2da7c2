"""Tile sizes are decided by the caller, then by the policies in order; a policy is added as docs/how_to_add.md says."""

import dataclasses
import itertools

import pytest

from jattn import AttentionSpec, CommonAttentionMetadata, KVCacheSpec, MLASpec
from jattn.backends import gpu_kernel, mla_gpu_prompts
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu import tile_policy
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import TileRequest, default_config
from tests.kernels.gpu.test_lowering import lower

SHAPE = dict(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=64)
FEW = dict(SHAPE, rows=4)
OTHERS = [dict(FEW, page_size=16), dict(FEW, rows=17), dict(FEW, rows=None), dict(FEW, kv_dtype="int8")]


def page_sized_blocks(request: TileRequest) -> dict:
    """bfloat16 decode over pages of 64: a block is a page, in 4 stages."""
    config, rows = request.config, request.rows
    if rows is None or rows > 16 or config.kv_dtype != "bfloat16" or config.page_size != 64:
        return {}
    return {"block_kv": 64, "stages": 4}


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setattr(tile_policy, "POLICIES", (page_sized_blocks, *tile_policy.POLICIES))


def test_a_new_policy_is_chosen_for_its_shapes_down_to_the_kernel(added):
    config = default_config(**FEW)
    assert (config.block_kv, config.stages, config.long_tiles, config.flat_list) == (64, 4, False, True)
    assert not supports(config)
    assert len(lower(config).mlir_module_serialized) > 10_000


def test_a_new_policy_changes_no_other_shape(added, monkeypatch):
    with_it = [default_config(**shape) for shape in OTHERS]
    monkeypatch.setattr(tile_policy, "POLICIES", tile_policy.POLICIES[1:])
    assert with_it == [default_config(**shape) for shape in OTHERS]
    assert default_config(**FEW).block_kv == 128


def test_the_backend_asks_the_policies(added):
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
    cache = KVCacheSpec(num_blocks=8, block_size=64, num_kv_heads=8, head_dim=128)
    batches = [CommonAttentionMetadata.from_lengths([n], [n], [[0, 1]], 64) for n in (1, 100)]
    blocks = [gpu_kernel.kernel_config(spec, cache, "bfloat16", batch).block_kv for batch in batches]
    assert blocks == [64, 128]


def test_the_caller_decides_before_every_policy(added):
    config = default_config(**FEW, block_kv=128)
    assert (config.block_kv, config.stages, config.narrow_rows) == (128, 4, 0)
    capped = LogitRule(scale=0.1, soft_cap=30.0)
    assert default_config(**SHAPE, logits=capped).fixed_max
    plain = default_config(**SHAPE, logits=capped, fixed_max=False)
    assert not plain.fixed_max


def test_the_first_policy_that_names_a_field_decides_it(monkeypatch):
    two, three = (lambda request, n=n: {"stages": n} for n in (2, 3))
    monkeypatch.setattr(tile_policy, "POLICIES", (two, three))
    assert default_config(**SHAPE).stages == 2


def test_a_policy_can_name_only_fields_of_the_config(monkeypatch):
    monkeypatch.setattr(tile_policy, "POLICIES", (lambda request: {"block_q": 64},))
    with pytest.raises(TypeError, match="block_q"):
        default_config(**SHAPE)


FITS = [
    *(("bfloat16", dims) for dims in ((16, 16), (64, 64), (128, 128), (192, 128), (256, 256))),
    *(("int8", dims) for dims in ((32, 32), (64, 64), (128, 128), (192, 192), (256, 256))),
]


@pytest.mark.parametrize(("kv_dtype", "dims"), FITS)
def test_the_rule_takes_as_many_stages_as_fit(kv_dtype, dims):
    config = default_config(**SHAPE | dict(head_dim=dims[0], v_head_dim=dims[1]), kv_dtype=kv_dtype)
    config = dataclasses.replace(config, **tile_policy.largest_tiles(TileRequest(config, None, frozenset())))
    more = dataclasses.replace(config, stages=config.stages + 1)
    assert not supports(config)
    assert config.stages == 3 or more.smem_bytes > tile_policy.SMEM_LIMIT


def test_one_buffer_of_queries_where_two_would_halve_the_blocks():
    config = default_config(**SHAPE | dict(head_dim=192, v_head_dim=128))
    assert (config.q_buffers, config.block_kv, config.stages) == (1, 128, 2)


def test_what_does_not_fit_is_refused_with_the_bytes():
    (reason,) = supports(default_config(**SHAPE | dict(head_dim=256, v_head_dim=256), kv_dtype="int8", stages=3))
    assert reason == "313600 bytes of shared memory; there are 227328"


@pytest.mark.parametrize("requests", [0, 20, 1000])
@pytest.mark.parametrize("rows", [None, 1, 8, 9, 16, 17, 64, 65, 512])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_no_policy_makes_a_config_that_the_kernel_refuses(kv_dtype, rows, requests):
    """A refused config would take the shape from pallas_gpu, and 'auto' would choose another backend in silence."""
    for head_dim, v_head_dim in itertools.product((32, 64, 96, 128, 192, 256), (32, 64, 128, 192, 256)):
        for page_size, token_scales, soft_cap in itertools.product((8, 16, 128), (False, True), (None, 30.0)):
            if v_head_dim > head_dim or (token_scales and kv_dtype == "bfloat16"):
                continue
            config = default_config(
                rows=rows, requests=requests, keys=requests or None,
                num_heads=8, num_kv_heads=2, head_dim=head_dim, v_head_dim=v_head_dim, page_size=page_size,
                layout="HND", dtype="bfloat16", kv_dtype=kv_dtype, token_scales=token_scales,
                mask=MaskRule(causal=True), logits=LogitRule(scale=1.0, soft_cap=soft_cap),
            )  # fmt: skip
            assert supports(config) == []


@pytest.mark.parametrize(
    ("fields", "whole", "block_kv"),
    [
        (dict(rows=12, keys=512), True, 64),
        (dict(rows=12, keys=832), False, 64),
        (dict(rows=12, keys=1024), False, 128),
        (dict(rows=4, keys=512), True, 128),
        (dict(rows=4, keys=832), False, 128),
        (dict(rows=4, keys=None), False, 128),
        (dict(rows=4, keys=4096), False, 128),
        (dict(rows=12, keys=4096, mask=MaskRule(left=127)), True, 64),
        (dict(rows=4, keys=4096, mask=MaskRule(left=127)), True, 128),
        (dict(rows=4, keys=4096, mask=MaskRule(left=127, spans=True)), False, 128),
        (dict(rows=4, keys=4096, mask=MaskRule(left=127), per_request_causal=True), False, 128),
        (dict(rows=4, keys=512, kv_dtype="int8"), True, 128),
        (dict(rows=2048, keys=1024), True, 128),
        (dict(rows=2048, keys=2048), False, 128),
        (dict(rows=8192, keys=8192, mask=MaskRule(left=127)), True, 64),
        (dict(rows=8192, keys=8192, mask=MaskRule(left=511)), True, 128),
    ],
)
def test_units_of_few_keys_are_not_cut(fields, whole, block_kv):
    config = default_config(**SHAPE | fields)
    assert (config.whole_units, config.block_kv) == (whole, block_kv) and not supports(config)


@pytest.mark.parametrize(
    ("fields", "pipelines", "narrow", "whole"),
    [
        (dict(rows=4, requests=49, keys=4096), 1, 8, False),  # 392 units
        (dict(rows=4, requests=50, keys=4096), 2, 8, False),
        (dict(rows=4, requests=50), 1, 8, False),
        (dict(rows=4, requests=1024, keys=65536), 2, 8, False),
        (dict(rows=4, requests=2**17, keys=2**20), 1, 8, False),  # 32 bits do not hold all blocks
        (dict(rows=4, requests=50, keys=321), 2, 8, False),
        (dict(rows=4, requests=50, keys=320), 2, 8, True),
        (dict(rows=9, requests=50, keys=4096), 2, 0, False),
        (dict(rows=9, requests=50, keys=4096, kv_dtype="int8"), 2, 16, False),
        (dict(rows=17, requests=50, keys=4096, kv_dtype="int8"), 1, 0, False),
        (dict(rows=4, requests=50, keys=4096, kv_dtype="int8", token_scales=True), 1, 8, False),
        (dict(rows=4, requests=50, keys=4096, pipelines=1), 1, 8, False),
        (dict(rows=4, requests=50, keys=4096, head_dim=256, v_head_dim=256), 1, 0, False),
        (dict(rows=4, requests=50, keys=896, head_dim=256, v_head_dim=256), 2, 8, False),
        (dict(rows=4, requests=16, head_dim=256, v_head_dim=256), 1, 8, False),
        (dict(rows=200, requests=50, keys=320), 2, 0, True),
        (dict(rows=200, requests=7, keys=320), 1, 0, True),
        (dict(rows=200, requests=50), 1, 0, False),
        (dict(rows=200, requests=1, mask=MaskRule(left=127)), 2, 0, True),
        (dict(mask=MaskRule(left=127)), 2, 0, True),
    ],
)
def test_pipelines_where_there_are_many_units_of_few_rows_or_keys(fields, pipelines, narrow, whole):
    config = default_config(**SHAPE | fields)
    assert (config.pipelines, config.narrow_rows, config.whole_units) == (pipelines, narrow, whole)
    assert not supports(config)


@pytest.mark.parametrize(
    "given",
    [
        dict(rows=4, block_kv=64),
        dict(rows=4, requests=1000, keys=4096, block_kv=128),
        dict(rows=4, requests=1000, keys=4096, stages=3, head_dim=64, v_head_dim=64),
        dict(requests=20, keys=200, stages=1),
        dict(rows=4, requests=1000, keys=4096, kv_dtype="int8", narrow_rows=0),
        dict(rows=4, requests=1000, keys=200, head_dim=256, v_head_dim=256, narrow_rows=0),
        dict(rows=4, logits=LogitRule(scale=0.1, soft_cap=30.0), fixed_max=True),
        dict(rows=4, requests=9, keys=4096, long_tiles=True),
        dict(rows=4, weights_first=True),
        dict(rows=32, computing=3, head_dim=64, v_head_dim=64),
        dict(rows=12, requests=9, keys=4096, block_kv=256),
        dict(rows=4, requests=9, keys=321, head_dim=64, v_head_dim=32, num_heads=4096, num_kv_heads=32, block_kv=256),
        dict(stages=3, kv_dtype="int8"),
        dict(rows=4, head_dim=64, v_head_dim=64, pipelines=2, block_kv=128),
    ],
)
def test_what_the_caller_gives_is_kept_beside_choices_that_fit_it(given):
    config = default_config(**SHAPE | given)
    assert not supports(config)
    assert all(getattr(config, name) == value for name, value in given.items() if hasattr(config, name))


@pytest.mark.parametrize("keys", [None, 200, 4096])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_callers_narrow_tiles_leave_no_row_of_a_request_without_a_tile(kv_dtype, keys):
    """Tiles of more rows are computed only by a kernel with long tiles; else they count as padding."""
    given = dict(narrow_rows=8, kv_dtype=kv_dtype)
    for rows in (9, 32, 200, None):
        assert default_config(**SHAPE | given, rows=rows, keys=keys, requests=1000).has_long_tiles
    assert not default_config(**SHAPE | given, rows=8, keys=keys, requests=1000).has_long_tiles


@pytest.mark.parametrize(
    ("fields", "buffers"),
    [
        (dict(), 2),
        (dict(head_dim=256, v_head_dim=256), 1),
        (dict(rows=4), 1),  # narrow
        (dict(rows=4, requests=8, keys=600), 1),
        (dict(rows=4, requests=512, keys=800), 2),  # two pipelines
        (dict(rows=4, requests=512, keys=800, head_dim=256, v_head_dim=256), 1),
        (dict(rows=2048, requests=1, keys=512), 1),  # 128 units for 132 CTAs
        (dict(rows=2304, requests=1, keys=576), 2),
        (dict(rows=2048, requests=1, keys=65536), 2),
        (dict(kv_dtype="int8"), 1),
        (dict(kv_dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn"), 2),
    ],
)
def test_one_buffer_of_queries_where_they_are_few_or_wide_or_over_8_bits(fields, buffers):
    config = default_config(**SHAPE | fields)
    assert not supports(config)
    assert config.q_buffers == buffers


@pytest.mark.parametrize(
    ("fields", "narrow"),
    [
        (dict(), 0),
        (dict(kv_dtype="int8"), 8),
        (dict(kv_dtype="int8", num_heads=128), 16),
        (dict(kv_dtype="int8", num_heads=256), 0),
        (dict(kv_dtype="int8", token_scales=True), 8),
        (dict(kv_dtype="int8", head_dim=256, v_head_dim=256), 0),
        (dict(kv_dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn"), 0),
        (dict(kv_dtype="int8", rows=32768, requests=1), 0),  # tiles of 192 rows
    ],
)
def test_narrow_tiles_beside_long_ones_over_an_8_bit_cache(fields, narrow):
    config = default_config(**SHAPE | fields)
    assert not supports(config)
    assert (config.long_tiles, config.narrow_rows) == (True, narrow)


@pytest.mark.parametrize(
    ("fields", "costs"),
    [
        (dict(), (22, 6)),
        (dict(dtype="float16", kv_dtype="float16"), (22, 6)),
        (dict(kv_dtype="int8"), (22, 7)),
        (dict(kv_dtype="int8", head_dim=256, v_head_dim=256), (22, 7)),
        (dict(kv_dtype="int8", rows=4), (11, 4)),
        (dict(kv_dtype="int8", rows=32), (11, 4)),
        (dict(kv_dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn"), (11, 4)),
    ],
)
def test_short_units_cost_more_beside_long_tiles(fields, costs):
    config = default_config(**SHAPE | fields)
    assert (config.unit_cost, config.short_weight) == costs


@pytest.mark.parametrize(
    ("page", "kernel"), [(48, "GpuKernelConfig"), (24, "GpuKernelConfig"), (3, "WarpKernelConfig")]
)
def test_pages_that_tma_cannot_copy_are_computed_by_warps(page, kernel):
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
    cache = KVCacheSpec(num_blocks=8, block_size=page, num_kv_heads=8, head_dim=128)
    config = gpu_kernel.kernel_config(spec, cache, "bfloat16")
    assert type(config).__name__ == kernel and not gpu_kernel.config_reasons(config)


ALIBI = LogitRule(scale=0.1, has_alibi=True)
D64 = dict(SHAPE, head_dim=64, v_head_dim=64)
E4M3 = dict(SHAPE, kv_dtype="float8_e4m3fn", rows=4 * 8192, keys=8192, requests=1)
CAPPED = dict(SHAPE, logits=LogitRule(scale=0.1, soft_cap=30.0))


@pytest.mark.parametrize(
    "fields, three, first",
    [
        (SHAPE, False, True),
        (dict(SHAPE, keys=1024), False, False),
        (dict(SHAPE, mask=MaskRule(left=500)), False, False),
        (dict(SHAPE, head_dim=256, v_head_dim=256), False, False),
        (dict(SHAPE, head_dim=192), False, True),
        (CAPPED, False, False),  # its maximum is fixed
        (dict(SHAPE, logits=LogitRule(scale=0.1, has_alibi=True)), False, True),
        (dict(E4M3, rows=2048, keys=65536, logits=LogitRule(scale=0.1, has_alibi=True)), False, False),
        (dict(SHAPE, logits=LogitRule(scale=0.1, score_fn=lambda s, h, q, k: s)), False, False),
        (FEW, False, False),
        (D64, True, True),
        (dict(D64, keys=1024), False, False),
        (dict(D64, rows=192), False, True),
        (dict(D64, qq_bias=True), False, True),
        (E4M3, True, False),
        (dict(E4M3, rows=2048, keys=65536), False, True),  # a chunk
        (dict(E4M3, rows=2048, keys=65536, requests=34), False, False),
        (dict(E4M3, rows=2048, keys=6144), False, False),
        (dict(E4M3, head_dim=64, v_head_dim=64), True, True),
        (dict(E4M3, requests=34), False, False),
        (dict(E4M3, requests=0), False, False),
        (dict(E4M3, token_scales=True), True, False),
        (dict(E4M3, compute_dtype="float8_e4m3fn"), False, False),
    ],
)
def test_long_prompts_have_three_warpgroups_or_no_maximum(fields, three, first):
    config = default_config(**fields)
    assert (config.computing == 3, config.weights_first) == (three, first)
    assert not supports(config)


@pytest.mark.parametrize(
    "fields, three",
    [
        (dict(E4M3, block_kv=64, stages=5), False),  # two warpgroups leave shared memory for five stages
        (dict(E4M3, block_kv=64, stages=3), True),
        (dict(E4M3, block_kv=128), False),
        (dict(D64, block_kv=64, stages=4), True),
        (dict(CAPPED, weights_first=True), False),
    ],
)
def test_policies_choose_nothing_that_the_callers_tiles_exclude(fields, three):
    config = default_config(**fields)
    assert not supports(config) and config.computing == 2 + three


@pytest.mark.parametrize("fields", [D64, E4M3])
def test_a_caller_of_two_warpgroups_gets_their_tiles(fields):
    """Over an 8-bit cache those are smaller: blocks of 64 keys."""
    assert default_config(**fields, computing=2) == default_config(**fields | dict(requests=64), computing=2)


@pytest.mark.parametrize(
    "fields, last_first",
    [
        (SHAPE, False),
        (dict(SHAPE, logits=ALIBI), True),
        (dict(SHAPE, logits=ALIBI, keys=1024), False),  # with maxima before, as the next
        (dict(SHAPE, logits=ALIBI, weights_first=False), False),
        (dict(SHAPE, logits=ALIBI, head_dim=256, v_head_dim=256), False),
        (dict(D64, logits=ALIBI), True),
        (dict(E4M3, logits=ALIBI), False),
        (dict(FEW, logits=ALIBI), False),
        (dict(FEW, logits=ALIBI, kv_dtype="int8", long_tiles=True, weights_first=True), False),  # its tiles are narrow
    ],
)
def test_the_last_block_is_first_where_rising_logits_have_no_maximum(fields, last_first):
    config = default_config(**fields)
    assert config.last_block_first == last_first and not supports(config)


def test_two_warpgroups_and_no_weights_first_where_registers_are_equal_shares(monkeypatch):
    """As nvJitLink compiles: with these, products would wait for one another."""
    monkeypatch.setattr(gpu_kernel.device, "keeps_registers", lambda: False)
    monkeypatch.setattr(gpu_kernel.device, "detect", lambda: gpu_kernel.HOPPER)
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64)
    cache = KVCacheSpec(num_blocks=8, block_size=64, num_kv_heads=8, head_dim=64)
    batch = CommonAttentionMetadata.from_lengths([4096], [4096], [list(range(64))], 64)
    config = gpu_kernel.kernel_config(spec, cache, "bfloat16", batch)
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    latent = mla_gpu_prompts.projection_config(MLASpec(num_heads=16, **sizes), "bfloat16", 64)
    for found, dim in ((config, 64), (latent, 192)):
        assert (found.computing, found.weights_first, found.head_dim) == (2, False, dim)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(computing=4), "computing 4: wanted 2 or 3"),
        (dict(computing=3, pipelines=2), "three warpgroups that compute: wanted long_tiles and one pipeline"),
        (dict(computing=3, head_dim=128, v_head_dim=128), "heads of 128 in blocks of 128: wanted at most 64 and 128"),
        (dict(weights_first=True, long_tiles=False), "weights_first: wanted long_tiles and one pipeline"),
        (dict(weights_first=True, kv_dtype="int8", token_scales=True), "weights_first with scales of tokens"),
        (dict(CAPPED, weights_first=True, fixed_max=True), "weights_first with fixed_max"),
        (dict(last_block_first=True, narrow_rows=8, long_tiles=False), "last_block_first with narrow_rows"),
        (
            dict(last_block_first=True, kv_dtype="int8", token_scales=True),
            "last_block_first with narrow_rows or scales",
        ),
        (dict(weights_first=True, head_dim=256, v_head_dim=256), "v_head_dim 256: wanted at most 192"),
    ],
)
def test_three_warpgroups_and_weights_first_refuse_what_they_do_not_serve(fields, words):
    reasons = supports(default_config(**D64 | fields))
    assert any(words in reason for reason in reasons), reasons
