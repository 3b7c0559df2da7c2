"""PackedConfig: what all launches for packed matrices share; PackedProductConfig: one of packed_product_sm90.py."""

import dataclasses
import functools

from pallas_kernels.algebra.checks import Reasons

BLOCK = 32  # inputs of a block: a thread has 8 consecutive ones, four threads side by side have all
EXPERT_ROWS = 16  # rows of a tile of an expert, at most
TILE_ROWS = 32  # rows of any other tile, at most
MAX_WARPS = 16  # of a CTA, and of an SM, as a thread has up to 128 registers
MAX_SPLITS = 8  # CTAs of a cluster
SM_SHARED_BYTES = 227 * 1024  # of the CTAs of an SM, each with 1 KiB that Mosaic adds
SHARED_BYTES = 224 * 1024  # of a CTA
PIECE_BYTES = 16  # of a piece, which one instruction of a thread copies
STEPS = 1, 2, 4, 8  # blocks of a step: the lanes of a warp exchange what they have of the inputs of a run
COPIES = 4  # pieces of x, of 8 inputs, that a thread copies in a turn: it loads all before it stores the first
BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # of a scale or a result
NVFP4, MXFP4 = ("fp4", 16, "float8_e4m3fn"), ("fp4", 32, "bfloat16")  # format, group, dtype of scales
MAX_ROWS = {4: 128, 8: 64}
"""By the bits of a code: rows up to which this kernel is faster than XLA's product with the dequantised matrix.

jattn/ops/product.py applies them, not `choose`: mixtures of experts have limits of their own. For gate and up of 8B the
two take 145 and 228 us for 128 rows of int4, 139 and 225 for 64 of fp8.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedConfig:
    """y = x w for matrices w of one form; hashable. Not checked: `supports` of each kernel says what it serves."""

    rows: int  # of the result; with experts, those of all tiles together
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
    has_aligned_tiles: bool = False  # the rows of each expert begin at a multiple of tile_rows
    tokens: int = 0  # rows of x, which every tile multiplies; 0: each tile has its own
    unroll: int = 1  # blocks of a step
    ring: int = 3  # slots in the shared memory of a warp, each for the weights of a step
    across: int = 4  # warps of a CTA side by side: each has other columns
    along: int = 1  # times so many: each has another part of the inner dimension
    splits: int = 1  # CTAs of a cluster, that share the inner dimension
    at_once: int = 0  # items (strips of tiles) side by side; a CTA computes every `at_once`-th of all. 0: one item each

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
        if self.experts and self.has_aligned_tiles:
            return self.rows // self.tile_rows
        if self.experts:
            full = self.rows // EXPERT_ROWS if self.tile_rows == EXPERT_ROWS else 0  # others than an expert's last
            return min(self.rows, self.experts + full)
        return -(-self.rows // TILE_ROWS)

    @property
    def items_at_once(self) -> int:
        """Clusters of `splits` CTAs. With few tokens most tiles have no rows, and to begin CTAs for them takes time."""
        return min(self.at_once or self.strips * self.tiles, self.strips * self.tiles)

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA, which are columns of mma: a multiple of 8."""
        if self.experts:
            most = self.rows if self.most_rows is None else min(self.rows, self.most_rows)
            return min(-(-most // 8) * 8, EXPERT_ROWS)
        return -(-self.rows // (8 * self.tiles)) * 8

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
        """Blocks of a step whose sums have the same scales, or none."""
        return min(self.unroll, self.group // BLOCK) if self.scales_sums else self.unroll

    @property
    def sum_floats(self) -> int:
        """Floats of the partial sums of a CTA."""
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
    def warp_columns(self) -> int:
        """Columns of a warp."""
        return 8 * self.columns

    @property
    def scale_rows(self) -> int:
        """Rows of scales of a step."""
        return self.unroll * BLOCK // self.group if self.scales_codes else self.unroll // self.run * self.scales_sums

    @property
    def zero_rows(self) -> int:
        """Rows of zero points of a step."""
        return self.unroll // self.run * self.has_zeros

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a warp in a block."""
        return BLOCK * self.warp_columns * BITS[self.format] // 8

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a warp in a step."""
        return self.unroll * self.block_bytes

    @property
    def small_pieces(self) -> int:
        """Pieces of scales and zero points of a warp in a step."""
        rows = self.scale_rows * ITEM_BYTES[self.scale_dtype] + self.zero_rows
        return rows * self.warp_columns // PIECE_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        return self.code_bytes + self.small_pieces * PIECE_BYTES

    @property
    def ring_start(self) -> int:
        """Bytes of shared memory before the rings: of the sums, the numbers and the rows of x."""
        return self.row_start + min(self.tile_rows, self.rows) * self.row_bytes

    @property
    def shared_floats(self) -> int:
        """Floats of the shared memory of a CTA."""
        return (self.ring_start + self.across * self.along * self.ring * self.slot_bytes) // 4


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
    refuse(c.unroll not in STEPS, f"steps of {c.unroll} blocks: wanted one of {', '.join(map(str, STEPS))}")
    refuse(c.most_rows is not None and c.most_rows < 1, f"at most {c.most_rows} rows of an expert: wanted 1 or more")
    if reasons:
        return reasons
    refuse_types(c, reasons)
    refuse(c.inner % (BLOCK * c.unroll) != 0, f"inner {c.inner}: wanted a multiple of {BLOCK * c.unroll}")
    refuse_groups(c, "step", BLOCK * c.unroll, reasons)
    item = 4 if BITS[c.format] == 4 else 1  # bytes of a column in a row of codes
    item = min(item, ITEM_BYTES.get(c.scale_dtype, item)) if not c.is_whole else item
    multiple = PIECE_BYTES // (1 if c.has_zeros else item)
    refuse(any(w % multiple or not w for w in c.widths), f"widths {c.widths}: wanted multiples of {multiple}")
    refuse(c.ring < 2, f"a ring of {c.ring} slots: wanted 2 or more")
    refuse(not 1 <= c.parts <= max(c.chunks, 1), f"{c.parts} parts of {c.chunks} steps")
    if not reasons:  # groups of less than a block have no runs
        refuse(4 * c.shared_floats > SHARED_BYTES, f"{4 * c.shared_floats} bytes of shared memory: too many")
        refuse(c.small_pieces > 32, f"{c.small_pieces} pieces of scales and zero points of a step: wanted at most 32")
    warps = c.across * c.along
    refuse(c.across not in (1, 2, 4, 8, 16) or warps % 4 != 0 or warps > MAX_WARPS, f"{c.across} x {c.along} warps")
    refuse(c.splits > MAX_SPLITS, f"{c.splits} CTAs of a cluster: too many")
    refuse(c.at_once != 0 and not c.experts, f"{c.at_once} items at once: only experts may have more items than CTAs")
    refuse(c.has_aligned_tiles and not c.experts, "aligned tiles: only experts have them")
    refuse(c.tokens != 0 and not c.has_aligned_tiles, f"{c.tokens} tokens of every tile: wanted aligned tiles")
    if c.has_aligned_tiles and c.experts:
        refuse(c.rows % c.tile_rows != 0, f"{c.rows} rows of aligned tiles: wanted a multiple of {c.tile_rows}")
        refuse(not 0 <= c.tokens <= c.tile_rows, f"{c.tokens} tokens: wanted at most {c.tile_rows}, or 0")
    return reasons


WARPS = ((4, 2), (1, 8), (1, 16), (2, 8), (2, 4), (4, 4), (8, 2), (16, 1))
FEW_WARPS = ((4, 1), (2, 2), (1, 4))
"""Warps of a CTA: side by side, and along the inner dimension. Few where more need too much shared memory."""
RINGS = {8: ((1, 3), (1, 2)), 4: ((2, 4), (1, 6), (1, 2))}
"""By the bits of a code: blocks of a step and slots of a ring. The first pair for which there is a launch is taken."""


@functools.lru_cache(maxsize=4096)
def choose(
    processors: int, *, chip: str = "sm_90", used: tuple[float, ...] = (), **fields
) -> PackedProductConfig | None:
    """The config of these sizes that is the fastest by `cost`; None where the kernel does not serve them.

    used: how many tiles have rows, in each of some cases that count alike; empty: all tiles have.
    """
    base = PackedProductConfig(**fields)
    if base.format not in BITS:
        return None
    for warps in (WARPS, FEW_WARPS):
        for unroll, ring in RINGS[BITS[base.format]]:
            if ways := ways_of(dataclasses.replace(base, unroll=unroll, ring=ring), processors, chip, warps):
                return _fastest(ways, processors, used or (base.tiles,))
    return None


def _fastest(ways: list[PackedProductConfig], processors: int, used: tuple[float, ...]) -> PackedProductConfig:
    """The way whose cost over the least of all ways is the smallest, on average of the numbers of used tiles."""
    costs = [[cost(way, processors, tiles) for tiles in used] for way in ways]
    least = [min(each) for each in zip(*costs, strict=True)]
    ratios = [sum(own / best for own, best in zip(each, least, strict=True)) for each in costs]
    return ways[ratios.index(min(ratios))]


def ways_of(
    base: PackedProductConfig, processors: int, chip: str = "sm_90", warps: tuple = WARPS
) -> list[PackedProductConfig]:
    """Every division of the work among so many warps that the kernel serves."""
    parts = [(across, along, splits) for across, along in warps for splits in range(1, MAX_SPLITS + 1)]
    every = (dataclasses.replace(base, across=across, along=along, splits=splits) for across, along, splits in parts)
    served = [way for way in every if not supports(way, chip=chip)]
    if not base.experts:
        return served
    return [dataclasses.replace(way, at_once=max(int(places(way, processors)) // way.splits, 1)) for way in served]


SPREAD = {1: 1.0, 2: 1.0, 3: 0.864, 4: 0.879, 5: 0.796, 6: 0.728, 7: 0.743, 8: 0.849}
"""The part of the places for CTAs that clusters can take, by their size. A cluster lies in one group of up to 18 SMs,
of which each card has others switched off: from 3 CTAs on it is one cluster less than the driver says of an H200
(2026-11-30), whose 132 SMs hold 66, 39, 30, 22, 17, 15 and 15 clusters of 2 to 8. A round more takes half as long
again."""
PACKED_CLUSTERS = 3  # CTAs of a cluster from which those that fit on one SM lie there, although others are free


def _of_an_sm(config: PackedProductConfig) -> int:
    """CTAs that fit on an SM, if a thread has up to 128 registers."""
    by_warps = MAX_WARPS // (config.across * config.along)
    return max(min(by_warps, SM_SHARED_BYTES // (4 * config.shared_floats + 1024)), 1)


def places(config: PackedProductConfig, processors: int) -> float:
    """CTAs that run at the same time."""
    return processors * _of_an_sm(config) * SPREAD[config.splits]


READ_RATE, SM_RATE = 4.39e6, 245e3  # bytes a microsecond, of all SMs and of one
START, ROUND, TURN = 0.7, 2.23, 0.62  # microseconds: of a launch; of a round of CTAs; of a turn of copies of x
DECODING = {8: 0.0118e-3, 4: 0.0169e-3}  # microseconds that a byte of a warp's codes and scales takes an SM
OF_FLOATS, OF_ROWS = 1.16, 0.79  # decoding takes 1.16 times as long with fp4, and 0.79 times more with each 8 rows more
CLUSTER, PEER, PART = 0.33, 0.093, 0.02
"""Microseconds of the end: of a cluster; of each other CTA of it, times 1 + rows / 16; of 8 rows of each part of a CTA.
All of these were fitted to 741 launches of 60 products, in int4, fp8, int8 and MXFP4 with 1 to 16 rows, on an H200
(2026-11-30): the chosen way takes 1.03 times as long as the best on average, and 1.19 at most."""


def cost(config: PackedProductConfig, processors: int, used: float) -> float:
    """About the microseconds of a launch in which so many tiles have rows.

    used: the tiles. CTAs run in rounds. In each, the SM that has most to do reads at its part of the memory's rate and
    decodes, which overlap: a norm of 4 of both times is hardly more than the longer one.
    """
    c, able = config, places(config, processors)
    warps, rows = c.across * c.along, min(c.tile_rows, c.rows)
    steps, turns = -(-c.chunks // c.parts), -(-rows * c.row_pieces // (32 * warps * COPIES))
    decoding = DECODING[BITS[c.format]] * (1 + OF_ROWS * (c.tile_rows // 8 - 1))
    decoding *= OF_FLOATS if c.format == "fp4" else 1

    def of_round(ctas: float) -> float:
        together = max(ctas / processors, 1)
        if c.splits >= PACKED_CLUSTERS:
            together = max(together, min(_of_an_sm(c), c.splits))
        of_sm = c.slot_bytes * warps * together
        reading = of_sm / min(SM_RATE, READ_RATE / min(ctas / together, processors))
        return steps * ((of_sm * decoding) ** 4 + reading**4) ** 0.25 + ROUND + TURN * (turns - 1)

    rounds, rest = divmod(c.strips * used * c.splits / able, 1)
    time = rounds * of_round(able) + (of_round(rest * able) if rest > 0.01 else 0)  # less is an error of rounding
    small = PEER * (c.splits - 1) * (1 + rows / 16) + CLUSTER * (c.splits > 1) + PART * c.along * c.tile_rows / 8
    return START + time + small
