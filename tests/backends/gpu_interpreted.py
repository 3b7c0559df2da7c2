"""`pallas_gpu` on a machine without a GPU: the warp-level kernel with few CTAs in JAX's interpreter."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax
import pytest

from jattn import device
from jattn.backends import gpu_kernel, pallas_gpu
from jattn.backends.base import AttentionImpl
from jattn.device import Chip

INTERPRETS = pytest.mark.skipif(
    jax.__version_info__ < gpu_kernel.WARPS_SINCE, reason="JAX interprets the warp-level kernel only, from 0.12 on"
)


@contextlib.contextmanager
def interpreted_warps() -> Iterator[None]:
    """Layers made here are for an A100, with 3 CTAs. The write is the reference's: its kernel has tests of its own."""
    from tests.kernels.gpu.interpreter import interpreted

    config = gpu_kernel.kernel_config
    few_ctas = lambda *args, **options: dataclasses.replace(config(*args, **options), num_ctas=3)  # noqa: E731
    with (
        mock.patch.object(device, "detect", lambda: Chip("gpu", "sm_80")),
        mock.patch.object(pallas_gpu.PallasGpuImpl, "do_kv_cache_update", AttentionImpl.do_kv_cache_update),
        mock.patch.object(gpu_kernel, "kernel_config", few_ctas),
        interpreted(),
    ):
        yield
