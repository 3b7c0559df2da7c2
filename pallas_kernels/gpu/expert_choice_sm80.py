"""The experts of up to 8 tokens, from the logits of their router: one CTA, a warp for each token.

    1  a warp takes the expert of its token with the largest rank, top_k times; among equals the first. The rank is the
       score, or score + correction. With groups of experts, the lanes of a group first add up its largest ranks, and
       the ranks of all but the best groups become -inf
    2  each of this device's experts that a live token chose sets a bit
    3  experts with a bit have a tile each, in their order

So few tokens fit in the smallest tile of a product, and every tile has all of them: row t is token t. Rows of x are
therefore not copied; the rows of tokens that did not choose the expert are computed and not used.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra.checks import Reasons
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import words_sm80 as words

TILE_ROWS = 8
WARPGROUPS = TILE_ROWS // 4  # a warp for each token
THREADS = 128 * WARPGROUPS
MOST_OF_LANE = 24  # experts of a lane
MOST_GROUP_BEST = 4  # experts of a group whose ranks are added up
SCORES = "softmax_over_all", "sigmoid"
NEGATIVE_INFINITY = 0x7FFFFF  # words.ordered(-inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceConfig:
    """A launch. Hashable."""

    tokens: int
    routes: int  # experts between which the router chooses
    top_k: int
    experts: int  # so many of these have tiles: all but identity experts, or those of one device
    scores: str = "softmax_over_all"  # or "sigmoid" of each logit
    has_correction: bool = False  # the largest score + correction is chosen, instead of the largest score
    groups: int = 1  # of consecutive experts, equally many in each
    top_groups: int = 1  # experts are chosen from so many groups: those with the largest sums of their ...
    group_best: int = 1  # ... so many largest scores, or scores + corrections
    identity_experts: int = 0  # the last of the routes: they give their input, and have no tiles
    least_sum: float | None = None  # scores are divided by their sum, at least this; None: they are not
    factor: float = 1.0
    has_scale: bool = False  # scores are multiplied by a number of each expert

    @property
    def tiles(self) -> int:
        """Tiles at most."""
        return min(self.tokens * self.top_k, self.experts)

    @property
    def group_lanes(self) -> int:
        """The lanes that have the experts of a group: side by side, a power of two."""
        return 32 >> (self.groups - 1).bit_length()

    @property
    def of_lane(self) -> int:
        """Experts of a lane, at most."""
        return cdiv(self.routes // self.groups, self.group_lanes)

    @property
    def words(self) -> int:
        """32-bit words with a bit for each expert that may have a tile."""
        return cdiv(self.experts, 32)


def supports(config: ChoiceConfig) -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    reasons.refuse(not 1 <= c.tokens <= TILE_ROWS, f"{c.tokens} tokens: wanted 1 to {TILE_ROWS}")
    if not (1 <= c.groups <= 32 and c.routes >= 1 and c.routes % c.groups == 0):
        return [*reasons, f"{c.routes} experts in {c.groups} groups: wanted 1 to 32 equal ones"]
    size, most = c.routes // c.groups, MOST_OF_LANE * c.group_lanes
    reasons.refuse(size > most, f"{size} experts{' of a group' if c.groups > 1 else ''}: wanted 1 to {most}")
    reasons.refuse(not 1 <= c.top_groups <= c.groups, f"top_groups {c.top_groups}: wanted 1 to {c.groups}")
    best = min(MOST_GROUP_BEST, size)
    reasons.refuse(not 1 <= c.group_best <= best, f"group_best {c.group_best}: wanted 1 to {best}")
    able = c.top_groups * size
    reasons.refuse(not 1 <= c.top_k <= min(32, able), f"top_k {c.top_k} of {able} experts: wanted 1 to {min(32, able)}")
    own = c.routes - c.identity_experts
    reasons.refuse(not 1 <= c.experts <= own, f"tiles of {c.experts} experts: wanted 1 to {own}")
    reasons.refuse(c.identity_experts < 0, f"{c.identity_experts} identity experts: wanted 0 or more")
    reasons.refuse(c.identity_experts > 0 and c.groups > 1, "identity experts and groups: wanted one of them")
    reasons.refuse(c.scores not in SCORES, f"scores {c.scores}: wanted {' or '.join(SCORES)}")
    return reasons


class ChosenExperts(NamedTuple):
    """What the kernel returns."""

    scores: jax.Array  # f32[tokens, top_k]
    row: jax.Array  # i32[tokens, top_k]: the row of each choice; 8 * tiles: none; 8 * tiles + 1: an identity expert
    plain_tiles: jax.Array  # i32[1 + tiles, 3]: the tiles, for expert_product_sm90.py
    packed_tiles: jax.Array  # i32[tiles, 3]: the same, for packed_product_sm90.py


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def choose_experts(
    logits: jax.Array, correction: jax.Array | None, scale: jax.Array | None, live: jax.Array, first: jax.Array,
    config: ChoiceConfig,
) -> ChosenExperts:  # fmt: skip
    """logits, correction, scale: f32[tokens, routes], f32[routes] or None.

    live i32[tokens]: 0: the token's choices have no tile. first i32[1]: the first of the experts that have tiles.
    """
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    wanted = [("logits", logits, (c.tokens, c.routes), "float32")]
    wanted += [("correction", correction, (c.routes,), "float32")] if c.has_correction else []
    wanted += [("scale", scale, (c.routes,), "float32")] if c.has_scale else []
    wanted += [("live", live, (c.tokens,), "int32"), ("first", first, (1,), "int32")]
    for name, array, shape, dtype in wanted:
        if (array.shape, array.dtype.name) != (shape, dtype):
            raise ValueError(f"{name} {array.dtype.name}{list(array.shape)} must be {dtype}{list(shape)}")

    def choose_experts(*refs):  # the kernel's name in a profile
        shared = plgpu.SMEM((shared_words(c),), jnp.int32)
        pl.run_scoped(functools.partial(_warpgroup, c, refs), shared, collective_axes="wg")

    mesh = plgpu.Mesh(grid=(1,), grid_names=("cta",), num_threads=WARPGROUPS, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    of_choices, of_tiles = c.tokens * c.top_k, 3 * c.tiles
    out = [jax.ShapeDtypeStruct((of_choices,), jnp.float32)]
    out += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (of_choices, 3 + of_tiles, of_tiles)]
    call = pl.kernel(choose_experts, out_type=out, mesh=mesh, compiler_params=params)
    scores, row, *tiles = call(*(array for _, array, _, _ in wanted))
    shape = c.tokens, c.top_k
    return ChosenExperts(scores.reshape(shape), row.reshape(shape), *(each.reshape(-1, 3) for each in tiles))


def shared_words(config: ChoiceConfig) -> int:
    """Words for the bits of the experts, up to a multiple of 4, and the number of tokens up to the last live one."""
    return cdiv(config.words, 4) * 4 + 4


def _warpgroup(config: ChoiceConfig, refs, shared):
    """One warpgroup of the CTA."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * (len(refs) + 1), ptx.SCALAR))
    def run(ctx, *args):
        *gmem, smem, wg = args
        thread = ptx.add(ptx.mul(ptx.scalar_value(wg), 128), ptx.thread_index())
        _choose(config, [ptx.pointer(ref, 0) for ref in gmem], ptx.pointer(smem, 3), thread)

    run(*refs, shared, lax.axis_index("wg"))


class _Operands(NamedTuple):
    """Their addresses."""

    logits: object
    correction: object  # or None
    scale: object  # or None
    live: object
    first: object


class _Choice(NamedTuple):
    """The choice of a lane, one of its warp's token."""

    token: object
    number: object  # of all choices
    there: object  # i32: 1 from lane 0 to top_k - 1 of a token's warp
    expert: object  # from `first` on; 0 if it has no tile
    has_tile: object  # is it a live token's, and of one of this device's experts?
    no_row: object  # what `row` of ChosenExperts has for a choice without a tile


def _choose(config: ChoiceConfig, gmem, shared, thread):
    """One thread. gmem: the addresses of the operands and the results; shared: of the shared memory."""
    c = config
    *given, scores, row, plain_tiles, packed_tiles = gmem
    logits, *rest = given
    correction = rest.pop(0) if c.has_correction else None
    scale = rest.pop(0) if c.has_scale else None
    operands = _Operands(logits, correction, scale, *rest)
    live_end = ptx.add(shared, ptx.i32(4 * (shared_words(c) - 4)))  # the address of the last live token's number + 1
    words.store_shared(shared, thread, ptx.bool_to_i32(ptx.less(thread, ptx.i32(shared_words(c)))), ptx.i32(0))
    words.barrier()
    choice = _choice(c, operands, scores, live_end, thread)
    word, place = arith.divui(choice.expert, ptx.i32(32)), arith.remui(choice.expert, ptx.i32(32))
    _combine("or", words.shared_place(shared, word), choice.has_tile, arith.shli(ptx.i32(1), place))
    words.barrier()
    bits = _all_bits(c, shared)
    in_tile = ptx.add(ptx.mul(_tile_of(bits, choice.expert), TILE_ROWS), choice.token)
    words.store(row, choice.number, choice.there, arith.select(choice.has_tile, in_tile, choice.no_row))
    rows = ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", live_end)
    _store_tiles(c, bits, rows, plain_tiles, packed_tiles, thread)


def _choice(c: ChoiceConfig, operands: _Operands, scores, live_end, thread) -> _Choice:
    """The thread's choice, whose score is stored."""
    lane, token = arith.remui(thread, ptx.i32(32)), arith.divui(thread, ptx.i32(32))
    is_token = ptx.less(token, ptx.i32(c.tokens))
    chosen, score = _experts_of_token(c, operands, token, lane, is_token)
    is_choice = arith.andi(is_token, ptx.less(lane, ptx.i32(c.top_k)))
    there, number = ptx.bool_to_i32(is_choice), ptx.add(ptx.mul(token, c.top_k), lane)
    words.store(scores, number, there, score, kind="f32")
    live = ptx.less(ptx.i32(0), ptx.load_word(words.place(operands.live, token), is_token))
    _combine("max", live_end, live, ptx.add(token, ptx.i32(1)))
    first = ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", operands.first)
    expert = arith.subi(chosen, first)
    has_tile = arith.andi(arith.andi(is_choice, live), ptx.less_unsigned(expert, ptx.i32(c.experts)))
    no_row = ptx.i32(TILE_ROWS * c.tiles)
    if c.identity_experts:  # the device that has the first experts adds them, so that only one does
        is_identity = ptx.less(ptx.i32(c.routes - c.identity_experts - 1), chosen)
        is_identity = arith.andi(is_identity, ptx.equal(first, ptx.i32(0)))
        no_row = ptx.add(no_row, ptx.bool_to_i32(is_identity))
    return _Choice(token, number, there, arith.select(has_tile, expert, ptx.i32(0)), has_tile, no_row)


def _store_tiles(c: ChoiceConfig, bits: list, rows, plain_tiles, packed_tiles, thread):
    """The tile of each expert that has a bit, by the expert's thread; zeros for tiles that are not used.

    rows: of each tile, up to that of the last live token.
    """
    used = functools.reduce(ptx.add, map(words.ones, bits))
    one = ptx.i32(1)
    _store_line(plain_tiles, ptx.i32(0), ptx.equal(thread, ptx.i32(0)), [used] * 3)
    for turn in range(cdiv(c.experts, THREADS)):
        expert = ptx.add(thread, ptx.i32(turn * THREADS))
        tile, is_used = _tile_of(bits, expert), _has_bit(bits, expert)
        _store_line(plain_tiles, ptx.add(tile, one), is_used, [expert, tile, one])
        _store_line(packed_tiles, tile, is_used, [expert, ptx.mul(tile, TILE_ROWS), rows])
    is_empty = arith.andi(ptx.less(thread, ptx.i32(c.tiles)), ptx.less(used, ptx.add(thread, one)))
    _store_line(plain_tiles, ptx.add(thread, one), is_empty, [ptx.i32(0)] * 3)
    _store_line(packed_tiles, thread, is_empty, [ptx.i32(0)] * 3)


def _experts_of_token(c: ChoiceConfig, operands: _Operands, token, lane, is_token) -> tuple:
    """(the expert of choice `lane` of the warp's token, its score); undefined from top_k on."""
    numbers, is_expert = _experts_of_lane(c, lane, is_token)
    at = lambda number: ptx.add(ptx.mul(token, c.routes), number)
    logits = [_load(operands.logits, at(number), there) for number, there in zip(numbers, is_expert, strict=True)]
    terms = []  # loaded here, before anything waits for the logits
    if c.has_correction:
        terms = [_load(operands.correction, number, there) for number, there in zip(numbers, is_expert, strict=True)]
    if c.scores == "softmax_over_all":
        shift = functools.reduce(ptx.fmax, logits)
        for distance in (16, 8, 4, 2, 1):
            shift = ptx.fmax(shift, ptx.shuffle_xor(shift, distance))
        power = lambda logit: ptx.exp(arith.subf(logit, shift))
        total = _sum_over_warp(functools.reduce(arith.addf, map(power, logits)))
        score_of = lambda logit: ptx.divide(power(logit), total)
    else:
        one = ptx.f32(1.0)
        score_of = lambda logit: ptx.divide(one, arith.addf(one, ptx.exp(arith.subf(ptx.f32(0.0), logit))))
    ranks = logits  # in the order of the scores; sums of a group need the scores
    if c.has_correction or c.groups > 1:
        ranks = [score_of(logit) for logit in logits]
    if c.has_correction:
        ranks = [arith.addf(rank, term) for rank, term in zip(ranks, terms, strict=True)]
    keys = [arith.select(there, words.ordered(x), ptx.i32(0)) for x, there in zip(ranks, is_expert, strict=True)]
    if c.groups > 1:
        keys = _of_best_groups(c, keys, lane)
    own = _largest(c.top_k, keys, numbers, lane)
    is_choice = arith.andi(is_token, ptx.less(lane, ptx.i32(c.top_k)))
    score = score_of(_load(operands.logits, at(own), is_choice))
    if c.least_sum is not None:
        total = _sum_over_warp(arith.select(is_choice, score, ptx.f32(0.0)))
        score = ptx.divide(score, _greater_of(total, c.least_sum))
    if c.factor != 1.0:
        score = arith.mulf(score, ptx.f32(c.factor))
    if c.has_scale:
        score = arith.mulf(score, _load(operands.scale, own, is_choice))
    return own, score


def _experts_of_lane(c: ChoiceConfig, lane, is_token) -> tuple[list, list]:
    """(numbers, and which of them are those of experts). The lanes of a group take its experts in turn."""
    size, lanes = c.routes // c.groups, c.group_lanes
    group, first = ptx.divided(lane, lanes)
    there = arith.andi(is_token, ptx.less(group, ptx.i32(c.groups)))
    places = [ptx.add(first, ptx.i32(lanes * i)) for i in range(c.of_lane)]
    numbers = [ptx.add(ptx.mul(group, size), place) for place in places]
    return numbers, [arith.andi(there, ptx.less(place, ptx.i32(size))) for place in places]


def _of_best_groups(c: ChoiceConfig, keys: list, lane) -> list:
    """`keys`, but the key of -inf for experts outside the best groups. Of equal groups the first is better.

    An expert of the best groups may have -inf too: between it and those outside, the lower number is chosen.
    """
    largest = [ptx.i32(0)] * c.group_best
    for key in keys:
        largest = _inserted(largest, key)
    distance = 1
    while distance < c.group_lanes:
        for key in [ptx.shuffle_xor_word(key, distance) for key in largest]:
            largest = _inserted(largest, key)
        distance *= 2
    worth = words.ordered(functools.reduce(arith.addf, map(words.float_of_ordered, largest)))
    group = arith.divui(lane, ptx.i32(c.group_lanes))
    worth = arith.select(ptx.less(group, ptx.i32(c.groups)), worth, ptx.i32(0))  # the last lanes may be of no group
    better = ptx.i32(0)  # the number of groups that are better than the lane's
    for i in range(1, 32 // c.group_lanes):  # lane ^ (i * lanes of a group) is of group ^ i
        other = ptx.shuffle_xor_word(worth, i * c.group_lanes)
        is_before = arith.andi(ptx.equal(worth, other), ptx.less(arith.xori(group, ptx.i32(i)), group))
        better = ptx.add(better, ptx.bool_to_i32(arith.ori(ptx.less_unsigned(worth, other), is_before)))
    most = arith.select(ptx.less(better, ptx.i32(c.top_groups)), ptx.i32(-1), ptx.i32(NEGATIVE_INFINITY))
    return [arith.minui(key, most) for key in keys]  # 0 where there is no expert


def _inserted(largest: list, key) -> list:
    """The largest keys, in descending order, with one more key among them."""
    out = []
    for each in largest:
        out.append(arith.maxui(each, key))
        key = arith.minui(each, key)
    return out


def _largest(count: int, keys: list, numbers: list, lane):
    """The number of the largest key of the warp in lane 0, of the next in lane 1, and so on; among equals the least."""

    def turn(i, carry):
        keys, own = carry
        largest = _over_warp("max", functools.reduce(arith.maxui, keys))
        none = ptx.i32(32 * len(keys))
        of_lane = [arith.select(ptx.equal(k, largest), n, none) for k, n in zip(keys, numbers, strict=True)]
        found = _over_warp("min", functools.reduce(arith.minui, of_lane))
        keys = [arith.select(ptx.equal(n, found), ptx.i32(0), k) for k, n in zip(keys, numbers, strict=True)]
        return keys, arith.select(ptx.equal(lane, i), found, own)

    return control.loop(ptx.i32(count), (keys, ptx.i32(0)), turn)[1]


def _greater_of(x, least: float):
    """The larger of both; a NaN stays one."""
    return ptx.asm_value("max.NaN.f32 $0, $1, $2;", "=f,f,f", x, ptx.f32(least), pure=True)


def _sum_over_warp(x):
    for distance in (16, 8, 4, 2, 1):
        x = arith.addf(x, ptx.shuffle_xor(x, distance))
    return x


def _over_warp(operation: str, word):
    """The largest or the least word of the warp, as numbers without a sign."""
    return ptx.asm_value(f"redux.sync.{operation}.u32 $0, $1, -1;", "=r,r", word)


def _load(base, number, condition):
    """f32 `number` of an array in GMEM; -inf without the condition."""
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f32 $0, 0fFF800000; @p ld.global.nc.f32 $0, [$1]; }"
    return ptx.asm_value(text, "=&f,l,r", words.place(base, number), ptx.bool_to_i32(condition), pure=True)


def _all_bits(c: ChoiceConfig, shared) -> list:
    """The words with a bit for each expert."""
    text, found = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{}];", []
    for i in range(0, c.words, 4):
        found += ptx.asm_values(text.format(4 * i), "=r,=r,=r,=r,r", 4, shared)
    return found[: c.words]


def _tile_of(bits: list, expert):
    """The number of bits before that of the expert."""
    number, lane = arith.divui(expert, ptx.i32(32)), arith.remui(expert, ptx.i32(32))
    tile = ptx.i32(0)
    for i, word in enumerate(bits):
        of_own = arith.select(ptx.equal(number, ptx.i32(i)), words.lower_lanes(lane), ptx.i32(0))
        mask = arith.select(ptx.less(ptx.i32(i), number), ptx.i32(-1), of_own)
        tile = ptx.add(tile, words.ones(arith.andi(word, mask)))
    return tile


def _has_bit(bits: list, expert):
    number, place = arith.divui(expert, ptx.i32(32)), arith.remui(expert, ptx.i32(32))
    own = ptx.i32(0)
    for i, word in enumerate(bits):
        own = arith.select(ptx.equal(number, ptx.i32(i)), word, own)
    return ptx.equal(arith.andi(arith.shrui(own, place), ptx.i32(1)), ptx.i32(1))


def _combine(operation: str, place, condition, word):
    """Combines a word of shared memory with another, if the condition holds."""
    kind = {"or": "b32", "max": "u32"}[operation]
    text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p red.shared.{operation}.{kind} [$0], $2; }}"
    ptx.asm(text, "r,r,r", place, ptx.bool_to_i32(condition), word)


def _store_line(base, line, condition, three):
    """Three words of GMEM, if the condition holds."""
    for i, word in enumerate(three):
        words.store(base, ptx.add(ptx.mul(line, 3), ptx.i32(i)), ptx.bool_to_i32(condition), word)
