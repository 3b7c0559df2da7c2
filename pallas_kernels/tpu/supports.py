"""What the TPU attention kernel cannot serve: `supports` gives every reason. Each list names what it can.

The limits are those of the compiler and of the chips' data sheets. The kernel was compiled for four generations and
never ran on one.
"""

from pallas_kernels.algebra.checks import Reasons, Subject, unlisted_fields
from pallas_kernels.tpu.config import LANES, LATENT_FORMS, TpuKernelConfig
from pallas_kernels.tpu.functions import function_reasons
from pallas_kernels.tpu.work_list import fields_of

MASKS = ("causal", "left", "right", "chunk", "lookback", "spans", "clamp_spans", "mask_fn")
LOGITS = ("scale", "soft_cap", "has_alibi", "alibi_sqrt", "score_fn")
"""Fields of a MaskRule and of a LogitRule that it honours."""

QUERY_DTYPES = ("bfloat16", "float32")
KV_DTYPES = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
MIB = 1 << 20
VMEM = {"v5e": 128 * MIB, "v6e": 128 * MIB, "v5p": 64 * MIB, "tpu7x": 64 * MIB}  # bytes a core
NAMES = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU v5": "v5p",
         "TPU v5p": "v5p", "TPU7x": "tpu7x", "TPU v7x": "tpu7x"}  # fmt: skip
"""Generation of each device_kind that JAX reports."""

SMEM = MIB - 64 * 1024  # bytes a core, less what the compiler reserves
SPILL = 16 * MIB  # bytes of VMEM requested beside the scratch, for registers that spill in the body of many rows


def generation_of(chip: str) -> str:
    """'v6e' for 'TPU v6 lite' and for 'v6e'; '' for ''."""
    return NAMES.get(chip, chip)


def reasons_of_chip(chip: str) -> Reasons:
    """Why nothing was compiled for a chip."""
    reasons, name = Reasons(), generation_of(chip)
    reasons.refuse(bool(name) and name not in VMEM, f"chip {chip}: compiled for {', '.join(VMEM)} only")
    return reasons


def supports(config: TpuKernelConfig, *, chip: str = "") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can. chip '': the smallest limits."""
    c, name, reasons = config, generation_of(chip), reasons_of_chip(chip)
    refuse = reasons.refuse
    refuse(c.dtype not in QUERY_DTYPES, f"q dtype {c.dtype}: wanted bfloat16 or float32")
    refuse(c.kv_dtype not in KV_DTYPES, f"kv dtype {c.kv_dtype}: wanted one of {', '.join(KV_DTYPES)}")
    refuse(c.out_dtype not in (c.dtype, "float32"), f"out dtype {c.out_dtype}: wanted {c.dtype} or float32")
    refuse(c.num_heads % c.num_kv_heads != 0, f"{c.num_heads} heads are not a multiple of {c.num_kv_heads} kv heads")
    refuse(c.group > 128, f"{c.group} query heads on one kv head: at most 128")
    _refuse_dims(c, refuse)
    page = c.page_size
    fits = page % 16 == 0 and 16 <= page <= 256
    refuse(not fits, f"page size {page}: wanted a multiple of 16 from 16 to 256", Subject.PAGE_SIZE)
    refuse(c.layout not in ("HND", "NHD", "HND128"), f"layout {c.layout}: wanted HND, NHD or HND128")
    if c.layout == "HND128":
        rows = page * c.head_dim // LANES
        wanted = c.head_dim in (16, 32, 64) and c.head_dim == c.v_head_dim and rows % 8 == 0 and rows > 0
        refuse(
            not wanted,
            f"layout HND128, head_dim {c.head_dim}, page size {page}: wanted 16, 32 or 64, and pages of whole 8 rows",
            Subject.PAGE_SIZE,
        )
        refuse(
            c.qq_bias or c.token_scales, "qq_bias or scales of tokens in the layout HND128: its keys are out of order"
        )
    refuse(
        c.token_scales and c.layout == "NHD",
        "scales of each token and head in the layout NHD: a page of them would be transposed; use HND",
    )
    refuse(
        c.qq_bias and c.shards.world > 1,
        "qq_bias with keys on several ranks: a row's biases lie side by side, its new tokens do not",
    )
    for seen in (*unlisted_fields(c.mask, MASKS), *unlisted_fields(c.logits, LOGITS)):
        refuse(True, f"{seen}: not in this kernel")
    reasons += function_reasons("mask_fn", c.mask.mask_fn, scored=False)
    reasons += function_reasons("score_fn", c.logits.score_fn, scored=True)
    room = VMEM.get(name, min(VMEM.values()))
    wanted = c.vmem_bytes() + SPILL
    seen = f"{wanted} bytes of VMEM ({c.num_kv_heads} kv heads)"
    refuse(wanted > room, f"{seen}; {name or 'the smallest chip'}: {room}", Subject.MEMORY)
    return reasons


def _refuse_dims(c: TpuKernelConfig, refuse):
    if not c.latent:
        for what, dim in (("head_dim", c.head_dim), ("v_head_dim", c.v_head_dim)):
            refuse(dim % 16 != 0 or not 16 <= dim <= 256, f"{what} {dim}: wanted a multiple of 16 from 16 to 256")
        return
    refuse(c.latent not in LATENT_FORMS, f"latent {c.latent}: wanted one of {', '.join(LATENT_FORMS)}")
    refuse(c.num_kv_heads != 1, f"{c.num_kv_heads} kv heads: rows of latents are shared by all heads")
    latent, rope = c.v_head_dim, c.head_dim - c.v_head_dim
    refuse(latent % LANES != 0 or not LANES <= latent <= 512, f"kv_lora_rank {latent}: wanted 128, 256, 384 or 512")
    refuse(rope % 16 != 0 or not 16 <= rope <= 128, f"qk_rope_head_dim {rope}: wanted a multiple of 16 from 16 to 128")


def smem_bytes(num_tokens: int, num_reqs: int, num_columns: int, config: TpuKernelConfig) -> int:
    """Bytes that are prefetched into SMEM: the block table, the tiles, the scales."""
    tiles = max(min(num_tokens, num_reqs + num_tokens // config.tile_tokens), 1)
    return 4 * (num_reqs * num_columns + len(fields_of(config)) * tiles + 2 * config.num_kv_heads + 1)


def supports_batch(
    num_tokens: int, num_reqs: int, num_columns: int, config: TpuKernelConfig, bias_tokens: int = 0
) -> list[str]:
    """Every reason why the kernel cannot serve a batch of these sizes. bias_tokens: Q of qq_bias [Q, Q]."""
    seen, most = smem_bytes(num_tokens, num_reqs, num_columns, config), config.bias_lanes
    found = [f"qq_bias of {bias_tokens} tokens: at most {most}, those of a part"] if bias_tokens > most else []
    if seen <= SMEM:
        return found
    return [
        *found,
        f"block_table of {num_reqs} x {num_columns} and {num_tokens} tokens: {seen} bytes of SMEM, there are {SMEM} on "
        "every generation; use larger pages, or fewer requests in a batch",
    ]
