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


PTX_OF_PARTS = {
    "put_fragment": _put_fragment,
    "get_fragment": _get_fragment,
    "arrive": _arrive,
    "add_parts": _add_parts,
    "store_merged": _store_merged,
}
"""As PTX of interpreter.py."""
