"""Zero points of the quantised weights of folders: those of experts, and those that the config contradicts."""

import numpy as np
import pytest

from tests.models.test_hub_formats import MOE, check, compressed, moe_tensors

RNG = np.random.default_rng(4)


def asymmetric(strategy, first):
    """A pack of int8 with zero points; those of every fourth weight, beginning with the one numbered so, are 0."""
    number = iter(range(10**6))

    def pack(x):
        shape = (1,) if strategy == "tensor" else (len(x), 1)
        zeros = RNG.integers(1, 9, shape).astype(np.int8)
        zeros = np.zeros_like(zeros) if next(number) % 4 == first else zeros
        codes, scales = np.round(x * 90).astype(np.int8), RNG.uniform(0.005, 0.01, shape).astype(np.float32)
        exact = (codes - zeros.astype(np.float64)) * scales
        return dict(weight=codes, weight_scale=scales, weight_zero_point=zeros), exact

    return pack


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_experts_of_which_one_has_zero_points_of_0(tmp_path, strategy, first):
    """With one zero point for a tensor, one expert in 255 has 0 by chance."""
    settings = compressed("int-quantized", 8, "int", strategy, symmetric=False)
    check(tmp_path / "moe", settings, asymmetric(strategy, first), "int8", MOE, moe_tensors)
