"""JAX's interpreter of Mosaic GPU kernels, with three additions: run_state, wgmma operands in registers, inline PTX.

`interpreted()` is a context in which plgpu.kernel runs on the CPU: threads, shared memory, barriers and TMA by JAX's
own model, which also finds races. A function of inline PTX is replaced by a numpy function, see PTX; one that is not
listed there raises KeyError.
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

_LOCK = threading.Lock()  # a function of inline PTX reads and writes its Refs as one step


@contextlib.contextmanager
def interpreted(**params):
    """Kernels traced in this context run in JAX's interpreter."""
    with mock.patch.object(jaxpr_interpret.JaxprInterpreter, "interpret", _interpret):
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
    transforms = eqn.params["pytree_ref_transforms"].unflatten(values[count:])
    kinds = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in eqn.params["flat_ret_ty"]]
    meaning = PTX[function.__qualname__.split(".")[0]]
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
            arrays = [
                np.array(memory.get_buffer_content(*place, thread, **log)[0] if place else arg)
                for place, arg in zip(places, args, strict=True)
            ]
            before = [array.copy() for array in arrays]
            results = meaning(closure, *arrays) or ()
            for place, array, old in zip(places, arrays, before, strict=True):
                if place and array.tobytes() != old.tobytes():
                    memory.store_buffer_content(*place, array, thread, **log)
        return token, *results

    out = callback.io_callback(
        run, (gpu_callbacks.TOKEN_SHAPE_DTYPE, *kinds), token, self.mesh_location, self.thread, values[:count],
        [() if t is None else t for t in transforms],
    )  # fmt: skip
    return out[0], list(out[1:])


_OURS = {discharge.run_state_p: _run_state, primitives.wgmma_ref_p: _wgmma, primitives.inline_mgpu_p: _inline}


def _flat_rows(closure, tok0, head0, row0, count=64):
    """(token, head) of the tile's rows."""
    packed = int(row0) + np.arange(count)
    return int(tok0) + packed // closure["group"], int(head0) + packed % closure["group"]


def _load_rows(closure, source, tile, tok0, head0, row0, nrows, first_chunk):
    chunks, steps = closure["chunks"], closure["steps"] // closure["parts"]
    chunk = int(first_chunk) + np.arange(128 * steps)
    tokens, heads = _flat_rows(closure, tok0, head0, row0)
    for row, column in zip(chunk // chunks, chunk % chunks * 8, strict=True):
        here = slice(column, column + 8)
        tile[row, here] = source[tokens[row], heads[row], here] if row < nrows else 0


def _zero_rows(closure, tile, first, last):
    row = np.arange(tile.shape[0])
    tile[(row < first) | (row >= last)] = 0


def _keep_columns(closure, x, counts):
    return (np.where(np.arange(x.shape[1]) < counts[:, None], x, -np.inf).astype(np.float32),)


def _store_rows(closure, out_ref, lse_ref, out, lse, tok0, head0, row0, nrows, column):
    n = int(np.clip(nrows, 0, 64))
    at = tuple(x[:n] for x in _flat_rows(closure, tok0, head0, row0))
    assert not np.isnan(out[:n]).any()
    out_ref[at[0], at[1], int(column) : int(column) + out.shape[1]] = out[:n].astype(out_ref.dtype)
    lse_ref[at] = lse[:n]


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


PTX = {
    "load_rows": _load_rows,
    "await_rows": lambda closure: None,
    "opaque": lambda closure, x: (x,),
    "zero_rows": _zero_rows,
    "keep_columns": _keep_columns,
    "store_rows": _store_rows,
    "store_partial": _store_partial,
    "load_partial": _load_partial,
}
"""Name of a function of ptx_sm90 or rows_sm90 -> a numpy function of the same effect, called with the variables of its
closure and its arguments as arrays. It returns the results, or None; arrays of Refs that it changed are stored."""
