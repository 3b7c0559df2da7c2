"""What the TPU kernel can do, asked before it is made, answered with every reason; and its default sizes.

Limits are those of the compiler and of the chips' data sheets: the kernel was compiled for four generations, and
never run on one.
"""

from pallas_kernels.algebra.checks import unlisted_fields
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, PACK, Config
from pallas_kernels.tpu.work_list import FIELDS

MASKS = ("causal", "left", "right", "chunk")  # fields of a MaskRule, and of a LogitRule, that it honours
LOGITS = ("scale", "soft_cap", "has_alibi")
EIGHT_BIT = ("float8_e4m3fn", "float8_e5m2", "int8")
MIB = 1 << 20
VMEM = {"v5e": 128 * MIB, "v6e": 128 * MIB, "v5p": 64 * MIB, "tpu7x": 64 * MIB}  # bytes a core
NAMES = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU v5": "v5p",
         "TPU v5p": "v5p", "TPU7x": "tpu7x", "TPU v7x": "tpu7x"}  # fmt: skip
"""JAX's device kinds."""

SMEM = MIB - 64 * 1024  # bytes a core, less what the compiler keeps of it
SPILL = 16 * MIB  # asked for on top of the scratch: registers that spill in the long body
PAGES, ROWS = 24 * MIB, 16 * MIB  # what the pages and the rows of a tile may take of it


def generation_of(chip: str) -> str:
    """'v6e' from 'TPU v6 lite' or 'v6e'; an empty one stays."""
    return NAMES.get(chip, chip)


def default_config(*, longest: int | None = None, **fields) -> Config:
    """Config's fields, and for the sizes not given the largest that stay within their shares; not checked.

    longest: bound on the new tokens of every request. One token each: there is no long body at all.
    """
    config = Config(**fields)
    dims = sum(cdiv(dim, LANES) * LANES for dim in (config.head_dim, config.v_head_dim))
    heads, item = config.num_kv_heads, 4 if config.kv_dtype == "float32" else 1 if config.kv_dtype in EIGHT_BIT else 2
    page_bytes = lambda keys: 2 * keys * heads * dims * item
    row_bytes = lambda rows: heads * rows * (2 * dims * 4 + (dims + 2 * LANES) * 4)
    blocks, tiles = (1536, 1024, 512, 256, 128), (512, 256, 128)
    found = dict(
        block_kv=next((n for n in blocks if page_bytes(n) <= PAGES), blocks[-1]),
        tile_rows=next((n for n in tiles if row_bytes(n) <= ROWS), tiles[-1]),
    )
    if longest is not None:
        found |= _rows_for(longest * config.group, config, found["tile_rows"])
    return Config(**(found | fields))


def _rows_for(rows: int, config: Config, most: int) -> dict[str, int]:
    """tile_rows and chunk_rows of requests that have at most so many rows."""
    if rows <= config.few_rows:
        return dict(tile_rows=config.group)
    chunk = min(config.chunk_rows, cdiv(rows, PACK) * PACK)
    return dict(tile_rows=max(min(most, cdiv(rows, chunk) * chunk), config.group), chunk_rows=chunk)


def supports(config: Config, *, chip: str = "") -> list[str]:
    """Every reason why the kernel cannot do this; empty: it can. chip: '' takes the smallest generation's limits."""
    c, reasons, name = config, [], generation_of(chip)

    def refuse(when: bool, reason: str):
        if when:
            reasons.append(reason)

    refuse(bool(name) and name not in VMEM, f"chip {chip}: compiled for {', '.join(VMEM)} only")
    refuse(c.dtype not in ("bfloat16", "float32"), f"q dtype {c.dtype}: wanted bfloat16 or float32")
    kinds = ("bfloat16", "float32", *EIGHT_BIT)
    refuse(c.kv_dtype not in kinds, f"kv dtype {c.kv_dtype}: wanted one of {', '.join(kinds)}")
    refuse(c.num_heads % c.num_kv_heads != 0, f"{c.num_heads} heads are not a multiple of {c.num_kv_heads} kv heads")
    refuse(c.num_kv_heads > LANES, f"{c.num_kv_heads} kv heads: the lse has a lane for each of at most {LANES}")
    refuse(c.group > 128, f"{c.group} query heads on one kv head: at most 128")
    for what, dim in (("head_dim", c.head_dim), ("v_head_dim", c.v_head_dim)):
        refuse(dim % 16 != 0 or not 64 <= dim <= 256, f"{what} {dim}: wanted a multiple of 16 from 64 to 256")
    page = c.page_size
    refuse(page % 16 != 0 or not 16 <= page <= 256, f"page size {page}: wanted a multiple of 16 from 16 to 256")
    for seen in (*unlisted_fields(c.mask, MASKS), *unlisted_fields(c.logits, LOGITS)):
        refuse(True, f"{seen}: not in this kernel")
    room = VMEM.get(name, min(VMEM.values()))
    wanted = c.vmem_bytes() + SPILL
    refuse(wanted > room, f"{wanted} bytes of VMEM ({c.num_kv_heads} kv heads); {name or 'the smallest chip'}: {room}")
    return reasons


def smem_bytes(num_tokens: int, num_reqs: int, num_columns: int, config: Config) -> int:
    """What is fetched into SMEM before the kernel begins: the table, the tiles, the scales."""
    tiles = max(min(num_tokens, num_reqs + num_tokens // config.tile_tokens), 1)
    return 4 * (num_reqs * num_columns + len(FIELDS) * tiles + 2 * config.num_kv_heads + 1)


def supports_batch(num_tokens: int, num_reqs: int, num_columns: int, config: Config) -> list[str]:
    """Reasons that only a batch's sizes give."""
    seen = smem_bytes(num_tokens, num_reqs, num_columns, config)
    if seen <= SMEM:
        return []
    return [
        f"block_table of {num_reqs} x {num_columns} and {num_tokens} tokens: {seen} bytes of SMEM, there are {SMEM} on "
        "every generation; use larger pages, or fewer requests in a batch"
    ]
