"""For interpreter.py: functions of inline PTX by which Hopper's wgmma tiles read an 8-bit cache, in numpy.

Transposed tiles and 8-bit weights keep the order of the keys here: test_stored_tiles.py judges the order on the chip.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu.queries_sm90 import TOP

BFLOAT16 = jnp.dtype(jnp.bfloat16)


def _convert(closure, source, target):
    values = source.astype(np.float32)
    target[...] = (values.T if closure["tile"].transposed else values).astype(target.dtype)


def _convert_rows(closure, source, target_tile):
    """Source and target may be the same memory, of 16 bits."""
    queries = source.view(BFLOAT16).astype(np.float32)
    _, exponent = np.frexp(np.abs(np.nan_to_num(queries)).max(axis=1))  # the largest is below 2 ** exponent
    power = np.minimum(TOP[closure["target"]] - exponent, 125)
    with np.errstate(invalid="ignore"):
        new = np.ldexp(queries, power[:, None]).astype(jnp.dtype(closure["target"]))
    target_tile[...] = new
    if source.shape == target_tile.shape and source.dtype == target_tile.dtype:
        source[...] = new
    return (np.ldexp(np.float32(1), -power),)


def _stage_rows(closure, tile, out):
    tile.view(jnp.dtype(closure["dtype"]))[...] = out.astype(jnp.dtype(closure["dtype"]))


def _keys(closure, kv0, start, stop):
    """(position of each thread's key, whether start <= key < stop)."""
    key = int(kv0) + np.arange(128) % closure["block"]
    return key, (key >= start) & (key < stop)


def _load_ids(closure, block_table, req, *where):
    key, seen = _keys(closure, *where)
    columns = np.where(seen, key // closure["page"], 0)
    return (np.where(seen, block_table[int(req), columns], 0).astype(np.int32),)


def _load_block(closure, pool, ids, head, *where):
    key, seen = _keys(closure, *where)
    offset, head = key % closure["page"], np.full_like(key, head)
    place = (ids, head, offset) if closure["heads_first"] else (ids, offset, head)
    return (np.where(seen, pool[place], 0).astype(np.float32),)


def _load_scales(closure, k, v, ids, head, *where):
    found = [_load_block(closure, pool, ids, head, *where)[0][: closure["block"]] for pool in (k, v)]
    return (np.concatenate(found),)


def _put_block(closure, tile, values):
    first, block = closure["first"], closure["block"]
    tile[first : first + block] = values[:block]


PTX_OF_EIGHT_BITS = {
    "convert": _convert,
    "convert_rows": _convert_rows,
    "eight_bit_weights": lambda closure, p: (p.astype(jnp.dtype(jnp.float8_e4m3fn)),),
    "stage_rows": _stage_rows,
    "load_ids": _load_ids,
    "load_block": _load_block,
    "load_scales": _load_scales,
    "put_block": _put_block,
    "capped": lambda closure, x, scale: ((closure["cap"] * np.tanh(x * scale)).astype(np.float32),),
}
"""As PTX of interpreter.py."""
