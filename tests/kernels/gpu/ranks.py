"""Several ranks on the PTX model: machines that run in step, side by side in one memory."""

import re
from unittest import mock

import numpy as np

from tests.kernels.gpu.simt import Machine


class Ranks(Machine):
    """A thread's addresses are those of its rank. arrays: of each rank, by name; between them lie 1 to 256 zeros."""

    def __init__(self, threads: int, arrays: list[dict[str, np.ndarray]]):
        self.arrays, self.starts, size = arrays, [], 1024
        for own in arrays:
            self.starts.append({})
            for name, array in own.items():
                self.starts[-1][name], size = size, size + array.nbytes // 256 * 256 + 256
        super().__init__(threads * len(arrays), size)
        self.of_rank = self.lane // threads
        self.thread = self.lane % threads
        for own, places in zip(arrays, self.starts, strict=True):
            for name, array in own.items():
                self.memory[places[name] : places[name] + array.nbytes] = array.view(np.uint8).ravel()

    def base(self, name: str) -> np.ndarray:
        """Each thread's address of its rank's array."""
        return np.array([places[name] for places in self.starts], np.int64)[self.of_rank]

    def read(self, rank: int, name: str) -> np.ndarray:
        like, start = self.arrays[rank][name], self.starts[rank][name]
        return self.memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    def table(self, name: str) -> mock.Mock:
        """peer_memory_sm90.Table, whose first array has this name."""
        starts = np.array([places[name] for places in self.starts], np.int64)
        address = lambda rank, _: np.broadcast_to(starts[rank], self.lane.shape)
        return mock.Mock(rank=self.of_rank, ranks=len(self.starts), address=address)

    def no_other_byte_has_changed(self) -> bool:
        """Is what lies behind each array still 0?"""
        ends = [(at + own[name].nbytes, at) for own, places in zip(self.arrays, self.starts, strict=True)
                for name, at in places.items()]  # fmt: skip
        return not any(self.memory[end : at + (end - at) // 256 * 256 + 256].any() for end, at in ends)

    def load(self, place, kind, mask=None):
        return super().load(place, np.int32 if kind is np.uint32 else kind, mask)

    def _branch(self, text, args):
        """peer_words_sm90.receive. What it waits for has come, since all threads have sent."""
        counts = [int(width) // 2 for width in re.findall(r"ld\.volatile\.global\.v(\d)\.b32", text)]
        given = len(counts)
        places, numbers, waits = (args[i * given : (i + 1) * given] for i in range(3))
        instead, found = args[3 * given :], []
        for place, count, number, wait in zip(places, counts, numbers, waits, strict=True):
            for k in range(count):
                word, seen = (self.load(place + 8 * k + at, np.int32, wait != 0) for at in (0, 4))
                assert (seen == number)[wait != 0].all(), "it would wait for ever"
                like = instead[len(found)]
                found.append(np.where(wait != 0, word.view(like.dtype), like))
        return found
