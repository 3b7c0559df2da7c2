"""Tile sizes and variants of the GPU kernel for a shape that its caller left open: `default_config`.

A policy is a pure function TileRequest -> {field of GpuKernelConfig: value}; POLICIES lists them in order. The first
policy that names a field decides it, and what the caller gave is decided before. To add a policy, write such a function
and put it in POLICIES before the one that it overrides.

Figures are microseconds, on an H200 unless another card is named, of the run in which a choice was compared: the kernel
may be faster since. Names such as dec_16x32k_fp8 (16 decodes of 32k keys, over float8) and pre_1x8k (a prompt of 8k
tokens) are those of benchmarks. docs/notebook/nvidia_h200.md has the runs, docs/performance/nvidia_attention.md today's
figures.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.gpu import flat_list
from pallas_kernels.gpu.config import KV_DTYPES_8BIT, SMEM_LIMIT, GpuKernelConfig
from pallas_kernels.gpu.supports import supports
from pallas_kernels.tuning import read_rows, table_path

NARROW_TILES = True
"""Decode by narrow_sm90.py: dec_16x32k_fp8 takes 267 us, with tiles of 64 rows 441; on an H100 32 requests of 600 keys
in bfloat16 32.9 and 37.7, long ones up to 1 % less."""

NARROW_ROWS_16BIT, NARROW_ROWS_8BIT = 8, 16
"""Requests of at most so many rows have narrow tiles. Of 16 rows in 16 bits they take 2 % longer than wgmma's."""

UNIT_COST, SHORT_WEIGHT, SHORT_WEIGHT_8BIT = 22, 6, 7
"""What a unit costs besides its blocks, and a block of a short tile (GpuKernelConfig.unit_cost and short_weight), in
kernels with long tiles. CTAs that have only short units beside others that compute end late if these cost less. us with
11 and 4, and with these: 42 decodes and two chunks of heads of 256 275 and 186; 100 decodes and a chunk of 8 heads on
one kv head 105 and 83; 153 decodes and a chunk of heads of 256 with a window 321 and 274; 16 chunks of 128 tokens with
heads of 64 248 and 257.
Over 8 bits narrow tiles cost 4 a block (narrow_weight): with 6 long decodes take 388 instead of 333. The end of a
chunk, which is a short tile and not narrow, costs 7. us with 4, with 7, and FlashAttention-3's: 90 decodes and a chunk
of 88 tokens after 23000 with heads of 64 158, 104, 122; 120 and one of 100 after 20000 157, 114, 182; 70 and three
chunks 203, 152, 254; heads of 256, which have no narrow tiles, 42 and two chunks 336, 255, 359."""

UNITS_PER_CTA = 3
"""From so many units for each CTA on, each computing warpgroup has a pipeline and units of its own, so that the end of
one unit and the loads of another overlap: on an H100 64 and 512 requests of 50 to 800 keys take 49 and 322 instead of
66 and 356, over an 8-bit cache 37 instead of 49. With 256 units for 132 CTAs one pipeline takes 33, two 36."""

PIPELINE_KEYS, MANY_REQUESTS = 320, 8
"""Tiles of many rows have two pipelines only where a unit has at most PIPELINE_KEYS, by a window or in a batch of at
least MANY_REQUESTS: on an H100 a window of 128 over a prompt of 8192 takes 144 instead of 162, 62 short requests with
that window 32 instead of 53, 32 prompts of 30 to 300 47 instead of 55; but a window of 512 5 to 10 % longer, and one
prompt of 256 9.6 instead of 9.0. Such units are never cut. Those of more keys may be: else, in a batch that is mostly
padding, one warpgroup alone would compute a request."""

PIPELINE_STAGES, STAGES_OF_SMALL_KEYS, SMALL_KEY_BYTES = 2, 4, 256
"""At most so many stages of a pipeline; the second number for narrow tiles whose key and value have at most
SMALL_KEY_BYTES. With four stages instead of two 512 tiny decodes of heads of 64 take 119.5 instead of 122, 256 over
float8 68 instead of 70.5; but 32 of 2000 keys of heads of 80, which have more bytes, 188 instead of 185.5."""

FLAT_LIST = True
"""The flat work list where every request has few rows: building it takes 6.6 to 12 us, in waves up to 23, and
the ranked one 27 to 54."""

PIECE_BLOCKS = 2
"""GpuKernelConfig.piece_blocks, in blocks, where there are at most half as many units as CTAs: one request of 1000
keys takes 7.2 instead of 7.9, two of 1500 to 2500 9.6 instead of 11.1, four of 700 to 1500 11.5 instead of 13.9, 30
of 300 to 900 and one kv head 9.5 instead of 10.7."""

FIXED_MAX = True
"""No running maximum under a soft cap, which soft_cap_sm90.py then computes. Without a maximum alone, before there was
softmax_sm90.py, a cap cost 15.3 % of prefill instead of 17.3."""

WHOLE_KEYS, WHOLE_KEYS_OF_MANY_ROWS, SMALL_BLOCK_KEYS = 768, 1024, 896
"""A unit of at most so many keys is not cut (in tiles of wgmma, 2026-11-24): 8 decodes of 600 keys take 11.2, cut 15.1;
pre_1x1k takes 23.9, with a launch that finds nothing to merge 25.7. Up to SMALL_BLOCK_KEYS few rows that are not narrow
have blocks of 64 keys."""

THREE_COMPUTE_DIM, FEW_REQUESTS, UNITS_OF_THREE = 64, 8, 4
"""Three warpgroups that compute, with tiles of 192 rows, for long prompts of heads of up to THREE_COMPUTE_DIM: one of
4096 tokens takes 280 instead of 311. Over an 8-bit cache, whose tiles are converted for more rows at a time, a prompt
of 8192 takes 909 instead of 984, and heads may have 128; but a chunk of 512 tokens takes 473 instead of 436, and a
batch with 32 decodes 548 instead of 499. So over an 8-bit cache only batches of at most FEW_REQUESTS, with at least
UNITS_OF_THREE units for each CTA, have three. Measured before computing warpgroups loaded their own queries."""

CHUNK_KEYS = 16
"""A chunk has at least so many keys for each new token: see _is_chunk."""


@dataclasses.dataclass(frozen=True)
class TileRequest:
    """The input of a policy."""

    config: GpuKernelConfig  # with the fields of the caller and of earlier policies
    rows: int | None  # upper bound of every request's packed rows (new tokens * group); None: unknown
    decided: frozenset[str]  # fields that the caller or an earlier policy decided
    keys: int | None = None  # upper bound of every request's keys; None: unknown
    requests: int = 0  # in the batch, those of padding included; 0: unknown
    card: str = ""  # whose table of tiles is used, e.g. "nvidia_h200"; H200_TABLE if it has none


def default_config(
    *, rows: int | None = None, keys: int | None = None, requests: int = 0, card: str = "", **fields
) -> GpuKernelConfig:
    """The config with these fields; POLICIES choose the others. Not checked (see supports.py).

    rows, keys: upper bounds of every request's packed rows (new tokens * group) and keys, if they are known. Few rows
    have tiles of their own; units of few keys are not cut. requests, card: see TileRequest.
    """
    return _chosen(POLICIES, (rows, keys, requests, card), tuple(fields.items()))


@functools.lru_cache(maxsize=1024)  # a batch that is built outside jit asks at every step
def _chosen(policies: tuple[Callable, ...], batch: tuple, fields: tuple[tuple[str, Any], ...]) -> GpuKernelConfig:
    rows, keys, requests, card = batch
    config, decided = GpuKernelConfig(**dict(fields)), frozenset(name for name, _ in fields)
    for policy in policies:
        chosen = policy(TileRequest(config, rows, decided, keys, requests, card))
        chosen = {name: value for name, value in chosen.items() if name not in decided}
        config, decided = dataclasses.replace(config, **chosen), decided | chosen.keys()
    return config


def _is_few(request: TileRequest) -> bool:
    """True if no tile has more rows than one warpgroup takes, or than the caller's narrow tiles."""
    return request.rows is not None and request.rows <= request.config.few_rows


def _narrow_rows(request: TileRequest) -> int:
    """Rows of a narrow tile, 8 or 16; 0: its rows are not few enough for narrow tiles."""
    most = NARROW_ROWS_8BIT if request.config.kv_dtype in KV_DTYPES_8BIT else NARROW_ROWS_16BIT
    if not NARROW_TILES or request.rows is None or request.rows > most or request.config.compute_dtype is not None:
        return 0
    return 8 if request.rows <= 8 else 16


def variants_for_few_rows(request: TileRequest) -> dict[str, Any]:
    """Which kinds of tile the kernel has and which work list it reads, given the rows of a request."""
    config = request.config
    if request.rows is None:
        return {}
    needs_long = config.weights_first or config.computing == 3  # set by the caller: no earlier policy does
    few, keys = _is_few(request) and not needs_long, _most_keys(request)
    long_tiles = _with(request, long_tiles=not few).long_tiles
    chosen: dict[str, Any] = {"long_tiles": long_tiles}
    if narrow_rows := _narrow_rows(request):
        narrow = _with(request, long_tiles=False, narrow_rows=narrow_rows, block_kv=128, q_buffers=1)
        few_units = not config.quantised and 0 < _units(request) < config.num_ctas  # then one stage is enough
        stages = _stages_that_fit(narrow, 128, most=4)
        if stages >= (1 if few_units else 2) and not supports(_with(request, narrow, stages=stages)):
            chosen["narrow_rows"] = narrow_rows
    block = 128 if "narrow_rows" in chosen and config.pipelines == 1 else 64
    is_counted = keys is None or _can_be_counted(request, keys, block)  # else the ranked list
    return chosen | {"flat_list": FLAT_LIST and not long_tiles and is_counted}


def _with(request: TileRequest, config: GpuKernelConfig | None = None, **fields) -> GpuKernelConfig:
    """The request's config, or this one, with those of the fields that are not decided yet."""
    own = {name: value for name, value in fields.items() if name not in request.decided}
    return dataclasses.replace(config or request.config, **own)


def two_pipelines(request: TileRequest) -> dict[str, Any]:
    """A pipeline for each computing warpgroup, where there are many units, of few rows or of few keys."""
    config, keys = request.config, _most_keys(request)
    if "pipelines" in request.decided:
        useful = config.pipelines == 2
    elif config.long_tiles:
        many = keys != request.keys or request.requests >= MANY_REQUESTS
        useful = many and keys is not None and keys <= PIPELINE_KEYS
    else:
        useful = keys is not None and _can_be_counted(request, keys, 64)
        useful = useful and _units(request) >= UNITS_PER_CTA * config.num_ctas
        useful = useful and (config.head_dim <= 128 or (keys or 0) <= SMALL_BLOCK_KEYS)
    only_narrow = "narrow_rows" in request.decided and config.narrow_rows > 0  # then a pipeline has no other tiles
    if not useful or (only_narrow and not _is_few(request)):
        return {}
    narrow = _narrow_rows(request)
    buffers = 1 if config.head_dim > 192 else 2
    two = _with(request, pipelines=2, block_kv=64, narrow_rows=narrow, q_buffers=buffers)
    each = STAGES_OF_SMALL_KEYS if narrow and config.key_bytes <= SMALL_KEY_BYTES else PIPELINE_STAGES
    stages = _stages_that_fit(two, 64, most=2 * each) // 2 * 2
    if supports(_with(request, two, stages=stages)):
        return {}
    chosen: dict[str, Any] = dict(pipelines=2, block_kv=64, stages=stages, narrow_rows=narrow, q_buffers=buffers)
    return chosen | {"whole_units": keys is not None and keys <= PIPELINE_KEYS}


def units_in_waves(request: TileRequest) -> dict[str, Any]:
    """May a flat list be in waves, rather than on a line?"""
    return {"in_waves": flat_list.may_be_in_waves(request.config, request.requests)}


def cost_of_flat_units(request: TileRequest) -> dict[str, Any]:
    """What a flat list counts for a unit besides its blocks."""
    config = request.config
    return {"unit_blocks": flat_list.blocks_of_a_unit(config, config.pipelines) if config.flat_list else 0}


def pieces_of_few_units(request: TileRequest) -> dict[str, Any]:
    """Where few units are cut into pieces for all CTAs, equal ones: see PIECE_BLOCKS."""
    config = request.config
    is_cut = config.flat_list and not (config.in_waves or config.whole_units or config.merges_inside)
    few = is_cut and 0 < 2 * _units(request) <= config.workers
    return {"piece_blocks": PIECE_BLOCKS if few else 0}


def query_buffers(request: TileRequest) -> dict[str, Any]:
    """Two pieces' queries in shared memory, or one, which the warpgroups that compute load themselves.

    Two where a CTA has many pieces: pre_1x8k takes 786, with one 821. One where queries are few, so that keys are asked
    for at once (8 decodes of 600 keys take 8.8 instead of 9.6, 16 of 4096 over float8 37.6 instead of 40.4), and where
    a head is too wide for two or for blocks of 128 beside two. One over an 8-bit cache whose tiles are converted: heads
    of 128 have no memory for two, and of 64 a mixed batch takes 580 instead of 695.
    """
    config = request.config
    if config.head_dim > 192 or (config.narrow_rows and config.pipelines == 1) or _has_few_units(request):
        return {"q_buffers": 1}
    if config.quantised:
        return {"q_buffers": 1} if config.compute_dtype is None and config.converts_tiles else {}
    if _stages_that_fit(config, 128, most=2) == 2:
        return {}
    one = dataclasses.replace(config, q_buffers=1)
    return {"q_buffers": 1} if _stages_that_fit(one, 128, most=2) == 2 else {}


def _has_few_units(request: TileRequest) -> bool:
    """At most one unit for each CTA, of so few keys that it is not cut?"""
    config, keys = request.config, _most_keys(request)
    if request.rows is None or not request.requests or keys is None or keys > WHOLE_KEYS_OF_MANY_ROWS:
        return False
    tiles = -(-request.rows // config.tile_rows)
    return request.requests * tiles * config.num_kv_heads <= config.workers


def _can_be_counted(request: TileRequest, keys: int, block: int) -> bool:
    """Do the blocks of all units fit in 32 bits, in which the flat list adds them up?"""
    blocks = -(-keys // block) + (keys != request.keys)  # a window begins within a block
    blocks += flat_list.blocks_of_a_unit(dataclasses.replace(request.config, block_kv=block), 1)
    return _units(request) * blocks < 2**31


def _units(request: TileRequest) -> int:
    """An upper bound of the units of a batch whose requests have few rows; 0: unknown."""
    return request.requests * request.config.num_kv_heads


def _most_keys(request: TileRequest) -> int | None:
    """An upper bound of the keys of a unit, by the lengths' bound or by a window; None: unknown."""
    config, rule, most = request.config, request.config.mask, request.keys
    bounded = rule.left >= 0 and (rule.causal or rule.right >= 0) and not rule.spans
    if not bounded or config.per_request_causal:
        return most
    tokens = -(-min(request.rows or config.part_rows, config.part_rows) // config.group) + 1  # of a tile
    window = rule.left + max(rule.right, 0) + tokens
    return window if most is None else min(most, window)


def units_of_few_keys(request: TileRequest) -> dict[str, Any]:
    """Blocks and cuts where each unit has few keys, by the lengths' bound or by a window.

    No unit is cut, so no launch merges parts. Of one warpgroup's rows, if they are not narrow, keys are read in blocks
    of 64, which both warpgroups begin sooner: one request of 300 keys takes 8.2, with blocks of 128 keys 9.2, and 11.2
    with the launch that merges.
    """
    config, most, few = request.config, _most_keys(request), _is_few(request)
    if most is None:
        return {}
    chosen: dict[str, Any] = {}
    if most <= (WHOLE_KEYS if few else WHOLE_KEYS_OF_MANY_ROWS):
        chosen["whole_units"] = True
    stages = _stages_that_fit(config, 64, most=5)
    is_free = "block_kv" not in request.decided or config.block_kv == 64
    if few and is_free and most <= SMALL_BLOCK_KEYS and not (config.quantised or config.narrow_rows) and stages >= 2:
        chosen |= {"block_kv": 64, "stages": stages}
    return chosen


def softmax_of_long_tiles(request: TileRequest) -> dict[str, Any]:
    """weights_first where registers allow it and units have many blocks: in a unit's first block the weights are
    computed twice. A prompt of 8192 takes 775 instead of 812, but 8 of 512 take 60.2 instead of 58.4. ALiBi's logits
    rise with the key's position, so that steep heads would compute every block twice (a prompt of 8192 takes 1223).
    With the last block first it takes 845, and with each block's maximum before its weights 949. Over an 8-bit cache a
    prompt of heads of 64 takes 344 instead of 376, and a chunk of 512 over 32768 keys 422 instead of 438, but ragged
    prompts of heads of 128 600 instead of 566.
    """
    config = request.config
    fits = config.v_head_dim <= 128 and not config.token_scales and config.compute_dtype is None
    fits = fits and config.logits.score_fn is None and not (FIXED_MAX and config.can_fix_max)
    if config.quantised:
        fits = fits and (config.computing == 3 and config.head_dim <= 64 or _is_chunk(request))
        fits = fits and not config.logits_rise
    first = fits and _has_long_units(request)
    if "weights_first" in request.decided:
        first = config.weights_first
    last_first = first and config.logits_rise and not config.narrow_rows
    return {"weights_first": first, "last_block_first": last_first}


def _is_chunk(request: TileRequest) -> bool:
    """Few requests whose keys are many times their new tokens: nearly every row sees nearly every block whole?"""
    if request.rows is None or request.keys is None or not 0 < request.requests <= FEW_REQUESTS:
        return False
    return request.config.computing == 2 and request.keys * request.config.group >= CHUNK_KEYS * request.rows


def three_compute_warpgroups(request: TileRequest) -> dict[str, Any]:
    """Tiles of 192 rows: see THREE_COMPUTE_DIM."""
    config, rows = request.config, request.rows
    three = _with(request, computing=3, block_kv=64 if config.quantised else 128)
    is_long = _has_long_units(request) and (rows is None or rows > three.tile_rows)
    if not is_long or three.computing != 3 or config.qq_bias:
        return {}
    if config.quantised:
        tiles = request.requests * config.num_kv_heads * -(-(rows or 0) // three.tile_rows)
        if config.head_dim > 128 or request.requests > FEW_REQUESTS or tiles < UNITS_OF_THREE * config.num_ctas:
            return {}
    elif config.head_dim > THREE_COMPUTE_DIM:
        return {}
    stages = _stages_that_fit(three, three.block_kv, most=3)
    if supports(_with(request, three, stages=stages)):
        return {}
    return {"computing": 3, "block_kv": three.block_kv, "stages": stages}


def _has_long_units(request: TileRequest) -> bool:
    """May units have long tiles, and more keys than units that are never cut?"""
    keys = _most_keys(request)
    return request.config.has_long_tiles and (keys is None or keys > WHOLE_KEYS_OF_MANY_ROWS)


def measured_tiles(request: TileRequest) -> dict[str, Any]:
    """block_kv and stages as measured by `python -m jattn bench --tune`; {} for a shape that is not in the table."""
    c = request.config
    if c.token_scales or c.compute_dtype is not None or c.pipelines == 2:  # not measured
        return {}
    kind = "narrow" if not c.has_short_tiles else "few" if _is_few(request) else "long"
    measured = measured_table(request.card).get((c.head_dim, c.v_head_dim, c.kv_dtype, kind), {})
    given = measured.keys() & request.decided
    return measured if all(getattr(c, name) == measured[name] for name in given) else {}


def largest_tiles(request: TileRequest) -> dict[str, Any]:
    """The rule where nothing was measured: the largest block of which two stages fit, in as many stages as fit.

    Blocks have 128 or 64 keys, in at most 3 stages. A block of narrow tiles always has 128 keys, in at most 4 stages.
    """
    config, decided = request.config, request.decided
    blocks, most = (128, 64), 3
    if not config.has_short_tiles:
        blocks, most = (128,), 4
    if "block_kv" in decided:
        blocks = (config.block_kv,)
    wanted = config.stages if "stages" in decided else 2
    stages = {block: _stages_that_fit(config, block, max(most, wanted)) for block in blocks}
    block = next((block for block in blocks if stages[block] >= wanted), blocks[-1])
    each = stages[block] // config.pipelines  # where not even one fits, supports.py refuses
    return {"block_kv": block, "stages": max(each, 1) * config.pipelines}


def narrow_beside_long(request: TileRequest) -> dict[str, Any]:
    """Narrow tiles for the decodes of a mixed batch over an 8-bit cache, which then need no converted tiles."""
    config = request.config
    if not (NARROW_TILES and config.converts_tiles and config.has_long_tiles) or config.narrow_rows:
        return {}
    rows = 8 if config.group <= 8 else 16  # of a request of one token
    beside = dataclasses.replace(config, narrow_rows=rows)
    fits = config.group <= rows and config.head_dim <= 128 and config.compute_dtype is None
    return {"narrow_rows": rows} if fits and not supports(beside) else {}


def cost_of_units(request: TileRequest) -> dict[str, Any]:
    """What the ranked list counts for a unit besides its blocks, and for a block of a short tile: see UNIT_COST."""
    config = request.config
    if not config.has_long_tiles or config.compute_dtype is not None:  # with products in 8 bits not measured
        return {}
    return {"unit_cost": UNIT_COST, "short_weight": SHORT_WEIGHT_8BIT if config.converts_tiles else SHORT_WEIGHT}


def soft_cap(request: TileRequest) -> dict[str, Any]:
    """How a soft-capped softmax is computed, where the cap bounds the logits."""
    config = request.config
    if not FIXED_MAX or "fixed_max" in request.decided or not config.can_fix_max:
        return {}
    if config.narrow_rows or config.weights_first:
        return {}
    return {"fixed_max": True}


POLICIES: tuple[Callable[[TileRequest], dict[str, Any]], ...] = (
    variants_for_few_rows,
    two_pipelines,
    units_in_waves,
    query_buffers,
    units_of_few_keys,
    pieces_of_few_units,
    three_compute_warpgroups,
    softmax_of_long_tiles,
    measured_tiles,
    largest_tiles,
    narrow_beside_long,
    cost_of_units,
    cost_of_flat_units,
    soft_cap,
)


H200_TABLE = "nvidia_h200"


@functools.cache
def measured_table(card: str = "") -> dict[tuple[int, int, str, str], dict[str, int]]:
    """(head_dim, v_head_dim, kv_dtype, kind) -> block_kv and stages, the fastest measured on this card.

    kind: "long" (prefill and mixed batches), "narrow" (narrow tiles) or "few" (other batches of few rows).
    """
    own, tiles = table_path(card), ("block_kv", "stages")
    path = own if own.is_file() else table_path(H200_TABLE)
    rows = read_rows(path, texts=("kv_dtype", "kind"), counts=("head_dim", "v_head_dim", *tiles))
    shape = lambda row: (row["head_dim"], row["v_head_dim"], row["kv_dtype"], row["kind"])
    return {shape(row): {name: row[name] for name in tiles} for row in rows}


def _stages_that_fit(config: GpuKernelConfig, block_kv: int, most: int) -> int:
    """Stages of this block for which there is shared memory, at most `most`; 0: not even one."""
    fits = lambda n: dataclasses.replace(config, block_kv=block_kv, stages=n).smem_bytes <= SMEM_LIMIT
    return next((n for n in range(most, 0, -1) if fits(n)), 0)
