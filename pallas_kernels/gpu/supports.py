"""What the Hopper attention kernel cannot serve: `supports` gives every reason. Each list names what it can."""

from pallas_kernels.algebra.checks import Reasons, Subject, unlisted_fields
from pallas_kernels.gpu.config import FP8, KV_DTYPES_8BIT, SMEM_LIMIT, GpuKernelConfig
from pallas_kernels.gpu.rows_sm90 import swizzle_bytes

MASKS = ("causal", "left", "right", "chunk", "lookback", "spans", "clamp_spans", "mask_fn")
"""The fields of a MaskRule that it honours."""

LOGITS = ("scale", "soft_cap", "has_alibi", "score_fn")
"""The fields of a LogitRule that it honours."""

QUERY_DTYPES = ("bfloat16", "float16")
COPY_ROWS = 8
"""Rows of a piece of shared memory that TMA fills and wgmma reads: a copy of keys begins and ends at one."""


def supports(config: GpuKernelConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    reasons += shape_reasons(c)
    page = f"page size {c.page_size}: wanted a multiple of {COPY_ROWS}"
    refuse(c.page_size % COPY_ROWS != 0, page, Subject.PAGE_SIZE)
    narrow = c.narrow_rows
    refuse(narrow not in (0, 8, 16), f"narrow_rows {narrow}: wanted 0, 8 or 16")
    block = 128 // max(c.pipelines, 1)
    refuse(bool(narrow) and c.block_kv != block, f"narrow_rows {narrow}: block_kv is {c.block_kv}, wanted {block}")
    if narrow and c.has_long_tiles:
        refuse(not c.quantised, f"narrow_rows {narrow} beside long tiles with a {c.kv_dtype} cache: wanted 8 bits")
        refuse(c.q_buffers != 1, f"narrow_rows {narrow} beside long tiles with {c.q_buffers} q_buffers: wanted 1")
        refuse(c.computing != 2, f"narrow_rows {narrow} with three warpgroups that compute: wanted two")
    refuse(c.pipelines not in (1, 2), f"pipelines {c.pipelines}: wanted 1 or 2")
    refuse(c.computing not in (2, 3), f"computing {c.computing}: wanted 2 or 3")
    if c.computing == 3:
        refuse(not c.has_long_tiles, "three warpgroups that compute: wanted long_tiles and one pipeline")
        rounded = f"compute_dtype {c.compute_dtype}"
        refuse(c.compute_dtype is not None, f"three warpgroups that compute with {rounded}: wanted two")
        widest, block = (128, 64) if c.quantised else (64, 128)  # beyond, registers are lacking
        fits = c.head_dim <= widest and c.block_kv <= block
        seen = f"heads of {c.head_dim} in blocks of {c.block_kv}"
        refuse(not fits, f"three warpgroups that compute with {seen}: wanted at most {widest} and {block}")
    if c.weights_first:
        refuse(not c.has_long_tiles, "weights_first: wanted long_tiles and one pipeline")
        refuse(c.token_scales, "weights_first with scales of tokens: wanted one of them")
        refuse(c.compute_dtype is not None, f"weights_first with compute_dtype {c.compute_dtype}: wanted one of them")
        refuse(c.fixed_max, "weights_first with fixed_max: wanted one of them")
        refuse(
            c.v_head_dim > 192, f"weights_first with v_head_dim {c.v_head_dim}: wanted at most 192, for its registers"
        )
    refuse(c.pipelines == 2 and c.converts_tiles, f"two pipelines with a {c.kv_dtype} cache: wanted narrow_rows")
    refuse(c.pipelines == 2 and c.token_scales, "two pipelines with scales of tokens: wanted one")
    wide = f"two pipelines with heads of {c.head_dim}: wanted at most 128, or narrow_rows"  # 128 registers compile
    refuse(c.pipelines == 2 and c.head_dim > 128 and not narrow, wide)
    refuse(c.stages < c.pipelines, f"{c.stages} stages for {c.pipelines} pipelines: wanted at least {c.pipelines}")
    refuse(c.stages % c.pipelines != 0, f"{c.stages} stages for two pipelines: wanted an even number")
    refuse(
        c.fixed_max and not c.can_fix_max, "fixed_max: wanted a soft cap of at most 55, bfloat16, nothing else added"
    )
    has_either = narrow > 0 or c.token_scales
    refuse(c.last_block_first and has_either, "last_block_first with narrow_rows or scales of tokens: wanted neither")
    refuse(c.fixed_max and narrow > 0, "fixed_max with narrow_rows: wanted one of them")
    refuse(c.compute_dtype not in (None, FP8), f"compute_dtype {c.compute_dtype}: wanted {FP8}")
    if c.compute_dtype is not None:
        refuse(c.kv_dtype != FP8, f"compute_dtype {c.compute_dtype} with a {c.kv_dtype} cache: wanted {FP8}")
        refuse(c.dtype != "bfloat16", f"compute_dtype {c.compute_dtype} with {c.dtype} queries: wanted bfloat16")
        refuse(c.token_scales, f"compute_dtype {c.compute_dtype} with scales of tokens: wanted scales of heads")
        wide = f"compute_dtype {c.compute_dtype} with v_head_dim {c.v_head_dim}: wanted at most 128"
        refuse(c.v_head_dim > 128, wide)
        refuse(narrow > 0, f"compute_dtype {c.compute_dtype} with narrow_rows: wanted one of them")
    refuse(c.converts_tiles and c.block_kv not in (64, 128), f"blocks of {c.block_kv} keys of 8 bits: wanted 64 or 128")
    refuse(c.q_buffers not in (1, 2), f"q_buffers {c.q_buffers}: wanted 1 or 2")
    reasons += list_reasons(c)
    refuse(
        c.token_scales and c.block_kv not in (64, 128), f"token_scales with blocks of {c.block_kv}: wanted 64 or 128"
    )
    wanted = c.smem_bytes
    seen = f"{wanted} bytes of shared memory; there are {SMEM_LIMIT}"
    refuse(not reasons and wanted > SMEM_LIMIT, seen, Subject.MEMORY)
    return reasons


def list_reasons(config: GpuKernelConfig) -> Reasons:
    """The reasons against work lists that every GPU attention kernel has."""
    c, reasons = config, Reasons()
    has_pieces = c.piece_blocks != 0
    reasons.refuse(c.flat_list and c.long_tiles, "flat_list: wanted long_tiles=False")
    reasons.refuse(c.in_waves and not c.flat_list, "in_waves: wanted flat_list")
    reasons.refuse(c.in_waves and has_pieces, "in_waves with piece_blocks: wanted one of them")
    reasons.refuse(c.merges_inside and has_pieces, "merges_inside with piece_blocks: wanted one of them")
    return reasons


def shape_reasons(config: GpuKernelConfig) -> Reasons:
    """The reasons against dtypes, shapes, masks and logits that every GPU attention kernel has."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(c.dtype not in QUERY_DTYPES, f"q dtype {c.dtype}: tensor cores take bfloat16 or float16")
    refuse(c.result_dtype not in (c.dtype, "float32"), f"output dtype {c.out_dtype}: wanted {c.dtype} or float32")
    kv_dtypes = (c.dtype, *KV_DTYPES_8BIT)
    refuse(c.kv_dtype not in kv_dtypes, f"kv dtype {c.kv_dtype} with q {c.dtype}: wanted one of {', '.join(kv_dtypes)}")
    refuse(c.num_heads % c.num_kv_heads != 0, f"{c.num_heads} heads are not a multiple of {c.num_kv_heads} kv heads")
    refuse(c.group > 128, f"{c.group} query heads on one kv head: wanted at most 128")
    for name, dim in (("head_dim", c.head_dim), ("v_head_dim", c.v_head_dim)):
        refuse(dim % 16 != 0 or not 16 <= dim <= 256, f"{name} {dim}: wanted a multiple of 16 up to 256")
        thin = c.quantised and c.kv_dtype in KV_DTYPES_8BIT and swizzle_bytes(dim, c.kv_dtype) < 32
        refuse(thin, f"{name} {dim} with an 8-bit cache: wanted a multiple of 32")
    refuse(c.token_scales and not c.quantised, f"token_scales with a {c.kv_dtype} cache: wanted 8 bits")
    refuse(c.v_head_dim > c.head_dim, f"v_head_dim {c.v_head_dim} is larger than head_dim {c.head_dim}")
    for seen in (*unlisted_fields(c.mask, MASKS), *unlisted_fields(c.logits, LOGITS)):
        refuse(True, f"{seen}: not in this kernel")
    positional = c.qq_bias or c.logits.has_alibi or c.logits.score_fn is not None or c.mask.mask_fn is not None
    refuse(c.shards.world > 1 and c.mask.spans, "spans with keys on several ranks: not in this kernel")
    refuse(
        c.shards.world > 1 and positional,
        "qq_bias, ALiBi, mask_fn or score_fn with keys on several ranks",
    )
    refuse(c.layout not in ("HND", "NHD"), f"layout {c.layout}: wanted HND or NHD")
    return reasons
