"""FP8 weights as Hugging Face folders store them: by blocks, and with one scale for a whole tensor."""

import functools

import ml_dtypes
import numpy as np
import pytest

from jattn import models
from tests.models.test_hub_formats import check, folder, fp8_pack, fp8_settings


@pytest.mark.parametrize("blocks", [(32, 32), (48, 40)])
def test_fp8_blocks(tmp_path, blocks):
    """Blocks that the sizes 64 and 96 are multiples of, and blocks that are cut at the end."""
    check(tmp_path / "fp8", fp8_settings(blocks), functools.partial(fp8_pack, blocks), "fp8")


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_fp8_with_one_scale_for_a_tensor(tmp_path, activations):
    """As Ministral and Devstral. Their scales of activations are not needed."""

    def pack(x):
        weight, scale = (x * 200).astype(ml_dtypes.float8_e4m3fn), np.array(0.0021, ml_dtypes.bfloat16)
        others = dict(activation_scale=np.array(0.5, ml_dtypes.bfloat16)) if activations == "static" else {}
        return dict(weight=weight, weight_scale_inv=scale, **others), weight.astype(np.float64) * float(scale)

    settings = dict(quant_method="fp8", weight_block_size=None, activation_scheme=activations, dequantize=False)
    check(tmp_path / "fp8", settings, pack, "fp8")
    folder(tmp_path / "blocks", settings, functools.partial(fp8_pack, (32, 32)))
    with pytest.raises(ValueError, match=r"scales \(\d+, \d+\) must be one number, as the config has no blocks"):
        models.load(tmp_path / "blocks")
