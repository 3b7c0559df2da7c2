"""`pallas_gpu` beside the witness of the conformance suite, with the warp-level kernel in JAX's interpreter.

The options and the masks are computed by functions that the Hopper kernel shares.
"""

import dataclasses
from unittest import mock

import jax
import pytest

from jattn import device
from jattn.backends import pallas_gpu
from jattn.backends.base import AttentionImpl
from jattn.device import Chip
from tests.cases import CASES, FEATURES
from tests.problem import Problem
from tests.running import conform

CHECKED = {
    "chunk_lookback": "mixed_unsorted",
    "chunk_lookback_non_causal": "decode",
    "output_fp8": "mixed",
    "output_int8": "decode",
}
CONFIG = pallas_gpu.kernel_config


def few_ctas(*args, **options):
    """The config with 3 CTAs instead of 132."""
    return dataclasses.replace(CONFIG(*args, **options), num_ctas=3)


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < pallas_gpu.WARPS_SINCE, reason="JAX interprets the warp-level kernel only, from 0.12 on"
)
@pytest.mark.parametrize("feature", CHECKED)
def test_an_option_is_as_the_witness_says(feature, monkeypatch):
    """The write is the reference's: its kernel has tests of its own."""
    from tests.kernels.gpu.interpreter import interpreted

    problem = Problem(
        case=CASES[CHECKED[feature]], feature=FEATURES[feature], heads=4, kv_heads=2, head_dim=64, block_size=16,
        dtype="bfloat16",
    )  # fmt: skip
    monkeypatch.setattr(device, "detect", lambda: Chip("gpu", "sm_80"))
    monkeypatch.setattr(pallas_gpu.PallasGpuImpl, "do_kv_cache_update", AttentionImpl.do_kv_cache_update)
    with mock.patch.object(pallas_gpu, "kernel_config", few_ctas), interpreted():
        conform(problem, "pallas_gpu", lse_floor=2.0**-15)
