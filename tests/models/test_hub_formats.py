"""Folders with quantised weights, packed here by hand from each format's specification."""

import functools
import json
import struct
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.errors import UnsupportedError
from jattn.models.checkpoint import Checkpoint
from jattn.models.families import FAMILIES
from jattn.models.load import stored_weights
from jattn.models.mxfp4 import mxfp4
from jattn.nn.weight_spec import weight_path
from jattn.ops.quantised import QuantisedArray, unpacked
from tests.models import examples, tiny

CONFIG = tiny.CONFIG | dict(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=40, torch_dtype="float32")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
RNG = np.random.default_rng(0)
DTYPES = {"int32": "I32", "int64": "I64", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}
DTYPES |= {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL"}


def save(path, tensors):
    """A *.safetensors file; the library does not write float8 from numpy."""
    table, data = {}, b""
    for name, x in tensors.items():
        bits = np.ascontiguousarray(x).tobytes()
        offsets = [len(data), len(data) + len(bits)]
        table[name] = dict(dtype=DTYPES[x.dtype.name], shape=list(x.shape), data_offsets=offsets)
        data += bits
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def folder(path, quantization, pack, config=CONFIG, tensors=tiny.tensors):
    """A folder whose layers' Linear modules are stored by pack(weight) -> (tensors, the numbers that they stand for),
    and the params with these numbers."""
    made, exact = {}, {}
    for name, x in tensors(config).items():
        module = name.removesuffix(".weight")
        if x.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):  # a router is not quantised
            parts, exact[name] = pack(x)
            made |= {f"{module}.{end}": value for end, value in parts.items()}
        else:
            made[name] = exact[name] = x
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | dict(quantization_config=quantization)))
    save(path / "model.safetensors", made)
    plain = path.parent / f"{path.name}_plain"
    plain.mkdir()
    tiny.write(plain, config, {name: x.astype(np.float32) for name, x in exact.items()})
    return models.load(plain)


def weight_paths_of(params) -> dict:
    """The leaves of params by path."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, QuantisedArray))
    return {weight_path(path): leaf for path, leaf in leaves}


def check(path, quantization, pack, format, config=CONFIG, tensors=tiny.tensors):
    plain_config, plain = folder(path, quantization, pack, config, tensors)
    seen_config, params = models.load(path)
    form = lambda x: (x.shape, x.dtype) if not isinstance(x, QuantisedArray) else (x.format, x.axis, x.dtype)
    parts = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    for dtype in None, "bfloat16":
        made = params if dtype is None else models.load(path, dtype=dtype)[1]
        loaded, told = weight_paths_of(made), stored_weights(path, dtype=dtype)
        assert {name: form(x) for name, x in loaded.items()} == {name: form(x) for name, x in told.items()}
        assert {name: parts(x) for name, x in loaded.items()} == {name: parts(x) for name, x in told.items()}
    kernel = params["layers"][1]["mlp"]["down"]["kernel"]
    assert isinstance(kernel, QuantisedArray) and kernel.format == format and kernel.dtype == "float32"
    np.testing.assert_allclose(kernel.dequantise(), plain["layers"][1]["mlp"]["down"]["kernel"], rtol=1e-6, atol=1e-7)
    wanted = models.prompt_logits(plain_config, plain, IDS)
    seen = models.prompt_logits(seen_config, params, IDS, chunk=3)
    assert np.abs(seen - wanted).max() < 1e-3 * np.std(wanted)
    return params


def engine_of(path, **options):
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    sizes = dict(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    return jattn.Engine.from_pretrained(path, **sizes | options)


def words(codes: np.ndarray, order=range(8), bits=4) -> np.ndarray:
    """Codes along the last axis -> int32, the code order[i] of each word at bit `bits` * i."""
    per = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per)
    word = sum(parts[..., place] << np.uint32(bits * i) for i, place in zip(range(per), order, strict=True))
    return np.asarray(word, np.uint32).view(np.int32)


def grouped(x: np.ndarray, group: int) -> np.ndarray:
    return np.repeat(x.astype(np.float64), group, axis=1)


def drawn(shape, group, bits=4, scales="float16"):
    """(codes [out, in], zero points [out, groups], scales [out, groups], their numbers)."""
    out, inputs = shape
    codes = RNG.integers(0, 2**bits, shape).astype(np.uint8)
    zeros = RNG.integers(1, 2**bits, (out, inputs // group)).astype(np.uint8)
    scale = (RNG.uniform(0.5, 1.5, zeros.shape) * 0.3 / 2 ** (bits - 1)).astype(scales)
    return codes, zeros, scale, (codes - grouped(zeros, group)) * grouped(scale, group)


def awq_pack(x):
    codes, zeros, scales, exact = drawn(x.shape, 32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return dict(qweight=words(codes.T, order), qzeros=words(zeros.T, order), scales=scales.T), exact


AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm", modules_to_not_convert=None)


def test_awq(tmp_path):
    check(tmp_path / "awq", AWQ, awq_pack, "int4")


def test_awq_of_one_group(tmp_path):
    """AutoAWQ writes group_size -1 for it."""

    def pack(x):
        codes, zeros, scales, exact = drawn(x.shape, x.shape[1])
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return dict(qweight=words(codes.T, order), qzeros=words(zeros.T, order), scales=scales.T), exact

    check(tmp_path / "awq", AWQ | dict(group_size=-1), pack, "int4")


def test_the_text_of_a_wrapper_may_be_quantised_inside_text_config(tmp_path):
    config = CONFIG | dict(model_type="mistral", sliding_window=None)
    folder(tmp_path / "awq", AWQ, awq_pack, config)
    _, params = models.load(tmp_path / "awq")
    wrapped = dict(model_type="mistral3", tie_word_embeddings=False, text_config=config | dict(quantization_config=AWQ))
    (tmp_path / "awq" / "config.json").write_text(json.dumps(wrapped))
    _, inside = models.load(tmp_path / "awq")
    first, second = (some["layers"][0]["attn"]["q"]["kernel"] for some in (params, inside))
    assert isinstance(second, QuantisedArray) and second.format == first.format
    np.testing.assert_array_equal(second.dequantise(), first.dequantise())


def test_the_order_of_awq_by_hand():
    """Output 1 is at bits 16 to 19 of its word, output 2 at bits 4 to 7."""
    from jattn.models.config_reader import ConfigReader
    from jattn.models.hub_formats import METHODS

    decoded = METHODS["awq"](ConfigReader(AWQ)).decode(
        np.full((8, 1), 0x75316420, np.uint32).view(np.int32), np.array([[0x88888888]], np.uint32).view(np.int32),
        np.ones((1, 8), np.float16),
    )  # fmt: skip
    np.testing.assert_array_equal(unpacked(decoded.codes, 1), np.repeat(np.arange(8)[:, None], 8, axis=1))
    np.testing.assert_array_equal(decoded.zero_points, np.zeros((8, 1)))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(tmp_path, bits, version):
    def pack(x):
        codes, zeros, scales, exact = drawn(x.shape, 32, bits)
        qweight, less = words(codes, range(32 // bits), bits).T, 1 if version == "gptq" else 0
        qzeros = words((zeros - less).T, range(32 // bits), bits)
        g_idx, bias = np.arange(x.shape[1], dtype=np.int32) // 32, np.zeros(len(x), np.float16)
        return dict(qweight=qweight, qzeros=qzeros, scales=scales.T, g_idx=g_idx, bias=bias), exact

    settings = dict(quant_method="gptq", bits=bits, group_size=32, desc_act=True, sym=False, checkpoint_format=version)
    check(tmp_path / "gptq", settings, pack, "int4" if bits == 4 else "int8")


def test_symmetric_gptq_without_zero_points_and_act_order_is_refused(tmp_path):
    def pack(x, shuffled=False):
        codes, zeros, scales, _ = drawn(x.shape, 32)
        g_idx = np.arange(x.shape[1], dtype=np.int32) // 32
        g_idx = RNG.permutation(g_idx) if shuffled else g_idx
        exact = (codes - 8.0) * grouped(scales, 32)
        qzeros = words(np.full_like(zeros, 7).T)
        return dict(qweight=words(codes).T, qzeros=qzeros, scales=scales.T, g_idx=g_idx), exact

    settings = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True)
    params = check(tmp_path / "gptq", settings, pack, "int4")
    assert params["layers"][0]["attn"]["q"]["kernel"].zero_points is None
    folder(tmp_path / "act_order", settings, lambda x: pack(x, True))
    with pytest.raises(UnsupportedError, match=r"g_idx \(desc_act\)"):
        models.load(tmp_path / "act_order")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_gptq_that_programs_read_differently_is_refused(tmp_path, bits):
    """The first version stores zero points less one: 0 becomes the largest code, which is 0 or one more than it."""

    def pack(x):
        codes, zeros, scales, exact = drawn(x.shape, 32, bits)
        zeros[0, 0] = 0
        order = range(32 // bits)
        qzeros = words((zeros - 1).T, order, bits)
        return dict(qweight=words(codes, order, bits).T, qzeros=qzeros, scales=scales.T), exact

    folder(tmp_path / "gptq", dict(quant_method="gptq", bits=bits, group_size=32, sym=False), pack)
    with pytest.raises(UnsupportedError, match=rf"tensor .*_proj\.qweight.*: a zero point is stored as {2**bits - 1}"):
        models.load(tmp_path / "gptq")


def fp8_settings(blocks):
    return dict(quant_method="fp8", weight_block_size=list(blocks), activation_scheme="dynamic", fmt="e4m3")


def fp8_pack(blocks, x):
    scales = RNG.uniform(0.001, 0.003, tuple(-(-n // b) for n, b in zip(x.shape, blocks, strict=True)))
    weight = (x * 200).astype(ml_dtypes.float8_e4m3fn)
    scales = scales.astype(np.float32)
    wide = np.repeat(np.repeat(scales, blocks[0], 0), blocks[1], 1)[: x.shape[0], : x.shape[1]]
    return dict(weight=weight, weight_scale_inv=scales), weight.astype(np.float64) * wide


LATENT = dict(
    model_type="deepseek_v3", vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5, eos_token_id=2, kv_lora_rank=32,
    q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1, torch_dtype="float32",
)  # fmt: skip


def latent_tensors(config):
    """Every tensor of a DeepSeek V3 of LATENT's sizes, and one of its further layer, which is skipped."""
    shapes = {"self_attn.q_a_proj": (32, 32), "self_attn.q_a_layernorm": (32,), "self_attn.q_b_proj": (4 * 24, 32)}
    shapes |= {"self_attn.kv_a_proj_with_mqa": (40, 32), "self_attn.kv_a_layernorm": (32,)}
    shapes |= {"self_attn.kv_b_proj": (4 * 24, 32), "self_attn.o_proj": (32, 32)}
    shapes |= {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    experts = ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(4))]
    names = {"model.embed_tokens": (40, 32), "lm_head": (40, 32), "model.norm": (32,)}
    names |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    for module in ("model.layers.0.mlp", *(f"model.layers.1.{name}" for name in experts)):
        names |= {f"{module}.{n}_proj": (32, 32) for n in ("gate", "up", "down")}
    names |= {"model.layers.1.mlp.gate": (4, 32), "model.layers.2.eh_proj": (32, 64)}
    made = {f"{name}.weight": RNG.normal(size=shape).astype(np.float32) * 0.3 for name, shape in names.items()}
    return made | {"model.layers.1.mlp.gate.e_score_correction_bias": np.arange(4, dtype=np.float32) / 8}


def test_fp8_of_latent_attention_and_experts(tmp_path):
    """kv_b_proj is split by head and dequantised; the blocks are cut at the ends of some tensors."""
    pack = functools.partial(fp8_pack, (24, 16))
    params = check(tmp_path / "fp8", fp8_settings((24, 16)), pack, "fp8", LATENT, latent_tensors)
    attn = params["layers"][0]["attn"]
    assert isinstance(attn["kv_a"]["kernel"], QuantisedArray) and isinstance(attn["q_b"]["kernel"], QuantisedArray)
    assert attn["w_uk"].shape == (4, 16, 32) and attn["w_uv"].shape == (4, 32, 8)


MOE = dict(
    model_type="qwen3_moe", vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[], tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip


def moe_tensors(config):
    shapes = {"model.embed_tokens": (40, 64), "lm_head": (40, 64), "model.norm": (64,)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {at + name: (64,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {at + f"self_attn.{x}_norm": (16,) for x in "qk"} | {at + "mlp.gate": (4, 64)}
        shapes |= {at + f"self_attn.{x}_proj": (16 if x in "kv" else 32, 64) for x in "qkv"}
        shapes |= {at + "self_attn.o_proj": (64, 32)}
        for e in range(4):
            shapes |= {at + f"mlp.experts.{e}.{x}_proj": (32, 64) for x in ("gate", "up")}
            shapes |= {at + f"mlp.experts.{e}.down_proj": (64, 32)}
    rng = np.random.default_rng(5)
    return {f"{name}.weight": (0.3 * rng.standard_normal(s)).astype(np.float32) for name, s in shapes.items()}


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_experts_stay_packed_and_give_the_tokens_of_the_dequantised_weights(tmp_path, method):
    settings = AWQ if method == "awq" else fp8_settings([32, 32])
    pack = awq_pack if method == "awq" else functools.partial(fp8_pack, [32, 32])
    format = "int4" if method == "awq" else "fp8"
    params = check(tmp_path / method, settings, pack, format, MOE, moe_tensors)
    for name, shape in dict(gate=(4, 64, 32), up=(4, 64, 32), down=(4, 32, 64)).items():
        kernel = params["layers"][0]["mlp"][name]["kernel"]
        assert (kernel.format, kernel.shape, kernel.axis) == (format, shape, -2)
    ask = jattn.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    sizes = dict(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    seen, wanted = (
        [out.token_ids for out in jattn.Engine(*models.load(at), **sizes).generate([IDS, IDS[:3], IDS[2:]], ask)]
        for at in (tmp_path / method, tmp_path / f"{method}_plain")
    )
    assert seen == wanted


def compressed(layout, bits, kind, strategy, **more):
    weights = dict(num_bits=bits, type=kind, strategy=strategy, symmetric=True, dynamic=False, actorder=None)
    group = dict(targets=["Linear"], weights=weights | more, input_activations=None, output_activations=None)
    return dict(
        quant_method="compressed-tensors", format=layout, config_groups={"group_0": group}, ignore=["lm_head"],
        quantization_status="compressed", kv_cache_scheme=None, version="0.12",
    )  # fmt: skip


@pytest.mark.parametrize("bits, zeros", [(4, False), (4, True), (8, True)])
def test_compressed_tensors_in_words(tmp_path, bits, zeros):
    def pack(x):
        codes, zero, scales, exact = drawn(x.shape, 32, bits, scales="bfloat16")
        shape, order = np.array(x.shape, np.int64), range(32 // bits)
        tensors = dict(weight_packed=words(codes, order, bits), weight_scale=scales, weight_shape=shape)
        if not zeros:
            return tensors, (codes - 8.0) * grouped(scales, 32)
        return tensors | dict(weight_zero_point=np.ascontiguousarray(words(zero.T, order, bits).T)), exact

    settings = compressed("pack-quantized", bits, "int", "group", group_size=32, symmetric=not zeros)
    check(tmp_path / "packed", settings, pack, f"int{bits}")


def packed_4(x, group, zeros=False):
    codes, _, scales, _ = drawn(x.shape, group)
    tensors = dict(weight_packed=words(codes), weight_scale=scales, weight_shape=np.array(x.shape, np.int64))
    return tensors, codes


def gptq_pack(x):
    codes, zeros, scales, exact = drawn(x.shape, 32)
    return dict(qweight=words(codes).T, qzeros=words((zeros - 1).T), scales=scales.T), exact


OTHER_GROUPS = {
    "awq": (AWQ | dict(group_size=64), awq_pack),
    "gptq": (dict(quant_method="gptq", bits=4, group_size=64), gptq_pack),
    "compressed-tensors": (
        compressed("pack-quantized", 4, "int", "group", group_size=64),
        lambda x: packed_4(x, 48 if x.shape[1] == 96 else 64),
    ),
    "one group": (compressed("pack-quantized", 4, "int", "channel"), lambda x: packed_4(x, 32)),
}


@pytest.mark.parametrize("case", OTHER_GROUPS)
def test_groups_of_another_size_than_the_config_says_are_refused(tmp_path, case):
    """The 96 inputs of down_proj have 64 and 32 of them in two groups of 64; equal groups would be other numbers."""
    settings, pack = OTHER_GROUPS[case]
    folder(tmp_path / "odd", settings, pack)
    for load in (models.load, stored_weights):
        with pytest.raises(ValueError, match="groups, which do not have group_size"):
            load(tmp_path / "odd")


def test_zero_points_that_the_config_says_and_the_folder_lacks_are_missing(tmp_path):
    settings = compressed("pack-quantized", 4, "int", "group", group_size=32, symmetric=False)
    folder(tmp_path / "odd", settings, lambda x: packed_4(x, 32))
    with pytest.raises(ValueError, match="is missing"):
        models.load(tmp_path / "odd")


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors_of_8_bits(tmp_path, kind, strategy):
    def pack(x):
        weight = np.round(x * 90).astype(np.int8) if kind == "int" else (x * 90).astype(ml_dtypes.float8_e4m3fn)
        scales = RNG.uniform(0.005, 0.01, (1,) if strategy == "tensor" else (len(x), 1)).astype(np.float32)
        return dict(weight=weight, weight_scale=scales), weight.astype(np.float64) * scales

    settings = compressed(f"{kind}-quantized", 8, kind, strategy)
    check(tmp_path / "plain", settings, pack, "int8" if kind == "int" else "fp8")


@pytest.mark.parametrize("name", ["", "model-Q4_K_M.gguf"])
def test_gguf_is_refused_by_its_name(tmp_path, name):
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(UnsupportedError, match="model-Q4_K_M.gguf: GGUF is not supported; pass the model's folder"):
        models.load(tmp_path / name)


REFUSED = {
    "bitsandbytes": (dict(quant_method="bitsandbytes", load_in_4bit=True), "quant_method='bitsandbytes' is not supp"),
    "no method": (dict(bits=4), "quant_method=None is not supported"),
    "fp8 of one block": (dict(quant_method="fp8", weight_block_size=[8]), r"weight_block_size=\[8\] must be"),
    "awq gemv": (AWQ | dict(version="gemv"), "version='gemv'"),
    "gptq of 3 bits": (dict(quant_method="gptq", bits=3), "bits=3 is not supported; it must be 4 or 8"),
    "an unknown key": (AWQ | dict(rotate=True), "rotate=True"),
    "fp4": (compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32), "format='mxfp4-pack-quan"),
    "sparse": (
        compressed("pack-quantized", 4, "int", "channel") | dict(sparsity_config=dict(format="sparse-24-bitmask")),
        "sparsity_config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_methods_are_refused_by_name(tmp_path, case):
    settings, message = REFUSED[case]
    tiny.write(tmp_path, CONFIG | dict(quantization_config=settings))
    with pytest.raises(UnsupportedError, match=message):
        models.load(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        models.load_config(tmp_path)


def test_a_quantised_folder_is_not_quantised_again_and_an_adapter_is_refused(tmp_path):
    folder(tmp_path / "awq", AWQ, awq_pack)
    with pytest.raises(UnsupportedError, match=r"its weights are quantised \(awq\) already; leave quantization out"):
        models.load(tmp_path / "awq", quantization="int8")
    (tmp_path / "awq" / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="is a LoRA adapter"):
        models.load(tmp_path / "awq")


def test_groups_that_do_not_divide_the_inputs_are_an_error(tmp_path):
    def pack(x):
        tensors, exact = awq_pack(x)
        return tensors | dict(scales=np.ones((5, len(x)), np.float16)), exact

    folder(tmp_path / "awq", AWQ, pack)
    with pytest.raises(ValueError, match="the number of its groups does not divide the number of its inputs"):
        models.load(tmp_path / "awq")


def ct_packed(x):
    codes, zeros, scales, exact = drawn(x.shape, 32, scales="bfloat16")
    shape, zeros = np.array(x.shape, np.int64), np.ascontiguousarray(words(zeros.T).T)
    return dict(weight_packed=words(codes), weight_scale=scales, weight_shape=shape, weight_zero_point=zeros), exact


def ct_plain(x):
    scales, zeros = np.full((len(x), 1), 0.01, np.float32), np.ones((len(x), 1), np.int8)
    return dict(weight=np.round(x * 90).astype(np.int8), weight_scale=scales, weight_zero_point=zeros), x


def gptq_pack(x):
    codes, zeros, scales, exact = drawn(x.shape, 32)
    g_idx = np.arange(x.shape[1], dtype=np.int32) // 32
    return dict(qweight=words(codes).T, qzeros=words((zeros - 1).T), scales=scales.T, g_idx=g_idx), exact


PACKS = {
    "awq": (AWQ, awq_pack),
    "gptq": (dict(quant_method="gptq", bits=4), gptq_pack),
    "packed": (compressed("pack-quantized", 4, "int", "group", symmetric=False), ct_packed),
    "int8": (compressed("int-quantized", 8, "int", "channel", symmetric=False), ct_plain),
    "fp8": (fp8_settings((32, 32)), functools.partial(fp8_pack, (32, 32))),
}
HOSTILE = {
    "cut": lambda x: x[:1], "narrow": lambda x: x[..., :1], "doubled": lambda x: np.concatenate([x, x]),
    "empty": lambda x: x[:0], "without columns": lambda x: x[..., :0], "flat": np.ravel, "one": lambda x: x.flat[0],
    "complex": lambda x: x.astype(np.complex64), "bool": lambda x: x.astype(np.bool_), "bytes": lambda x: x.view("i1"),
}  # fmt: skip


OF_NUMPY = ("unpack", "reshape", "broadcast")
"""Words of sentences that do not say what is wrong with a tensor."""


@pytest.mark.parametrize("method", PACKS)
def test_tensors_that_do_not_fit_one_another_are_refused(tmp_path, method):
    """Scales and zero points of another shape would be read beyond their ends, or give other numbers."""
    folder(tmp_path / "good", *PACKS[method], CONFIG | dict(num_hidden_layers=1))
    checkpoint, at = Checkpoint(tmp_path / "good"), "model.layers.0.mlp.down_proj."
    tensors = {name: checkpoint.read(name).copy() for name in checkpoint.locations}
    for name in (name for name in tensors if name.startswith(at)):
        for kind, change in HOSTILE.items():
            wrong, right = np.asarray(change(tensors[name])), tensors[name]
            if wrong.dtype == right.dtype and wrong.shape == right.shape:
                continue
            save(tmp_path / "good" / "model.safetensors", tensors | {name: wrong})
            with pytest.raises(ValueError, match=r"model\.safetensors: tensor .*mlp\.down") as caught:
                models.load(tmp_path / "good")
            assert not any(words in str(caught.value) for words in OF_NUMPY), (name, kind)
            try:  # it reads no codes, so it may not see what is wrong
                stored_weights(tmp_path / "good")
            except ValueError as error:
                assert "down" in str(error) and str(tmp_path) in str(error), (name, kind, error)


def test_codes_without_scales_are_no_plan(tmp_path):
    folder(tmp_path / "fp8", *PACKS["fp8"])
    checkpoint = Checkpoint(tmp_path / "fp8")
    tensors = {name: checkpoint.read(name).copy() for name in checkpoint.locations if not name.endswith("scale_inv")}
    save(tmp_path / "fp8" / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="has dtype float8_e4m3fn and no scales"):
        stored_weights(tmp_path / "fp8")


@pytest.mark.parametrize(("method", "part"), [("awq", "scales"), ("gptq", "qzeros"), ("packed", "weight_shape")])
def test_a_part_of_a_module_that_is_missing_is_named(tmp_path, method, part):
    folder(tmp_path / "less", *PACKS[method])
    checkpoint = Checkpoint(tmp_path / "less")
    name = f"model.layers.1.mlp.up_proj.{part}"
    save(tmp_path / "less" / "model.safetensors", {n: checkpoint.read(n) for n in checkpoint.locations if n != name})
    for load in (models.load, stored_weights):
        with pytest.raises(ValueError, match=rf"less.*up_proj\.\w+ is stored quantised, but {name} is missing"):
            load(tmp_path / "less")


@pytest.mark.parametrize("method", PACKS)
def test_a_config_that_says_nothing_of_its_quantised_weights_is_named(tmp_path, method):
    """Some programs write their settings to a file of their own, as quantize_config.json."""
    folder(tmp_path / "bare", *PACKS[method])
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"config\.json has no quantization_config, but .*_proj\.\w+"):
        models.load(tmp_path / "bare")


@pytest.mark.parametrize("dtype", ["int7", 3, "float8_e4m3fn", ["float32"]])
def test_the_dtype_of_a_quantised_folder_is_checked(tmp_path, dtype):
    folder(tmp_path / "awq", *PACKS["awq"])
    (tmp_path / "awq" / "config.json").write_text(json.dumps(CONFIG | dict(quantization_config=AWQ, torch_dtype=dtype)))
    for load in (models.load, stored_weights):
        with pytest.raises(ValueError, match=r"config\.json: dtype=.* must be one of float16"):
            load(tmp_path / "awq")


def test_a_long_list_is_cut_in_the_error():
    with pytest.raises(UnsupportedError, match="weight_block_size") as caught:
        models.config_of(CONFIG | dict(quantization_config=dict(quant_method="fp8", weight_block_size=[1] * 1000)))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("method", ["awq", "gptq", "packed"])
def test_words_of_4_bits_are_rearranged_without_unpacking_them(tmp_path, method):
    """Otherwise a large matrix would need eight times its packed size, and more of it while threads read others."""
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    folder(tmp_path / "big", *PACKS[method], CONFIG | sizes)
    words_of_largest = 512 * 1024 // 2
    tracemalloc.start()
    try:
        params = models.load(tmp_path / "big")[1]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    stored = sum(x.nbytes for x in jax.tree.leaves(params))
    assert peak < stored + 3 * words_of_largest, f"{peak / stored:.1f} times the packed weights"


def test_experts_of_which_some_are_not_quantised_are_refused(tmp_path):
    settings, pack = fp8_settings((32, 32)), functools.partial(fp8_pack, (32, 32))
    folder(tmp_path / "mixed", settings, pack, MOE, moe_tensors)
    checkpoint, module = Checkpoint(tmp_path / "mixed"), "model.layers.1.mlp.experts.2.up_proj"
    tensors = {name: checkpoint.read(name) for name in checkpoint.locations if not name.startswith(module)}
    save(tmp_path / "mixed" / "model.safetensors", tensors | {f"{module}.weight": np.ones((32, 64), np.float32)})
    for load in (models.load, stored_weights):
        with pytest.raises(ValueError, match=rf"mixed: .*experts.0.up_proj is stored quantised and {module} is not"):
            load(tmp_path / "mixed")


def test_inputs_that_do_not_fill_a_word_of_4_bits_are_refused(tmp_path):
    def pack(x):
        codes, _, scales, exact = drawn(x.shape, x.shape[1])
        filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
        shape = np.array(x.shape, np.int64)
        return dict(weight_packed=words(filled), weight_scale=scales, weight_shape=shape), exact

    folder(tmp_path / "odd", compressed("pack-quantized", 4, "int", "channel"), pack, CONFIG | dict(hidden_size=60))
    with pytest.raises(ValueError, match=r"odd.model\.safetensors: tensor .*its 60 inputs must be a multiple of 8"):
        models.load(tmp_path / "odd")


def test_the_plan_of_packed_experts(tmp_path):
    """mxfp4 of gpt-oss, which its own table reads."""
    sizes = dict(num_local_experts=2, num_experts_per_tok=1, hidden_size=64, intermediate_size=32, head_dim=8)
    values = examples.of("gpt_oss", **sizes, num_hidden_layers=1, num_attention_heads=4, sliding_window=5)
    config, made = models.config_of(values), {}
    for source in FAMILIES["gpt_oss"].tensors(config).values():
        made |= dict.fromkeys(source.names, np.zeros(1, np.float32))
    for name, rows, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        at = f"model.layers.0.mlp.experts.{name}"
        del made[at]
        made |= {f"{at}_blocks": np.zeros((2, rows, inputs // 32, 16), np.uint8)}
        made |= {f"{at}_scales": np.full((2, rows, inputs // 32), 120, np.uint8)}
    (tmp_path / "config.json").write_text(json.dumps(values | dict(quantization_config=dict(quant_method="mxfp4"))))
    save(tmp_path / "model.safetensors", made)
    told = stored_weights(tmp_path)
    for part, columns, tensor in (("gate", slice(0, None, 2), "gate_up_proj"), ("down", slice(None), "down_proj")):
        at = f"model.layers.0.mlp.experts.{tensor}"
        kernel, form = mxfp4(columns, made[f"{at}_blocks"], made[f"{at}_scales"]), told[f"layers.0.mlp.{part}.kernel"]
        assert (form.format, form.axis, form.dtype) == (kernel.format, kernel.axis, kernel.dtype)
        shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        assert shapes(form) == shapes(kernel)
