"""JAX's interpreter of Mosaic GPU kernels, with three additions: run_state, wgmma operands in registers, inline PTX.

`interpreted()` is a context in which plgpu.kernel runs on the CPU: threads, shared memory, barriers and TMA by JAX's
own model. A function of inline PTX is replaced by a numpy function, see PTX; one that is not listed there raises
KeyError. With detect_races=True, accesses of two warpgroups, or of one and TMA, that no barrier orders fail: see
interpreter_races.py.
"""

import contextlib
import inspect
import threading
from unittest import mock

import jax
import numpy as np
from jax._src import callback, core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode
from jax._src.state import discharge
from jax._src.state.types import AbstractRef

from jattn.ops import quantised
from pallas_kernels.gpu import softmax_sm90 as softmax
from pallas_kernels.gpu.packed_codes_sm90 import unit_of_scaled
from tests.kernels.gpu.interpreter_eight_bits import PTX_OF_EIGHT_BITS
from tests.kernels.gpu.interpreter_parts import PTX_OF_PARTS, flat_rows, warp_rows
from tests.kernels.gpu.interpreter_races import WRITERS, check_races, multiply

_COPIES = {}  # of each CTA: groups of copies (where to, array) that are not waited for; the last group is open
_LOCK = threading.Lock()  # a function of inline PTX reads and writes its Refs as one step


@contextlib.contextmanager
def interpreted(**params):
    """Kernels traced in this context run in JAX's interpreter."""
    _COPIES.clear()
    with (
        mock.patch.object(jaxpr_interpret.JaxprInterpreter, "interpret", _interpret),
        mock.patch.object(gpu_callbacks, "wgmma", multiply),
    ):
        with force_gpu_interpret_mode(InterpretGPUParams(**params)):
            yield


_original = jaxpr_interpret.JaxprInterpreter.interpret


def _interpret(self, jaxpr, token, *args):
    """JaxprInterpreter.interpret, one equation at a time: by _OURS, or else by JAX as a jaxpr of its own."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
    for eqn in jaxpr.eqns:
        ours = _OURS.get(eqn.primitive)
        in_registers = eqn.primitive is primitives.wgmma_ref_p and not isinstance(eqn.invars[1].aval, AbstractRef)
        if in_registers or (ours and eqn.primitive is not primitives.wgmma_ref_p):
            token, out = _OURS[eqn.primitive](self, eqn, token, [read(v) for v in eqn.invars])
        else:
            names = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
            results = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
            small = core.Jaxpr([], names, results, [eqn], eqn.effects, debug_info=jaxpr.debug_info)
            token, out = _original(self, small, token, *(env[v] for v in names))
            env |= zip(results, out, strict=True)
            continue
        env |= {v: x for v, x in zip(eqn.outvars, out, strict=True) if not isinstance(v, core.DropVar)}
    return token, [read(v) for v in jaxpr.outvars]


def _allocate(self, token, value):
    """The key of a new buffer of this thread with that value."""
    registers = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token, compute_unit=self.thread, memory_space_id=registers, initial_ref_count=1
    )
    return gpu_callbacks.call_allocate_buffer(
        token=token, mesh_location=self.mesh_location, thread=self.thread,
        allocation_request_as_array=request, value=value, source_info=None,
    )  # fmt: skip


def _free(self, token, key):
    return gpu_callbacks.call_deallocate_buffer(
        token=token, mesh_location=self.mesh_location, thread=self.thread, allocation_key_as_array=key, source_info=None
    )


def _run_state(self, eqn, token, values):
    """Values become buffers for the body; Refs pass through."""
    jaxpr, keys, own = eqn.params["jaxpr"], [], []
    for value, var in zip(values, eqn.invars, strict=True):
        fresh = not isinstance(var.aval, AbstractRef)
        if fresh:
            token, value = _allocate(self, token, value)
        keys.append(value)
        own.append(fresh)
    token, _ = self.interpret(jaxpr, token, *keys)
    out = []
    for value, key, fresh, var in zip(values, keys, own, eqn.invars, strict=True):
        if fresh:
            token, value = gpu_callbacks.call_get(
                token=token, result_shape_and_dtype=var.aval, mesh_location=self.mesh_location, thread=self.thread,
                allocation_key_as_array=key, transforms=(), source_info=None,
            )  # fmt: skip
            token = _free(self, token, key)
        out.append(value)
    return token, out


def _wgmma(self, eqn, token, values):
    """acc += a b with a in registers."""
    acc, a, b, *leaves = values
    empty = jax.tree.structure([])
    trees = [eqn.params[f"{name}_transforms_tree"] or empty for name in ("acc", "a", "b")]
    acc_t, _, b_t = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    b, b_t = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_t)
    token, key = _allocate(self, token, a)
    token = callback.io_callback(
        gpu_callbacks.wgmma, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, mesh_location=self.mesh_location,
        thread=self.thread, acc_allocation_key_as_array=acc, acc_transforms=acc_t, a_allocation_key_as_array=key,
        a_transforms=(), b_allocation_key_as_array=b, b_transforms=b_t,
    )  # fmt: skip
    return _free(self, token, key), []


def _inline(self, eqn, token, values):
    """Runs the numpy function that PTX has for a function of inline PTX."""
    function, count = eqn.params["mgpu_fn"], eqn.params["pytree_args"].num_leaves
    is_ref = [isinstance(v.aval, AbstractRef) for v in eqn.invars[:count]]
    transforms = [t or () for t in eqn.params["pytree_ref_transforms"].unflatten(values[count:])]
    given = [v.aval for v in eqn.invars[:count]]
    resolved = [jaxpr_interpret.resolve_ref(*one) for one in zip(given, values[:count], transforms, strict=True)]
    kinds = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in eqn.params["flat_ret_ty"]]
    name = function.__qualname__.split(".")[0]
    closure = inspect.getclosurevars(function).nonlocals

    @gpu_callbacks.fail_on_exception
    def run(token, location, thread, args, transforms):
        memory = gpu_callbacks._get_shared_memory()
        with _LOCK:
            places = []
            for ref, arg, where in zip(is_ref, args, transforms, strict=True):
                key = gpu_callbacks.HostAllocationKey.from_array(arg) if ref else None
                steps = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(where)) if ref else None
                places.append((key, memory.access(key, steps)) if ref else None)
            log = dict(logging_info=shared_memory.GPULoggingInfo(location, thread, None))
            if name == "end_reads":
                memory.commit_smem(thread)
            check_races(thread, [place for place in places if place], writes=name in WRITERS)
            arrays = [
                np.array(memory.get_buffer_content(*place, thread, **log)[0] if place else arg)
                for place, arg in zip(places, args, strict=True)
            ]
            before = [array.copy() for array in arrays]
            store = lambda place, array: memory.store_buffer_content(*place, array, thread, **log)
            groups = _COPIES.setdefault(tuple(np.ravel(location)), [[]])
            results = ()
            if name in COPIES:  # until it is waited for, nothing is known of what a copy has written
                groups[-1].append((places[1], COPIES[name](closure, *arrays)))
                arrays[1][...] = _unknown(arrays[1].dtype)
            elif name == "commit":
                groups.append([])
            elif name == "wait_for_copies":
                for group in groups[: len(groups) - 1 - closure["pending"]]:
                    for place, array in group:
                        store(place, array)
                    group.clear()
            else:
                results = PTX[name](closure, *arrays) or ()
            for result, kind in zip(results, kinds, strict=True):  # else XLA would wait for ever
                assert (np.shape(result), result.dtype) == (kind.shape, kind.dtype), f"{name}: wanted {kind}"
            for place, array, old in zip(places, arrays, before, strict=True):
                if place and array.tobytes() != old.tobytes():
                    store(place, array)
        return token, *results

    out = callback.io_callback(
        run, (gpu_callbacks.TOKEN_SHAPE_DTYPE, *kinds), token, self.mesh_location, self.thread,
        *([each[n] for each in resolved] for n in range(2)),
    )  # fmt: skip
    return out[0], list(out[1:])


_OURS = {discharge.run_state_p: _run_state, primitives.wgmma_ref_p: _wgmma, primitives.inline_mgpu_p: _inline}


def _load_rows(closure, source, tile, tok0, head0, row0, nrows, first_chunk):
    chunks, steps = closure["chunks"], closure["steps"] // closure["parts"]
    chunk = int(first_chunk) + np.arange(128 * steps)
    tokens, heads = flat_rows(closure, tok0, head0, row0)
    tile = tile.view(source.dtype)  # whose bits are copied: queries that are converted come to a tile of another dtype
    for row, column in zip(chunk // chunks, chunk % chunks * 8, strict=True):
        here = slice(column, column + 8)
        tile[row, here] = source[tokens[row], heads[row], here] if row < nrows else 0


def _zero_rows(closure, tile, first, last, begin, end):
    row = np.arange(tile.shape[0])
    tile[((row < first) | (row >= last)) & (row >= begin) & (row < end)] = 0


def _gather(closure, source, index):
    return (np.where(index >= 0, source.reshape(-1)[np.maximum(index, 0)], 0).astype(source.dtype),)


def _keep_columns(closure, x, counts, starts=None):
    column = np.arange(x.shape[1])
    seen = (column < counts[:, None]) & (True if starts is None else column >= starts[:, None])
    return (np.where(seen, x, -np.inf).astype(np.float32),)


def _add_slope(closure, x, factor, slope, shift):
    return ((x * factor + slope[:, None] * np.arange(x.shape[1]) + shift[:, None]).astype(np.float32),)


def _store_rows(closure, out_ref, lse_ref, out, lse, tok0, head0, row0, nrows, column):
    n = int(np.clip(nrows, 0, 64))
    at = tuple(x[:n] for x in flat_rows(closure, tok0, head0, row0))
    assert not np.isnan(out[:n]).any()
    out_ref[at[0], at[1], int(column) : int(column) + out.shape[1]] = out[:n].astype(out_ref.dtype)
    lse_ref[at] = lse[:n]


def _store_tile(closure, tile, out_ref, lse_ref, lse, tok0, head0, row0, nrows):
    out = tile.view(out_ref.dtype)[:, : closure["dim"]].astype(np.float32)  # whose dtype may be another
    _store_rows(closure, out_ref, lse_ref, out, lse, tok0, head0, row0, nrows, 0)


def _store_partial(closure, acc_ref, lse_ref, acc, lse, slot, row0, nrows, column):
    n = int(np.clip(nrows, 0, 64))
    rows = slice(int(row0), int(row0) + n)
    acc_ref[int(slot), rows, int(column) : int(column) + acc.shape[1]] = acc[:n]
    lse_ref[int(slot), rows] = lse[:n]


def _load_partial(closure, acc_ref, lse_ref, slot, row0, nrows, column):
    n, width = int(np.clip(nrows, 0, 64)), closure["width"]
    acc, lse = np.zeros((64, width), np.float32), np.full(64, -np.inf, np.float32)
    rows = slice(int(row0), int(row0) + n)
    if n:
        acc[:n] = acc_ref[int(slot), rows, int(column) : int(column) + width]
        lse[:n] = lse_ref[int(slot), rows]
    return acc, lse


def _raise_shift(closure, x, factor, acc, m, total):
    top = (x * np.reshape(factor, (-1, 1))).max(axis=1)
    raised = np.ceil(top) - (softmax.MOST_RISE - 1) if closure["eight_bits"] else top
    new = np.where(top > m + softmax.MOST_RISE, raised, m).astype(np.float32)
    alpha = np.exp2(m - new).astype(np.float32)
    return new, total * alpha, acc * alpha[:, None]


def _weights_first(closure, x, factor, acc, m, total):
    logits = x * np.reshape(factor, (-1, 1))
    with np.errstate(over="ignore"):
        large = ~(np.exp2(logits - m[:, None]).sum(axis=1) <= softmax.MOST_SUM)
    new = np.where(large, np.maximum(m, logits.max(axis=1)), m).astype(np.float32)
    alpha, p = np.exp2(m - new).astype(np.float32), np.exp2(logits - new[:, None]).astype(np.float32)
    return new, total * alpha + p.sum(axis=1), acc * alpha[:, None], p.astype(jax.numpy.dtype(closure["dtype"]))


def _unknown(dtype):
    """What a tile holds while a copy to it is under way: NaN, or the smallest integer."""
    return np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else np.nan


def _key_of_thread(closure):
    """(number of the key in the block, whether the thread is the first that holds its row)."""
    keys, thread = closure["keys"], np.arange(128)
    return thread // 32 * keys + thread % 32 % keys, thread % 32 < keys


def _pool_rows(closure, block_table, req, head, kv0, start, stop):
    key, (heads, page) = _key_of_thread(closure)[0] + int(kv0), (closure["heads"], closure["page"])
    out = np.full(128, -1, np.int32)
    for i in np.flatnonzero((key >= start) & (key < stop)):
        first = block_table[int(req), key[i] // page] * heads * page
        offset = key[i] % page
        out[i] = first + (int(head) * page + offset if closure["heads_first"] else offset * heads + int(head))
    return (out,)


def _put_rows(closure, box, own_rows):
    own, first = _key_of_thread(closure)
    box[own[first]] = own_rows[first]


def _copy_block(closure, pool, tile, box):
    """What the tile will hold."""
    out, lines = np.zeros_like(tile), pool.reshape(-1, pool.shape[-1])
    out[box >= 0] = lines[box[box >= 0]]
    return out


def _copy_scales(closure, pool, tile, box):
    out = np.zeros_like(tile)
    out[box >= 0] = pool.reshape(-1)[box[box >= 0]]
    return out


COPIES = {"copy_block": _copy_block, "copy_scales": _copy_scales}
"""The same for copies that are under way until `wait_for_copies`: from the first argument to the second."""


def _load_queries(closure, source, tok0, head0, row0, nrows):
    count, dim = 8 * closure["rows8"], closure["dim"]
    tokens, heads = flat_rows(closure, tok0, head0, row0, count)
    out = np.zeros((4, count, dim), source.dtype)
    for i in range(min(count, int(nrows))):
        out[:, i] = source[tokens[i], heads[i]]
    return (out.reshape(closure["shape"]),)


def _read_queries(closure, tile):
    count, dim = 8 * closure["rows8"], closure["dim"]
    tile = tile.view(jax.numpy.dtype(closure["dtype"]))  # raw memory, where other tiles' queries are converted in place
    rows = np.broadcast_to(tile[:count, :dim], (4, count, dim))
    return (np.ascontiguousarray(rows).reshape(closure["shape"]),)


def _start_state(closure):
    acc, stats = (np.zeros(shape, np.float32) for shape in closure["shapes"])
    warp_rows(stats, stats.shape[1] // 8, 1)[...] = -1e38
    return acc, stats


def _put_queries(closure, tile, queries):
    tile[:16] = warp_rows(queries, 2, closure["dim"])[0]


def _keys_times_queries(closure, tile, queries, first):
    q = queries[:16] if closure["stored"] else warp_rows(queries, closure["rows8"], closure["dim"])[0]
    q = q.astype(np.float32)
    return ((tile[int(first) : int(first) + 64].astype(np.float32) @ q.T).astype(np.float32),)


def _softmax_times_values(closure, tile, x, factor, acc, stats, first, scales=None):
    acc, stats, rows8 = acc.copy(), stats.copy(), closure["rows8"]
    states, sums = acc.reshape(4, 8 * rows8, -1), stats.reshape(4, 8 * rows8, -1)
    for w in range(4):
        y = x[16 * w : 16 * w + 16].T * factor
        top = np.maximum(sums[w, :, 0], y.max(axis=1))
        alpha, p = np.exp2(sums[w, :, 0] - top), np.exp2(y - top[:, None])
        sums[w, :, 1] = sums[w, :, 1] * alpha + p.sum(axis=1)
        sums[w, :, 0] = top
        p = p if scales is None else p * scales[16 * w : 16 * w + 16]
        kind = np.float32 if closure["parts"] == 2 else jax.numpy.dtype(closure["target"])
        values = tile[int(first) + 16 * w :][:16].astype(np.float32)
        states[w] = states[w] * alpha[:, None] + p.astype(kind).astype(np.float32) @ values
    return acc, stats


def _decode_tile(closure, source, target):
    target[:, : closure["dim"]] = source.astype(np.float32).astype(target.dtype)


def _bfloat16_parts(closure, p):
    high = (np.ascontiguousarray(p).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    kind = jax.numpy.dtype(jax.numpy.bfloat16)
    return high.astype(kind), (p - high).astype(kind)


def _queries_times_keys(closure, q_tile, k_tile):
    return tuple(
        (q_tile[half].astype(np.float32) @ k_tile.astype(np.float32).T).astype(np.float32)
        for half in range(closure["halves"])
    )


def _add_weighted_values(closure, v_tile, *fragments):
    halves, values = closure["halves"], v_tile[:, : closure["dim"]].astype(np.float32)
    parts = zip(fragments[:halves], fragments[halves:], strict=True)
    return tuple((acc + p.astype(np.float32) @ values).astype(np.float32) for acc, p in parts)


def _put_numbers(closure, box, *numbers):
    box[: len(numbers)] = numbers


def _add_products(closure, tile, queries, sums):
    """The queries are as _load_queries leaves them: the same for each warp."""
    dim, at, count = 16 * closure["steps"], closure["column"], tile.shape[1]
    q = warp_rows(queries, 2, dim)[0, :, at : at + count].astype(np.float32)
    sums = sums.copy()
    sums[:, : q.shape[0]] += tile.astype(np.float32) @ q.T
    return (sums,)


def _constants(closure):
    out = np.zeros(closure["shape"], np.float32)
    if any(closure["values"]):  # of a state: maxima, then sums
        out[0] = closure["values"][0]
    return (out,)


def _weigh(closure, stats, x, state, turn):
    """The first two rows of a state are the maxima and the sums; the first of factors are flat."""
    top, m = x.max(axis=0), state[0]
    new = np.where(top > m + (8 + closure["bias"]), top - closure["bias"], m)
    factor, p = np.exp2(m - new), np.exp2(x - new)
    out, factors = np.zeros_like(state), np.zeros((64, 8), np.float32)
    out[0], out[1] = new, state[1] * factor + p.sum(axis=0)
    factors.reshape(-1)[: len(new)] = factor
    assert np.isfinite(p).all() and p.max(initial=0) < 2**15.5
    return out, p.astype(jax.numpy.dtype(closure["target"])), factors


def _put_weights(closure, out, stats, weights, factors):
    out[...] = weights.reshape(-1)
    stats[: weights.shape[1]] = factors.reshape(-1)[: weights.shape[1]]


def _put_sums(closure, stats, state):
    stats[: 2 * state.shape[1]] = state[:2].reshape(-1)


def _add_weighted(closure, tiles, weights, stats, acc, first_part):
    """acc [16 rows, columns of the warpgroup], in our order."""
    p, rows = weights.reshape(tiles.shape[1], -1).astype(np.float32), acc.size // 16
    values = np.concatenate(list(tiles), axis=1).astype(np.float32)
    first = int(first_part) * tiles.shape[2]
    acc = acc.reshape(16, rows) * stats[:16, None] + p.T @ values[:, first : first + rows]
    return (acc.reshape(closure["shape"]).astype(np.float32),)


def _store_columns(closure, out, lse, part, part_lse, stats, acc, is_part, slot, tok0, head0, row0, nrows, skipped, wg):
    values, (m, total) = acc.reshape(16, -1), stats[:32].reshape(2, 16)
    columns = slice(int(wg) * closure["half"], (int(wg) + 1) * closure["half"])
    for r in range(min(16, int(nrows) - int(skipped))):
        row, seen = int(skipped) + r, total[r] > 0
        value = values[r] / total[r] if seen else np.zeros_like(values[r])
        base2 = m[r] + np.log2(total[r]) if seen else -np.inf
        assert not np.isnan(value).any()
        if is_part:
            part[int(slot), row, columns] = value
            part_lse[int(slot), row] = base2
            continue
        (token,), (head,) = flat_rows(closure, tok0, head0, int(row0) + row, 1)
        out[token, head, columns] = value.astype(out.dtype)
        lse[token, head] = base2 * np.log(2)


def _put_list(closure, source, target, place, stage):
    target[int(stage)] = source.reshape(-1)[int(place) : int(place) + target.shape[1]]


def _copy_rows(closure, pool, lists, tile, place):
    """The copies end at once: the kernel waits for all of a block before it publishes any."""
    entries, first = lists.reshape(-1)[int(place) : int(place) + len(tile)], closure["column"] // 2
    rows = pool.reshape(-1, closure["row_bytes"] // 2)[np.maximum(entries, 0), first : first + tile.shape[1]]
    tile[...] = np.where(entries[:, None] >= 0, rows, np.zeros((), tile.dtype))


def _keep_listed(closure, x, listed, stage):
    return (np.where(listed[int(stage)] >= 0, x, -np.inf).astype(np.float32),)


def _columns_of_rows():
    """Of packed_wgmma_sm90.py: the column of a warpgroup that is row i of wgmma."""
    row = np.arange(64)
    return row // 16 * 16 + row % 8 * 2 + row % 16 // 8


def _decoded_columns(closure, values, wg, *others):
    cfg, columns = closure["cfg"], 64 * int(wg) + _columns_of_rows()
    first = closure["span"] * cfg.span
    if cfg.format in ("int4", "fp4"):
        codes = np.asarray(quantised.unpacked(values, 0))[first : first + cfg.span, columns]
        numbers = np.array(quantised.FORMATS[cfg.format].numbers)[codes]
    else:
        numbers = values[first : first + cfg.span, columns]
        numbers = numbers.view(jax.numpy.float8_e4m3fn) if cfg.format == "fp8" else numbers
    numbers = numbers.astype(np.float32) - (others[0].astype(np.float32)[columns] if cfg.zero_rows else 0)
    if cfg.scales_codes:
        scales = np.repeat(others[-1].astype(np.float32)[first // cfg.group :], cfg.group, axis=0)[: cfg.span]
        numbers = numbers * scales[:, columns] / unit_of_scaled(cfg.scale_dtype, cfg.element)
    exact = numbers.T.astype(jax.numpy.dtype(cfg.element))
    assert (exact.astype(np.float32) == numbers.T).all()
    return (exact,)


_SUMS = {}  # of a strip and a tile: the sums of each CTA of the cluster


def _store_results(closure, memory, total, wg, strip, tile, split, *gmem):
    cfg = closure["cfg"]
    here = _SUMS.setdefault((int(strip), int(tile)), {})
    here[int(split), int(wg)] = total[np.argsort(_columns_of_rows())].T
    if len(here) < cfg.splits * cfg.warpgroups:
        return
    sums = np.concatenate([sum(here[s, w] for s in range(cfg.splits)) for w in range(cfg.warpgroups)], axis=1)
    here.clear()
    matrix = max(i for i, first in enumerate(cfg.first_strips) if first <= strip)
    column, row = (int(strip) - cfg.first_strips[matrix]) * cfg.strip, int(tile) * cfg.tile_rows
    scales, factor, before = gmem[matrix], gmem[cfg.has_factor * len(cfg.widths) + matrix], sum(cfg.widths[:matrix])
    out = gmem[-1][:, before : before + cfg.widths[matrix]]
    part = out[row : row + cfg.tile_rows, column : column + cfg.strip]
    sums = sums[: part.shape[0], : part.shape[1]]
    own = lambda of_columns: of_columns[0, column : column + cfg.strip].astype(np.float32)
    sums = sums * (own(scales) if cfg.is_whole else 1) * (own(factor) if cfg.has_factor else 1)
    part[...] = (sums * (unit_of_scaled(cfg.scale_dtype, cfg.element) if cfg.scales_codes else 1)).astype(out.dtype)


def _factor_of_columns(closure, factor, expert, column, wg):
    return (factor[int(expert), 0, int(column) + 64 * int(wg) + _columns_of_rows()],)


def _store_pairs(closure, out, y, wg, row, column):
    rows, first = slice(int(row), int(row) + y.shape[1]), int(column) + 64 * int(wg)
    out[rows, first : first + 64] = y[np.argsort(_columns_of_rows())].T.astype(out.dtype)


_OF_OTHER_FILES = PTX_OF_PARTS | PTX_OF_EIGHT_BITS
PTX = _OF_OTHER_FILES | {
    "decoded_columns": _decoded_columns,
    "scales_of_columns": lambda closure, scales, wg: (scales.astype(np.float32)[64 * int(wg) + _columns_of_rows()],),
    "store_results": _store_results,
    "store_pairs": _store_pairs,
    "factor_of_columns": _factor_of_columns,
    "pool_rows": _pool_rows,
    "put_rows": _put_rows,
    "row_maxima": lambda closure, x: (np.maximum(x.max(axis=1), np.float32(-3e38)),),
    "partial_row_sums": lambda closure, x: (x.sum(axis=1),),
    "weighted_row_sums": lambda closure, x, factors: ((x * factors).sum(axis=1),),
    "complete_row_sums": lambda closure, x: (x,),
    "sync_lanes": lambda closure: None,
    "sync_warps": lambda closure: None,
    "load_queries": _load_queries,
    "read_queries": _read_queries,
    "sync_warpgroup": lambda closure: None,
    "end_reads": lambda closure: None,
    "put_queries": _put_queries,
    "start_state": _start_state,
    "keys_times_queries": _keys_times_queries,
    "softmax_times_values": _softmax_times_values,
    "decode_tile": _decode_tile,
    "load_per_key": lambda closure, scales: (scales,),
    "queries_times_keys": _queries_times_keys,
    "split_columns": lambda closure, x: np.split(x, x.shape[1] // closure["width"], axis=1),
    "join_columns": lambda closure, *parts: (np.concatenate(parts, axis=1),),
    "unpaired": lambda closure, acc: (acc.reshape(-1),),
    "paired": lambda closure, numbers: (numbers.reshape(closure["shape"]),),
    "exponentials": lambda closure, x, factor, top: (np.exp2(x * factor - top[:, None]).astype(np.float32),),
    "bfloat16_parts": _bfloat16_parts,
    "rescaled": lambda closure, acc, alpha: (acc * alpha[:, None],),
    "add_weighted_values": _add_weighted_values,
    "put_numbers": _put_numbers,
    "load_rows": _load_rows,
    "await_rows": lambda closure: None,
    "opaque": lambda closure, x: (x,),
    "zero_rows": _zero_rows,
    "gather": _gather,
    "raise_shift": _raise_shift,
    "weights_first": _weights_first,
    "scale_rows": lambda closure, x, factors: (x * factors[:, None],),
    "keep_columns": _keep_columns,
    "row_numbers": lambda closure: (np.arange(64, dtype=np.int32),),
    "numbers": lambda closure: (np.indices(closure["shape"], np.int32)[closure["axis"]],),
    "column_numbers": lambda closure: (np.arange(closure["count"], dtype=np.int32),),
    "add_slope": _add_slope,
    "store_rows": _store_rows,
    "store_partial": _store_partial,
    "store_tile": _store_tile,
    "load_partial": _load_partial,
    "add_products": _add_products,
    "_constants": _constants,
    "fold": lambda closure, sums: (sums[:, : sums.shape[1] // 2],),
    "weigh": _weigh,
    "put_weights": _put_weights,
    "put_sums": _put_sums,
    "add_weighted": _add_weighted,
    "store_columns": _store_columns,
    "put_list": _put_list,
    "copy_rows": _copy_rows,
    "await_copies": lambda closure: None,
    "keep_listed": _keep_listed,
}
"""Name of a function of ptx_sm90 or rows_sm90 -> a numpy function of the same effect, called with the variables of its
closure and its arguments as arrays. It returns the results, or None; arrays of Refs that it changed are stored."""
