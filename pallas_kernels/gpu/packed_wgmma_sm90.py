"""Products of 9 to 256 rows with packed matrices, y = x w, by wgmma.

Columns of w are the rows of wgmma, and tokens its columns:

    y^T [64 columns, tokens]  +=  scale[group, column] * (w^T [64, inputs of the group] . x^T [inputs, tokens])

The inner dimension is cut into chunks of `depth` inputs. TMA copies the codes, scales and rows of x of a chunk to a
stage, a part of shared memory. The stages are a ring: as many chunks are on their way as there are stages. A warpgroup
turns the codes of its 64 columns into the dtype of x in registers, in which they are exact: the first operand of
wgmma. While one warpgroup decodes, the tensor cores multiply for another. Of each 16 columns, a thread (g = lane / 4,
t = lane % 4) has columns 2 g and 2 g + 1, as rows g and g + 8 of wgmma, so that it reads neighbours. Sums are scaled in
float32 at the end of each group. Codes of NVFP4, and of MXFP4 with rows of bfloat16, are multiplied by their scales
instead, and the sums of all groups stay in wgmma's accumulator. A CTA has up to 64 rows of x, or up to 128 where it has
two warpgroups, which have the registers for it: codes are then decoded once for twice as many rows.

Warpgroup w starts the copies to the stages w, w + warpgroups and so on. It refills a stage one step after all
warpgroups have read it, so that it rarely waits. CTAs of a cluster share the inner dimension (packed_sums_sm90.py).
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import packed_codes_sm90 as codes
from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.packed_product_config import BITS, ITEM_BYTES
from pallas_kernels.gpu.packed_wgmma_config import COLUMNS, PIECE, PackedWgmmaConfig, StagedConfig, supports
from pallas_kernels.gpu.row_states_sm90 import across_columns

_WGMMA = plgpu.Layout.WGMMA


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def packed_product_wgmma(x: jax.Array, matrices: tuple[packed_sums.Packed, ...], config: PackedWgmmaConfig) -> tuple:
    """y [T, width] for each matrix. x [T, inner] of 16 bits."""
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    packed_sums.check_operands(c, x, matrices)
    out_type = jax.ShapeDtypeStruct((c.rows, c.joined_width), jnp.dtype(c.dtype))

    def packed_product_wgmma(x, *refs):  # the kernel's name in a profile
        *refs, out = refs
        run = functools.partial(_product, c, x, packed_sums.of_each(c, refs), out)
        pl.run_scoped(run, _shared(c), collective_axes="wg")

    mesh = plgpu.Mesh(
        grid=(c.strips, c.tiles), grid_names=("strip", "tile"), cluster=(c.splits,), cluster_names=("split",),
        num_threads=c.warpgroups, thread_name="wg",
    )  # fmt: skip
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(packed_product_wgmma, out_type=out_type, mesh=mesh, compiler_params=params)
    x = jnp.pad(x, ((0, c.tiles * c.tile_rows - c.rows), (0, 0)))
    return packed_sums.apart(c, call(x, *packed_sums.joined(matrices)))


def _transforms(cfg: StagedConfig, name: str) -> tuple:
    """The layout in shared memory of the codes ("values") or the rows of x ("tokens"), which TMA swizzles.

    Words of 4-bit codes are not swizzled: the threads of a warp read neighbours in a row, without bank conflicts.
    """
    tiled = lambda columns, swizzle: (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    if name == "tokens":
        return tiled(cfg.span, 2 * cfg.span)
    return () if BITS[cfg.format] == 4 else tiled(PIECE, PIECE)


def _ref_type(cfg: StagedConfig, name: str):
    """The type of a Ref of `_shared` that is passed to inline PTX."""
    return plgpu.RefType(_transforms(cfg, name))


def _shared(cfg: PackedWgmmaConfig) -> dict:
    """The shared memory and the barriers of a CTA."""
    return matrix_stages(cfg) | row_stages(cfg) | stage_barriers(cfg)


def matrix_stages(cfg: StagedConfig) -> dict:
    """The shared memory for the stages of a matrix."""
    value = {"int8": jnp.int8, "fp8": jnp.uint8}.get(cfg.format, jnp.uint32)
    tile = functools.partial(plgpu.SMEM, transforms=_transforms(cfg, "values"))
    found = dict(values=tile((cfg.stages, cfg.value_rows, cfg.strip), value))
    if cfg.scale_rows:
        found["scales"] = plgpu.SMEM((cfg.stages, cfg.scale_rows, cfg.strip), jnp.dtype(cfg.scale_dtype))
    if cfg.zero_rows:
        found["zeros"] = plgpu.SMEM((cfg.stages, cfg.zero_rows, cfg.strip), jnp.int8)
    return found


def row_stages(cfg: StagedConfig) -> dict:
    """The shared memory for the stages of x."""
    shape, transforms = (cfg.stages, cfg.tile_rows, cfg.depth), _transforms(cfg, "tokens")
    return dict(tokens=plgpu.SMEM(shape, jnp.dtype(cfg.x_dtype), transforms=transforms))


def stage_barriers(cfg: StagedConfig) -> dict:
    """full: a stage has arrived; free: all warpgroups have read it."""
    return dict(
        full=plgpu.Barrier(num_arrivals=cfg.copies, num_barriers=cfg.stages),
        free=plgpu.Barrier(num_arrivals=cfg.warpgroups, num_barriers=cfg.stages),
    )


def _product(cfg: PackedWgmmaConfig, x, arrays, out, smem: dict):
    """One warpgroup."""
    wg, split = lax.axis_index("wg"), lax.axis_index("split")
    edge = lambda i: lax.div(i * cfg.chunks, jnp.int32(cfg.splits))
    first = edge(split)
    count = edge(split + 1) - first
    copy = functools.partial(_copy, cfg, x, arrays, smem)
    stage_of = lambda i: lax.rem(i, jnp.int32(cfg.stages))

    @pl.loop(wg, jnp.minimum(cfg.stages, count), step=cfg.warpgroups)
    def _(i):
        copy(first + i, i)

    def refill(i):
        """Starts the copies to the stage that all warpgroups have read in step i - 1."""
        later, before = i - 1 + cfg.stages, stage_of(i - 1 + cfg.stages)

        @when((wg == lax.rem(before, jnp.int32(cfg.warpgroups))) & (i > 0) & (later < count))
        def _():
            plgpu.barrier_wait(smem["free"].at[before])
            copy(first + later, before)

    def step(i, total):
        slot = stage_of(i)

        def await_next():
            when(i + 1 < count)(lambda: plgpu.barrier_wait(smem["full"].at[stage_of(i + 1)]))

        for run in range(cfg.depth // cfg.run):
            total = add_run(cfg, smem, slot, run, wg, total, await_next)
        rows.end_reads()  # of scales
        when(i + cfg.stages < count)(lambda: plgpu.barrier_arrive(smem["free"].at[slot]))
        refill(i)
        return total

    zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, cfg.tile_rows), jnp.float32), _WGMMA)
    plgpu.barrier_wait(smem["full"].at[0])
    total = lax.fori_loop(0, count, step, zeros)
    memory = "values" if cfg.value_bytes > cfg.token_bytes else "tokens"
    store_results(cfg, arrays, out, smem[memory], _ref_type(cfg, memory), total, wg)


def _copy(cfg: PackedWgmmaConfig, x, arrays, smem: dict, chunk, slot):
    """Starts the copies of a chunk to a stage."""
    strip, row = lax.axis_index("strip"), lax.axis_index("tile") * cfg.tile_rows
    tokens = x.at[pl.ds(row, cfg.tile_rows), pl.ds(chunk * cfg.depth, cfg.depth)]
    plgpu.copy_gmem_to_smem(tokens, smem["tokens"].at[slot], smem["full"].at[slot])
    ends = (*cfg.first_strips[1:], cfg.strips)
    for matrix, first, end in zip(arrays, cfg.first_strips, ends, strict=True):

        @when((strip >= first) & (strip < end))
        def _(matrix=matrix, first=first):
            copy_matrix(cfg, matrix, (), (strip - first) * cfg.strip, smem, smem["full"].at[slot], chunk, slot)


def copy_matrix(cfg: StagedConfig, matrix, lead: tuple, column, smem: dict, full, chunk, slot):
    """Starts the copies of a chunk of a matrix, (values, scales, zero points if there are any), from a column on.

    lead: the first indices, of an expert.
    """
    columns, group = pl.ds(column, cfg.strip), lax.div(chunk * cfg.depth, jnp.int32(cfg.group))
    starts = dict(values=(chunk * cfg.value_rows, cfg.value_rows))
    starts |= dict(scales=(group, cfg.scale_rows), zeros=(group, cfg.zero_rows))
    for source, (name, (start, size)) in zip(matrix, starts.items(), strict=False):
        if size:
            plgpu.copy_gmem_to_smem(source.at[(*lead, pl.ds(start, size), columns)], smem[name].at[slot], full)


def add_run(cfg: StagedConfig, smem: dict, slot, run: int, wg, total, meanwhile):
    """total + the products of the inputs of a run of a stage.

    meanwhile: called after the stage's last wgmma has been issued, before its result is needed.
    """
    spans = range(run * cfg.run // cfg.span, (run + 1) * cfg.run // cfg.span)
    zeros = smem["zeros"].at[slot, run] if cfg.zero_rows else None
    of_codes = smem["scales"].at[slot] if cfg.scales_codes else None

    def multiply(acc):
        for span in spans:
            left = decoded_columns(cfg, smem["values"].at[slot], zeros, span, wg, of_codes)
            right = smem["tokens"].at[slot, :, pl.ds(span * cfg.span, cfg.span)].transpose((1, 0))
            plgpu.wgmma(acc, left, right)
        if run == cfg.depth // cfg.run - 1:
            meanwhile()

    if not cfg.scales_sums:  # they stay in the accumulator
        return pl.run_state(multiply)(plgpu.ACC.init(total))

    def scaled(acc):
        scale = scales_of_columns(cfg, smem["scales"].at[slot, run], wg)
        multiply(acc)
        return acc[...] * across_columns(scale, acc.shape)

    return total + pl.run_scoped(scaled, plgpu.ACC((COLUMNS, cfg.tile_rows), jnp.float32))


def first_column(wg):
    """The first of the two columns of this thread: its number in the strip."""
    g, _, _, warp = ptx.lane_position(hidden=True)
    return ptx.add(ptx.mul(ptx.scalar_value(wg), COLUMNS), ptx.mul(warp, 16), ptx.mul(g, 2))


def decoded_columns(cfg: StagedConfig, values, zeros, span: int, wg, scales=None):
    """The numbers of this warpgroup's codes, less their zero points, of a span of a stage: [64 columns, span].

    scales: of the stage, by which codes are multiplied: see packed_codes_sm90.scale_pairs.
    """
    is_four = BITS[cfg.format] == 4
    kinds, others = [_ref_type(cfg, "values"), ptx.SCALAR], [ref for ref in (zeros, scales) if ref is not None]
    shape, element = (COLUMNS, cfg.span), jnp.dtype(cfg.element)

    @plgpu.inline_mgpu(
        arg_types=(*kinds, *(plgpu.RefType(),) * len(others)),
        return_type=plgpu.ShapeDtypeStruct(shape, element, _WGMMA),
    )
    def decode(ctx, values, wg, *others):
        column = first_column(wg)
        offsets = _zero_pairs(cfg, others[0], column) if cfg.zero_rows else None
        own = (_scales_of_codes(cfg, others[-1], column, span),) if cfg.scales_codes else ()
        words_of = _words_of_4_bits if is_four else _words_of_8_bits
        read = words_of(cfg, values, column, span, *own)
        kind, words = utils.dtype_to_ir_type(element), []
        for second, place in rows.pair_places(rows.empty_fragment(shape, _WGMMA, kind)):
            word = read(place // 8, second)
            words.append(codes.subtract(word, offsets[second], cfg.element) if offsets else word)
        return rows.fragment_of_words(shape, kind, words)

    return decode(values, wg, *others)


def _words_of_4_bits(cfg: StagedConfig, values, column, span: int, scales=None):
    """A function (n, second) -> a word: inputs 8 n + 2 t and 8 n + 2 t + 1 of the thread's first or second column.

    scales: those of `_scales_of_codes`.
    """
    place, t = ptx.add(ptx.pointer(values, 3), ptx.mul(column, 4)), ptx.lane_position()[1]
    loaded: dict[int, list] = {}

    def read(eight: int, second: int):
        if eight not in loaded:
            offset = 4 * cfg.strip * (span * cfg.span // 8 + eight)
            both = ptx.asm_values(f"ld.shared.v2.b32 {{$0, $1}}, [$2+{offset}];", "=r,=r,r", 2, place)
            decode = functools.partial(codes.pair_of_word, cfg.format, t=t, element=cfg.element)
            own = [None, None] if scales is None else scales[8 * eight // cfg.group]
            loaded[eight] = [decode(word, scale=scale) for word, scale in zip(both, own, strict=True)]
        return loaded[eight][second]

    return read


def _scales_of_codes(cfg: StagedConfig, scales, column, span: int) -> list:
    """[group of the span][column of the thread]: what codes are multiplied by. scales: of a stage, in SMEM.

    Of four groups the four threads of a column have one each, and the others from one another.
    """
    size, groups, t = ITEM_BYTES[cfg.scale_dtype], cfg.span // cfg.group, ptx.lane_position()[1]
    place, row = ptx.add(ptx.pointer(scales, 3), ptx.mul(column, size)), size * cfg.strip
    text, first = f"ld.shared.{'u16' if size == 1 else 'b32'} $0, [$1+{{}}];", row * span * groups
    load = lambda place, offset: ptx.asm_value(text.format(first + offset), "=r,r", place)
    two = functools.partial(codes.two_scales, cfg.scale_dtype, element=cfg.element)
    if groups != 4:
        return [codes.each_twice(two(word=load(place, row * group))) for group in range(groups)]
    own = two(word=load(ptx.add(place, ptx.mul(t, row)), 0))
    of_thread = lambda t: ptx.asm_value(f"shfl.sync.idx.b32 $0, $1, {t}, 0x1c1f, -1;", "=r,r", own)
    return [codes.each_twice(of_thread(group)) for group in range(groups)]


def _words_of_8_bits(cfg: StagedConfig, values, column, span: int):
    """The same for codes of 8 bits: of each input, a thread reads the two bytes of its columns at once."""
    t, base = ptx.lane_position()[1], ptx.pointer(values, 3)
    row = lambda odd: ptx.add(ptx.mul(t, 2), ptx.i32(odd))
    places = [ptx.add(base, ptx.swizzled(row(odd), column, cfg.strip, PIECE)) for odd in range(2)]
    loaded: dict[int, list] = {}

    def read(eight: int, second: int):
        if eight not in loaded:
            offset = cfg.strip * (span * cfg.span + 8 * eight)
            text = f"ld.shared.u16 $0, [$1+{offset}];"
            two = [ptx.asm_value(text, "=r,r", place) for place in places]
            loaded[eight] = codes.pairs_of_bytes(cfg.format, *two, 0, cfg.element)
        return loaded[eight][second]

    return read


def _zero_pairs(cfg: StagedConfig, zeros, column) -> list:
    """The zero point of each of the two columns, twice in a word."""
    word = ptx.asm_value("ld.shared.u16 $0, [$1];", "=r,r", ptx.add(ptx.pointer(zeros, 3), column))
    floats = [ptx.float_of_byte(word, i) for i in range(2)]
    return [ptx.pack_16bit(x, x, cfg.element) for x in floats]


def scales_of_columns(cfg: StagedConfig, scales, wg):
    """f32 (64,): of the warpgroup's columns, from SMEM [strip]."""
    layout = _WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout),
    )
    def read(ctx, scales, wg):
        size = ITEM_BYTES[cfg.scale_dtype]
        place = ptx.add(ptx.pointer(scales, 3), ptx.mul(first_column(wg), size))
        if size == 4:
            found = ptx.asm_values("ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", 2, place)
        else:
            word = ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", place)
            of_half = ptx.float_of_bf16 if cfg.scale_dtype == "bfloat16" else ptx.float_of_f16
            found = [of_half(word, half) for half in range(2)]
        fragment = rows.empty_fragment((COLUMNS,), layout)
        rows.fill(fragment, lambda i: found[i : i + 1])
        return fragment

    return read(scales, wg)


def store_results(cfg: PackedWgmmaConfig, arrays, out, memory, kind, total, wg):
    """Sums of the cluster to GMEM. Those of a CTA, [tile_rows, pitch] floats, replace what was in `memory`."""
    flat = [*(of_matrix[1] for of_matrix in arrays), *(of_matrix[-1] for of_matrix in arrays if cfg.has_factor), out]
    numbers = [lax.axis_index(name) for name in ("strip", "tile", "split")]

    @plgpu.inline_mgpu(arg_types=(kind, _WGMMA, *(ptx.SCALAR,) * 4, *(plgpu.RefType(),) * len(flat)))
    def store(ctx, memory, total, wg, strip, tile, split, *gmem):
        base, column, t = ptx.pointer(memory, 3), first_column(wg), ptx.lane_position()[1]
        wg, strip, tile, split = map(ptx.scalar_value, (wg, strip, tile, split))
        ptx.asm("bar.sync 0;", "")  # no warpgroup needs its stages any longer
        sums: dict[int, list] = {}
        for (second, place), pair in zip(rows.pair_places(total), list(total.registers.flat), strict=True):
            for k in range(2):
                sums.setdefault(place + k, [None, None])[second] = rows.pair_element(pair, k)
        for row, both in sums.items():
            at = ptx.add(base, ptx.mul(ptx.add(ptx.mul(t, 2 * cfg.pitch), column), 4))
            ptx.asm(f"st.shared.v2.f32 [$0+{4 * cfg.pitch * row}], {{$1, $2}};", "r,f,f", at, *both)
        addresses = [ptx.pointer(ref, 0) for ref in gmem]
        packed_sums.add_up(cfg, packed_sums.results_of(cfg, addresses, strip, tile), base, split, wg)
        packed_sums.wait_to_leave(cfg)

    store(memory, total, wg, *numbers, *flat)
