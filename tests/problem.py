"""One attention problem: the arrays of a case and a feature, poisoned, and the oracle's result.

Four switches are always on, because no result may depend on any of them:
    1. pages that no request references, and the tail of each last page, hold NaN (int8: the extreme value);
    2. physical pages are permuted;
    3. unused table columns, and the whole rows of padding requests, hold -1 and 2**31 - 1;
    4. padding requests and padding tokens stand at the end, their q rows NaN, their k and v rows 3e4.
Every tensor is N(0, 1) from a separate generator, so that no two are equal by accident.
"""

import dataclasses
import functools
import zlib

import numpy as np

import jattn
from tests import tolerances
from tests.cases import CASES, PLAIN, Case, Feature
from tests.oracle import attention, cache, quant

GARBAGE = (-1, 2**31 - 1)
PADDING = 3e4


@dataclasses.dataclass(frozen=True)
class Answer:
    """The oracle's result, and the largest errors that are allowed."""

    out: np.ndarray
    lse: np.ndarray
    out_limit: np.ndarray | float  # [T 1 1]: a request's rows have its own
    lse_limit: np.ndarray | float  # [T 1]
    output: tuple[str, float] | None = None  # (dtype, scale) of a quantised result

    def check(self, state) -> None:
        """Everything that a state must be: right, finite, and exactly (0, -inf) where nothing was visible."""
        out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse, np.float64)
        assert not out[np.isneginf(self.lse)].any(), "rows that see no key, padding among them, must be exactly 0"
        tolerances.assert_within(lse, self.lse, self.lse_limit, "lse")
        if self.output is None:
            tolerances.assert_within(out, self.out, self.out_limit, "out")
        else:
            self.check_quantised(out, *self.output)

    def check_quantised(self, stored: np.ndarray, name: str, scale: float) -> None:
        """Each stored number is one nearest to some real number within the limit, and the largest stands for more."""
        wanted, limit = self.out / scale, self.out_limit / scale
        within = np.clip(wanted, -quant.LARGEST[name], quant.LARGEST[name])
        assert stored.shape == wanted.shape and np.isfinite(stored).all()
        wrong = np.abs(stored - within) - np.abs(quant.round_to(wanted, name) - within)
        assert (wrong <= 2 * limit).all(), f"stored out: {wrong.max()=:.3g}, and {2 * np.max(limit)=:.3g} at most"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Everything that a call needs, in numpy; `problem.replace(...)` changes some fields."""

    case: Case = CASES["mixed"]
    ids: tuple[int, ...] = ()  # who the requests are: data follows the id, not the place; (): 0, 1, 2 ...
    feature: Feature = PLAIN
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    block_size: int = 4
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: dtype
    quant: str = "none"
    layout: str = "auto"
    seed: int = 0
    page_seed: int = 0
    pad_tokens: int = 3
    pad_reqs: int = 2
    pad_columns: int = 2
    spare_blocks: int = 3
    poison: float = np.nan

    def replace(self, **changes) -> "Problem":
        return dataclasses.replace(self, **changes)

    def alone(self, r: int) -> "Problem":
        """Request r by itself, the same request."""
        case = Case(f"{self.case.name}[{r}]", (self.case.query_lens[r],), (self.case.seq_lens[r],))
        return self.replace(case=case, ids=(self.requests[r],))

    # ------------------------------------------------------------------ sizes
    @property
    def requests(self) -> tuple[int, ...]:
        return self.ids or tuple(range(len(self.case.query_lens)))

    @property
    def causal(self) -> bool | tuple[bool, ...]:
        """What the batch says: one bool, or one a request."""
        return self.feature.causal_of(self.requests)

    @property
    def num_tokens(self) -> int:
        return self.case.num_tokens + self.pad_tokens

    @property
    def num_reqs(self) -> int:
        return len(self.case.query_lens) + self.pad_reqs

    @property
    def pages_of(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-n // self.block_size) for n in self.case.seq_lens)

    @property
    def num_blocks(self) -> int:
        return sum(self.pages_of) + self.spare_blocks

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def storage(self) -> str:
        return self.cache_dtype or self.dtype

    # ------------------------------------------------------------------ numpy data
    def rng(self, name: str) -> np.random.Generator:
        """A generator of this tensor alone."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name: str, *shape: int) -> np.ndarray:
        """N(0, 1) as the dtype holds it, in float32."""
        return tolerances.rounded(self.rng(name).normal(size=shape), self.dtype)

    def padded(self, rows: np.ndarray, fill: float) -> np.ndarray:
        """rows [live tokens, ...] in the dtype, followed by rows of padding."""
        full = np.full((self.num_tokens, *rows.shape[1:]), fill)
        full[: len(rows)] = rows
        return full.astype(tolerances.DTYPES[self.dtype])

    @functools.cached_property
    def q(self) -> np.ndarray:
        rows = []
        for (i, n), new in zip(self.lengths, self.case.query_lens, strict=True):
            whole = self.normal(f"q{i}", max(n, new), self.heads, self.head_dim)
            rows.append(whole[len(whole) - new :])
        return self.padded(np.concatenate(rows), np.nan)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(id, total tokens) of each request; a shorter request's data is a prefix of a longer one's."""
        return list(zip(self.requests, self.case.seq_lens, strict=True))

    @functools.cached_property
    def keys(self) -> list[np.ndarray]:
        """Real keys of each request, [L K D]."""
        return [self.normal(f"k{i}", n, self.kv_heads, self.head_dim) for i, n in self.lengths]

    @functools.cached_property
    def values(self) -> list[np.ndarray]:
        return [self.normal(f"v{i}", n, self.kv_heads, self.v_dim) for i, n in self.lengths]

    def new(self, rows: list[np.ndarray]) -> np.ndarray:
        """The packed new tokens of arrays with a row for each token; padding rows are PADDING, unlike the poison."""
        return self.padded(np.concatenate([x[n:] for x, n in zip(rows, self.case.computed, strict=True)]), PADDING)

    @functools.cached_property
    def block_table(self) -> np.ndarray:
        """i32[R B]: permuted pages, and garbage in all unused columns and rows."""
        width = max(self.pages_of) + self.pad_columns
        table = np.resize(np.array(GARBAGE, np.int32), (self.num_reqs, width))
        pages = iter(self.rng(f"pages{self.page_seed}").permutation(self.num_blocks))
        for r, count in enumerate(self.pages_of):
            table[r, :count] = [next(pages) for _ in range(count)]
        return table

    def slots(self, r: int, first: int = 0) -> list[int]:
        """Slots of request r's tokens from `first` on."""
        length = self.case.seq_lens[r]
        return cache.slots_of(self.block_table[r], first, length - first, self.block_size)

    @functools.cached_property
    def numbers(self) -> dict[str, np.ndarray]:
        """The traced parameters by name: those of the feature, and the scales of a quantised cache."""
        found = {}
        for wanted in self.feature.params:
            name = wanted.removesuffix("[]")
            heads = self.kv_heads if name in ("k_scale", "v_scale") else self.heads
            if name == "output_scale":  # the largest values saturate
                found[name] = self.rng(name).uniform(0.6, 0.9) / quant.LARGEST[self.spec.output_dtype]
            elif name == "qq_bias":  # some tokens are hidden from others, none from itself
                bias = found[name] = self.rng(name).normal(size=(6, 6))
                bias[(np.abs(bias) > 1.2) & ~np.eye(6, dtype=bool)] = -np.inf
            elif name == "distance_bias":  # some keys are farther away than its ends
                found[name] = self.rng(name).normal(size=(self.heads, 7))
            elif not name.endswith("_scale"):
                found[name] = self.rng(name).normal(size=heads)
            else:
                per_head = wanted.endswith("[]") and not (heads == self.kv_heads and self.quant == "per_tensor")
                found[name] = self.rng(name).uniform(0.6, 1.6, size=heads if per_head else ())
        if self.quant in ("per_tensor", "per_head"):
            for name, rows in (("k_scale", self.keys), ("v_scale", self.values)):
                found[name] = quant.scale_of(np.concatenate(rows), self.storage, self.quant)
        return {name: np.float32(x) for name, x in found.items()}

    # ------------------------------------------------------------------ jattn's inputs
    @property
    def spec(self) -> jattn.AttentionSpec:
        heads = dict(num_heads=self.heads, num_kv_heads=self.kv_heads)
        dims = dict(head_dim=self.head_dim, v_head_dim=self.v_head_dim)
        return jattn.AttentionSpec(**heads, **dims, **self.feature.spec)

    @property
    def cache_spec(self) -> jattn.KVCacheSpec:
        return jattn.KVCacheSpec(
            num_blocks=self.num_blocks, block_size=self.block_size, num_kv_heads=self.kv_heads,
            head_dim=self.head_dim, v_head_dim=self.v_head_dim, dtype=self.storage, layout=self.layout,
            quant=self.quant,
        )  # fmt: skip

    @property
    def params(self) -> jattn.AttentionParams:
        return jattn.AttentionParams(**self.numbers)

    @property
    def meta(self) -> jattn.CommonAttentionMetadata:
        live, case = len(self.case.query_lens), self.case
        meta = jattn.CommonAttentionMetadata.from_lengths(
            case.query_lens, case.seq_lens, self.block_table[:live], self.block_size, num_tokens=self.num_tokens,
            num_reqs=self.num_reqs, causal=self.causal, **self.feature.reach_of_batch(self.lengths),
        )  # fmt: skip
        return meta.replace(block_table=self.block_table)

    def cache(self, *, new: bool = True, storage: str | None = None) -> jattn.PagedKV:
        """A poisoned cache that holds the computed tokens, and with `new` the batch's own as well."""
        poison = 1e30 if self.storage == "int8" and self.quant != "per_token_head" else self.poison
        pools = []
        for rows, dim in ((self.keys, self.head_dim), (self.values, self.v_dim)):
            pool = np.full((self.num_blocks, self.block_size, self.kv_heads, dim), poison, np.float32)
            for r, x in enumerate(rows):
                stop = self.case.seq_lens[r] if new else self.case.computed[r]
                pool = cache.write(pool, x[:stop], self.slots(r)[:stop])
            pools.append(pool)
        scales = jattn.AttentionParams(**{k: v for k, v in self.numbers.items() if k in ("k_scale", "v_scale")})
        return jattn.PagedKV.from_logical(self.cache_spec, *pools, scales, storage=storage)

    # ------------------------------------------------------------------ the witness
    def stored(self, pages: jattn.PagedKV) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Real keys and values that the cache holds now, each checked against `oracle.quant` first."""
        found = []
        for pool, rows, name in zip(pages.logical(), (self.keys, self.values), ("k_scale", "v_scale"), strict=True):
            scale = self.numbers.get(name)
            lengths = enumerate(self.case.seq_lens)
            held = [cache.gather(np.asarray(pool), self.block_table[r], n) for r, n in lengths]
            for mine, x in zip(held, rows, strict=True):
                self.check_stored(mine, x if scale is None else x / quant.spread(scale, _per(scale)))
            found.append([attention.scaled(x, scale) for x in held])
        return found[0], found[1]

    def check_stored(self, held: np.ndarray, wanted: np.ndarray) -> None:
        """`held` is what this cache must make of `wanted` (real numbers over the parameters' scales)."""
        assert np.isfinite(held).all(), "a live slot holds poison"
        if self.quant == "none":
            ulp = tolerances.eps(self.storage) * np.abs(wanted) * 0.50001 + 1e-7
            assert (np.abs(held - wanted) <= ulp).all()
        else:
            unit = np.float64(1.0)
            if self.quant == "per_token_head":
                unit = quant.scale_of(wanted, self.storage, self.quant)[..., None]
            assert quant.is_nearest(held / unit, wanted / unit, self.storage).all()

    def answer(self, pages: jattn.PagedKV) -> Answer:
        """The witness over what `pages` holds, padding rows included."""
        return self.answer_over(*self.stored(pages))

    def answer_over(self, keys, values, q_starts=None) -> Answer:
        """The witness over these real keys and values, one [L K *] a request; q_starts: first position of each."""
        scale = self.feature.spec.get("scale") or self.head_dim**-0.5
        window = self.feature.spec.get("sliding_window")
        options = dict(
            scale=scale, window=(window - 1, 0) if isinstance(window, int) else window,
            chunk_size=self.spec.chunk_size, lookback=self.spec.chunk_lookback, alibi_sqrt=self.spec.use_alibi_sqrt,
            clamp_spans=self.spec.mm_prefix_clamp_sliding_window, soft_cap=self.feature.spec.get("logits_soft_cap"),
            slopes=self.numbers.get("alibi_slopes"), sinks=self.numbers.get("sinks"),
            mask_fn=self.feature.spec.get("mask_fn"), score_fn=self.feature.spec.get("score_fn"),
            each=self.feature.reach(self.lengths), qq_bias=self.numbers.get("qq_bias"),
            distance_bias=self.numbers.get("distance_bias"),
        )  # fmt: skip
        batch = dict(num_tokens=self.num_tokens, causal=self.causal, q_starts=q_starts, **options)
        q = attention.scaled(self.q[: self.case.num_tokens], self.numbers.get("q_scale"))
        naive = functools.partial(tolerances.naive_one, dtype=self.dtype)
        out, lse = attention.ragged(q, keys, values, self.case.query_lens, **batch)
        rough_out, rough_lse = attention.ragged(q, keys, values, self.case.query_lens, attend=naive, **batch)
        mass, _ = attention.ragged(q, keys, [np.abs(v) for v in values], self.case.query_lens, **batch)
        parts = np.split(q, np.cumsum(self.case.query_lens)[:-1])
        logits = [tolerances.largest_logit(mine, k, scale) for mine, k in zip(parts, keys, strict=True)]
        return Answer(
            out,
            lse,
            tolerances.allowed_each(rough_out, out, self.case.query_lens, self.dtype, mass, logits),
            tolerances.allowed_each(rough_lse, lse, self.case.query_lens, "float32", np.ones_like(lse), logits),
            None if self.spec.output_dtype is None else (self.spec.output_dtype, float(self.numbers["output_scale"])),
        )


def _per(scale: np.ndarray) -> str:
    return "per_head" if np.ndim(scale) else "per_tensor"
