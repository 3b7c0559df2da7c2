"""The batches of `benchmarks.gpu.sweep`: one or more of each class, others that a seed draws, and variants of some."""

import dataclasses
from typing import Any

import numpy as np

from benchmarks.gpu import cases

MOST_KEYS = 3 << 30  # bytes of a drawn batch's keys and values
MODELS = {  # heads, kv heads, head_dim, v_head_dim, soft cap, window
    "llama8b": (32, 8, 128, 128, None, None),
    "llama70b_tp8": (8, 1, 128, 128, None, None),
    "qwen7b": (28, 4, 128, 128, None, None),
    "qwen14b": (40, 8, 128, 128, None, None),
    "qwen30b_a3b": (32, 4, 128, 128, None, None),
    "glm4": (32, 2, 128, 128, None, None),
    "starcoder2_7b": (36, 4, 128, 128, None, None),
    "grok": (48, 8, 128, 128, 30.0, None),
    "mistral_window": (32, 8, 128, 128, None, 4096),
    "mha13b": (40, 40, 128, 128, None, None),
    "gpt_oss": (64, 8, 64, 64, None, None),
    "gpt_oss_window": (64, 8, 64, 64, None, 128),
    "llama1b": (32, 8, 64, 64, None, None),
    "qwen05b": (14, 2, 64, 64, None, None),
    "falcon7b": (71, 1, 64, 64, None, None),
    "phi2": (32, 32, 80, 80, None, None),
    "phi3_mini": (32, 32, 96, 96, None, None),
    "dim112": (32, 8, 112, 112, None, None),
    "gemma2_9b": (16, 8, 256, 256, 50.0, None),
    "gemma2_9b_window": (16, 8, 256, 256, 50.0, 4096),
    "gemma3_12b": (16, 8, 256, 256, None, None),
    "gemma3_12b_window": (16, 8, 256, 256, None, 1024),
    "gemma_2b": (8, 1, 256, 256, None, None),
    "mla_materialised": (16, 16, 192, 128, None, None),
}
EIGHT_BITS = ("llama8b", "qwen30b_a3b", "gpt_oss", "llama70b_tp8", "gemma3_12b")
MIXED = ((1, 4096),) * 32 + ((2048, 2048), (2048, 6144))
SHORT_MIXED = tuple((1, 100 + 41 * i % 900) for i in range(60)) + ((700, 700), (300, 1500))
LONG_MIXED = tuple((1, n) for n in (900, 16000, 3000, 30000, 700, 12000, 5000, 8000) * 4)
LONG_MIXED += ((512, 9000), (512, 512), (1024, 3000))
TINY = tuple((1, 50 + 37 * i % 751) for i in range(512))
PROMPTS = tuple((n, n) for n in (3001, 517, 1800, 64, 2222, 130, 905, 4000))


def decodes(count: int, length: int) -> tuple:
    """`count` requests of one new token, of lengths within a tenth of `length`."""
    return tuple((1, length - 7 * i % max(length // 10, 1)) for i in range(count))


def ragged(count: int, least: int, most: int) -> tuple:
    """`count` requests of one new token, of lengths from `least` to below `most`."""
    return tuple((1, least + 613 * i % (most - least)) for i in range(count))


def beside(long: int, keys: int, short: int, least: int, most: int, new: int = 1) -> tuple:
    """`long` requests of `keys` keys, then `short` ones of lengths from `least` to below `most`; `new` tokens each."""
    lengths = [keys] * long + [least + 37 * i % (most - least) for i in range(short)]
    return tuple((new, length) for length in lengths)


def law(count: int, low: int, high: int) -> tuple:
    """`count` requests of one new token, of lengths from `low` to `high` that are even in the logarithm."""
    return tuple((1, int(low * (high / low) ** (i * 0.618034 % 1))) for i in range(count))


def prompt(length: int, count: int = 1) -> tuple:
    """`count` prompts."""
    return ((length, length),) * count


CLASSES: tuple[tuple[Any, ...], ...] = (  # name, model, lengths, page[, 8 bits[, layout]]
    ("pre_1x512", "llama8b", prompt(512), 16),
    ("dec_1x300", "llama8b", decodes(1, 300), 16),
    ("dec_4x500", "llama8b", decodes(4, 500), 16),
    ("dec_512_tiny", "llama8b", TINY, 16),
    ("pre_1x4k_d256_softcap", "gemma2_9b", prompt(4096), 16),
    ("pre_ragged", "llama8b", PROMPTS, 16),
    ("chunk_512_of_64k", "llama8b", ((512, 65536),), 16),
    ("pre_1x8k_d192_v128", "mla_materialised", prompt(8192), 16),
    ("pre_1x4k_d64", "gpt_oss", prompt(4096), 16),
    ("pre_1x4k_d96", "phi3_mini", prompt(4096), 16),
    ("pre_1x8k_fp8", "llama8b", prompt(8192), 16, True),
    ("mixed_32d_2p_fp8", "llama8b", MIXED, 16, True),
    ("pre_1x4k_d256", "gemma3_12b", prompt(4096), 64),
    ("mixed_d256", "gemma3_12b", MIXED, 64),
    ("pre_1x8k", "llama8b", prompt(8192), 16),
    ("mixed_32d_2p", "llama8b", MIXED, 16),
    ("dec_64x4k", "llama8b", ((1, 4096),) * 64, 16),
    ("mixed_d256_fp8", "gemma3_12b", MIXED, 64, True),
    ("dec_16x32k", "llama8b", ((1, 32768),) * 16, 16),
    ("pre_1x128", "llama8b", prompt(128), 16),
    ("pre_1x256", "llama8b", prompt(256), 16),
    ("pre_1x768", "llama8b", prompt(768), 16),
    ("pre_1x1k", "llama8b", prompt(1024), 16),
    ("pre_1x2k", "llama8b", prompt(2048), 64),
    ("pre_1x512_d64", "gpt_oss", prompt(512), 16),
    ("pre_1x512_mha", "mha13b", prompt(512), 16),
    ("pre_1x512_tp8", "llama70b_tp8", prompt(512), 16),
    ("pre_1x1k_tp8", "llama70b_tp8", prompt(1024), 16),
    ("pre_1x512_cap", "gemma2_9b", prompt(512), 16),
    ("pre_8x512", "llama8b", prompt(512, 8), 16),
    ("pre_16x256", "qwen7b", prompt(256, 16), 16),
    ("pre_ragged_d64", "gpt_oss", PROMPTS, 64),
    ("pre_ragged_d256", "gemma3_12b", PROMPTS, 64),
    ("dec_1x500_kv4", "qwen30b_a3b", decodes(1, 500), 16),
    ("dec_2x400_d64", "gpt_oss", decodes(2, 400), 16),
    ("dec_3x450_tp8", "llama70b_tp8", decodes(3, 450), 16),
    ("dec_4x400_d256", "gemma3_12b", decodes(4, 400), 16),
    ("dec_1x1k", "llama8b", decodes(1, 1000), 16),
    ("dec_1x2k", "llama8b", decodes(1, 2000), 16),
    ("dec_8x600", "llama8b", decodes(8, 600), 16),
    ("dec_32x600", "llama8b", decodes(32, 600), 16),
    ("dec_4_ragged", "llama8b", ragged(4, 700, 1500), 16),
    ("dec_16_ragged", "llama8b", ragged(16, 300, 900), 16),
    ("dec_32_ragged", "llama8b", ragged(32, 450, 750), 16),
    ("dec_32_ragged_d64", "gpt_oss", ragged(32, 450, 750), 64),
    ("dec_32_long_ragged", "llama8b", ragged(32, 100, 4000), 16),
    ("dec_32_long_ragged_fp8", "llama8b", ragged(32, 100, 4000), 16, True),
    ("dec_60_ragged_kv4", "qwen7b", ragged(60, 200, 1500), 16),
    ("dec_long_and_short", "llama8b", beside(3, 20000, 40, 300, 800), 16),
    ("dec_long_and_tiny", "llama8b", beside(5, 32000, 200, 100, 300), 16),
    ("dec_long_and_tiny_d64", "gpt_oss", beside(5, 32000, 200, 100, 300), 16),
    ("dec_long_and_short_kv4", "qwen7b", beside(3, 32000, 60, 100, 500), 16),
    ("dec_long_and_short_fp8", "llama8b", beside(3, 16000, 30, 200, 600), 16, True),
    ("dec_long_and_short_d256", "gemma3_12b", beside(3, 16000, 30, 200, 600), 16),
    ("spec_4_long_and_short", "llama8b", beside(3, 32000, 40, 100, 500, new=4), 16),
    ("mixed_long_and_short", "llama8b", (*beside(3, 32000, 40, 100, 500), (700, 700)), 16),
    ("mixed_200d_chunk_of_30k", "llama8b", (*decodes(200, 500), (2048, 30000)), 16),
    ("mixed_200d_chunk_of_30k_d64", "gpt_oss", (*decodes(200, 500), (2048, 30000)), 16),
    ("mixed_100d_chunk_tp8", "llama70b_tp8", (*law(100, 200, 12000), (1024, 9000)), 16),
    ("mixed_150d_prompts_tp8", "llama70b_tp8", (*law(150, 50, 800), (119, 137), (2740, 2747), (612, 830)), 16),
    ("mixed_42d_2p_d256", "gemma3_12b", (*law(42, 50, 4000), (815, 5910), (345, 346)), 64),
    ("mixed_150d_chunk_window4k_d256", "gemma2_9b_window", (*law(150, 50, 470), (1805, 23723)), 16),
    ("mixed_90d_chunk_d64_fp8", "gpt_oss", (*law(90, 50, 220), (88, 23137)), 64, True),
    ("mixed_120d_chunk_fp8", "llama8b", (*law(120, 50, 400), (100, 20000)), 16, True),
    ("mixed_70d_chunks_fp8", "llama8b", (*law(70, 100, 3000), (40, 8000), (200, 1200), (77, 30000)), 16, True),
    ("mixed_42d_2p_d256_fp8", "gemma3_12b", (*law(42, 50, 4000), (815, 5910), (345, 346)), 64, True),
    ("pre_4x2k_mha", "mha13b", prompt(2000, 4), 16),
    ("pre_ragged_d80", "phi2", PROMPTS, 16),
    ("pre_ragged_d96", "phi3_mini", PROMPTS, 16),
    ("chunks_64x32_tp8", "llama70b_tp8", tuple((32, n) for _, n in law(64, 200, 20000)), 16),
    ("dec_512_tiny_d64", "gpt_oss", TINY, 16),
    ("dec_512_tiny_tp8", "llama70b_tp8", TINY, 16),
    ("dec_300_tiny_kv4", "qwen7b", TINY[:300], 16),
    ("dec_256_tiny_fp8", "llama8b", TINY[:256], 16, True),
    ("chunk_128_of_16k", "llama8b", ((128, 16384),), 16),
    ("chunk_256_of_32k_tp8", "llama70b_tp8", ((256, 32768),), 16),
    ("chunk_1k_of_100k", "qwen30b_a3b", ((1024, 100_000),), 64),
    ("chunk_512_of_64k_d64", "gpt_oss", ((512, 65536),), 16),
    ("chunk_512_of_32k_d256", "gemma3_12b", ((512, 32768),), 16),
    ("chunk_512_of_16k_d192", "mla_materialised", ((512, 16384),), 64),
    ("chunk_512_of_32k_fp8", "llama8b", ((512, 32768),), 16, True),
    ("mixed_short", "llama8b", SHORT_MIXED, 16),
    ("mixed_short_d64", "gpt_oss", SHORT_MIXED, 16),
    ("mixed_tp8", "llama70b_tp8", MIXED, 16),
    ("mixed_short_fp8", "llama8b", SHORT_MIXED, 16, True),
    ("mixed_tp8_fp8", "llama70b_tp8", MIXED, 16, True),
    ("mixed_d64_fp8", "gpt_oss", MIXED, 16, True),
    ("mixed_g8_fp8", "qwen30b_a3b", MIXED, 32, True),
    ("mixed_long_fp8", "llama8b", LONG_MIXED, 64, True),
    ("mixed_spec_fp8", "llama8b", ((3, 4096),) * 32 + MIXED[32:], 16, True),
    ("pre_ragged_fp8", "llama8b", PROMPTS, 16, True),
    ("pre_1x4k_d64_fp8", "gpt_oss", prompt(4096), 16, True),
    ("spec_4_of_32x2k", "llama8b", tuple((4, n) for _, n in decodes(32, 2000)), 16),
    ("spec_9_of_16x3k_d64", "gpt_oss", tuple((9, n) for _, n in decodes(16, 3000)), 16),
    ("spec_2_of_128x500", "qwen7b", tuple((2, n) for _, n in decodes(128, 500)), 16),
    ("spec_5_of_8x8k_mha", "mha13b", tuple((5, n) for _, n in decodes(8, 4000)), 16),
    ("dec_64x4k_window128", "gpt_oss_window", decodes(64, 4096), 16),
    ("pre_1x8k_window128", "gpt_oss_window", prompt(8192), 16),
    ("pre_1x16k_window4k", "mistral_window", prompt(16384), 16),
    ("dec_32x8k_window1k_d256", "gemma3_12b_window", decodes(32, 8192), 16),
    ("pre_1x8k_window1k_d256", "gemma3_12b_window", prompt(8192), 16),
    ("dec_32x4k_cap_d256", "gemma2_9b", decodes(32, 4096), 16),
    ("pre_1x8k_cap_window_d256", "gemma2_9b_window", prompt(8192), 16),
    ("pre_1x4k_cap30", "grok", prompt(4096), 16),
    ("dec_32x2k_d80", "phi2", decodes(32, 2000), 16),
    ("pre_1x4k_d80", "phi2", prompt(4096), 16),
    ("dec_32x4k_d112", "dim112", decodes(32, 4000), 16),
    ("pre_1x4k_d112", "dim112", prompt(4096), 16),
    ("dec_32x2k_d96", "phi3_mini", decodes(32, 2000), 16),
    ("dec_32x2k_d192", "mla_materialised", decodes(32, 2000), 64),
    ("dec_16x4k_mqa_d256", "gemma_2b", decodes(16, 4096), 16),
    ("pre_1x4k_mqa_d256", "gemma_2b", prompt(4096), 16),
    ("dec_32x4k_mqa71", "falcon7b", decodes(32, 4096), 16),
    ("pre_1x4k_mqa71", "falcon7b", prompt(4096), 16),
    ("dec_32x4k_kv2", "glm4", decodes(32, 4096), 16),
    ("dec_48x3k_group9", "starcoder2_7b", decodes(48, 3000), 16),
    ("dec_16x4k_fp8", "llama8b", decodes(16, 4096), 16, True),
    ("dec_32x4k_fp8_d64", "gpt_oss", decodes(32, 4096), 16, True),
    ("dec_32x2k_p32", "llama8b", decodes(32, 2000), 32),
    ("dec_32x2k_p48", "llama8b", decodes(32, 2000), 48),
    ("dec_32x2k_p128_nhd", "llama8b", decodes(32, 2000), 128, False, "NHD"),
    ("dec_32x2k_p256", "llama8b", decodes(32, 2000), 256),
    ("pre_1x4k_p48", "llama8b", prompt(4096), 48),
    ("pre_1x4k_p32_nhd", "llama8b", prompt(4096), 32, False, "NHD"),
    ("pre_1x4k_p256", "llama8b", prompt(4096), 256),
)
VARIANTS = (  # case, fields of the config that the policy would choose otherwise
    ("dec_1x300", dict(block_kv=128, stages=2)),
    ("dec_512_tiny", dict(block_kv=128, stages=2)),
    ("dec_512_tiny_d64", dict(block_kv=128, stages=3)),
    ("pre_ragged", dict(whole_units=True)),
    ("pre_ragged_d256", dict(whole_units=True)),
)


def case_of(
    name: str, model: str, lengths: tuple, page: int, eight_bits: bool = False, layout: str = "HND"
) -> cases.KernelCase:
    """A batch of a model in MODELS."""
    heads, kv_heads, dim, v_dim, cap, window = MODELS[model]
    options = (("soft_cap", cap),) if cap else ()
    options += (("window", window),) if window else ()
    options += (("layout", layout),) if layout != "HND" else ()
    return cases.KernelCase(
        name=name, lengths=lengths, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, page=page,
        kv_dtype="float8_e4m3fn" if eight_bits else "bfloat16", options=options,
    )  # fmt: skip


def lengths_of(kind: str, rng: np.random.Generator) -> tuple:
    """(q_len, seq_len) of each request of a drawn batch."""
    log = lambda low, high, *size: np.exp(rng.uniform(np.log(low), np.log(high), size)).astype(int)
    if kind == "prefill":
        n = int(log(128, 16384, 1)[0])
        return ((n, n),)
    if kind == "prefills":
        return tuple((int(n), int(n)) for n in log(64, 4096, int(rng.integers(2, 13))))
    if kind == "chunk":
        new, old = int(log(128, 4096, 1)[0]), int(log(2048, 65536, 1)[0])
        return ((new, old + new),)
    if kind == "decode":
        count, top = int(log(1, 256, 1)[0]), int(log(256, 32768, 1)[0])
        return tuple((1, int(n)) for n in rng.integers(top // 4, top, count))
    if kind == "tiny":
        return tuple((1, int(n)) for n in log(16, 800, int(log(1, 512, 1)[0])))
    if kind == "spec":
        q_len, seqs = int(rng.integers(2, 9)), log(256, 16384, int(log(1, 64, 1)[0]))
        return tuple((q_len, int(n)) for n in seqs)
    decoding = tuple((1, int(n)) for n in log(200, 8192, int(rng.integers(4, 65))))
    return decoding + tuple((int(n), int(n + old)) for n, old in zip(log(200, 4096, 2), log(64, 8192, 2), strict=True))


def drawn(seed: int, number: int) -> cases.KernelCase:
    """Case `number` of a seed: the same whatever was drawn before it."""
    rng = np.random.default_rng((seed, number))
    model = str(rng.choice(list(MODELS)))
    kind = str(rng.choice(("prefill", "prefills", "chunk", "decode", "tiny", "spec", "mixed")))
    page, eight_bits = int(rng.choice((16, 32, 48, 64, 128, 256))), model in EIGHT_BITS and rng.random() < 0.3
    lengths = lengths_of(kind, rng)
    name = f"{seed}.{number}_{kind}_{model}_p{page}{'_fp8' * eight_bits}"
    case = case_of(name, model, lengths, page, eight_bits, str(rng.choice(("HND", "NHD"))))
    if case.read_bytes() <= MOST_KEYS:
        return case
    return dataclasses.replace(case, lengths=lengths[: max(1, int(len(lengths) * MOST_KEYS / case.read_bytes()))])
