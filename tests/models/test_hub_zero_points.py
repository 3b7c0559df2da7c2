"""Zero points of the quantised weights of folders: those of experts, and those that the config contradicts."""

import functools
import re

import numpy as np
import pytest

from jattn import models
from jattn.models.checkpoint import Checkpoint
from jattn.models.load import stored_weights
from tests.models.test_hub_formats import (
    AWQ,
    CONFIG,
    MOE,
    awq_pack,
    check,
    compressed,
    ct_packed,
    ct_plain,
    drawn,
    folder,
    fp8_pack,
    fp8_settings,
    moe_tensors,
    packed_4,
    words,
)

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


CONTRADICTED = {"words": ("pack-quantized", 4, "group", ct_packed), "bytes": ("int-quantized", 8, "channel", ct_plain)}


@pytest.mark.parametrize("form", CONTRADICTED)
def test_zero_points_of_weights_that_the_config_calls_symmetric_are_refused(tmp_path, form):
    """Other programs leave them out, so that the same folder would be another model."""
    layout, bits, strategy, pack = CONTRADICTED[form]
    folder(tmp_path / "odd", compressed(layout, bits, "int", strategy, group_size=32), pack)
    with pytest.raises(ValueError, match="weight_zero_point has other numbers than 0, but the config says"):
        models.load(tmp_path / "odd")


def test_stored_zero_points_of_0_change_nothing(tmp_path):
    """Packed, 0 is the code 8."""

    def pack(x):
        scales = RNG.uniform(0.05, 0.1, (len(x), x.shape[1] // 32)).astype(np.float32)
        codes = RNG.integers(0, 16, x.shape).astype(np.uint8)
        zeros = np.full(scales.shape[::-1], 8)
        tensors = dict(weight_packed=words(codes), weight_scale=scales, weight_shape=np.array(x.shape, np.int64))
        exact = (codes - 8.0) * np.repeat(scales.astype(np.float64), 32, axis=1)
        return tensors | dict(weight_zero_point=np.ascontiguousarray(words(zeros).T)), exact

    params = check(tmp_path / "zeros", compressed("pack-quantized", 4, "int", "group", group_size=32), pack, "int4")
    assert params["layers"][0]["attn"]["q"]["kernel"].zero_points is None


@pytest.mark.parametrize("shape", [(), (1,), None])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_zero_points_of_0_beside_symmetric_weights_may_have_any_shape(tmp_path, strategy, shape):
    """They are left out, as the config says; one 0 beside a scale for each output, too."""

    def pack(x):
        scales = RNG.uniform(0.005, 0.01, (1,) if strategy == "tensor" else (len(x), 1)).astype(np.float32)
        zeros = np.zeros((len(x), 1) if shape is None else shape, np.int8)
        codes = np.round(x * 90).astype(np.int8)
        return dict(weight=codes, weight_scale=scales, weight_zero_point=zeros), codes * scales.astype(np.float64)

    check(tmp_path / "zeros", compressed("int-quantized", 8, "int", strategy), pack, "int8")


@pytest.mark.parametrize("size, strategy", [(32, "group"), (-1, "channel")])
def test_without_a_strategy_the_group_size_tells_it(size, strategy):
    """As compressed-tensors reads it; actorder false is null."""
    settings = compressed("pack-quantized", 4, "int", strategy, group_size=size)
    told = models.config_of(CONFIG | dict(quantization_config=settings))
    group = settings["config_groups"]["group_0"]
    group["weights"].pop("strategy")
    group["weights"]["actorder"] = False
    group["input_activations"] = dict(num_bits=8, type="int", strategy="token", dynamic=True, actorder=False)
    assert models.config_of(CONFIG | dict(quantization_config=settings)) == told


def symmetric_gptq(x):
    codes, zeros, scales, exact = drawn(x.shape, 32)
    return dict(qweight=words(codes).T, qzeros=words(np.full_like(zeros, 7).T), scales=scales.T), exact


PLANNED = {
    "awq": (AWQ, awq_pack, {"qzeros": 1}),
    "gptq": (dict(quant_method="gptq", bits=4, group_size=32), symmetric_gptq, {"qzeros": 4}),
    "packed": (compressed("pack-quantized", 4, "int", "group", group_size=32), lambda x: packed_4(x, 32), {}),
    "asymmetric": (
        compressed("int-quantized", 8, "int", "channel", symmetric=False), asymmetric("channel", 0),
        {"weight_zero_point": 2},
    ),
    "fp8": (fp8_settings((32, 32)), functools.partial(fp8_pack, (32, 32)), {}),
}  # fmt: skip


@pytest.mark.parametrize("method", PLANNED)
def test_a_plan_reads_the_scales_of_one_expert(tmp_path, method, monkeypatch):
    """Those of all are a tenth of a folder in 4 bits. Zero points are read until one is not 0."""
    settings, pack, zeros = PLANNED[method]
    folder(tmp_path / "moe", settings, pack, MOE, moe_tensors)
    seen, read = [], Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: seen.append(name) or read(self, name))
    stored_weights(tmp_path / "moe")
    found = [re.search(r"layers\.1\.mlp\.experts\.\d+\.gate_proj\.(.*)", name) for name in seen]
    ends = [match[1] for match in found if match]
    for end in set(ends):
        assert ends.count(end) == zeros.get(end, 1), end
