"""`pallas_tpu` on a machine without a TPU: what it supports, what it refuses, packed keys and gradients.

Its results are tested in `tests/kernels/tpu`, by the interpreter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn.backends import Feature
from jattn.backends.pallas_tpu import kernel_config
from jattn.device import Chip

V6E = Chip("tpu", "v6e")
LAYER = dict(num_heads=8, num_kv_heads=2, head_dim=128)
POOL = dict(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=128)


def reasons(spec=(), cache=(), chip=V6E, needs=()):
    """Why pallas_tpu refuses this layer over this cache."""
    reports = jattn.explain(
        jattn.AttentionSpec(**LAYER | dict(spec)), jattn.KVCacheSpec(**POOL | dict(cache)), chip, needs
    )
    return next(report for report in reports if report.name == "pallas_tpu").reasons


def test_it_is_the_first_choice_on_tpu_and_sdpa_where_it_refuses():
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    assert jattn.PagedAttention(spec, cache_spec, platform=V6E).backend_name == "pallas_tpu"
    assert jattn.PagedAttention(spec, cache_spec, platform="tpu").backend_name == "pallas_tpu"
    small = jattn.KVCacheSpec(**POOL | dict(block_size=8))
    assert jattn.PagedAttention(spec, small, platform=V6E).backend_name == "sdpa"
    assert jattn.empty_cache(cache_spec, platform=V6E).k.dtype == jnp.bfloat16, "native: no relayout, no bits"


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(8, 64, "float32"), (144, 128, "bfloat16")])
def test_a_layer_that_every_generation_takes_is_taken_where_none_is_named(heads, head_dim, dtype):
    sizes = dict(num_kv_heads=heads, head_dim=head_dim)
    found = [
        reasons(dict(num_heads=heads) | sizes, sizes | dict(dtype=dtype), Chip("tpu", name))
        for name in ("", "v5e", "v6e", "v5p", "tpu7x")
    ]
    assert found == [()] * 5


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(144, 144, 64), (512, 128, 128), (128, 64, 256)])
def test_a_layer_of_many_heads_has_one_size_of_tiles_whatever_the_launch_adds(heads, kv_heads, head_dim, chip):
    """The work list is made before the dtype of the queries and the parameters are known."""
    spec = jattn.AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, sliding_window=9, use_rswa=True
    )
    cache_spec = jattn.KVCacheSpec(num_blocks=4, block_size=16, num_kv_heads=kv_heads, head_dim=head_dim)
    by_span = dataclasses.replace(spec, use_rswa=False, use_mm_prefix=True, has_sinks=True)
    scaled = jattn.AttentionParams(q_scale=jnp.ones(heads))
    launches = [
        kernel_config(spec, cache_spec, chip=chip),
        kernel_config(spec, cache_spec, "float32", chip=chip),
        kernel_config(by_span, cache_spec, "float32", None, scaled, chip=chip),
    ]
    assert len({(c.tile_rows, c.chunk_rows, c.part_kv, c.block_kv) for c in launches}) == 1


TABLE = jnp.array([True, False, True, True])
REFUSED = [
    (dict(chip=Chip("cpu")), "platform not supported: cpu"),
    (dict(chip=Chip("tpu", "TPU v4")), "chip TPU v4: compiled for v5e, v6e, v5p, tpu7x only"),
    (dict(cache=dict(dtype="float16")), "kv_cache_dtype not supported: float16"),
    (dict(cache=dict(block_size=24)), "block_size not supported: 24"),
    (dict(cache=dict(block_size=512)), "page size 512: wanted a multiple of 16 from 16 to 256"),
    (
        dict(cache=dict(dtype="int8", quant="per_token_head", layout="NHD")),
        "scales of each token and head in the layout NHD",
    ),
    (dict(spec=dict(use_distance_bias=True)), "learned bias of the distance not supported"),
    (dict(spec=dict(head_dim=40), cache=dict(head_dim=40)), "head_dim 40: wanted a multiple of 16"),
    (dict(spec=dict(mask_fn=lambda h, i, j: TABLE[i % 4])), "mask_fn reads an array of its own: not in this kernel"),
    (dict(spec=dict(score_fn=lambda s, *a: s - s.sum())), "score_fn uses reduce_sum: not in this kernel"),
    (
        dict(spec=dict(attn_type="encoder_decoder", mask_fn=lambda h, i, j: i == j)),
        "mask_fn and score_fn not supported",
    ),
    (dict(spec=dict(attn_type="encoder_decoder", has_alibi=True)), "not supported across encoder and decoder"),
    (dict(needs=(Feature.BATCH_INVARIANCE,)), "batch invariance not supported"),
    (dict(spec=dict(use_qq_bias=True), needs=(Feature.DCP,)), "DCP not supported with use_qq_bias=True"),
    (dict(spec=dict(attn_type="encoder_only"), needs=(Feature.DCP,)), "DCP not supported with attn_type=encoder_only"),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
def test_what_the_kernel_cannot_do_is_refused_with_its_reason(asked, sentence):
    assert any(sentence in reason for reason in reasons(**asked)), reasons(**asked)


def test_a_table_that_smem_cannot_hold_is_refused_when_the_batch_is_known():
    attn = jattn.PagedAttention(jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), platform=V6E)
    meta = jattn.CommonAttentionMetadata.from_lengths([1] * 64, [9] * 64, np.zeros((64, 1), np.int32), 16)
    meta = meta.replace(block_table=np.zeros((64, 5000), np.int32))
    with pytest.raises(jattn.UnsupportedError, match="block_table of 64 x 5000.*SMEM"):
        attn.build(meta)


def test_a_tree_wider_than_a_part_is_refused_at_the_call():
    spec = jattn.AttentionSpec(**LAYER, use_qq_bias=True)
    attn = jattn.PagedAttention(spec, jattn.KVCacheSpec(**POOL), platform=V6E)
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [3], [[0]], 16)
    q, cache = jnp.ones((1, 8, 128), jnp.bfloat16), jattn.empty_cache(attn.cache_spec, storage="native")
    with pytest.raises(jattn.UnsupportedError, match="qq_bias of 300 tokens: at most 256"):
        attn.attend(q, cache, attn.build(meta), jattn.AttentionParams(qq_bias=jnp.zeros((300, 300))))


def packed(monkeypatch):
    """(a function of a backend and q, k, v that returns loss and output; q, k, v): an encoder, windowed, float32."""
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    spec = jattn.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=64, attn_type="encoder_only", sliding_window=(9, 3)
    )
    meta = jattn.CommonAttentionMetadata.from_lengths([20, 7], [20, 7], None, 1, num_tokens=32, num_reqs=3)
    keys = jax.random.split(jax.random.key(0), 4)
    rows = [jax.random.normal(key, (32, heads, 64)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)]

    def loss(backend, q, k, v):
        out = jattn.attention(q, k, v, meta, spec, backend=backend).out
        return (out * rows[3]).sum(), out

    return loss, rows[:3]


BOTH = ("pallas_tpu", "sdpa")


def test_packed_keys_give_the_numbers_of_sdpa(monkeypatch):
    loss, rows = packed(monkeypatch)
    with pltpu.force_tpu_interpret_mode():
        mine, theirs = (jax.jit(functools.partial(loss, name))(*rows)[1] for name in BOTH)
    np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_their_gradient_is_that_of_sdpa(monkeypatch):
    """The gradient of a linear loss needs no launch, so no interpreter is needed."""
    loss, rows = packed(monkeypatch)
    alone = lambda name: lambda *args: loss(name, *args)[0]
    mine, theirs = (jax.jit(jax.grad(alone(name), (0, 1, 2)))(*rows) for name in BOTH)
    for got, want in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
