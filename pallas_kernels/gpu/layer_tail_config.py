"""What is static about one launch of layer_tail_sm90.py."""

import dataclasses
import functools

from pallas_kernels.algebra.checks import Reasons
from pallas_kernels.gpu.gates import ACTIVATIONS

PIECE = 64  # weight columns of one product: the rows of wgmma
BLOCK = 128  # of the inner dimension: one step of a CTA's loop
MAX_ROWS = 64
MAX_RANKS = 8
MAX_CTAS = 256
THREADS = 128  # of a warpgroup
ALIGNMENT = 1024  # of arrays in shared memory
SMEM_LIMIT = 232448 - 3 * ALIGNMENT  # bytes a CTA may use on Hopper, less mbarriers, scratch, and what Mosaic takes
SCRATCH = 8  # f32 in which a warpgroup adds up squares
PARTS = 16  # of a unit's keys, at most
KV_HEADS = 64  # with a counter
ATTENDING_ROWS = 8  # tokens, at most, whose attention a launch computes
SHARES = 4  # of a token's columns, each added up by a CTA, at most
SUMS, KEPT_SUMS = 192, 160  # floats of a thread's accumulators, at most; where warpgroups cannot move registers
WIDE_PIECES, WIDE_SUMS = 6, 121  # tiles of so many pieces and sums or more spill with 168 registers a thread
COMPUTING_REGISTERS, LOADING_REGISTERS = 240, 104  # of a thread, with such tiles
PAIR = 3.0  # microseconds that a pair of CTAs must save: it exchanges sums, and takes a stage of the ring for them
READ_RATE, L2_RATE, SM_RATE = 4.4e6, 5.5e6, 50e3  # bytes a microsecond: of the memory, the L2 cache, one SM


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainProduct:
    """y = x w of the chain. A strip is `pieces` * 64 columns of w; `splits` CTAs share the inner dimension of each.

    The gated product has one split, or two: then a pair of CTAs shares each strip (layer_tail_pairs_sm90.py). Its last
    strip may have columns past the end of the weights, which are read as zeros.
    """

    inner: int
    widths: tuple[int, ...]  # columns of each weight
    gated: bool = False  # two weights of one width; a strip has the same columns of both
    pieces: int = 2
    splits: int = 1

    @property
    def columns(self) -> int:
        return PIECE * self.pieces

    @property
    def width(self) -> int:
        """Columns of all weights."""
        return sum(self.widths)

    @property
    def strips(self) -> int:
        return -(-self.width // self.columns)

    @property
    def has_whole_strips(self) -> bool:
        return self.width % self.columns == 0

    @property
    def is_paired(self) -> bool:
        """Does a pair of CTAs share each strip?"""
        return self.gated and self.splits > 1

    @property
    def units(self) -> int:
        """CTAs that have work."""
        return self.strips * self.splits

    @property
    def blocks(self) -> int:
        """Blocks of the inner dimension for each CTA."""
        return self.inner // (BLOCK * self.splits)

    @property
    def together(self) -> int:
        """Blocks of the inner dimension that are multiplied, all their pieces, before the first of them is free."""
        return 2 if self.blocks % 2 == 0 and not self.gated else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailAttention:
    """Attention of one new token a request over a paged bf16 cache, in the same launch, before the products."""

    heads: int
    kv_heads: int
    head_dim: int  # all of it is rotated, in pairs (i, i + head_dim / 2)
    scale: float
    blocks: int
    page: int  # slots of a block
    columns: int  # of the block table
    heads_first: bool
    left: int = -1  # keys before the new one that it sees; -1: all
    norm_eps: float | None = None  # of the norm of each query's and key's head before the rotation; None: no norm
    norm_one_plus: bool = False
    has_bias: bool = False  # of queries, keys and values, before the norm
    sums: int = 0  # CTAs that shared the inner dimension of the projections, whose sums are added up; 0: they have been
    eps: float = 1e-5  # with sums: of the norm before the projections
    shares: int = 4  # with sums: of a token's columns, of each of which there is a sum of squares
    unrolled: int = 4  # keys of a group of lanes that are loaded at the same time

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def together(self) -> int:
        """Query heads of a unit: they read the same keys."""
        return next(n for n in (4, 3, 2, 1) if self.group % n == 0)

    @property
    def chunks(self) -> int:
        """Units of a kv head."""
        return self.group // self.together

    @property
    def units(self) -> int:
        """Units of a token."""
        return self.kv_heads * self.chunks

    @property
    def lanes(self) -> int:
        """Lanes that share a key, with 8 dimensions each."""
        return self.head_dim // 8

    @property
    def groups(self) -> int:
        """Groups of lanes in a warpgroup."""
        return THREADS // self.lanes

    @property
    def keys_a_turn(self) -> int:
        return self.groups * self.unrolled

    @property
    def width(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def state_floats(self) -> int:
        """f32 in shared memory, after the scratch, in which the four warps merge their states."""
        return 4 * self.together * (self.head_dim + 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTailConfig:
    """One launch; hashable. Not checked here: `supports` says what cannot be served."""

    rows: int  # T, tokens
    products: tuple[ChainProduct, ...]  # o, gate and up, down, and the next layer's q, k and v if there is one
    eps: tuple[float | None, float | None] = (1e-5, 1e-5)  # of the MLP's norm and the next layer's; None: no norm
    one_plus: tuple[bool, bool] = (False, False)
    after_eps: tuple[float | None, float | None] = (None, None)  # of norms of what o and down give; None: no norm
    after_one_plus: tuple[bool, bool] = (False, False)
    activation: str = "silu"  # of the gate
    factors: tuple[float, float] = (1.0, 1.0)  # of the sums that are added to the residual: of o, and of down
    ctas: int = 132
    token_stages: int = 4
    slots: int = 8  # blocks of a piece in shared memory
    in_flight: int = 3  # weight blocks that a CTA has asked for and not received
    attention: TailAttention | None = None  # None: it has been computed before, and its output is an argument
    adds_directly: bool = False  # the CTAs of the next projections add up the residual themselves: tail_sums_sm90.py
    ranks: int = 1  # devices that share the inner dimensions of o and down; each adds up the sums of all

    @property
    def rows8(self) -> int:
        """Tokens, in eights."""
        return -(-self.rows // 8) * 8

    @property
    def scratch_floats(self) -> int:
        return SCRATCH + (0 if self.attention is None else self.attention.state_floats)

    @property
    def sums(self) -> int:
        """Floats of a thread's accumulators."""
        return max(p.pieces for p in self.products) * self.rows8 // 2

    @property
    def moves_registers(self) -> bool:
        """Do the warpgroups that load give registers to the one that computes?"""
        return max(p.pieces for p in self.products) >= WIDE_PIECES and self.sums >= WIDE_SUMS

    @property
    def in_pairs(self) -> bool:
        """Are CTAs launched in clusters of two, numbers 2 i and 2 i + 1?"""
        return any(p.is_paired for p in self.products)

    @property
    def ring_barriers(self) -> int:
        """mbarriers of the stages of weights and of tokens."""
        return 2 * (self.slots + self.token_stages)

    @property
    def hidden(self) -> int:
        return self.products[0].width

    @property
    def gives_sums(self) -> bool:
        """The next projections are left as each CTA's sums and the squares of the norm, for the next launch."""
        return self.attention is not None and self.attention.sums > 0 and len(self.products) == 4

    @property
    def shares(self) -> int:
        """CTAs that add up a token's columns. One that normalises them before they are added needs them all."""
        if self.after_eps != (None, None):
            return 1
        return max(s for s in (1, 2, 4) if s * self.rows <= self.ctas and self.hidden % (s * BLOCK) == 0)

    @property
    def token_bytes(self) -> int:
        return self.rows8 * BLOCK * 2


def supports(config: LayerTailConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    refuse(not 1 <= c.rows <= MAX_ROWS, f"{c.rows} rows: wanted 1 to {MAX_ROWS}")
    for p in c.products:
        refuse(any(w % PIECE or not w for w in p.widths), f"widths {p.widths}: wanted multiples of {PIECE}")
        refuse(p.inner % (BLOCK * p.splits) != 0, f"inner {p.inner}: wanted a multiple of {BLOCK * p.splits}")
        partial = not p.gated and not p.has_whole_strips
        refuse(partial, f"widths {p.widths}: wanted a sum that is a multiple of {p.columns}")
        refuse(p.units > c.ctas, f"{p.units} units of {p.widths}: there are {c.ctas} CTAs")
        pair = p.splits == 2 and p.pieces == 2 and c.ctas % 2 == 0
        refuse(
            p.is_paired and not pair,
            f"a gated product of {p.pieces} pieces shared by {p.splits} of {c.ctas} CTAs: wanted 2 pieces shared by 2 "
            "of an even number",
        )
        halves = p.gated and p.pieces % 2 > 0
        refuse(halves, f"{p.pieces} pieces of the gated {p.widths}: wanted strips of equal parts of both")
        needed = p.together * p.pieces
        refuse(needed > c.slots, f"{needed} blocks of {p.widths} multiplied together: shared memory has {c.slots}")
        refuse(
            p.together > c.token_stages, f"{p.together} blocks of tokens together: there are {c.token_stages} stages"
        )
    if c.attention is not None:
        a, inner = c.attention, c.products[0].inner
        refuse(c.ranks > 1, f"attention with {c.ranks} ranks")
        refuse(
            None in c.eps or c.after_eps != (None, None),
            "attention in the launch: wanted a norm before the MLP and one before the projections, and no others",
        )
        refuse(c.rows > ATTENDING_ROWS, f"attention of {c.rows} rows: wanted at most {ATTENDING_ROWS}")
        refuse(a.head_dim not in (64, 128), f"attention with heads of {a.head_dim}: wanted 64 or 128")
        refuse(a.heads % a.kv_heads != 0 or a.kv_heads > KV_HEADS, f"{a.heads} heads over {a.kv_heads} kv heads")
        refuse(a.heads * a.head_dim != inner, f"{a.heads} heads of {a.head_dim}: the projection has {inner} rows")
        refuse(c.rows * a.units > c.ctas, f"{c.rows * a.units} units of attention: there are {c.ctas} CTAs")
    refuse(
        c.adds_directly and (c.attention is None or not c.attention.sums or c.products[-1].splits > SHARES),
        f"sums by the CTAs that multiply them: wanted attention with sums, and at most {SHARES} shares",
    )
    refuse(c.rows > c.ctas, f"{c.rows} rows: {c.ctas} CTAs add up one each at least")
    refuse(c.activation not in ACTIVATIONS, f"activation {c.activation!r}: wanted one of {', '.join(ACTIVATIONS)}")
    refuse(c.slots < c.in_flight, f"{c.in_flight} blocks in flight: shared memory has {c.slots}")
    refuse(not 1 <= c.ranks <= MAX_RANKS, f"{c.ranks} ranks: wanted 1 to {MAX_RANKS}")
    refuse(c.ctas > MAX_CTAS, f"{c.ctas} CTAs: wanted {MAX_CTAS} at most")
    return reasons


@functools.lru_cache(maxsize=1024)
def choose(
    rows: int, hidden: int, heads_width: int, mlp_width: int, next_widths: tuple[int, ...], ctas: int,
    attention: TailAttention | None = None, **fields,
) -> LayerTailConfig | None:  # fmt: skip
    """The config of these sizes with the fastest tiles by `micros`; None where the kernel does not serve them."""
    wanted = [
        ChainProduct(inner=heads_width, widths=(hidden,)),
        ChainProduct(inner=hidden, widths=(mlp_width, mlp_width), gated=True),
        ChainProduct(inner=mlp_width, widths=(hidden,)),
    ]
    if next_widths:
        wanted.append(ChainProduct(inner=hidden, widths=next_widths))
    rows8 = -(-rows // 8) * 8
    stages, slots = _ring_sizes(rows8, attention)
    fastest = lambda product, slots: min(
        _ways(product, rows8, ctas, slots), key=lambda p: micros(p, rows8), default=None
    )
    gated = fastest(wanted[1], slots)
    if gated is not None and gated.is_paired:
        slots -= 1  # a pair receives sums in the memory of one
    ways = (gated if product.gated else fastest(product, slots) for product in wanted)
    chosen = tuple(way for way in ways if way is not None)
    if len(chosen) < len(wanted):
        return None
    sizes = dict(ctas=ctas, token_stages=stages, slots=slots, attention=attention)
    config = LayerTailConfig(rows=rows, products=chosen, **sizes, **fields)
    return None if supports(config) else config


def _ring_sizes(rows8: int, attention: TailAttention | None) -> tuple[int, int]:
    """(token_stages, slots)"""
    stages = {8: 6, 16: 6, 24: 4, 32: 4}.get(rows8, 3)
    others = stages * rows8 * BLOCK * 2
    if attention is not None:
        others += -(-4 * (SCRATCH + attention.state_floats) // ALIGNMENT) * ALIGNMENT - ALIGNMENT
    return stages, (SMEM_LIMIT - others) // (PIECE * BLOCK * 2)


def _ways(product: ChainProduct, rows8: int, ctas: int, slots: int):
    for pieces in (1, 2, 3, 4, 5, 6, 8):
        if (product.gated and pieces % 2) or pieces * rows8 // 2 > SUMS:
            continue
        if product.width % (pieces * PIECE) and not product.gated:
            continue
        for splits in ((1, 2) if pieces == 2 and ctas % 2 == 0 else (1,)) if product.gated else range(1, 9):
            if not product.gated and pieces * rows8 > 128:
                continue
            if product.inner % (splits * BLOCK) == 0:
                tiled = dataclasses.replace(product, pieces=pieces, splits=splits)
                if tiled.units <= ctas and tiled.together * pieces <= slots:
                    yield tiled


def micros(product: ChainProduct, rows8: int) -> float:
    """About the microseconds of a product: what the memory, the L2 cache and the busiest SM take."""
    p = product
    weights = p.inner * p.width * 2
    each = p.blocks * BLOCK * (p.columns + rows8) * 2
    sums = PAIR * (p.splits - 1) if p.gated else 2 * p.splits * rows8 * p.width * 4 / L2_RATE
    return max(weights / READ_RATE, each * p.units / L2_RATE, each / SM_RATE) + sums
