"""Named ragged batches and named attention features: plain frozen data, shared by tests and benchmarks.

A `Case` says how long each request is (`seq_len` counts the new tokens); a `Feature` says which options of
`AttentionSpec` are on, which traced parameters they need and what the batch says about causality. The
callables use operators only, so the same ones run in numpy, jnp and inside a Pallas kernel.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: new tokens and total tokens of every request."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of the whole batch."""
        return sum(self.query_lens)

    @property
    def computed(self) -> tuple[int, ...]:
        """Cached tokens of each request."""
        return tuple(s - q for q, s in zip(self.query_lens, self.seq_lens, strict=True))


def _table(*rows: Case) -> Mapping[str, Case]:
    return MappingProxyType({row.name: row for row in rows})


CASES = _table(
    Case("single_token", (1,), (1,)),
    Case("single_prompt", (9,), (9,)),
    Case("decode", (1, 1, 1, 1), (7, 1, 18, 33)),
    Case("prefill", (5, 1, 17), (5, 1, 17)),
    Case("chunked_prefill", (6, 4, 3), (20, 4, 35)),
    Case("mixed", (1, 1, 6, 3, 8), (19, 4, 22, 3, 8)),
    Case("mixed_unsorted", (6, 1, 8, 1, 3), (22, 19, 8, 4, 30)),
    Case("speculative", (2, 3, 8, 5), (13, 30, 21, 5)),
    Case("empty_in_the_middle", (1, 0, 4, 0, 0, 2), (12, 0, 9, 0, 0, 2)),
    Case("cached_but_idle", (1, 0, 3), (9, 21, 17)),
    Case("long_and_short", (1, 1, 12), (70, 2, 12)),
    Case("two_tiles", (135, 1), (139, 20)),
    Case("page_edges", (1, 1, 1, 1, 3), (15, 16, 17, 32, 48)),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Feature:
    """One way to ask for attention."""

    name: str
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    params: tuple[str, ...] = ()
    causal: bool | str = True  # "alternate": requests 0, 2, 4 ... see ahead

    def causal_of(self, ids: tuple[int, ...]) -> bool | tuple[bool, ...]:
        """`causal` of the batch: one bool, or one for each request."""
        return tuple(i % 2 == 1 for i in ids) if self.causal == "alternate" else bool(self.causal)

    def reach(self, lengths: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """For each request (id, total tokens): the number of keys that R-SWA keeps, and the spans of two images."""
        found = []
        for i, n in lengths:
            prefix = min(n // 2, 3 + 2 * i) if self.spec.get("use_rswa") else 0
            early, late = (1 + i % 2, n // 3), (max(n - 9 - i % 3, 0), n - 1 - i % 2)
            spans = [late] if early[0] >= early[1] or early[1] >= late[0] else [early, late]
            found.append(dict(prefix=prefix, spans=spans if self.spec.get("use_mm_prefix") and n > 2 else []))
        return found

    def reach_of_batch(self, lengths: list[tuple[int, int]]) -> dict[str, Any]:
        """The arguments of from_lengths for `reach`; empty if the layer uses neither."""
        rows = self.reach(lengths)
        asked = (("use_rswa", "rswa_prefix_lens", "prefix"), ("use_mm_prefix", "mm_prefix_ranges", "spans"))
        return {name: [row[key] for row in rows] for flag, name, key in asked if self.spec.get(flag)}


def no_thirds(head, q_pos, kv_pos):
    """Hide every third diagonal, shifted by the head."""
    return (q_pos + kv_pos + head) % 3 != 0


def fade(score, head, q_pos, kv_pos):
    """A score that falls with the distance and differs by head."""
    return score - 0.05 * (q_pos - kv_pos) * (1 + head % 2)


_CAP = dict(logits_soft_cap=1.5)
_ALIBI, _SINKS = dict(has_alibi=True), dict(has_sinks=True)
_WINDOW, _CHUNK = dict(sliding_window=5), dict(chunk_size=7)
_RSWA, _SPANS = dict(sliding_window=4, use_rswa=True), dict(use_mm_prefix=True)
_SQRT = _ALIBI | dict(use_alibi_sqrt=True)
_MASK, _SCORE = dict(mask_fn=no_thirds), dict(score_fn=fade)
_BOTH = ("alibi_slopes", "sinks")


def _features(*rows: Feature) -> Mapping[str, Feature]:
    return MappingProxyType({row.name: row for row in rows})


PLAIN = Feature("plain")
SINGLE = _features(
    PLAIN,
    Feature("scale", dict(scale=0.37)),
    Feature("non_causal", causal=False),
    Feature("per_request_causal", causal="alternate"),
    Feature("window_1", dict(sliding_window=1)),
    Feature("window_5", _WINDOW),
    Feature("window_left", dict(sliding_window=(3, -1))),
    Feature("window_two_sided", dict(sliding_window=(3, 2)), causal=False),
    Feature("window_right", dict(sliding_window=(-1, 1)), causal=False),
    Feature("chunk", _CHUNK),
    Feature("chunk_lookback", _CHUNK | dict(chunk_lookback=1)),
    Feature("rswa", _RSWA),
    Feature("mm_prefix", _SPANS),
    Feature("soft_cap", _CAP),
    Feature("alibi_sqrt", _SQRT, ("alibi_slopes",)),
    Feature("alibi", _ALIBI, ("alibi_slopes",)),
    Feature("sinks", _SINKS, ("sinks",)),
    Feature("qq_bias", dict(use_qq_bias=True), ("qq_bias",)),
    Feature("distance_bias", dict(use_distance_bias=True), ("distance_bias",)),
    Feature("mask_fn", _MASK),
    Feature("score_fn", _SCORE),
    Feature("scales", params=("q_scale", "k_scale", "v_scale")),
    Feature("head_scales", params=("q_scale[]", "k_scale[]", "v_scale[]")),
    Feature("output_fp8", dict(output_dtype="float8_e4m3fn"), ("output_scale",)),
    Feature("output_int8", dict(output_dtype="int8"), ("output_scale",)),
)
COMBINED = _features(
    Feature("window_alibi", _WINDOW | _ALIBI, ("alibi_slopes",)),
    Feature("window_sinks", _WINDOW | _SINKS, ("sinks",)),
    Feature("cap_sinks_window", _CAP | _SINKS | _WINDOW, ("sinks",)),
    Feature("chunk_alibi_sinks", _CHUNK | _ALIBI | _SINKS, _BOTH),
    Feature("cap_alibi_non_causal", _CAP | _ALIBI, ("alibi_slopes",), causal=False),
    Feature("mask_fn_sinks", _MASK | _SINKS, ("sinks",)),
    Feature("per_request_causal_window", dict(sliding_window=(4, 3)), causal="alternate"),
    Feature("everything", _WINDOW | _CHUNK | _CAP | _ALIBI | _SINKS | _MASK | _SCORE | dict(scale=0.3),
            (*_BOTH, "q_scale[]", "k_scale[]", "v_scale[]")),
    Feature("everything_two_ways", dict(sliding_window=(6, 4)) | _CAP | _ALIBI | _SINKS | _MASK | _SCORE,
            (*_BOTH, "q_scale", "k_scale", "v_scale"), causal="alternate"),
    Feature("chunk_lookback_non_causal", dict(chunk_size=4, chunk_lookback=2), causal=False),
    Feature("rswa_mm_prefix_sqrt", _RSWA | _SPANS | _SQRT | _SINKS, _BOTH),
    Feature("mm_prefix_window", _SPANS | _WINDOW | _SINKS, ("sinks",)),
    Feature("mm_prefix_clamped", _SPANS | dict(sliding_window=3, mm_prefix_clamp_sliding_window=True)),
    Feature("mm_prefix_chunk_mask_fn", _SPANS | _CHUNK | _MASK | _CAP),
    Feature("qq_bias_alibi_score_fn", dict(use_qq_bias=True) | _ALIBI | _SCORE | _SINKS | _WINDOW, (*_BOTH, "qq_bias")),
    Feature("rswa_per_request", _RSWA | _SPANS, causal="alternate"),
    Feature("everything_e5m2", dict(sliding_window=(6, 4), output_dtype="float8_e5m2") | _CAP | _ALIBI | _SINKS,
            (*_BOTH, "q_scale", "k_scale", "v_scale", "output_scale"), causal="alternate"),
)  # fmt: skip
FEATURES = MappingProxyType({**SINGLE, **COMBINED})
