"""The launches of a mixture with up to 8 tokens, on a Hopper GPU: which there are, and under vmap one for each element.

Results of a product have 8 rows for each tile of ChosenExperts, of which row t is token t.
"""

import jax

from jattn import device
from jattn.ops.expert_packed import are_alike
from jattn.ops.product import Kernels
from jattn.ops.quantised import QuantisedArray
from pallas_kernels.gpu import expert_choice_sm80, expert_product_sm90, packed_product_sm90
from pallas_kernels.gpu import expert_product_config as plain_config
from pallas_kernels.gpu import packed_product_config as packed_config
from pallas_kernels.gpu.expert_choice_sm80 import TILE_ROWS, ChoiceConfig, ChosenExperts

ProductConfig = plain_config.ExpertProductConfig | packed_config.PackedProductConfig


def config_of(
    kernels: Kernels, *, tokens: int, tiles: int, used: tuple[float, ...], dtype: str, is_shared: bool
) -> ProductConfig | None:
    """The launch for these matrices [experts, inner, width]; None if there is none. With two plain ones it
    computes silu(x gate) * (x up).

    used: how many of the tiles have rows, in each of some cases that count alike; only the launch of packed matrices
    depends on it. is_shared: x has the tokens, which every tile multiplies; else it has 8 rows for each tile.
    """
    first, processors, chip = kernels[0], device.processors(), device.detect().generation
    if processors is None or any(kernel.shape != first.shape for kernel in kernels):
        return None
    experts, inner, width = first.shape
    shape = dict(
        rows=TILE_ROWS * tiles, inner=inner, experts=experts, tokens=tokens if is_shared else 0, dtype=dtype, chip=chip
    )
    if isinstance(first, QuantisedArray):
        if not are_alike(kernels) or first.axis != -2:
            return None
        widths = (width,) * len(kernels)
        return packed_config.choose(
            processors,
            widths=widths,
            most_rows=tokens,
            has_aligned_tiles=True,
            x_dtype=dtype,
            used=used,
            **shape,
            **first.form,
        )
    if any(isinstance(kernel, QuantisedArray) or kernel.dtype.name != dtype for kernel in kernels):
        return None
    return plain_config.choose(processors, width=width, tile_rows=TILE_ROWS, matrices=len(kernels), **shape)


def choose_experts(
    logits: jax.Array, correction: jax.Array | None, scale: jax.Array | None, live: jax.Array, first: jax.Array,
    config: ChoiceConfig,
) -> ChosenExperts:  # fmt: skip
    """`expert_choice_sm80.choose_experts`; under vmap a launch for each element."""

    @jax.custom_batching.sequential_vmap
    def each(*given):
        return expert_choice_sm80.choose_experts(*given, config)

    return each(logits, correction, scale, live, first)


def products(x: jax.Array, kernels: Kernels, chosen: ChosenExperts, config: ProductConfig) -> list[jax.Array]:
    """x times the matrices of the experts that have tiles: a result for each packed matrix, one for all plain ones."""

    @jax.custom_batching.sequential_vmap
    def each(x, kernels, chosen):
        if isinstance(config, plain_config.ExpertProductConfig):
            return [expert_product_sm90.expert_product(x, kernels, chosen.plain_tiles, config)]
        arrays = tuple(kernel.arrays for kernel in kernels)
        return list(packed_product_sm90.packed_product(x, arrays, config, chosen.packed_tiles))

    return each(x, kernels, chosen)
