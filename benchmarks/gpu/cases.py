"""The GPU kernel's benchmark cases by name, and small ragged batches for correctness."""

import dataclasses

import numpy as np

from pallas_kernels.algebra.mask import MaskRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A batch, (q_len, seq_len) for each request, and the GpuKernelConfig fields that it sets."""

    name: str
    lengths: tuple
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    page: int = 16
    kv_dtype: str = "bfloat16"
    pad_tokens: int = 0
    pad_reqs: int = 0
    options: tuple = ()  # (name, value) pairs: fields of GpuKernelConfig, or arguments of check.config_of

    @property
    def q_lens(self):
        return np.array([q for q, _ in self.lengths])

    @property
    def seq_lens(self):
        return np.array([s for _, s in self.lengths])

    def read_bytes(self) -> int:
        """Bytes that must be moved at least: every visible key and value once, q and out once."""
        item = 1 if self.kv_dtype in ("float8_e4m3fn", "float8_e5m2", "int8") else 2
        window = dict(self.options).get("window")
        seen = self.seq_lens if window is None else np.minimum(self.seq_lens, window + self.q_lens - 1)
        kv = int(seen.sum()) * self.num_kv_heads * (self.head_dim + self.v_head_dim) * item
        return kv + int(self.q_lens.sum()) * self.num_heads * (self.head_dim + self.v_head_dim) * 2

    def flops(self) -> int:
        """FLOP: pairs of a query and a key it sees (causal, in a window), times 2 (D + V), times heads."""
        window = dict(self.options).get("window", int(self.seq_lens.max()))
        pairs = sum(int(np.minimum(np.arange(s - q, s) + 1, window).sum()) for q, s in self.lengths)
        return pairs * self.num_heads * 2 * (self.head_dim + self.v_head_dim)


def _decode(n, length):
    return ((1, length),) * n


RAGGED = tuple((1, 128 * (37 * i % 97 + 1)) for i in range(64))
TIMED = [
    KernelCase(name="dec_64x4k", lengths=_decode(64, 4096)),
    KernelCase(name="dec_16x32k", lengths=_decode(16, 32768)),
    KernelCase(name="dec_1x128k", lengths=_decode(1, 131072)),
    KernelCase(name="dec_256x1k", lengths=_decode(256, 1024)),
    KernelCase(name="dec_ragged64", lengths=RAGGED),
    KernelCase(name="dec_8x1k", lengths=_decode(8, 1024)),
    KernelCase(name="dec_16x4k", lengths=_decode(16, 4096)),
    KernelCase(name="dec_1x32k", lengths=_decode(1, 32768)),
    KernelCase(name="dec_64x32k+window1024", lengths=_decode(64, 32768), options=(("window", 1024),)),
    KernelCase(name="pre_1x8k", lengths=((8192, 8192),)),
    KernelCase(name="pre_4x4k", lengths=((4096, 4096),) * 4),
    KernelCase(name="pre_1x32k", lengths=((32768, 32768),)),
    KernelCase(name="chunk_2k_of_32k", lengths=((2048, 32768),)),
    KernelCase(name="mixed_32d_2p", lengths=_decode(32, 4096) + ((2048, 2048), (2048, 6144))),
    KernelCase(name="dec_16x32k_fp8_p64", lengths=_decode(16, 32768), page=64, kv_dtype="float8_e4m3fn"),
    KernelCase(name="dec_16x32k_fp8", lengths=_decode(16, 32768), kv_dtype="float8_e4m3fn"),
]
FEATURES = {
    "window1024": (("window", 1024),),
    "softcap": (("soft_cap", 30.0),),
    "sinks": (("has_sinks", True),),
    "alibi": (("alibi", True),),
}
TIMED += [
    dataclasses.replace(case, name=f"{case.name}+{name}", options=options)
    for case in TIMED
    if case.name in ("dec_64x4k", "pre_1x8k")
    for name, options in FEATURES.items()
]
MIX = ((1, 700), (5, 133), (300, 300), (1, 1), (70, 515), (0, 0), (17, 2000), (129, 129), (2, 4096), (33, 1000))
TREES = ((16, 1000), (16, 130), (9, 4096), (16, 16), (1, 64))
SIZES = ((64, 64), (80, 80), (96, 96), (112, 112), (192, 128), (192, 192), (256, 256))
ALL = (
    ("mask", MaskRule(left=200, chunk=512)),
    ("soft_cap", 15.0),
    ("alibi", True),
    ("has_sinks", True),
    ("layout", "NHD"),
    ("kv_dtype", "float8_e4m3fn"),
)
CHECKED = [
    KernelCase(name="mix", lengths=MIX, pad_tokens=37, pad_reqs=3),
    KernelCase(name="mix_gqa1", lengths=MIX, num_heads=4, num_kv_heads=4, pad_tokens=5),
    KernelCase(name="mix_gqa7", lengths=MIX, num_heads=14, num_kv_heads=2, page=64),
    KernelCase(name="mix_mqa64", lengths=MIX, num_heads=64, num_kv_heads=1, page=8),
    KernelCase(name="mix_page256", lengths=MIX, page=256),
    KernelCase(name="mix_page48", lengths=MIX, page=48),
    KernelCase(name="mix_page40_fp8", lengths=MIX, page=40, kv_dtype="float8_e4m3fn"),
    KernelCase(name="mix_page3", lengths=MIX, page=3, pad_tokens=37),
    KernelCase(name="short_whole", lengths=((1, 300), (4, 512), (1, 1), (90, 200), (0, 0)), pad_tokens=37, pad_reqs=3),
    KernelCase(name="dec_whole", lengths=((1, 300), (2, 512), (1, 1), (1, 129), (0, 0)), pad_tokens=70, pad_reqs=3),
    KernelCase(name="mix_fp8", lengths=MIX, kv_dtype="float8_e4m3fn"),
    KernelCase(name="mix_e5m2", lengths=MIX, kv_dtype="float8_e5m2"),
    KernelCase(name="mix_int8", lengths=MIX, kv_dtype="int8"),
    KernelCase(name="mix_window", lengths=MIX, options=(("window", 100),)),
    KernelCase(name="mix_cap", lengths=MIX, options=(("soft_cap", 20.0), ("alibi", True), ("has_sinks", True))),
    KernelCase(name="mix_sinks", lengths=MIX, options=(("has_sinks", True),)),
    KernelCase(name="mix_alibi", lengths=MIX, options=(("alibi", True),)),
    KernelCase(name="mix_full", lengths=MIX, options=(("mask", MaskRule(causal=False)),)),
    KernelCase(name="mix_lr", lengths=MIX, options=(("mask", MaskRule(causal=False, left=77, right=30)),)),
    KernelCase(name="mix_chunk", lengths=MIX, options=(("mask", MaskRule(chunk=192)),)),
    KernelCase(name="mix_lookback", lengths=MIX, options=(("mask", MaskRule(chunk=80, lookback=2)),)),
    KernelCase(name="mix_whole", lengths=MIX, pad_tokens=37, options=(("whole_units", True), ("any_rows", True))),
    KernelCase(name="mix_spans", lengths=MIX, pad_tokens=37, options=(("mask", MaskRule(spans=True)),)),
    KernelCase(
        name="mix_clamped",
        lengths=MIX,
        options=(("mask", MaskRule(left=200, spans=True, clamp_spans=True)), ("kv_dtype", "float8_e4m3fn")),
    ),
    KernelCase(name="mix_qq", lengths=MIX, options=(("qq_bias", True), ("alibi", True))),
    KernelCase(name="tree_qq", lengths=TREES, options=(("qq_bias", True),)),
    KernelCase(
        name="dec_qq_fp8", lengths=((4, 700), (1, 3), (4, 4096)), kv_dtype="float8_e4m3fn", options=(("qq_bias", True),)
    ),
    KernelCase(
        name="dec_spans_fp8",
        lengths=((4, 700), (1, 3), (4, 4096)),
        kv_dtype="float8_e4m3fn",
        options=(("mask", MaskRule(spans=True)),),
    ),
    KernelCase(
        name="mix_mask_fn", lengths=MIX, options=(("mask", MaskRule(mask_fn=lambda h, q, k: (q + k + h) % 3 != 0)),)
    ),
    KernelCase(name="mix_score_fn", lengths=MIX, options=(("score_fn", lambda s, h, q, k: s * 0.5 + 0.01 * (k - q)),)),
    KernelCase(name="mix_percausal", lengths=MIX, options=(("per_request_causal", True),)),
    KernelCase(name="mix_all", lengths=MIX, num_heads=24, options=ALL),
    KernelCase(name="mix_nhd", lengths=MIX, options=(("layout", "NHD"),)),
    KernelCase(name="mix_f16", lengths=MIX, options=(("dtype", "float16"), ("kv_dtype", "float16"))),
    *(KernelCase(name=f"mix_d{d}_v{v}", lengths=MIX, head_dim=d, v_head_dim=v) for d, v in SIZES),
    *(
        KernelCase(name=f"mix_d{d}_fp8", lengths=MIX, head_dim=d, v_head_dim=d, kv_dtype="float8_e4m3fn", page=page)
        for d, page in ((64, 16), (192, 64))
    ),
    KernelCase(name="one_long", lengths=((1, 20000), (1, 3))),
]
