"""A paged cache in numpy, read and written one token at a time.

    slot = block * S + offset          a slot below 0, or from N * S on, writes nothing

Pages are arrays [N, S, ...]; every function returns a new array.
"""

import numpy as np


def write(pages, rows, slots):
    """Put rows[i] into slot slots[i], in order."""
    pages = np.array(pages)
    blocks, size = pages.shape[:2]
    for row, slot in zip(rows, slots, strict=True):
        if 0 <= slot < blocks * size:
            pages[slot // size, slot % size] = row
    return pages


def gather(pages, block_row, length):
    """The first `length` tokens of one request, whose pages are listed in block_row: [length, ...]."""
    size = pages.shape[1]
    tokens = [pages[block_row[t // size], t % size] for t in range(length)]
    return np.stack(tokens) if tokens else np.zeros((0, *pages.shape[2:]), pages.dtype)


def copy(pages, pairs):
    """pages[dst] = the old pages[src] for every (src, dst): a chain 0->1, 1->2 moves old values."""
    new = np.array(pages)
    for source, target in pairs:
        new[target] = pages[source]
    return new


def slots_of(block_row, first, count, size):
    """The slots of tokens first .. first + count - 1 of one request."""
    return [int(block_row[t // size]) * size + t % size for t in range(first, first + count)]
