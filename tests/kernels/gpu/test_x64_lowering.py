"""With jax_enable_x64, a loop between Python's integers counts in 64 bits, and a kernel must not: each still lowers."""

import jax
import pytest

from tests.kernels.gpu import (
    test_draw,
    test_expert_packed,
    test_expert_product,
    test_lowering,
    test_many_rows,
    test_mla,
    test_packed_wgmma,
)

LOWERINGS = {
    "attention": lambda: test_lowering.test_lowers_for_cuda("all"),
    "latent attention": lambda: test_mla.test_lowers_for_cuda("decode"),
    "latent attention in 8 bits": lambda: test_mla.test_lowers_for_cuda("e4m3"),
    "many rows": lambda: test_many_rows.test_it_lowers_for_cuda("q, k and v of Llama 8B", 200),
    "packed": lambda: test_packed_wgmma.test_it_lowers_for_cuda("AWQ", 2),
    "packed experts": lambda: test_expert_packed.test_it_lowers_for_cuda("olmoe", "NVFP4", 2, 300),
    "draws": test_draw.launches_of_a_draw_on_hopper,
    "experts": lambda: test_expert_product.test_it_lowers_for_cuda("qwen3_30b", False, 64),
}


@pytest.mark.parametrize("name", LOWERINGS)
def test_a_kernel_lowers_where_integers_have_64_bits(name):
    with jax.enable_x64(True):
        LOWERINGS[name]()
