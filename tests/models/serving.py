"""A model run as by a server: ragged steps over permuted pages, padded to two static sizes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import jattn
from jattn import models

BLOCK_SIZE, WIDTH, REQUESTS, PREFILL, DECODE = 4, 8, 3, 24, 4

step = functools.partial(jax.jit, static_argnames=("config", "backend"))(models.forward)


def reference(config: models.ModelConfig) -> str:
    """The name of the backend in plain jnp for this model's layers."""
    return "mla_sdpa" if isinstance(config.layers[0].attention, jattn.MLASpec) else "sdpa"


@dataclasses.dataclass
class Server:
    """Two requests and a padding request; each cache group has its own pages."""

    config: models.ModelConfig
    params: Any
    backend: str = ""  # "": the reference

    def __post_init__(self):
        self.backend = self.backend or reference(self.config)
        groups, blocks = len(self.config.cache_groups), REQUESTS * WIDTH
        rng = np.random.default_rng(7)
        self.tables = [rng.permutation(blocks).reshape(REQUESTS, WIDTH).astype(np.int32) for _ in range(groups)]
        self.caches = self.config.make_caches(blocks, BLOCK_SIZE, "float32")

    def run(self, prompts: list[np.ndarray], schedule: list[tuple[int, ...]]) -> list[np.ndarray]:
        """The logits of every token, [len, vocab] per prompt. schedule: new tokens of each prompt, per step."""
        done, logits = [0] * len(prompts), [[] for _ in prompts]
        for new in schedule:
            tokens = np.concatenate([p[d : d + n] for p, d, n in zip(prompts, done, new, strict=True)])
            done = [d + n for d, n in zip(done, new, strict=True)]
            rows = self.step(tokens, new, done, [len(p) for p in prompts])
            for mine, part in zip(logits, np.split(rows, np.cumsum(new)), strict=False):
                mine.append(part)
        assert done == [len(p) for p in prompts], "the schedule must serve every token"
        return [np.concatenate(mine) for mine in logits]

    def step(self, tokens: np.ndarray, query_lens, seq_lens, final_seq_lens) -> np.ndarray:
        """One compiled step; padding tokens have ids outside the vocabulary."""
        size = DECODE if max(query_lens) <= 1 else PREFILL
        metas = [self.meta(table, query_lens, seq_lens, final_seq_lens, size) for table in self.tables]
        padded = np.pad(tokens, (0, size - len(tokens)), constant_values=10**6).astype(np.int32)
        meta = metas[0] if len(metas) == 1 else tuple(metas)
        self.caches, logits = step(self.config, self.params, padded, self.caches, meta, backend=self.backend)
        return np.asarray(logits)[: len(tokens)]

    def meta(self, table, query_lens, seq_lens, final_seq_lens, size: int) -> jattn.CommonAttentionMetadata:
        """The batch, with the same static max_query_len for all steps of a size."""
        live = table[: len(query_lens)]
        meta = jattn.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, live, BLOCK_SIZE, num_tokens=size, num_reqs=REQUESTS, final_seq_lens=final_seq_lens
        )
        return meta if size == DECODE else meta.replace(max_query_len=PREFILL)
