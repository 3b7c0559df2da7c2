"""A ragged batch for latent attention, poisoned and permuted, and the ways to read it."""

import dataclasses
import functools

import jax
import numpy as np

import jattn
from jattn import MLAAttention, MLAParams, MLASpec, mla_cache_spec
from tests.oracle.mla import latent_attention

SIZES = dict(num_heads=3, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
SPEC = MLASpec(**SIZES)
S = 4
QUERIES, TOTALS = (1, 5, 0, 11, 1), (9, 5, 0, 30, 1)  # decode, whole prompt, none, a later chunk, first token
PADDED_TOKENS, PADDED_REQS = 21, 7
FEATURES = {
    "window, scale": dict(sliding_window=6, scale=0.4),
    "chunk, user": dict(
        chunk_size=16,
        mask_fn=lambda h, i, j: (i - j) % 3 != h,
        score_fn=lambda s, h, i, j: s + 0.1 * h - 0.01 * (i - j),
    ),
    "cap, alibi, window, sinks": dict(has_sinks=True, sliding_window=(9, -1), has_alibi=True, logits_soft_cap=2.0),
}
MQA, MHA, OWN = "forward_mqa", "prefill_mha", "prefill_mha with the new tokens as given"


def normal(seed: int, *shape) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def poisoned_table(totals, size: int, num_blocks: int, width: int, seed: int = 0) -> np.ndarray:
    """Each request's pages, drawn at random; unused columns name a page that nobody owns, or nothing."""
    pages = np.random.default_rng(seed).permutation(num_blocks - 2)
    table = np.full((len(totals), width), num_blocks - 1)
    table[:, -1] = 10**6
    for r, total in enumerate(totals):
        need = -(-total // size)
        table[r, :need], pages = pages[:need], pages[need:]
    return table


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch over permuted pages; what no request refers to is NaN."""

    spec: MLASpec = SPEC
    options: tuple = ()  # of the cache
    backend: str = "mla_sdpa"

    @functools.cached_property
    def mla(self) -> MLAAttention:
        wide = dict(self.options).get("wide")
        options = dict(dtype="float32") | dict(self.options)
        if wide:
            sizes = dict(num_kv_heads=1, head_dim=self.spec.head_dim, v_head_dim=options.pop("wide"))
            cache_spec = jattn.KVCacheSpec(num_blocks=32, block_size=S, **sizes, **options)
        else:
            cache_spec = mla_cache_spec(self.spec, 32, S, **options)
        return MLAAttention(self.spec, cache_spec, self.backend)

    @functools.cached_property
    def rows(self) -> tuple[list, list]:
        kv_c = [normal(10 + r, n, self.spec.kv_lora_rank) for r, n in enumerate(TOTALS)]
        k_pe = [normal(20 + r, n, self.spec.qk_rope_head_dim) for r, n in enumerate(TOTALS)]
        return kv_c, k_pe

    @functools.cached_property
    def q(self) -> np.ndarray:
        return normal(1, PADDED_TOKENS, self.spec.num_heads, self.spec.qk_head_dim)

    @functools.cached_property
    def params(self) -> MLAParams:
        width = self.spec.qk_nope_head_dim + self.spec.v_head_dim
        heads, latent = self.spec.num_heads, self.spec.kv_lora_rank
        return MLAParams(
            kv_b_proj=normal(2, latent, heads, width) * latent**-0.5,
            alibi_slopes=np.array([0.5, 0.25, 0.1], np.float32) if self.spec.has_alibi else None,
            sinks=np.array([0.5, -1.0, 2.0], np.float32) if self.spec.has_sinks else None,
        )

    def table(self, seed=3) -> np.ndarray:
        return poisoned_table(TOTALS, S, 32, 9, seed)

    def meta(self, queries=QUERIES, totals=TOTALS, **options):
        options = dict(num_tokens=PADDED_TOKENS, num_reqs=PADDED_REQS) | options
        return jattn.CommonAttentionMetadata.from_lengths(queries, totals, self.table(), S, **options)

    def packed(self, rows, first, last) -> np.ndarray:
        out = np.concatenate([x[a:b] for x, a, b in zip(rows, first, last, strict=True)])
        return np.concatenate([out, np.full((PADDED_TOKENS - len(out), out.shape[1]), np.nan, np.float32)])

    def new_rows(self):
        first = np.subtract(TOTALS, QUERIES)
        return tuple(self.packed(x, first, TOTALS) for x in self.rows)

    @functools.cached_property
    def cache(self) -> jattn.PagedKV:
        """Filled in two writes, context first."""
        poison = float("nan") if self.mla.cache_spec.dtype != "int8" else 99.0
        cache, done = self.mla.empty_cache(poison, storage="native"), np.zeros(len(TOTALS), int)
        for upto in (np.subtract(TOTALS, QUERIES), np.array(TOTALS)):
            while (count := np.minimum(upto - done, 4)).any():
                m = self.mla.build(self.meta(count, done + count))
                kv_c, k_pe = (self.packed(x, done, done + count) for x in self.rows)
                cache, done = self.mla.write(kv_c, k_pe, cache, m, self.params), done + count
        return cache

    def wanted(self, rows=None, **options):
        spec, (kv_c, k_pe) = self.spec, self.rows if rows is None else rows
        return latent_attention(
            self.q[: sum(QUERIES)], kv_c, k_pe, self.params.kv_b_proj, QUERIES,
            nope=spec.qk_nope_head_dim, num_tokens=PADDED_TOKENS, scale=spec.scale, chunk_size=spec.chunk_size,
            window=spec.sliding_window, soft_cap=spec.logits_soft_cap, slopes=self.params.alibi_slopes,
            sinks=self.params.sinks, mask_fn=spec.mask_fn, score_fn=spec.score_fn, **options,
        )  # fmt: skip


def check(state, wanted, atol=2e-5):
    np.testing.assert_allclose(state.out, wanted[0], rtol=0, atol=atol)
    np.testing.assert_allclose(state.lse, wanted[1], rtol=0, atol=atol)


def read(mla, reading, *args):
    return getattr(mla, reading.split()[0])(*args)


SHARED = jax.jit(read, static_argnums=(0, 1))


def run(case: Case, reading: str, *, cache=None, **options):
    """One reading, compiled once for all tests that ask for the same."""
    m, params = case.mla.build(case.meta(**options)), case.mla.prepare_params(case.params)
    extra = case.new_rows() if reading == OWN else ()
    return SHARED(case.mla, reading, case.q, case.cache if cache is None else cache, m, params, *extra)


PLAIN = Case()
