"""Folders of compressed-tensors that ask for rounded activations, and with scales of cached keys and values."""

import copy

import ml_dtypes
import numpy as np
import pytest

from jattn import models
from jattn.errors import UnsupportedError
from jattn.models.checkpoint import Checkpoint
from jattn.models.hub_scheme import Decoded, check_range
from jattn.models.load import stored_weights
from jattn.ops.quantised import QuantisedArray
from tests.models import tiny
from tests.models.test_hub_formats import (
    CONFIG,
    IDS,
    MOE,
    check,
    compressed,
    ct_packed,
    engine_of,
    folder,
    moe_tensors,
    save,
)

RNG = np.random.default_rng(2)
DYNAMIC = dict(
    num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True, group_size=None, block_structure=None,
    observer="memoryless", observer_kwargs={}, actorder=None,
)  # fmt: skip
STATIC = DYNAMIC | dict(strategy="tensor", dynamic=False, observer="minmax")


def settings_of(kind, strategy, activations, bits=8, layout=None, **more):
    settings = compressed(layout or f"{kind}-quantized", bits, kind, strategy, **more)
    group = settings["config_groups"]["group_0"]
    group["input_activations"] = activations | dict(type=kind if activations["num_bits"] == 8 else "float")
    return settings


def rows(x, kind, scales):
    """Codes, and the numbers of scales that broadcast over [out, in]."""
    weight = np.round(x * 90).astype(np.int8) if kind == "int" else (x * 90).astype(ml_dtypes.float8_e4m3fn)
    return weight, weight.astype(np.float64) * scales.astype(np.float64)


@pytest.mark.parametrize("activations", ["dynamic", "static", "asymmetric"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_w8a8(tmp_path, kind, strategy, activations):
    """Weights alone are used: activations are not rounded."""
    others = {} if activations == "dynamic" else dict(input_scale=np.array([0.02], ml_dtypes.bfloat16))
    if activations == "asymmetric":
        others |= dict(input_zero_point=np.array([3], np.int8))

    def pack(x):
        shape = (1,) if strategy == "tensor" else (len(x), 1)
        scales = RNG.uniform(0.005, 0.01, shape).astype(ml_dtypes.bfloat16)
        weight, exact = rows(x, kind, scales)
        return dict(weight=weight, weight_scale=scales) | others, exact

    of_inputs = DYNAMIC if activations == "dynamic" else STATIC | dict(symmetric=activations == "static")
    check(tmp_path / "w8a8", settings_of(kind, strategy, of_inputs), pack, "int8" if kind == "int" else "fp8")


def blocks_pack(x, kind="float", blocks=(32, 48)):
    shape = tuple(-(-n // b) for n, b in zip(x.shape, blocks, strict=True))
    scales = RNG.uniform(0.005, 0.01, shape).astype(np.float32)
    wide = np.repeat(np.repeat(scales, blocks[0], 0), blocks[1], 1)[: x.shape[0], : x.shape[1]]
    weight, exact = rows(x, kind, wide)
    return dict(weight=weight, weight_scale=scales), exact


BY_128 = DYNAMIC | dict(strategy="group", group_size=128)


@pytest.mark.parametrize("structure", [[32, 48], "32x48"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_blocks(tmp_path, kind, structure):
    """Blocks that are cut at the ends of some tensors."""
    settings = settings_of(kind, "block", BY_128, block_structure=structure)
    pack = lambda x: blocks_pack(x, kind)
    check(tmp_path / "blocks", settings, pack, "int8" if kind == "int" else "fp8")


def test_experts_in_blocks(tmp_path):
    settings = settings_of("float", "block", BY_128, block_structure=[32, 48])
    check(tmp_path / "moe", settings, blocks_pack, "fp8", MOE, moe_tensors)


@pytest.mark.parametrize("structure", [None, [32], "32", [0, 32], "axb", {"32": 32}, [32.5, 48], [True, 48], 32])
def test_blocks_without_sizes_are_refused(structure):
    settings = settings_of("float", "block", BY_128, block_structure=structure)
    with pytest.raises((UnsupportedError, ValueError), match="block_structure="):
        models.config_of(CONFIG | dict(quantization_config=settings))


def test_weights_of_4_bits_beside_activations_of_8(tmp_path):
    """Packed in words, or one in a byte where activations are integers."""
    settings = settings_of("int", "group", DYNAMIC, 4, "pack-quantized", group_size=32, symmetric=False)
    check(tmp_path / "packed", settings, ct_packed, "int4")

    def pack(x):
        codes = RNG.integers(-8, 8, x.shape).astype(np.int8)
        scales = RNG.uniform(0.05, 0.1, (len(x), 1)).astype(np.float32)
        return dict(weight=codes, weight_scale=scales), codes * scales.astype(np.float64)

    check(tmp_path / "bytes", settings_of("int", "channel", DYNAMIC, 4), pack, "int8")


WRONG = {
    "4 bits": (dict(num_bits=4), "float activations of 4 bits are not supported"),
    "16 bits": (dict(num_bits=16), "activations of 16 bits"),
    "another key": (dict(rotate=True), "rotate=True"),
    "another type": (dict(type="complex"), "type='complex' must be one of int, float"),
    "another strategy": (dict(strategy="row"), "strategy='row' must be one of"),
    "another time": (dict(dynamic="global"), "dynamic='global'"),
    "an order": (dict(actorder="group"), "actorder='group'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_of_activations_are_checked(case):
    change, message = WRONG[case]
    settings = settings_of("float", "channel", DYNAMIC)
    settings["config_groups"]["group_0"]["input_activations"] |= change
    with pytest.raises((UnsupportedError, ValueError), match=f"group_0, input_activations.*{message}"):
        models.config_of(CONFIG | dict(quantization_config=settings))


def test_rounded_outputs_are_refused():
    settings = settings_of("float", "channel", DYNAMIC)
    settings["config_groups"]["group_0"]["output_activations"] = DYNAMIC
    with pytest.raises(UnsupportedError, match="group_0: output_activations=.*is not supported"):
        models.config_of(CONFIG | dict(quantization_config=settings))


# ------------------------------------------------------------------ several groups
def channel_pack(x):
    scales = RNG.uniform(0.005, 0.01, (len(x), 1)).astype(np.float32)
    weight, exact = rows(x, "float", scales)
    return dict(weight=weight, weight_scale=scales), exact


def groups_settings():
    """One group for attention and one for the rest, which give activations different settings; and one without weights,
    of attention itself. The format is told by group."""
    settings = settings_of("float", "channel", DYNAMIC)
    groups = settings["config_groups"]
    groups["group_0"] |= dict(targets=["re:.*self_attn.*"], format="float-quantized")
    groups["group_1"] = copy.deepcopy(groups["group_0"]) | dict(targets=["re:.*mlp.*"], input_activations=None)
    groups["group_2"] = dict(targets=["LlamaAttention"], weights=None, input_activations=STATIC)
    return settings | dict(format="mixed-precision", ignore=["lm_head", "re:.*gate$"])


def test_groups_of_equal_weights(tmp_path):
    check(tmp_path / "groups", groups_settings(), channel_pack, "fp8")


def test_modules_that_are_ignored_are_read_as_they_are(tmp_path):
    """Their tensors say so; the list is not needed."""
    settings = settings_of("float", "channel", DYNAMIC) | dict(
        ignore=["lm_head", r"re:model\.layers\.1\.mlp.*down_proj"]
    )
    folder(tmp_path / "ignored", settings, channel_pack)
    checkpoint, module = Checkpoint(tmp_path / "ignored"), "model.layers.1.mlp.down_proj"
    tensors = {name: checkpoint.read(name) for name in checkpoint.locations if not name.startswith(module)}
    save(tmp_path / "ignored" / "model.safetensors", tensors | {f"{module}.weight": np.ones((64, 96), np.float32)})
    _, params = models.load(tmp_path / "ignored")
    first, second = (layer["mlp"]["down"]["kernel"] for layer in params["layers"])
    assert isinstance(first, QuantisedArray) and (np.asarray(second) == 1).all()
    assert not isinstance(stored_weights(tmp_path / "ignored")["layers.1.mlp.down.kernel"], QuantisedArray)


@pytest.mark.parametrize("change", [dict(num_bits=4), dict(strategy="tensor"), dict(symmetric=False)])
def test_groups_of_different_weights_are_refused(change):
    settings = groups_settings()
    settings["config_groups"]["group_1"]["weights"] |= change
    with pytest.raises(UnsupportedError, match="config_groups 'group_0, group_1' have weights with different settings"):
        models.config_of(CONFIG | dict(quantization_config=settings))


@pytest.mark.parametrize("groups", [{}, None, [], {"W8A8": ["Linear"]}, {"group_0": dict(targets=["Linear"])}])
def test_groups_that_quantise_nothing_are_refused(groups):
    settings = settings_of("float", "channel", DYNAMIC) | dict(config_groups=groups)
    with pytest.raises(UnsupportedError, match="config_groups=|must have weights or input_activations"):
        models.config_of(CONFIG | dict(quantization_config=settings))


# ------------------------------------------------------------------ scales of the cache
CACHE = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.k_zero_point"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_proj.k_bias"),
    "older": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale", "self_attn.kv_scale"),
}


def with_cache_scales(path, names):
    """A w8a8 folder with such tensors in each layer, and the params of its dequantised weights."""
    settings = settings_of("float", "channel", DYNAMIC) | dict(kv_cache_scheme=CACHE)
    plain_config, plain = folder(path, settings, channel_pack)
    checkpoint = Checkpoint(path)
    made = {f"model.layers.{i}.{name}": np.float32([0.07]) for i in range(2) for name in names}
    save(path / "model.safetensors", {name: checkpoint.read(name) for name in checkpoint.locations} | made)
    return plain_config, plain


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_the_cache_are_left_out(tmp_path, names):
    """The engine computes those of an 8-bit cache, and a bfloat16 one needs none."""
    plain_config, plain = with_cache_scales(tmp_path / "cache", NAMES[names])
    config, params = models.load(tmp_path / "cache")
    wanted = models.prompt_logits(plain_config, plain, IDS)
    assert np.abs(models.prompt_logits(config, params, IDS) - wanted).max() < 1e-3 * np.std(wanted)
    assert "layers.0.attn.q.kernel" in stored_weights(tmp_path / "cache")


def test_a_cache_that_would_need_the_folders_scales_is_refused(tmp_path):
    with_cache_scales(tmp_path / "cache", ["self_attn.k_scale", "self_attn.v_scale"])
    with pytest.raises(
        UnsupportedError, match=r"cache_quant='per_tensor': .*self_attn\.k_scale.*leave cache_quant out"
    ):
        engine_of(tmp_path / "cache", cache_dtype="float8_e4m3fn", cache_quant="per_tensor")
    engine_of(tmp_path / "cache", cache_dtype="float8_e4m3fn")


def test_scales_of_the_cache_without_quantised_weights_are_unknown(tmp_path):
    tiny.write(tmp_path, CONFIG, tiny.tensors(CONFIG) | {"model.layers.0.self_attn.k_scale": np.float32([1])})
    with pytest.raises(ValueError, match=r"self_attn\.k_scale' is not used by this model"):
        models.load(tmp_path)


@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
def test_scales_with_which_weights_do_not_fit_in_their_dtype_are_refused(tmp_path, scales):
    """As weights that are stored as floats: they would be infinite."""

    def pack(x):
        scale = np.full((len(x), 1), 200, scales)  # * 448 > 65504
        weight, exact = rows(x / x.max(), "float", scale)
        return dict(weight=weight, weight_scale=scale), exact

    folder(tmp_path / "w8a8", settings_of("float", "channel", DYNAMIC), pack)
    models.load(tmp_path / "w8a8", dtype="bfloat16")
    with pytest.raises(ValueError, match="layers.0.*a scale of 200 gives weights that do not fit in float16"):
        models.load(tmp_path / "w8a8", dtype="float16")


@pytest.mark.parametrize(
    ("format", "lowest", "zero_point", "scale"),
    [("int4", -8, None, 8500), ("int8", -128, None, 513), ("int4", -8, 7, 4500), ("int8", -128, 127, 257.5)],
)
def test_the_lowest_code_must_fit_in_the_dtype_too(format, lowest, zero_point, scale):
    """It is farther from 0 than the highest one, 7 or 127."""
    zeros = None if zero_point is None else np.array([[zero_point]], np.int8)
    weight = Decoded(np.zeros((1, 8), np.int8), np.array([[scale]], np.float32), zeros)
    assert (lowest - (zero_point or 0)) * scale < -float(np.finfo(np.float16).max)
    with pytest.raises(ValueError, match="gives weights that do not fit in float16"):
        check_range(weight, format, "float16")


@pytest.mark.parametrize("stored", ["float32", "float64"])
def test_float64_is_float32_where_jax_has_no_wider_floats(tmp_path, stored):
    """As weights that are not quantised."""
    config = CONFIG | dict(torch_dtype=stored)
    folder(tmp_path / "blocks", settings_of("float", "block", BY_128, block_structure=[32, 48]), blocks_pack, config)
    _, params = models.load(tmp_path / "blocks", dtype="float64" if stored == "float32" else None)
    kernel = params["layers"][0]["attn"]["q"]["kernel"]
    assert kernel.dtype == kernel.dequantise().dtype == params["embed"].dtype == "float32"
