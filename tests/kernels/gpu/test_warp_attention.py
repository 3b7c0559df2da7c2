"""The warp-level attention kernel: its reasons, its lowering, and its numbers in JAX's interpreter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

from benchmarks.gpu import operations
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config_sm80 import CHIPS, SMEM_OF_CUDA
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports_sm80 import supports
from pallas_kernels.gpu.tile_policy_sm80 import warp_config
from pallas_kernels.gpu.work_list import build_work_list
from tests.kernels.gpu.test_lowering import lower
from tests.oracle.attention import ragged

INTERPRETS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)
SHAPE = dict(chip="sm_80", num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=8, num_ctas=3)
DECODES = ((1, 65), (1, 0), (1, 200), (1, 64), (1, 1), (1, 63))
TWO_TOKENS = ((2, 70), (1, 129), (0, 0), (2, 2), (2, 64))
BATCHES = {  # name -> (query length, total length) of each request, fields of the config, the oracle's options
    "decode": (DECODES, {}, {}),
    "decode in waves": (DECODES, dict(in_waves=True), {}),
    "one long request in parts": (((1, 700),), dict(stages=3), {}),
    "group 7, page 16, NHD, D 128": (
        DECODES, dict(num_heads=14, head_dim=128, v_head_dim=128, page_size=16, layout="NHD"), {}
    ),
    "16 rows, f16, one stage": (
        TWO_TOKENS, dict(num_heads=16, dtype="float16", kv_dtype="float16", stages=1, page_size=128), {}
    ),
    "page 3": (TWO_TOKENS, dict(page_size=3), {}),
    "window": (((1, 300), (1, 20), (2, 150)), dict(mask=MaskRule(left=70)), dict(window=(70, -1))),
    "soft cap and sinks": (
        DECODES, dict(logits=LogitRule(scale=0.1, soft_cap=5.0), has_sinks=True), dict(soft_cap=5.0, sinks=None)
    ),
    "alibi, D 80 V 48": (
        DECODES, dict(logits=LogitRule(scale=0.1, has_alibi=True), head_dim=80, v_head_dim=48), dict(slopes=None)
    ),
    "not causal, mask_fn": (
        TWO_TOKENS, dict(mask=MaskRule(causal=False, mask_fn=lambda h, q, k: (q + k + h) % 3 != 0)),
        dict(causal=False, mask_fn=lambda h, q, k: (q + k + h) % 3 != 0),
    ),
}  # fmt: skip

QUICK = ("decode", "mixed")
MIXED = ((1, 65), (40, 100), (90, 90), (0, 0), (1, 1), (33, 200))
BATCHES |= {  # with wide tiles
    "mixed": (MIXED, {}, {}),
    "mixed, halves of a tile in turn": (MIXED, dict(tile_halves=1, stages=2), {}),
    "spec decode, 64 rows": (((20, 100), (3, 200), (0, 0), (9, 9)), dict(page_size=16), {}),
    "prefill in parts, D 192 V 128": (((70, 300),), dict(head_dim=192, v_head_dim=128, num_ctas=4, page_size=64), {}),
    "mixed with every option, NHD": (
        MIXED,
        dict(logits=LogitRule(scale=0.1, soft_cap=5.0, has_alibi=True), has_sinks=True, layout="NHD",
             mask=MaskRule(left=50), head_dim=32, v_head_dim=16),
        dict(soft_cap=5.0, slopes=None, sinks=None, window=(50, -1)),
    ),
    "mixed, f16, not causal, score_fn": (
        MIXED,
        dict(dtype="float16", kv_dtype="float16", mask=MaskRule(causal=False),
             logits=LogitRule(scale=0.1, score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q))),
        dict(causal=False, score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q)),
    ),
}  # fmt: skip


E4M3, E5M2 = dict(kv_dtype="float8_e4m3fn"), dict(kv_dtype="float8_e5m2")
BATCHES |= {  # with 8-bit keys and values
    "decode, e4m3": (DECODES, dict(E4M3), {}),
    "one long request in parts, int8": (((1, 700),), dict(kv_dtype="int8", chip="sm_90", layout="NHD"), {}),
    "16 rows, f16, e5m2 with token scales": (
        TWO_TOKENS, dict(E5M2, num_heads=16, dtype="float16", token_scales=True, page_size=128), {}
    ),
    "decode, int8 with token scales, NHD, D 96 V 32": (
        DECODES, dict(kv_dtype="int8", token_scales=True, head_dim=96, v_head_dim=32, layout="NHD", has_sinks=True),
        dict(sinks=None),
    ),
    "mixed, e4m3": (MIXED, dict(E4M3), {}),
    "mixed, int8 with token scales": (MIXED, dict(kv_dtype="int8", token_scales=True, layout="NHD"), {}),
    "mixed, f16, e5m2 with token scales, halves in turn": (
        MIXED, dict(E5M2, dtype="float16", token_scales=True, tile_halves=1), {}
    ),
    "prefill in parts, e4m3, D 192 V 128, window": (
        ((70, 300),), dict(E4M3, head_dim=192, v_head_dim=128, num_ctas=4, page_size=64, mask=MaskRule(left=50)),
        dict(window=(50, -1)),
    ),
    "mixed with every option, int8 with token scales": (
        MIXED,
        dict(logits=LogitRule(scale=0.1, soft_cap=5.0, has_alibi=True), has_sinks=True, mask=MaskRule(left=50),
             head_dim=64, v_head_dim=32, kv_dtype="int8", token_scales=True),
        dict(soft_cap=5.0, slopes=None, sinks=None, window=(50, -1)),
    ),
}  # fmt: skip


ALIBI_AND_SCORES = dict(
    logits=LogitRule(scale=0.1, has_alibi=True, score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q) + 0.1 * h)
)
OF_BOTH = dict(slopes=None, score_fn=lambda s, h, q, k: s * 0.5 + 0.01 * (k - q) + 0.1 * h)
BATCHES |= {  # where numbers of rows and columns, or queries, are not kept in registers
    "16 rows, D 224, alibi and score_fn": (
        TWO_TOKENS, dict(ALIBI_AND_SCORES, num_heads=16, head_dim=224, v_head_dim=32, page_size=128), OF_BOTH
    ),
    "mixed with groups of 16, D 256, f16, int8 with token scales": (
        MIXED, dict(num_heads=32, head_dim=256, v_head_dim=256, dtype="float16", kv_dtype="int8", token_scales=True), {}
    ),
    "mixed with groups of 16, D 224, f16, e4m3 with token scales, alibi and score_fn": (
        ((1, 70), (6, 130), (1, 1)),
        dict(E4M3, **ALIBI_AND_SCORES, num_heads=32, head_dim=224, v_head_dim=224, dtype="float16", token_scales=True),
        OF_BOTH,
    ),
    "mixed, mask_fn and score_fn": (
        MIXED,
        dict(ALIBI_AND_SCORES, mask=MaskRule(mask_fn=lambda h, q, k: (q + k + h) % 3 != 0)),
        dict(OF_BOTH, mask_fn=lambda h, q, k: (q + k + h) % 3 != 0),
    ),
}  # fmt: skip


def poison(dtype):
    """NaN, or the smallest integer."""
    return -128 if dtype == "int8" else np.nan


def make_batch(lengths, config, pads, seed=0):
    """(q, pools, table), (starts, lengths), keys, values, pools of scales: pages permuted, NaN where no token lives,
    garbage ids. Keys and values are the real ones: stored * scale of the head * scale of the token."""
    rng, c = np.random.default_rng(seed), config
    counts = [-(-total // c.page_size) for _, total in lengths]
    order, used = rng.permutation(sum(counts) + 5), 0
    table = np.full((len(lengths) + 2, max(counts) + 2), 10**6, np.int32)
    table[:, ::2] = -1
    pools = [
        np.full((len(order), c.num_kv_heads, c.page_size, d), poison(c.kv_dtype), np.float32)
        for d in (c.head_dim, c.v_head_dim)
    ]
    scale_pools = [np.full(pool.shape[:-1], np.nan, np.float32) for pool in pools]
    of_heads = np.asarray(head_scales(c), np.float64)
    rows, size = [[], []], 30 if c.kv_dtype == "int8" else 1
    for r, (_, total) in enumerate(lengths):
        table[r, : counts[r]] = order[used : used + counts[r]]
        used += counts[r]
        for pool, scale_pool, of_head, tokens in zip(pools, scale_pools, of_heads, rows, strict=True):
            new = rng.standard_normal((total, *pool.shape[1:2], pool.shape[3])) * size
            new = new.astype(c.kv_dtype).astype(np.float32)
            scale = rng.uniform(0.5, 1.5, new.shape[:-1]).astype(np.float32)
            for t in range(total):
                pool[table[r, t // c.page_size], :, t % c.page_size] = new[t]
                scale_pool[table[r, t // c.page_size], :, t % c.page_size] = scale[t]
            real = new.astype(np.float64) * of_head[:, None]
            tokens.append(real * scale[..., None] if c.token_scales else real)
    as_stored = lambda x: x if c.layout == "HND" else x.swapaxes(1, 2)
    pools = [jnp.asarray(as_stored(p), jnp.dtype(c.kv_dtype)) for p in pools]
    scale_pools = [jnp.asarray(as_stored(p)) for p in scale_pools] if c.token_scales else [None, None]
    starts = np.cumsum([0, *(n for n, _ in lengths), 0, 0]).astype(np.int32)
    q = rng.standard_normal((starts[-1] + pads, c.num_heads, c.head_dim)).astype(c.dtype)
    q[starts[-1] :] = np.nan
    seqs = np.array([*(total for _, total in lengths), 0, 0], np.int32)
    return (jnp.asarray(q), *pools, jnp.asarray(table)), (starts, seqs), rows, scale_pools


def head_scales(config):
    """Scales of each kv head's keys and values: 1 unless they have 8 bits."""
    if not config.quantised:
        return np.ones((2, config.num_kv_heads), np.float32)
    size = 30 if config.kv_dtype == "int8" else 1
    return np.linspace([0.5, 1.5], [0.8, 0.7], config.num_kv_heads).T.astype(np.float32) / size


def compare(lengths, fields, options, pads=5, rows=None):
    """Compares the warp-level kernel with the oracle."""
    fields = SHAPE | dict(logits=LogitRule(scale=0.1)) | fields
    group = fields["num_heads"] // fields["num_kv_heads"]
    config = warp_config(**fields, rows=rows or group * max(n for n, _ in lengths))
    assert not supports(config)
    compare_config(config, lengths, options, pads)


def compare_config(config, lengths, options, pads=5, **interpreter):
    """Runs the config's kernel in the interpreter, with these parameters of it, and compares it with the oracle."""
    from tests.kernels.gpu.interpreter import interpreted

    args, (starts, seqs), (keys, values), scale_pools = make_batch(lengths, config, pads)
    scales, names = map(jnp.asarray, head_scales(config)), ("k_scale", "v_scale", "k_token_scale", "v_token_scale")
    options, extra = dict(options), dict(zip(names, (*scales, *scale_pools), strict=True))
    for name, argument in (("sinks", "sinks"), ("slopes", "alibi_slopes")):
        if name in options:
            options[name] = np.linspace(-1, 1, config.num_heads) / (1 if name == "sinks" else 50)
            extra[argument] = jnp.asarray(options[name], jnp.float32)
    if config.merges_inside:
        extra["counters"] = jnp.zeros(config.workers, jnp.int32)
    with interpreted(**interpreter):
        work = build_work_list(jnp.asarray(starts), jnp.asarray(seqs), args[0].shape[0], config)
        out, lse = (np.asarray(x, np.float64) for x in ragged_paged_attention(*args, work, config, **extra))
    end = starts[-1]
    queries, options = np.asarray(args[0], np.float64)[:end], {"scale": config.logits.scale} | options
    want, want_lse = ragged(queries, keys, values, [n for n, _ in lengths], **options)
    np.testing.assert_allclose(out[:end], want, rtol=2**-8, atol=2e-2 if config.dtype == "bfloat16" else 2e-3)
    np.testing.assert_allclose(lse[:end], want_lse, atol=1e-4)
    assert (out[end:] == 0).all() and np.isneginf(lse[end:]).all()
    assert (out[:end][np.isneginf(want_lse)] == 0).all()


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BATCHES])
def test_is_attention(name):
    compare(*BATCHES[name])


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
def test_a_tile_of_padding_has_more_rows_than_those_of_any_request():
    compare(*BATCHES["spec decode, 64 rows"], pads=60)


REFUSED = {
    "sm_75": (dict(chip="sm_75"), "chip sm_75: wanted one of sm_80"),
    "one stage of 8 bits": (dict(kv_dtype="int8", rows=2, stages=1), "stages 1: wanted at least 2"),
    "token scales of 16 bits": (dict(token_scales=True), "token_scales with a bfloat16 cache: wanted 8 bits"),
    "D 80 of 8 bits": (dict(E4M3, head_dim=80), "head_dim 80 with an 8-bit cache: wanted a multiple of 32"),
    "blocks of 128": (dict(block_kv=128), "block_kv 128: wanted 64"),
    "two halves of 256 columns": (dict(head_dim=256, v_head_dim=256, tile_halves=2), "tile_halves 2: wanted"),
    "too many stages": (dict(chip="sm_86", stages=9), "bytes of shared memory; there are 101376 on sm_86"),
    "fixed max": (dict(fixed_max=True), "fixed_max True: a choice of the Hopper kernel, wanted False"),
    "waves of a ranked list": (dict(in_waves=True), "in_waves: wanted flat_list"),
    "two pipelines": (dict(pipelines=2), "pipelines 2: a choice of the Hopper kernel, wanted 1"),
    "three that compute": (dict(computing=3), "computing 3: a choice of the Hopper kernel, wanted 2"),
    "last block first": (
        dict(last_block_first=True),
        "last_block_first True: a choice of the Hopper kernel, wanted False",
    ),
    "weights first": (dict(weights_first=True), "weights_first True: a choice of the Hopper kernel, wanted False"),
    "a merge inside": (dict(rows=4, merges_inside=True), "merges_inside True: a choice of the Hopper kernel"),
    "one query buffer": (dict(q_buffers=1), "q_buffers 1: a choice of the Hopper kernel, wanted 2"),
    "no CTA": (dict(num_ctas=0), "num_ctas 0: wanted at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    fields, reason = REFUSED[name]
    assert any(reason in why for why in supports(warp_config(**SHAPE | fields)))


@pytest.mark.parametrize("rows", [None, 1, 8, 9, 16, 17, 64, 65])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_fits_every_chip_and_head(chip, rows):
    """A refused config would take the shape from pallas_gpu, and 'auto' would choose another backend in silence."""
    dims = ((16, 16), (64, 64), (80, 48), (96, 96), (128, 128), (192, 128), (192, 192), (256, 224), (256, 256))
    every = [(d, v, {}) for d, v in dims]
    every += [(d, v, dict(E4M3, token_scales=scaled)) for d, v in dims if d % 32 == 0 for scaled in (False, True)]
    for head_dim, v_head_dim, quantised in every:
        fields = SHAPE | dict(chip=chip, head_dim=head_dim, v_head_dim=v_head_dim) | quantised
        del fields["num_ctas"]
        config = warp_config(**fields, rows=rows)
        assert not supports(config)
        assert config.num_ctas % CHIPS[chip].processors == 0
        ctas = config.num_ctas // CHIPS[chip].processors
        assert ctas * (config.smem_bytes + SMEM_OF_CUDA) <= CHIPS[chip].smem


ALLOCATED = (
    dict(rows=2), dict(), dict(E4M3, rows=2), dict(E4M3), dict(E4M3, token_scales=True),
    dict(kv_dtype="int8", token_scales=True, rows=2, stages=3), dict(head_dim=80, v_head_dim=48, stages=3),
)  # fmt: skip


@pytest.mark.parametrize("fields", ALLOCATED, ids=str)
def test_shared_memory_is_counted_as_mosaic_allocates_it(fields):
    """Mosaic takes the device's limit, which a machine without a GPU lacks, and refuses a byte more."""
    config = warp_config(**SHAPE | fields)
    with artificial_shared_memory_limit(config.smem_bytes):
        lower(config)
    with artificial_shared_memory_limit(config.smem_bytes - 1), pytest.raises(ValueError, match="shared memory"):
        lower(config)


def test_two_halves_get_the_stages_that_let_two_ctas_share_a_multiprocessor():
    """With the three stages of one half, an H200 held one CTA, and took 2344 us for a prompt of 8192 tokens."""
    fields = SHAPE | dict(chip="sm_90", head_dim=128, v_head_dim=128, num_ctas=264)
    config = warp_config(**fields, tile_halves=2)
    assert (config.tile_halves, config.stages) == (2, 2)
    assert 2 * (config.smem_bytes + SMEM_OF_CUDA) <= CHIPS["sm_90"].smem


@pytest.mark.parametrize(("v_head_dim", "halves"), [(64, 2), (96, 1)])
def test_a_bias_leaves_registers_for_two_halves_of_64_columns_only(v_head_dim, halves):
    """With two of 96, float16 over int8 with a soft cap and a chunk spilled 80 bytes on sm_80, and with ALiBi 84."""
    fields = SHAPE | dict(head_dim=v_head_dim, v_head_dim=v_head_dim, logits=LogitRule(scale=0.1), qq_bias=True)
    assert warp_config(**fields).tile_halves == halves


LOWERED = {
    "decode": dict(rows=2),
    "mixed": {},
    "decode, 8 bits": dict(E4M3, rows=2, token_scales=True),
    "mixed, 8 bits": dict(kv_dtype="int8", token_scales=True),
    "every option": dict(
        logits=LogitRule(scale=0.1, soft_cap=30.0, has_alibi=True), has_sinks=True, mask=MaskRule(left=99), layout="NHD"
    ),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name):
    """For the chip that JAX assumes where there is none, sm_90; `benchmarks.gpu.registers` compiles for the others."""
    assert len(lower(warp_config(**SHAPE | LOWERED[name])).mlir_module_serialized) > 10_000


@pytest.mark.parametrize("name", LOWERED)
def test_no_barrier_has_the_number_of_a_warps_own(name):
    """Barrier 1 + w is warp w's, of 32 threads; Mosaic's of a warpgroup, of 128 threads, is number 1, too."""
    text = operations.text_of(operations.module_of(warp_config(**SHAPE | LOWERED[name])))
    counts = set(re.findall(r"bar\.sync \$0, (\d+)", text))
    assert counts == {"32"} and "bar.sync 0;" in text
