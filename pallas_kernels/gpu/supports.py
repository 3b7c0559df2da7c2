"""What the Hopper kernel can do, asked before it is made, answered with every reason; and its default tiles."""

from pallas_kernels import tuning
from pallas_kernels.algebra.checks import unlisted_fields
from pallas_kernels.gpu.pieces_sm90 import Config
from pallas_kernels.gpu.rows_sm90 import ROWS, swizzle_bytes

MASKS = ("causal", "left", "right", "chunk", "mask_fn")  # fields of a MaskRule, and of a LogitRule, that it honours
LOGITS = ("scale", "soft_cap", "has_alibi", "score_fn")
EIGHT_BIT = ("float8_e4m3fn", "float8_e5m2", "int8")
SMEM_LIMIT = 232448 - 4096  # bytes a CTA may use on Hopper, less barriers and reduction scratch
SCALE_BYTES = 8  # of a key and its value, where each has its own
NARROW = True  # narrow_sm90 for 8-bit decode: 267 us where the tiles of 64 rows take 441 (dec_16x32k_fp8)
FLAT_LIST = True  # the flat work list for batches of few rows a request: 6.6 to 12 us where the ranked takes 27 to 42
FIXED_MAX = True  # no running maximum under a soft cap, where it can be: by itself it gains only 2 % of prefill
CAP_FOURTHS = 1  # with it: of every 4 scores so many are capped by FMA: prefill 927 us, with none 1009, with two 961


def smem_bytes(config: Config) -> int:
    """Shared memory of one CTA."""
    dims = config.head_dim + config.v_head_dim
    item = 1 if config.kv_dtype in EIGHT_BIT else 2
    work = 2 * config.block_kv * dims * 2 if config.quantised and not config.narrow_rows else 0
    key = dims * item + (SCALE_BYTES if config.token_scales else 0)
    queries = 2 * config.q_buffers * ROWS * config.head_dim * 2
    return queries + config.stages * config.block_kv * key + work + 2304


def default_tiles(
    head_dim: int,
    v_head_dim: int,
    kv_dtype: str,
    page_size: int,
    rows: int | None = None,
    narrow: bool = NARROW,
    token_scales: bool = False,
) -> dict[str, int]:
    """block_kv and stages: as measured (pallas_kernels/tuning), else by rule; and which kernel few rows get.

    rows: bound on the packed rows of every request, when it is known: few rows have tiles of their own.
    """
    found = rule_of_tiles(head_dim, v_head_dim, kv_dtype, page_size, rows, narrow, token_scales)
    if token_scales:  # not measured by themselves: they need shared memory of their own
        return found
    kind = "narrow" if "narrow_rows" in found else "long" if found.get("long_tiles", True) else "few"
    return found | tuning.tiles(head_dim=head_dim, v_head_dim=v_head_dim, kv_dtype=kv_dtype, kind=kind)


def rule_of_tiles(
    head_dim, v_head_dim, kv_dtype, page_size, rows=None, narrow=NARROW, token_scales=False
) -> dict[str, int]:
    """The larger block of 128 and 64 keys (8-bit: 64) of which two fit, in as many stages as fit: 3, or 5 of 8 bits."""
    eight = kv_dtype in EIGHT_BIT
    q_buffers = 2 if head_dim <= 192 else 1
    dims, queries = head_dim + v_head_dim, 2 * q_buffers * ROWS * head_dim * 2
    scale = SCALE_BYTES if token_scales else 0
    known = {} if q_buffers == 2 else {"q_buffers": q_buffers}
    known |= {} if rows is None else {"long_tiles": rows > ROWS, "flat_list": FLAT_LIST and rows <= ROWS}
    if narrow and eight and rows is not None and rows <= 16:
        stages = min((SMEM_LIMIT - queries - 2304) // (128 * (dims + scale)), 4)
        if stages >= 2:
            return {"block_kv": 128, "stages": stages, "narrow_rows": 8 if rows <= 8 else 16} | known
    for block in (64,) if eight else (128, 64):
        room = SMEM_LIMIT - queries - 2304 - (2 * block * dims * 2 if eight else 0)
        stages = min(room // (block * (dims * (1 if eight else 2) + scale)), 5 if eight else 3)
        if stages >= 2:
            break
    return {"block_kv": block, "stages": max(stages, 1)} | known  # if even one does not fit, `supports` says so


def supports(config: Config, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot do this; empty: it can."""
    c, reasons = config, []

    def refuse(when: bool, reason: str):
        if when:
            reasons.append(reason)

    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    refuse(c.dtype not in ("bfloat16", "float16"), f"q dtype {c.dtype}: tensor cores take bfloat16 or float16")
    known = (c.dtype, *EIGHT_BIT)
    refuse(c.kv_dtype not in known, f"kv dtype {c.kv_dtype} with q {c.dtype}: wanted one of {', '.join(known)}")
    refuse(c.num_heads % c.num_kv_heads != 0, f"{c.num_heads} heads are not a multiple of {c.num_kv_heads} kv heads")
    refuse(c.num_heads // c.num_kv_heads > 128, "more than 128 query heads on one kv head")
    for name, dim in (("head_dim", c.head_dim), ("v_head_dim", c.v_head_dim)):
        refuse(dim % 16 != 0 or not 16 <= dim <= 256, f"{name} {dim}: wanted a multiple of 16 up to 256")
        thin = c.quantised and c.kv_dtype in EIGHT_BIT and swizzle_bytes(dim, c.kv_dtype) < 32
        refuse(thin, f"{name} {dim} with an 8-bit cache: wanted a multiple of 32")
    refuse(c.v_head_dim > c.head_dim, f"v_head_dim {c.v_head_dim} is larger than head_dim {c.head_dim}")
    for seen in (*unlisted_fields(c.mask, MASKS), *unlisted_fields(c.logits, LOGITS)):
        refuse(True, f"{seen}: not in this kernel")
    page = c.page_size
    refuse(page < 8 or page & (page - 1) != 0, f"page size {page}: wanted a power of two of at least 8")
    refuse(c.layout not in ("HND", "NHD"), f"layout {c.layout}: wanted HND or NHD")
    narrow = c.narrow_rows
    refuse(narrow not in (0, 8, 16), f"narrow_rows {narrow}: wanted 0, 8 or 16")
    refuse(bool(narrow) and not c.quantised, f"narrow_rows {narrow} with a {c.kv_dtype} cache: wanted 8 bits")
    refuse(bool(narrow) and c.block_kv != 128, f"narrow_rows {narrow}: block_kv is {c.block_kv}, wanted 128")
    refuse(bool(narrow) and c.long_tiles, f"narrow_rows {narrow}: wanted long_tiles=False")
    refuse(
        c.fixed_max and not c.can_fix_max, "fixed_max: wanted a soft cap of at most 55, bfloat16, nothing else added"
    )
    refuse(c.cap_fourths not in range(5), f"cap_fourths {c.cap_fourths}: wanted 0 to 4")
    refuse(c.cap_fourths > 0 and not c.logits.soft_cap, f"cap_fourths {c.cap_fourths}: wanted a soft cap")
    refuse(c.cap_fourths > 0 and c.narrow_rows > 0, "cap_fourths with narrow_rows: wanted one of them")
    refuse(c.q_buffers not in (1, 2), f"q_buffers {c.q_buffers}: wanted 1 or 2")
    refuse(c.flat_list and c.long_tiles, "flat_list: wanted long_tiles=False")
    refuse(c.token_scales and not c.quantised, f"token_scales with a {c.kv_dtype} cache: wanted 8 bits")
    refuse(
        c.token_scales and c.block_kv not in (64, 128), f"token_scales with blocks of {c.block_kv}: wanted 64 or 128"
    )
    refuse(
        not reasons and smem_bytes(c) > SMEM_LIMIT, f"{smem_bytes(c)} bytes of shared memory; there are {SMEM_LIMIT}"
    )
    return reasons
