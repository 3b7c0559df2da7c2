"""NVFP4 and fp8 folders of ModelOpt, compressed-tensors and fbgemm, made here from their specification."""

import itertools
import json

import jax
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.models.checkpoint import Checkpoint
from jattn.models.load import stored_weights
from jattn.models.model_folder import read_model_folder
from jattn.ops import product as product_ops
from jattn.ops.quantised import QuantisedArray, unpacked
from tests.models import examples, tiny
from tests.models.test_hub_formats import (
    CONFIG,
    HOSTILE,
    IDS,
    MOE,
    OF_NUMPY,
    check,
    compressed,
    engine_of,
    folder,
    moe_tensors,
    save,
)

RNG = np.random.default_rng(1)
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODELOPT = dict(
    quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"], producer=dict(name="modelopt", version="0.35.0"),
    kv_cache_scheme=dict(dynamic=False, num_bits=8, type="float"),
    config_groups=dict(group_0=dict(
        targets=["Linear"], weights=dict(dynamic=False, num_bits=4, type="float", group_size=16),
        input_activations=dict(dynamic=False, num_bits=4, type="float", group_size=16),
    )),
)  # fmt: skip
OLD = dict(
    producer=dict(name="modelopt", version="0.27.0"),
    quantization=dict(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16, exclude_modules=["lm_head"]),
)


def nvfp4_parts(x):
    """(bytes of two codes, scales e4m3 of 16 inputs, one scale of all, the numbers)."""
    codes = RNG.integers(0, 16, x.shape)
    scales = RNG.uniform(30, 448, (x.shape[0], x.shape[1] // 16)).astype(E4M3)
    whole = np.float32(RNG.uniform(0.0002, 0.0004))
    exact = E2M1[codes] * np.repeat(scales.astype(np.float64), 16, axis=1) * np.float64(whole)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8), scales, whole, exact


def modelopt_pack(x):
    weight, scales, whole, exact = nvfp4_parts(x)
    input_scale = np.array(0.01, np.float32)
    return dict(weight=weight, weight_scale=scales, weight_scale_2=np.array(whole), input_scale=input_scale), exact


def ct_pack(x):
    """The scale of all is stored as its reciprocal."""
    weight, scales, whole, _ = nvfp4_parts(x)
    inverse = np.array([1 / whole], np.float32)
    codes = np.stack([weight & 15, weight >> 4], -1).reshape(x.shape)
    exact = E2M1[codes] * np.repeat(scales.astype(np.float64), 16, axis=1) / np.float64(inverse[0])
    others = dict(input_global_scale=np.array([100.0], np.float32))
    return dict(weight_packed=weight, weight_scale=scales, weight_global_scale=inverse) | others, exact


def ct_settings(activations=4, strategy="tensor_group"):
    local = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local", symmetric=True)
    settings = compressed(
        "nvfp4-pack-quantized", 4, "float", strategy, group_size=16, scale_dtype="torch.float8_e4m3fn",
        zp_dtype="torch.float8_e4m3fn", observer="memoryless_minmax",
    )  # fmt: skip
    settings["config_groups"]["group_0"]["input_activations"] = local if activations == 4 else None
    return settings


def test_modelopt_nvfp4(tmp_path):
    params = check(tmp_path / "nvfp4", MODELOPT, modelopt_pack, "fp4")
    kernel = params["layers"][0]["attn"]["q"]["kernel"]
    assert kernel.group_size == 16 and kernel.scales.dtype == E4M3 and kernel.zero_points is None
    assert kernel.factor.shape == (1, kernel.shape[1]) and kernel.factor.dtype == "float32"
    bits = 8 * sum(x.nbytes for x in jax.tree.leaves(kernel)) / (kernel.shape[0] * kernel.shape[1])
    assert bits == 4.5 + 32 / kernel.shape[0]


def test_the_first_code_of_a_byte_is_in_its_low_bits():
    from jattn.models.hub_codes import nvfp4

    weight = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    decoded = nvfp4("", False, weight, np.ones((1, 1), E4M3), np.array(2.0, np.float32))
    np.testing.assert_array_equal(unpacked(decoded.codes, 1), np.arange(16)[None])
    np.testing.assert_array_equal(decoded.scales, np.ones((1, 1), E4M3))
    np.testing.assert_array_equal(decoded.factor, [[2.0]])


def move_settings(path):
    """Into hf_quant_config.json, which older folders have alone."""
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text(json.dumps(OLD))


def test_the_settings_of_modelopt_may_be_in_a_file_of_their_own(tmp_path):
    _, wanted = folder(tmp_path / "old", MODELOPT, modelopt_pack)
    move_settings(tmp_path / "old")
    _, params = models.load(tmp_path / "old")
    kernel = params["layers"][1]["mlp"]["up"]["kernel"]
    assert kernel.format == "fp4"
    np.testing.assert_allclose(kernel.dequantise(), wanted["layers"][1]["mlp"]["up"]["kernel"], rtol=1e-6)
    old = read_model_folder(tmp_path / "old")
    assert (old.stored_dtype, old.method_of_weights) == ("float32", "modelopt")
    settings = OLD | dict(quantization=OLD["quantization"] | dict(quant_algo="INT4_AWQ"))
    (tmp_path / "old" / "hf_quant_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=r"hf_quant_config\.json.*quant_algo='INT4_AWQ' is not supported"):
        models.load_config(tmp_path / "old")


def test_a_wrapper_may_have_modelopts_file(tmp_path):
    config = CONFIG | dict(model_type="mistral", sliding_window=None)
    folder(tmp_path / "old", MODELOPT | dict(quant_method="modelopt_fp4"), modelopt_pack, config)
    _, inside = models.load(tmp_path / "old")
    wrapped = dict(model_type="mistral3", tie_word_embeddings=False, text_config=config, quantization_config=None)
    (tmp_path / "old" / "config.json").write_text(json.dumps(wrapped))
    move_settings(tmp_path / "old")
    _, params = models.load(tmp_path / "old")
    first, second = (some["layers"][0]["attn"]["q"]["kernel"] for some in (params, inside))
    np.testing.assert_array_equal(first.dequantise(), second.dequantise())


@pytest.mark.parametrize("activations", [4, 16])
@pytest.mark.parametrize("strategy", ["tensor_group", "group"])
def test_nvfp4_of_compressed_tensors(tmp_path, activations, strategy):
    check(tmp_path / "nvfp4", ct_settings(activations, strategy), ct_pack, "fp4")


def test_experts_of_nvfp4_have_scales_of_their_own(tmp_path):
    params = check(tmp_path / "moe", MODELOPT, modelopt_pack, "fp4", MOE, moe_tensors)
    kernel = params["layers"][0]["mlp"]["down"]["kernel"]
    assert (kernel.shape, kernel.scales.shape, kernel.factor.shape) == ((4, 32, 64), (4, 2, 64), (4, 1, 64))
    assert len(np.unique(kernel.factor)) == 4


PHI3 = examples.of(
    "phi3", hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=40, torch_dtype="float32",
)  # fmt: skip


def phi3_tensors(config):
    shapes = {"model.embed_tokens": (40, 64), "lm_head": (40, 64), "model.norm": (64,)}
    for at in ("model.layers.0.", "model.layers.1."):
        shapes |= {at + "self_attn.qkv_proj": (128, 64), at + "self_attn.o_proj": (64, 64)}
        shapes |= {at + "mlp.gate_up_proj": (96, 64), at + "mlp.down_proj": (64, 48)}
        shapes |= {at + name: (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": 0.3 * RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_parts_of_fused_projections(tmp_path, kind):
    """q, k and v are slices of one tensor, as gate and up are."""
    settings, pack = (MODELOPT, modelopt_pack) if kind == "nvfp4" else (modelopt_fp8("FP8"), fp8_pack)
    check(tmp_path / "fused", settings, pack, kind.replace("nv", ""), PHI3, phi3_tensors)


TIED = CONFIG | dict(tie_word_embeddings=True)


def tied_tensors(config):
    return {name: x for name, x in tiny.tensors(config).items() if name != "lm_head.weight"}


def test_tied_embeddings_and_a_quantised_head(tmp_path):
    check(tmp_path / "tied", MODELOPT, modelopt_pack, "fp4", TIED, tied_tensors)
    weight, scales, whole, exact = nvfp4_parts(np.zeros((40, 64)))
    _, wanted = folder(tmp_path / "head", MODELOPT, modelopt_pack)
    checkpoint = Checkpoint(tmp_path / "head")
    tensors = {name: checkpoint.read(name) for name in checkpoint.locations}
    head = {"weight": weight, "weight_scale": scales, "weight_scale_2": np.array([whole])}
    save(tmp_path / "head" / "model.safetensors", tensors | {f"lm_head.{name}": x for name, x in head.items()})
    config, params = models.load(tmp_path / "head")
    assert params["head"]["kernel"].format == "fp4"
    logits = models.prompt_logits(config, params, IDS)
    np.testing.assert_allclose(logits, models.prompt_logits(config, params | _head(exact), IDS), rtol=1e-3, atol=1e-3)


def _head(exact):
    return dict(head=dict(kernel=jax.numpy.asarray(exact.T, np.float32)))


# ------------------------------------------------------------------ fp8 with other scales
def modelopt_fp8(algorithm):
    activations = dict(dynamic=False, num_bits=8, type="float")
    return MODELOPT | dict(
        quant_algo=algorithm, config_groups=dict(group_0=dict(weights=activations, input_activations=activations))
    )


def fp8_pack(x, shape=(), **others):
    weight = (x * 200).astype(E4M3)
    scale = np.asarray(RNG.uniform(0.001, 0.003, len(x) if shape == "outputs" else 1), np.float32)
    exact = weight.astype(np.float64) * scale[:, None]
    stored = scale if shape == "outputs" else scale.reshape(shape)
    return dict(weight=weight, weight_scale=stored) | others, exact


def test_modelopt_fp8(tmp_path):
    inputs = np.array(0.5, np.float32)
    check(tmp_path / "fp8", modelopt_fp8("FP8"), lambda x: fp8_pack(x, input_scale=inputs), "fp8")
    check(tmp_path / "rows", modelopt_fp8("FP8_PER_CHANNEL_PER_TOKEN"), lambda x: fp8_pack(x, "outputs"), "fp8")


def test_modelopt_fp8_in_blocks(tmp_path):
    def pack(x):
        weight, blocks = (x * 200).astype(E4M3), tuple(-(-n // 128) for n in x.shape)
        scales = RNG.uniform(0.001, 0.003, blocks).astype(np.float32)
        wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
        return dict(weight=weight, weight_scale=scales[:, None, :, None]), weight.astype(np.float64) * wide

    sizes = dict(hidden_size=256, intermediate_size=384, num_attention_heads=2, num_key_value_heads=1, head_dim=128)
    check(tmp_path / "blocks", modelopt_fp8("fp8_pb_wo"), pack, "fp8", CONFIG | sizes)


def test_fbgemm_fp8(tmp_path):
    def pack(x):
        tensors, exact = fp8_pack(x, "outputs")
        return tensors | dict(weight_scale=tensors["weight_scale"][:, None]), exact

    settings = dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"])
    check(tmp_path / "fbgemm", settings, pack, "fp8")
    with pytest.raises(ValueError, match="activation_scale_ub=-1"):
        models.config_of(CONFIG | dict(quantization_config=settings | dict(activation_scale_ub=-1)))


def test_autofp8_calls_the_scale_of_a_tensor_weight_scale(tmp_path):
    settings = dict(
        quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"], kv_cache_scheme="static"
    )
    scales = dict(input_scale=np.array(0.5, np.float32), kv_scale=np.array(0.5, np.float32))
    check(tmp_path / "fp8", settings, lambda x: fp8_pack(x, **scales), "fp8")


# ------------------------------------------------------------------ what runs them
@pytest.mark.parametrize(("kind", "devices"), [("nvfp4", 2), ("fp8", 1)])
def test_an_engine_gives_the_tokens_of_the_plain_weights(tmp_path, kind, devices):
    settings, pack = (MODELOPT, modelopt_pack) if kind == "nvfp4" else (modelopt_fp8("FP8"), fp8_pack)
    folder(tmp_path / kind, settings, pack)
    ask = jattn.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    seen, wanted = (
        [out.token_ids for out in engine_of(tmp_path / name, tensor_parallel=n).generate([IDS, IDS[:3]], ask)]
        for name, n in ((kind, devices), (f"{kind}_plain", 1))
    )
    assert seen == wanted


def test_jattn_plan_reads_what_is_resident(tmp_path, capsys):
    from jattn import cli

    folder(tmp_path / "nvfp4", MODELOPT, modelopt_pack)
    move_settings(tmp_path / "nvfp4")
    assert cli.main(["plan", "--model", str(tmp_path / "nvfp4"), "--devices", "h100", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    params = models.load(tmp_path / "nvfp4")[1]
    assert found["layouts"][0]["weight_bytes"] == sum(x.nbytes for x in jax.tree.leaves(params))


def test_hoppers_kernels_multiply_nvfp4_as_it_is_stored(tmp_path, monkeypatch):
    """Loaded from a folder, of one request and of many; other chips dequantise it."""
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    folder(tmp_path / "nvfp4", MODELOPT, modelopt_pack, CONFIG | sizes)
    mlp = models.load(tmp_path / "nvfp4", dtype="bfloat16")[1]["layers"][0]["mlp"]
    kernels = tuple(mlp[name]["kernel"] for name in ("gate", "up"))

    def chosen(rows, chip):
        monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", chip))
        monkeypatch.setattr(product_ops.device, "processors", lambda: 132)
        return product_ops._choose(jax.numpy.ones((rows, 128), "bfloat16"), kernels, np.dtype("float32")).name

    assert [chosen(rows, "sm_90") for rows in (1, 16, 64, 257)] == ["gpu_packed"] * 3 + ["dot"]
    assert chosen(1, "sm_80") == "dot"


# ------------------------------------------------------------------ wrong folders
PACKS = {"modelopt": (MODELOPT, modelopt_pack), "compressed-tensors": (ct_settings(), ct_pack)}
WRONG = {  # of the scale of a whole weight
    "0": (np.float32([0.0]), "{} is 0, which must be above 0"), "negative": (np.float32([-1]), "{} is -1, which must"),
    "nan": (np.float32([np.nan]), "{}.* has NaN"), "two": (np.float32([1, 2]), r"{} is float32\[2\], which must be"),
    "int": (np.int32([1]), "{} is int32"), "absent": (None, "but .*{} is missing"),
    "subnormal": (np.float32([1e-40]), "{} is .*e-41: the factor .* of the weight is no normal float32"),
}  # fmt: skip


@pytest.mark.parametrize("method", PACKS)
def test_wrong_scales_of_a_weight_are_named(tmp_path, method):
    folder(tmp_path / "wrong", *PACKS[method], CONFIG | dict(num_hidden_layers=1))
    checkpoint = Checkpoint(tmp_path / "wrong")
    tensors = {name: checkpoint.read(name).copy() for name in checkpoint.locations}
    ending = "weight_scale_2" if method == "modelopt" else "weight_global_scale"
    name = f"model.layers.0.mlp.down_proj.{ending}"
    for wrong, message in WRONG.values():
        changed = {other: x for other, x in tensors.items() if other != name}
        save(tmp_path / "wrong" / "model.safetensors", changed if wrong is None else changed | {name: wrong})
        with pytest.raises(ValueError, match=rf"wrong.*mlp\.down_proj\..*{message.format(ending)}"):
            models.load(tmp_path / "wrong")


FP8 = {
    "modelopt fp8": (modelopt_fp8("FP8"), fp8_pack),
    "by outputs": (modelopt_fp8("FP8_PER_CHANNEL_PER_TOKEN"), lambda x: fp8_pack(x, "outputs")),
    "fbgemm": (dict(quant_method="fbgemm_fp8"), lambda x: fp8_pack(x, "outputs")),
}


@pytest.mark.parametrize("method", PACKS | FP8)
def test_tensors_that_do_not_fit_one_another_are_named(tmp_path, method):
    folder(tmp_path / "good", *(PACKS | FP8)[method], CONFIG | dict(num_hidden_layers=1))
    checkpoint, at = Checkpoint(tmp_path / "good"), "model.layers.0.mlp.down_proj."
    tensors = {name: checkpoint.read(name).copy() for name in checkpoint.locations}
    used = (name for name in tensors if name.startswith(at) and "input" not in name)
    for name, (kind, change) in itertools.product(used, HOSTILE.items()):
        right, wrong = tensors[name], np.asarray(change(np.atleast_1d(tensors[name])))
        is_same = wrong.dtype == right.dtype and (wrong.shape == right.shape or wrong.size == right.size == 1)
        if is_same or (method in FP8 and wrong.dtype == right.dtype and "scale" in name and kind == "flat"):
            continue
        save(tmp_path / "good" / "model.safetensors", tensors | {name: wrong})
        with pytest.raises(ValueError, match=r"model\.safetensors: tensor .*mlp\.down") as caught:
            models.load(tmp_path / "good")
        assert not any(words in str(caught.value) for words in OF_NUMPY), (name, kind)


PARTS = {
    "cut scales": ("weight_scale", lambda x: x[:, :2], "its 96 inputs have 2 groups, which do not have group_size=16"),
    "swizzled": ("weight_scale", lambda x: np.resize(x, (128, 8)), "must have equal numbers of outputs"),
    "float scales": ("weight_scale", lambda x: x.astype(np.float32), "scales have dtype float32"),
    "no scales": ("weight_scale", lambda x: None, "down_proj.weight_scale is missing"),
    "int8 codes": ("weight", lambda x: x.view(np.int8), "codes have dtype int8, which must be uint8"),
    "cut codes": ("weight", lambda x: x[:, :47], "its 94 inputs must be a multiple of 8"),
    "flat codes": ("weight", np.ravel, r"codes \(3072,\) must be a matrix"),
}


@pytest.mark.parametrize("case", PARTS)
def test_wrong_parts_of_nvfp4_are_named(tmp_path, case):
    end, change, message = PARTS[case]
    folder(tmp_path / "wrong", MODELOPT, modelopt_pack, CONFIG | dict(num_hidden_layers=1))
    checkpoint, name = Checkpoint(tmp_path / "wrong"), f"model.layers.0.mlp.down_proj.{end}"
    tensors = {other: checkpoint.read(other).copy() for other in checkpoint.locations}
    changed = change(tensors.pop(name))
    save(tmp_path / "wrong" / "model.safetensors", tensors | ({} if changed is None else {name: changed}))
    with pytest.raises(ValueError, match=rf"wrong.*mlp\.down_proj\..*{message}"):
        models.load(tmp_path / "wrong")


def test_the_wrong_one_of_many_experts_is_named(tmp_path):
    folder(tmp_path / "moe", MODELOPT, modelopt_pack, MOE, moe_tensors)
    checkpoint, name = Checkpoint(tmp_path / "moe"), "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = {other: checkpoint.read(other) for other in checkpoint.locations}
    save(tmp_path / "moe" / "model.safetensors", tensors | {f"{name}_scale_2": np.float32([-1])})
    with pytest.raises(ValueError, match=rf"{name}: weight_scale_2 is -1, which must be above 0"):
        models.load(tmp_path / "moe")


REFUSED = {
    "awq": (MODELOPT | dict(quant_algo="NVFP4_AWQ"), "quant_algo='NVFP4_AWQ' is not supported; known: FP8, "),
    "mixed": (MODELOPT | dict(quant_algo="MIXED_PRECISION"), "quant_algo='MIXED_PRECISION' is not"),
    "none": (dict(quant_method="modelopt"), "quant_algo=None is not supported"),
    "groups": (MODELOPT | dict(group_size=32), "group_size=32 is not supported; it must be 16"),
    "scaled inputs": (MODELOPT | dict(pre_quant_scale=True), "pre_quant_scale=True"),
    "another key": (MODELOPT | dict(rotate=True), "rotate=True"),
    "fp8 with activations of 4 bits": (MODELOPT | dict(quant_algo="FP8"), "float activations of 4 bits are not"),
    "other groups": (
        compressed("nvfp4-pack-quantized", 4, "float", "group", group_size=32), "format='nvfp4-pack-quantized' with"
    ),
    "4 bits of outputs": (
        compressed("nvfp4-pack-quantized", 4, "float", "channel"), "weights of 4 bits by channel is not supported"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_settings_are_refused_by_name(case):
    settings, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        models.config_of(CONFIG | dict(quantization_config=settings))


def test_modelopt_may_quantise_the_cache_alone(tmp_path):
    settings = dict(quant_method="modelopt", quant_algo=None, kv_cache_quant_algo="FP8", exclude_modules=[])
    tensors = {f"model.layers.{i}.self_attn.k_proj.k_scale": np.float32([0.1]) for i in range(2)}
    (tmp_path / "model").mkdir()
    tiny.write(tmp_path / "model", CONFIG | dict(quantization_config=settings), tiny.tensors(CONFIG) | tensors)
    config, params = models.load(tmp_path / "model")
    assert not any(isinstance(x, QuantisedArray) for x in jax.tree.leaves(params, is_leaf=lambda x: x is not params))
    assert config == models.config_of(CONFIG) and stored_weights(tmp_path / "model")
    _, params = models.load(tmp_path / "model", quantization="int8")
    assert params["layers"][0]["mlp"]["up"]["kernel"].format == "int8"


def test_modelopts_file_may_say_that_nothing_is_quantised(tmp_path):
    tiny.write(tmp_path, CONFIG)
    settings = dict(producer=dict(name="modelopt"), quantization=dict(quant_algo=None, kv_cache_quant_algo=None))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    assert models.load(tmp_path)[0] == models.config_of(CONFIG)
