"""For interpreter.py: functions of inline PTX that pass on or merge parts of a result, in numpy."""

import numpy as np

from pallas_kernels.gpu.merge_few_sm90 import PARTS_IN_FLIGHT


def flat_rows(closure, tok0, head0, row0, count=64):
    """(token, head) of the tile's rows."""
    packed = int(row0) + np.arange(count)
    return int(tok0) + packed // closure["group"], int(head0) + packed % closure["group"]


def _put_fragment(closure, q_tile, stats, acc, top, total):
    raw = q_tile.reshape(-1).view(np.uint8)
    raw[: acc.size * 4] = acc.reshape(-1).view(np.uint8)
    stats[:128] = np.concatenate([top, total])


def _get_fragment(closure, q_tile, stats):
    shape = (64, closure["dim"])
    raw = np.ascontiguousarray(q_tile).reshape(-1).view(np.uint8)[: 4 * shape[0] * shape[1]]
    return raw.view(np.float32).reshape(shape).copy(), stats[:64].copy(), stats[64:128].copy()


def _arrive(closure, counters, arrived, index, count):
    counters[int(index)] += 1
    arrived[0] = counters[int(index)] == count


def _numbers_of_threads(closure, element, nrows):
    """Of merge_few_sm90.py: (row, first column) of each thread that has a row."""
    chunk, each = int(element) // 4 + np.arange(128), closure["dim"] // 4
    return [(i, c // each, c % each * 4) for i, c in enumerate(chunk) if c // each < nrows]


def _add_parts(closure, parts, lses, part, first, last, element, nrows, acc, top, total):
    acc, top, total = acc.reshape(128, 4).copy(), top.copy(), total.copy()
    for thread, row, column in _numbers_of_threads(closure, element, nrows):
        for cta in range(int(part), min(int(part) + PARTS_IN_FLIGHT, int(last) + 1)):
            slot = 2 * cta + (cta == first)
            new = np.maximum(top[thread], lses[slot, row])
            a, b = np.exp2(top[thread] - new), np.exp2(lses[slot, row] - new)
            acc[thread] = acc[thread] * a + parts[slot, row, column : column + 4] * b
            top[thread], total[thread] = new, total[thread] * a + b
    return acc.reshape(-1), top, total


def _store_merged(closure, per_head, out, lse, element, nrows, tok0, head0, row0, acc, top, total):
    for thread, row, column in _numbers_of_threads(closure, element, nrows):
        (token,), (head,) = flat_rows(closure, tok0, head0, int(row0) + row, 1)
        m, denominator, value = top[thread], total[thread], acc.reshape(128, 4)[thread]
        seen = denominator > 0
        if closure["has_sinks"]:
            sink = per_head[head, 1] * np.log2(np.e)
            shift = max(m, sink)
            value, denominator = value * np.exp2(m - shift), denominator * np.exp2(m - shift) + np.exp2(sink - shift)
            m = shift
        out[token, head, column : column + 4] = (value / denominator).astype(out.dtype) if seen else 0
        if column == 0:
            lse[token, head] = (m + np.log2(denominator)) / np.log2(np.e) if seen else -np.inf


def warp_rows(array, rows8, width):
    """The registers of a fragment that warp_mma_sm80.py passes on, as [warps, rows, width]: the order is ours."""
    return array.reshape(4, 8 * rows8, -1)[..., :width]


def _put_state(closure, scratch, stats_out, acc, stats, wg):
    n, dim = closure["n"], closure["dim"]
    place, rows8 = slice(8 * n, 8 * n + 8), stats.shape[1] // 8
    states = warp_rows(acc, rows8, dim)[:, place]
    raw, first = scratch.reshape(-1).view(np.uint8), int(wg) * states.size * 4
    raw[first : first + states.size * 4] = np.ascontiguousarray(states, np.float32).reshape(-1).view(np.uint8)
    stats_out[64 * int(wg) :][:64] = warp_rows(stats, rows8, 2)[:, place].reshape(-1).view(stats_out.dtype)


def _merge_and_store(
    closure, scratch, stats, out, lse, part, part_lse, per_head, is_part, slot, scale, tok0, head0, row0, nrows, wg
):
    warps, dim, line = closure["warps"], closure["dim"], closure["line"]
    states = np.ascontiguousarray(scratch).reshape(-1).view(np.float32)[: warps * 8 * dim].reshape(warps, 8, dim)
    top, total = stats.view(np.float32)[: warps * 16].reshape(warps, 8, 2).transpose(2, 0, 1)
    for mine in range(line * warps, (line + 1) * warps):
        row = 8 * closure["n"] + mine
        if row >= nrows:
            continue
        (token,), (head,) = flat_rows(closure, tok0, head0, int(row0) + row, 1)
        m = top[:, mine].max()
        weight = np.exp2(top[:, mine] - m)
        denominator, seen = (weight * total[:, mine]).sum(), (weight * total[:, mine]).sum() > 0
        value = (weight[:, None] * states[:, mine]).sum(0) * scale
        assert not np.isnan(value).any()
        if is_part:
            part[int(slot), row] = value / denominator if seen else 0
            part_lse[int(slot), row] = m + np.log2(denominator) if seen else -np.inf
            continue
        if closure["has_sinks"]:
            sink = per_head[head, closure["sink_column"]] * np.log2(np.e)
            shift = max(m, sink)
            value, denominator = value * np.exp2(m - shift), denominator * np.exp2(m - shift) + np.exp2(sink - shift)
            m = shift
        out[token, head] = (value / denominator).astype(out.dtype) if seen else 0
        lse[token, head] = (m + np.log2(denominator)) / np.log2(np.e) if seen else -np.inf


PTX_OF_PARTS = {
    "put_fragment": _put_fragment,
    "put_state": _put_state,
    "merge_and_store": _merge_and_store,
    "get_fragment": _get_fragment,
    "arrive": _arrive,
    "add_parts": _add_parts,
    "store_merged": _store_merged,
}
"""As PTX of interpreter.py."""
