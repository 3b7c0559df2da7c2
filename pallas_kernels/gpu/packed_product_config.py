"""What is static about one launch of packed_product_sm90.py."""

import dataclasses
import functools

BLOCK = 32  # of the inner dimension: a thread has 8 consecutive inputs of each, a group of four threads all
TILE_ROWS = 16  # rows of x that a CTA multiplies, at most
MAX_ROWS = 64
"""Rows up to which the packed product is faster than a product with the dequantised matrix."""
MAX_PARTS_OF_CTA, MAX_SPLITS = 4, 8
RESIDENT = 4  # warpgroups of 128 threads that an SM runs at the same time, at 128 registers a thread
READ_RATE, SM_RATE = 4.4e6, 50e3  # bytes a microsecond: of the memory, of one SM
STEP, ROUND, CLUSTER, PEER = 0.22, 1.0, 0.5, 0.05
"""Microseconds, see `cost`: a step of one warpgroup; a round of CTAs; a cluster, and each CTA of it."""
SHARED_BYTES = 224 * 1024  # that the warpgroups of an SM share
MAX_STAGES = 6
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedProductConfig:
    """y = x w for matrices w of one form; hashable. Not checked here: `supports` says what cannot be served."""

    rows: int  # T; of tiles of experts: the rows that all of them have together
    inner: int
    widths: tuple[int, ...]  # columns of each matrix
    format: str  # of a QuantisedArray
    group: int  # inputs that share a scale
    scale_dtype: str
    has_zeros: bool = False
    dtype: str = "float32"  # of y
    experts: int = 0  # matrices [experts, inner, width], of which a tile of rows uses one; 0: matrices [inner, width]
    tiles: int = 1  # of rows
    unroll: int = 1  # blocks whose weights are asked for at once
    warpgroups: int = 1  # of a CTA; each multiplies a part of the inner dimension
    splits: int = 1  # CTAs of a cluster, that share the inner dimension

    @property
    def columns(self) -> int:
        """Consecutive columns of one thread: 16 or 8 bytes of a row of codes."""
        return 4 if BITS[self.format] == 4 else 8

    @property
    def strip(self) -> int:
        """Columns of a CTA: four warps of eight groups of threads."""
        return 32 * self.columns

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA: columns of mma."""
        return 8 if self.rows <= 8 else TILE_ROWS

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
    def parts(self) -> int:
        """Of the inner dimension."""
        return self.warpgroups * self.splits

    @property
    def chunks(self) -> int:
        """Steps of the loop over the inner dimension."""
        return self.inner // (BLOCK * self.unroll)

    @property
    def is_whole(self) -> bool:
        """One scale for each column."""
        return self.group == self.inner

    @property
    def run(self) -> int:
        """Blocks of a step that have the same scales."""
        return self.unroll if self.is_whole else min(self.unroll, self.group // BLOCK)

    @property
    def pitch(self) -> int:
        """Floats of a row of partial sums in shared memory; the 4 that are not used keep stores free of conflicts."""
        return self.strip + 4

    @property
    def thread_bytes(self) -> int:
        """What a thread copies for a step of the loop."""
        runs, scales = self.unroll // self.run, 0 if self.is_whole else self.columns * SCALE_BYTES[self.scale_dtype]
        zeros = self.columns if self.has_zeros else 0
        return self.unroll * (self.columns * BITS[self.format] + 2 * self.tile_rows) + runs * (scales + zeros)

    @property
    def stages(self) -> int:
        """Steps of which shared memory has the copies."""
        return max(2, min(MAX_STAGES, SHARED_BYTES // RESIDENT // (128 * self.thread_bytes)))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a warpgroup: its copies, then its sums."""
        return max(128 * self.thread_bytes * self.stages, 4 * self.tile_rows * self.pitch)


def supports(config: PackedProductConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, []

    def refuse(when: bool, reason: str):
        if when:
            reasons.append(reason)

    refuse(chip != "sm_90", f"chip {chip}: the kernel was only built and measured for sm_90")
    refuse(c.format not in BITS, f"format {c.format}: wanted one of {', '.join(BITS)}")
    if reasons:
        return reasons
    refuse(c.scale_dtype not in SCALE_BYTES, f"scales {c.scale_dtype}: wanted floats")
    refuse(c.dtype not in ("float32", "bfloat16", "float16"), f"results {c.dtype}: wanted floats of 16 or 32 bits")
    refuse(c.has_zeros and not c.format.startswith("int"), f"zero points of {c.format}: only integers have them")
    refuse(c.inner % (BLOCK * c.unroll) != 0, f"inner {c.inner}: wanted a multiple of {BLOCK * c.unroll}")
    if not c.is_whole:
        refuse(c.inner % c.group != 0 or c.group % BLOCK != 0, f"groups of {c.group}: wanted multiples of {BLOCK}")
        nested = c.group % (BLOCK * c.unroll) == 0 or (BLOCK * c.unroll) % c.group == 0
        refuse(not nested, f"groups of {c.group}: a step of {BLOCK * c.unroll} inputs has parts of some")
    refuse(any(w % c.columns or not w for w in c.widths), f"widths {c.widths}: wanted multiples of {c.columns}")
    refuse(not 1 <= c.parts <= max(c.chunks, 1), f"{c.parts} parts of {c.chunks} steps")
    if reasons:
        return reasons
    refuse(c.warpgroups * c.shared_bytes > SHARED_BYTES, f"steps of {c.thread_bytes} bytes a thread: too many")
    refuse(c.warpgroups > MAX_PARTS_OF_CTA or c.splits > MAX_SPLITS, f"{c.warpgroups} x {c.splits} parts: too many")
    return reasons


@functools.lru_cache(maxsize=4096)
def choose(processors: int, *, chip: str = "sm_90", **fields) -> PackedProductConfig | None:
    """The config of these sizes with the fastest parts by `cost`; None where the kernel does not serve them."""
    base = PackedProductConfig(**fields)
    unrolls = (2, 1) if BITS.get(base.format) == 4 else (1,)
    for unroll in unrolls:
        ways = [
            dataclasses.replace(base, unroll=unroll, warpgroups=warpgroups, splits=splits)
            for warpgroups in (1, 2, 4)
            for splits in (1, 2, 4, 8)  # others leave SMs of a GPC unused
        ]
        ways = [way for way in ways if not supports(way, chip=chip)]
        if ways:
            return min(ways, key=lambda way: cost(way, processors))
    return None


def cost(config: PackedProductConfig, processors: int) -> float:
    """About the microseconds of a launch.

    What the memory and the busiest SM take to read; the first copies and the last sums of each round of CTAs; joining
    the CTAs of a cluster.
    """
    c = config
    of_cta = c.strip * c.inner * BITS[c.format] / 8 / c.splits
    ctas = c.strips * c.tiles * c.splits
    busiest = -(-ctas // processors)
    resident = min(busiest, RESIDENT // c.warpgroups)
    step = 128 * c.unroll * c.columns * BITS[c.format]  # bytes of codes of a warpgroup
    rate = min(SM_RATE, resident * c.warpgroups * step / STEP)
    read = max(of_cta * ctas / READ_RATE, of_cta * busiest / rate)
    return read + ROUND * -(-busiest // resident) + (CLUSTER + PEER * c.splits if c.splits > 1 else 0)
