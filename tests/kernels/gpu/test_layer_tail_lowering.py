"""The launch for the rest of a layer lowers for CUDA, and on several ranks with their addresses."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu import layer_tail_arrivals_sm90 as arrivals
from pallas_kernels.gpu import layer_tail_sm90 as kernel
from pallas_kernels.gpu.layer_tail_config import choose
from pallas_kernels.gpu.layer_tail_ranks_sm90 import exchange
from tests.kernels.gpu.test_layer_tail import SHAPES, attention_of, choice


@pytest.mark.parametrize(
    ("name", "rows", "attention"),
    [("small", 1, None), ("small", 13, None), ("Llama 1B", 64, None), ("the last layer", 32, None),
     ("Llama 8B, one of 4", 1, None), ("Llama 8B, one of 4", 64, None), ("Llama 8B, one of 8", 24, None),
     ("Llama 1B", 4, attention_of(32, 8, 64)), ("the last layer", 5, attention_of(16, 4, 128, heads_first=False)),
     ("hidden 896", 3, attention_of(14, 2, 64, has_bias=True)), ("Gemma 2 9B", 64, None),
     ("Gemma 2 9B, one of 4", 3, None), ("OLMo 2 7B", 1, None), ("OLMo 2 7B, one of 4", 33, None)],
)  # fmt: skip
def test_it_lowers_for_cuda(name, rows, attention):
    hidden, heads, wide, following = SHAPES[name]
    config = choice(name, rows, 132, attention=attention)
    assert config is not None
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    weights = ((shape(heads, hidden),), (shape(hidden, wide),) * 2, (shape(wide, hidden),))
    weights += (tuple(shape(hidden, width) for width in following),) if following else ()
    counters, keys = (shape(arrivals.WORDS, dtype=jnp.int32),) * 2, ()
    if attention is not None:
        a, order = attention, (attention.kv_heads, 16) if attention.heads_first else (16, attention.kv_heads)
        keys = (shape(rows, a.head_dim // 2, dtype=jnp.float32),) * 2
        keys += shape(rows, a.columns, dtype=jnp.int32), shape(133, 8, dtype=jnp.int32)
        keys += tuple(shape(n * a.head_dim) for n in (a.heads, a.kv_heads, a.kv_heads) * a.has_bias)
        keys += (shape(a.blocks, *order, a.head_dim),) * 2
    a = shape(rows, heads if attention is None else attention.width)
    norms = tuple(None if eps is None else shape(hidden) for eps in (*config.eps, *config.after_eps))
    args = a, shape(rows, hidden), weights, norms, counters, keys
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    run = jax.jit(lambda *args: kernel.layer_tail(*args[:-1], config, args[-1]))
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(*args)
    assert [x.shape for x in export.out_avals[:1]] == [(rows, hidden)]
    assert [x.shape for x in export.out_avals[-2:]] == [x.shape for x in keys[-2:]] or not keys
    assert "mosaic_gpu_v2" in export.mlir_module()


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_lowers_for_several_ranks_with_the_addresses_of_all(ranks):
    config = choose(13, *SHAPES["small"], 132, ranks=ranks)
    mesh = jax.make_mesh((ranks,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    hidden, heads, wide, following = SHAPES["small"]
    zeros = lambda *dims: jnp.zeros(dims, jnp.bfloat16)

    def on_rank():
        weights = ((zeros(heads, hidden),), (zeros(hidden, wide),) * 2, (zeros(wide, hidden),))
        weights += (tuple(zeros(hidden, width) for width in following),)
        counters = *(jnp.zeros(arrivals.WORDS, jnp.int32),) * 2, *exchange(config)
        a, x, norms = zeros(13, heads), zeros(13, hidden), (zeros(hidden),) * 2
        return kernel.layer_tail(a, x, weights, norms, counters, config)[0]

    text = lowered_on(mesh, on_rank)
    assert text.count("uses_xla_collective_metadata = true") == 1  # XLA has a barrier before each such launch
    assert f'xla_replica_ids = "{",".join(map(str, range(ranks)))}"' in text


def lowered_on(mesh, function) -> str:
    """The module of a function that each device of the mesh calls."""
    specs = dict(mesh=mesh, in_specs=(), out_specs=jax.sharding.PartitionSpec(), check_vma=False)
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    run = jax.jit(jax.shard_map(function, **specs))
    return jax.export.export(run, platforms=["cuda"], disabled_checks=[check])().mlir_module()
