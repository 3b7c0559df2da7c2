"""Folders of NVIDIA ModelOpt: fp8 and NVFP4. Older ones have their settings in hf_quant_config.json alone."""

import functools

import numpy as np

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_codes import (
    NVFP4_GROUP,
    groups_of_blocks,
    nvfp4,
    nvfp4_groups,
    of_blocks,
    of_outputs,
    of_tensor,
    one_group,
)
from jattn.models.hub_scheme import Decoded, Scheme
from jattn.models.hub_settings import USE_FLOATS, check_activations, config_groups

SETTINGS = "hf_quant_config.json"
"""The file of older folders, whose object `quantization` has the settings."""
BLOCK = 128
"""Outputs and inputs of a block of FP8_PB_WO, which the settings do not tell."""


def modelopt(c: ConfigReader) -> Scheme | None:
    """One algorithm for all modules but those that are left as they are. None: weights are floats, as where the cache
    alone is quantised."""
    q = c.section("quantization") if "quantization" in c.given else c
    algorithm, of_cache = q.get("quant_algo"), q.get("kv_cache_quant_algo", q.get("kv_cache_scheme"))
    name = algorithm.upper() if isinstance(algorithm, str) else algorithm
    if (not isinstance(name, str) or name not in ALGORITHMS) and not (name is None and (of_cache or q is not c)):
        raise UnsupportedError(
            f"{q.where}: quant_algo={short(algorithm)} is not supported; known: {', '.join(ALGORITHMS)}; use one of "
            f"these, {USE_FLOATS}"
        )
    scheme = None if name is None else ALGORITHMS[name]
    if q.get("config_groups") is not None:  # they repeat what the algorithm says
        for group in config_groups(q).values():
            check_activations(group, is_fp4=scheme is OF_NVFP4)
    q.only("has_zero_point", False)
    q.only("pre_quant_scale", False)
    if scheme is OF_NVFP4:
        q.only("group_size", NVFP4_GROUP)
    q.ignore("exclude_modules", "ignore", "producer", "group_size", "kv_cache_quant_algo", "kv_cache_scheme")
    c.ignore("producer")
    q.refuse_unread()
    return scheme


def _blocks(weight: np.ndarray, scales: np.ndarray, *of_activations) -> Decoded:
    """Scales [blocks of outputs, 1, blocks of inputs, 1]."""
    is_long = scales.ndim == 4 and scales.shape[1::2] == (1, 1)
    return of_blocks(False, BLOCK, BLOCK, weight, scales[:, 0, :, 0] if is_long else scales)


WEIGHT, INPUT = ("weight", "weight_scale"), ("input_scale",)
OF_NVFP4 = Scheme(
    "fp4", (*WEIGHT, "weight_scale_2"), functools.partial(nvfp4, "weight_scale_2", False), nvfp4_groups,
    INPUT, group_size=NVFP4_GROUP,
)  # fmt: skip
ALGORITHMS = {
    "FP8": Scheme("fp8", WEIGHT, of_tensor, one_group, INPUT),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", WEIGHT, of_outputs, one_group, INPUT),
    "FP8_PB_WO": Scheme("fp8", WEIGHT, _blocks, functools.partial(groups_of_blocks, BLOCK), INPUT),
    "NVFP4": OF_NVFP4,
    "W4A16_NVFP4": OF_NVFP4,
}
