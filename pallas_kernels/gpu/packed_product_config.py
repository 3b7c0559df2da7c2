"""PackedConfig: what all launches for packed matrices share; PackedProductConfig: one of packed_product_sm90.py."""

import dataclasses
import functools

from pallas_kernels.algebra.checks import Reasons

BLOCK = 32  # of the inner dimension: a thread has 8 consecutive inputs of each, a group of four threads all
EXPERT_ROWS = 16  # rows of x of a tile of an expert, at most
TILE_ROWS = 32  # of any other tile
MAX_WARPS, MAX_SPLITS = 16, 8  # of a CTA; CTAs of a cluster
SM_SHARED_BYTES = 227 * 1024  # of an SM
SHARED_BYTES = 224 * 1024  # of a CTA
COPIES = 4  # pieces of x that a thread copies at a time
BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # of a scale or a result
NVFP4, MXFP4 = ("fp4", 16, "float8_e4m3fn"), ("fp4", 32, "bfloat16")  # format, group, dtype of scales
MAX_ROWS = {4: 128, 8: 64}
"""By the bits of a code: rows up to which this kernel is faster than XLA's product with the dequantised matrix.

For gate and up of 8B these take 145 and 228 us for 128 rows of int4, 139 and 225 for 64 of fp8.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedConfig:
    """y = x w for matrices w of one form; hashable. Not checked: `supports` of each kernel says what it serves."""

    rows: int  # T, of the result; of tiles of experts: the rows that all of them have together
    inner: int
    widths: tuple[int, ...]  # columns of each matrix
    format: str  # of a QuantisedArray
    group: int  # inputs that share a scale
    scale_dtype: str
    has_zeros: bool = False
    has_factor: bool = False
    dtype: str = "float32"  # of y
    x_dtype: str = "bfloat16"

    @property
    def element(self) -> str:
        """The dtype of what is multiplied."""
        return self.x_dtype

    @property
    def strip(self) -> int:
        """Columns of a CTA."""
        raise NotImplementedError

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA."""
        raise NotImplementedError

    @property
    def filled_rows(self) -> int:
        """Rows of a tile that may be used."""
        return min(self.tile_rows, self.rows)

    @property
    def x_rows(self) -> int:
        return self.rows

    @property
    def joined_width(self) -> int:
        """Columns of y, in which the results of the matrices lie side by side."""
        return sum(self.widths)

    @property
    def first_strips(self) -> tuple[int, ...]:
        """The number of the first strip of each matrix."""
        counts = [-(-width // self.strip) for width in self.widths]
        return tuple(sum(counts[:i]) for i in range(len(counts)))

    @property
    def strips(self) -> int:
        """Strips of all matrices."""
        return sum(-(-width // self.strip) for width in self.widths)

    @property
    def is_whole(self) -> bool:
        """One scale for each column."""
        return self.group == self.inner

    @property
    def scales_codes(self) -> bool:
        """Are codes multiplied by their scales, and the products by x?

        Those of NVFP4 are exact in 16 bits, and in bfloat16 those of MXFP4, whose scales are powers of two: see
        packed_codes_sm90.scale_pairs. Other bfloat16 scales of such groups give numbers that are rounded to bfloat16.
        """
        form = self.format, self.group, self.scale_dtype
        return form == NVFP4 or (form == MXFP4 and self.x_dtype == "bfloat16" and not self.is_whole)

    @property
    def scales_sums(self) -> bool:
        """Is the sum of each group multiplied by its scale?"""
        return not self.is_whole and not self.scales_codes

    @property
    def arrays(self) -> int:
        """Arrays of a matrix, in the order of packed_sums_sm90.Packed."""
        return 2 + self.has_zeros + self.has_factor

    @property
    def pitch(self) -> int:
        """Floats of a row of partial sums in shared memory; the 4 that are not used keep stores free of conflicts."""
        return self.strip + 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedProductConfig(PackedConfig):
    """A launch of packed_product_sm90.py."""

    experts: int = 0  # matrices [experts, inner, width], of which a tile of rows uses one; 0: matrices [inner, width]
    most_rows: int | None = None  # of an expert; None: not known
    has_full_tiles: bool = False  # the rows of each expert begin at a multiple of tile_rows
    tokens: int = 0  # x has so many rows, which are the first of every tile; 0: x has all rows
    unroll: int = 1  # blocks of a step
    depth: int = 1  # steps whose weights are in flight
    across: int = 4  # warps of a CTA side by side: each has other columns
    along: int = 1  # times so many: each has another part of the inner dimension
    splits: int = 1  # CTAs of a cluster, that share the inner dimension

    @property
    def columns(self) -> int:
        """Consecutive columns of one thread: 16 or 8 bytes of a row of codes."""
        return 4 if BITS[self.format] == 4 else 8

    @property
    def strip(self) -> int:
        """Columns of a CTA. A warp has eight groups of threads."""
        return 8 * self.across * self.columns

    @property
    def tiles(self) -> int:
        """Of rows; of experts the most that there can be."""
        if self.experts and self.has_full_tiles:
            return self.rows // self.tile_rows
        if self.experts:
            full = self.rows // EXPERT_ROWS if self.tile_rows == EXPERT_ROWS else 0  # others than an expert's last
            return min(self.rows, self.experts + full)
        return -(-self.rows // TILE_ROWS)

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA, which are columns of mma: a multiple of 8."""
        if self.experts:
            most = self.rows if self.most_rows is None else min(self.rows, self.most_rows)
            return min(-(-most // 8) * 8, EXPERT_ROWS)
        return -(-self.rows // (8 * self.tiles)) * 8

    @property
    def filled_rows(self) -> int:
        return min(self.tile_rows, self.rows, self.most_rows or self.rows)

    @property
    def x_rows(self) -> int:
        return self.tokens or self.rows

    @property
    def parts(self) -> int:
        """Of the inner dimension."""
        return self.along * self.splits

    @property
    def warpgroups(self) -> int:
        """Of a CTA."""
        return self.across * self.along // 4

    @property
    def chunks(self) -> int:
        """Steps of the loop over the inner dimension."""
        return self.inner // (BLOCK * self.unroll)

    @property
    def run(self) -> int:
        """Blocks of a step that have the same scales."""
        return min(self.unroll, self.group // BLOCK) if self.scales_sums else self.unroll

    @property
    def sum_floats(self) -> int:
        """Of the partial sums of a CTA."""
        return self.along * self.tile_rows * self.pitch

    @property
    def row_pieces(self) -> int:
        """Pieces of 8 inputs of a row of x that a CTA multiplies, at most."""
        return -(-self.chunks // self.splits) * self.unroll * BLOCK // 8

    @property
    def row_bytes(self) -> int:
        """From one row of x to the next in shared memory; an odd number of half lines keeps loads free of conflicts."""
        return -(-16 * self.row_pieces // 128) * 128 + 64

    @property
    def has_offset(self) -> bool:
        """Are the numbers of the codes too large by something that is taken off the sums?"""
        return self.has_zeros or self.format == "int4"

    @property
    def element(self) -> str:
        """The dtype of what is multiplied. One instruction decodes two codes of fp8 to float16, five to bfloat16."""
        return "float16" if self.format == "fp8" else self.x_dtype

    @property
    def becomes_float16(self) -> bool:
        """Are rows of bfloat16 multiplied as float16, which has fewer exponents?"""
        return self.x_dtype != self.element

    @property
    def has_numbers(self) -> bool:
        """Has each run of a row a number (packed_rows_sm90.py)?"""
        return self.becomes_float16 or self.has_offset

    @property
    def row_start(self) -> int:
        """Bytes of shared memory before the rows of x: of the sums, then of the numbers of each run."""
        runs = self.row_pieces // (4 * self.run)
        return 4 * (self.sum_floats + (runs * self.tile_rows if self.has_numbers else 0))

    @property
    def shared_floats(self) -> int:
        """Of a CTA."""
        return (self.row_start + self.filled_rows * self.row_bytes) // 4


def refuse_types(config: PackedConfig, reasons: Reasons) -> None:
    """Adds the reasons against types that no kernel serves."""
    c, refuse = config, reasons.refuse
    is_known = c.scale_dtype in ("float32", "bfloat16", "float16") or c.scales_codes
    refuse(not is_known, f"scales {c.scale_dtype}: wanted floats of 16 or 32 bits, or e4m3 of fp4 in groups of 16")
    refuse(c.dtype not in ("float32", "bfloat16", "float16"), f"results {c.dtype}: wanted floats of 16 or 32 bits")
    refuse(c.x_dtype not in ("bfloat16", "float16"), f"rows {c.x_dtype}: wanted floats of 16 bits")
    refuse(c.has_zeros and not c.format.startswith("int"), f"zero points of {c.format}: only integers have them")


def refuse_groups(config: PackedConfig, name: str, inputs: int, reasons: Reasons) -> None:
    """Adds the reasons against groups whose sums are scaled. name: of what takes so many inputs at a time."""
    c, refuse = config, reasons.refuse
    if c.scales_sums:
        refuse(c.inner % c.group != 0 or c.group % BLOCK != 0, f"groups of {c.group}: wanted multiples of {BLOCK}")
        nested = c.group % inputs == 0 or inputs % c.group == 0
        refuse(not nested, f"groups of {c.group}: a {name} of {inputs} inputs has parts of some")


def supports(config: PackedProductConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel was only built and measured for sm_90")
    refuse(c.format not in BITS, f"format {c.format}: wanted one of {', '.join(BITS)}")
    if reasons:
        return reasons
    refuse_types(c, reasons)
    refuse(c.inner % (BLOCK * c.unroll) != 0, f"inner {c.inner}: wanted a multiple of {BLOCK * c.unroll}")
    refuse_groups(c, "step", BLOCK * c.unroll, reasons)
    refuse(any(w % c.columns or not w for w in c.widths), f"widths {c.widths}: wanted multiples of {c.columns}")
    refuse(not 1 <= c.parts <= max(c.chunks, 1), f"{c.parts} parts of {c.chunks} steps")
    if not reasons:  # groups of less than a block have no runs
        refuse(4 * c.shared_floats > SHARED_BYTES, f"{4 * c.shared_floats} bytes of shared memory: too many")
    warps = c.across * c.along
    refuse(c.across not in (1, 2, 4, 8, 16) or warps % 4 != 0 or warps > MAX_WARPS, f"{c.across} x {c.along} warps")
    refuse(c.splits > MAX_SPLITS, f"{c.splits} CTAs of a cluster: too many")
    refuse(c.has_full_tiles and not c.experts, "full tiles: only those of experts are padded")
    refuse(c.tokens != 0 and not c.has_full_tiles, f"{c.tokens} tokens of every tile: wanted full tiles")
    if c.has_full_tiles and c.experts:
        refuse(c.rows % c.tile_rows != 0, f"{c.rows} rows of full tiles: wanted a multiple of {c.tile_rows}")
        refuse(not 0 <= c.tokens <= c.tile_rows, f"{c.tokens} tokens: wanted at most {c.tile_rows}, or 0")
    return reasons


WARPS = ((4, 2), (1, 8), (1, 16), (2, 8), (2, 4), (4, 4), (8, 2), (16, 1))
"""Side by side, and along the inner dimension. With 16 rows a thread needs more than 128 registers unless its CTA has
512 threads. Of 8-bit codes two warps side by side read 128 bytes of a row; one of eight alone was slower."""


@functools.lru_cache(maxsize=4096)
def choose(processors: int, *, chip: str = "sm_90", **fields) -> PackedProductConfig | None:
    """The config of these sizes that is the fastest by `cost`; None where the kernel does not serve them."""
    base = PackedProductConfig(**fields)
    for unroll in (2, 1) if BITS.get(base.format) == 4 else (1,):
        best = min(_ways(base, unroll, chip), key=lambda way: cost(way, processors), default=None)
        if best is not None:
            return best
    return None


def _ways(base: PackedProductConfig, unroll: int, chip: str):
    """Every division of the work that the kernel serves. More than 8 rows need CTAs of MAX_WARPS if these fit."""
    every = [_divided(base, unroll, *warps, splits) for warps in WARPS for splits in range(1, MAX_SPLITS + 1)]
    is_slow = lambda way: BITS.get(way.format) == 8 and (way.across, way.along) == (1, 8)
    served = [way for way in every if not is_slow(way) and not supports(way, chip=chip)]
    largest = [way for way in served if way.across * way.along == MAX_WARPS]
    return largest if base.tile_rows == 16 or base.tile_rows > 16 and largest else served


def _divided(base: PackedProductConfig, unroll: int, across: int, along: int, splits: int) -> PackedProductConfig:
    """One division of the work, with as many steps in flight as a thread has registers for.

    Up to 8 steps, short code matters more, as it is read from memory, too: one step, unless 4 blocks are all.
    """
    way = dataclasses.replace(base, unroll=unroll, across=across, along=along, splits=splits)
    depth = {8: 8, 16: 6}.get(base.tile_rows, 4) // unroll if BITS.get(base.format) == 4 else 1
    steps = -(-way.chunks // way.parts)
    if steps <= 8 and steps * unroll > 4:
        depth = min(depth, 2 // unroll)
    return dataclasses.replace(way, depth=max(1, min(depth, steps)))


READ_RATE, SM_RATE = 3.75e6, 26e3
"""Bytes a microsecond: of all CTAs with up to 8 rows; of the one CTA of an SM with 16, which has much to multiply."""
ROUND, START, TURN, NEEDED_WARPS = 2.0, 1.4, 0.3, 1600
CLUSTER, PEER, PEER_ROW = 0.4, 0.1, 0.01  # of a cluster of CTAs; of each after the first; of each of its rows


def cost(config: PackedProductConfig, processors: int) -> float:
    """About the microseconds of a launch, without what all launches need; measured on an H200.

    With few rows memory is shared by all CTAs that run, so what counts is that they run in few rounds. Clusters of more
    than two CTAs do not fit on every SM: some groups of SMs have an odd number.
    """
    c = config
    warps, shared = c.across * c.along, 4 * c.shared_floats + 1024
    slots = min(MAX_WARPS // warps, SM_SHARED_BYTES // shared)
    usable = processors * slots * (5 if c.splits <= 2 else 4) // 5
    ctas = c.strips * c.tiles * c.splits
    rounds = -(-c.strips * c.tiles // max(usable // c.splits, 1))
    of_cta = c.strip * c.inner * BITS[c.format] / 8 / c.splits
    turns = -(-c.filled_rows * c.row_pieces // (32 * warps * COPIES))
    peer = PEER + PEER_ROW * c.filled_rows
    small = CLUSTER * (c.splits > 1) + peer * (c.splits - 1) + 0.02 * c.parts
    if c.tile_rows >= 16:
        again = c.along**0.2 if c.tile_rows > 16 else 1.0  # each part of the inner dimension has sums of its own
        return rounds * (of_cta / SM_RATE * c.tile_rows / 16 + START + TURN * turns) * again + small
    read = of_cta * ctas / READ_RATE / min(1.0, ctas / processors) ** 0.5
    read /= min(1.0, min(ctas, processors * slots) * warps / NEEDED_WARPS)
    return read + (rounds - 1) * ROUND / slots + 0.2 / slots + rounds * TURN * turns + small
