"""The KV write of `pallas_gpu` on each chip: quantised by the kernel where it has the instructions, else by XLA."""

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn.backends import gpu_write
from jattn.device import Chip
from pallas_kernels.gpu.config_sm80 import CHIPS

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CACHES = [(dtype, quant) for dtype in (*FLOAT8, "int8") for quant in ("per_tensor", "per_head", "per_token_head")]


@pytest.mark.parametrize(("dtype", "quant"), CACHES)
@pytest.mark.parametrize("generation", [*CHIPS, ""])
def test_the_kernel_gets_rows_that_the_chip_can_quantise(generation, dtype, quant, monkeypatch):
    """sm_89 rounds to float8, and sm_90 finds the largest of two numbers at once; ptxas refuses both before."""
    chip = Chip("gpu", generation)
    spec = jattn.KVCacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=32, dtype=dtype, quant=quant)
    cache = jax.eval_shape(lambda: jattn.empty_cache(spec, platform=chip))
    rows, seen = jax.ShapeDtypeStruct((5, 2, 32), jnp.bfloat16), []

    def write_rows(rows, scales, slots, pools, scale_pools, **options):
        seen.append(({x.dtype.name for x in rows}, len(scales), len(options["divisors"])))
        return pools, scale_pools

    monkeypatch.setattr(gpu_write, "write_rows", write_rows)
    slots = jax.ShapeDtypeStruct((5,), jnp.int32)
    write = lambda *args: gpu_write.write_pages(chip, *args, jattn.AttentionParams())
    jax.eval_shape(write, cache, rows, rows, slots)
    tokens, capability = quant == "per_token_head", chip.compute_capability or 90
    if capability < 90 and tokens or capability < 89 and dtype in FLOAT8:
        assert seen == [({dtype}, 2 * tokens, 0)]
    else:
        assert seen == [({"bfloat16"}, 0, 0 if tokens else 2)]
