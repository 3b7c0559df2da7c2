"""One completion as the scheduler sees it: its tokens, how many are computed, and the blocks it holds."""

import dataclasses
import hashlib

from jattn.engine.params import SamplingParams


@dataclasses.dataclass(eq=False)
class Sequence:
    """A prompt and its generated tokens; a request with n completions has n sequences."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    salt: bytes = b""  # admission.root_of: a hash of the request's salt and rope variant
    tokens: list[int] = dataclasses.field(default_factory=list)  # the prompt, then the output
    num_computed: int = 0  # tokens whose keys and values are in the cache
    tables: list[list[int]] = dataclasses.field(
        default_factory=list
    )  # one per cache group; only BlockTables changes them
    kept_from: list[int] = dataclasses.field(default_factory=list)  # per group: blocks before this one were given back
    names: list[bytes] = dataclasses.field(default_factory=list)  # hashes of the first full blocks
    num_shared: int = 0  # blocks that came from the prefix cache
    num_published: int = 0  # blocks that others may share
    num_preemptions: int = 0

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    def start_over(self) -> None:
        """Keep the tokens and forget what was computed; the caller has dropped the pools that held its blocks."""
        self.num_preemptions += bool(self.tables)
        self.tables, self.kept_from, self.names = [], [], []
        self.num_computed = self.num_shared = self.num_published = 0


def seed_of(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for 0, a hash of both for the others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}.{index}".encode(), digest_size=8).digest(), "little") >> 1


def final_length(prompt: tuple[int, ...], params: SamplingParams, max_model_len: int) -> int:
    """The most tokens that a request will ever have; known at its start, and the same after a preemption."""
    return min(len(prompt) + params.max_tokens, max_model_len)
