"""Mutants of the shared algebra: each is one fault that a maintainer could make, and a case that catches it.

A mutant wraps the original function; `problem` is small, differs from every other problem of the suite in its pool
size (so that no trace made of healthy code can be reused), and is one on which the mistake shows.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from tests.cases import CASES, FEATURES, Case
from tests.problem import Problem

MASK, RANGE = ("pallas_kernels.algebra.mask.visible",), ("pallas_kernels.algebra.mask.key_range",)
FINISH, WEIGHTS = ("pallas_kernels.algebra.softmax.finish",), ("pallas_kernels.algebra.softmax.weights",)
LOGITS = ("jattn.ops.layer.shape_logits", "pallas_kernels.cpu.paged_attention.shape_logits")
SPLIT_SLOT, WRITE = ("jattn.cache.write.split_slot",), ("jattn.backends.base.write_kv",)
TILE, TERMS = ("jattn.ops.cpu_loop.attend_tile",), ("jattn.ops.attend.layer_terms",)
PAGES = ("jattn.ops.keys.gather_pages",)
STORED = ("pallas_kernels.algebra.quant.to_dtype",)
EVERYWHERE, JNP_ONLY = ("sdpa", "pallas_cpu"), ("sdpa",)


@dataclasses.dataclass(frozen=True, eq=False)
class Mutant:
    """Its place, what it does to the original, the problem that it is tried on, and the backends that use it."""

    targets: tuple[str, ...]
    make: Callable[[Callable], Callable]
    problem: Problem
    backends: tuple[str, ...] = EVERYWHERE


def with_rule(**changes):
    """Call the original with its static rule changed; a value may be a function of the old rule."""

    def make(original):
        def mutant(rule, *args, **kwargs):
            new = {name: value(rule) if callable(value) else value for name, value in changes.items()}
            return original(dataclasses.replace(rule, **new), *args, **kwargs)

        return mutant

    return make


def shifted(by: int):
    """Causality off by one: the position of the query is increased by `by`."""
    return lambda original: lambda rule, head, q, kv, *traced: original(rule, head, q + by, kv, *traced)


def range_end(move):
    """The key range ends at move(end) instead."""

    def make(original):
        def mutant(*args, **kwargs):
            first, last = original(*args, **kwargs)
            return first, move(last)

        return mutant

    return make


def finished(change):
    """`softmax.finish` with change(original, m, l, acc, sink)."""
    return lambda original: lambda m, l, acc, sink=None: change(original, m, l, acc, sink)


def wrapping_slot(original):
    """A slot of -1 is not remapped, and means the last slot."""
    return lambda slot, blocks, size: (slot // size, slot % size)


def swapped(original):
    """Keys stored as values, values as keys."""
    return lambda cache, k, v, slots, params=None: original(cache, v, k, slots, params)


def transposed_heads(original):
    """Query head h reads kv head h % K instead of h // G."""

    def mutant(terms, tile, q, steps, num_parts):
        rows, heads, dim = q.shape
        kv = steps[0].keys.num_kv_heads
        q = q.reshape(rows, heads // kv, kv, dim).swapaxes(1, 2).reshape(rows, heads, dim)
        out, lse = original(terms, tile, q, steps, num_parts)
        back = lambda x: x.reshape(rows, kv, heads // kv, -1).swapaxes(1, 2).reshape(rows, heads, -1)
        return back(out), back(lse)[..., 0]

    return mutant


def no_rescale(original):
    """The old accumulator is not rescaled to the new maximum."""

    def mutant(m, logits, *more):
        new, alpha, p = original(m, logits, *more)
        return new, jnp.ones_like(alpha), p

    return mutant


def without(name: str):
    """A traced number is not passed to the tile."""
    return lambda original: lambda *asked: dataclasses.replace(original(*asked), **{name: None})


def transposed(name: str):
    """Rows and columns of a traced matrix are exchanged."""
    change = lambda terms: dataclasses.replace(terms, **{name: getattr(terms, name).T})
    return lambda original: lambda *asked: change(original(*asked))


def reversed_ends(name: str):
    """The last axis of a traced array is read from its end."""
    change = lambda terms: dataclasses.replace(terms, **{name: getattr(terms, name)[..., ::-1]})
    return lambda original: lambda *asked: change(original(*asked))


def wrapping(original):
    """Stored numbers above the dtype's maximum wrap to its minimum."""
    return lambda x, dtype, scale=None: (
        original(x, dtype, scale)
        if scale is None
        else ((jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int32) + 128) % 256 - 128).astype(dtype)
    )


def neighbour_page(original):
    return lambda pool, pages: original(pool, pages + 1)


def on(feature: str, case: str = "mixed_unsorted", **options) -> Problem:
    return Problem(case=CASES[case], feature=FEATURES[feature], **options)


LONG = Case("long", (1, 2), (700, 9))
MUTANTS = {
    "causal mask shows the next key": Mutant(MASK, shifted(1), on("plain")),
    "causal mask hides the query's own key": Mutant(MASK, shifted(-1), on("plain")),
    "causality ignored": Mutant(MASK, with_rule(causal=False), on("plain")),
    "per-request causality ignored": Mutant(
        MASK,
        lambda original: lambda rule, head, q, kv, causal=None, *traced: original(rule, head, q, kv, None, *traced),
        on("per_request_causal"),
    ),
    "window one key too wide": Mutant(MASK, with_rule(left=lambda rule: rule.left + 1), on("window_5")),
    "window one key too narrow": Mutant(MASK, with_rule(left=lambda rule: rule.left - 1), on("window_5")),
    "right side of the window one too wide": Mutant(
        MASK, with_rule(right=lambda r: r.right + 1), on("window_two_sided")
    ),
    "chunks ignored": Mutant(MASK, with_rule(chunk=0), on("chunk")),
    "lookback ignored": Mutant(MASK, with_rule(lookback=0), on("chunk_lookback")),
    "key range forgets the lookback": Mutant(RANGE, with_rule(lookback=0), on("chunk_lookback")),
    "window hides the prefix": Mutant(MASK, with_rule(prefix=False), on("rswa"), JNP_ONLY),
    "spans ignored": Mutant(MASK, with_rule(spans=False), on("mm_prefix"), JNP_ONLY),
    "key range forgets the spans": Mutant(RANGE, with_rule(spans=False), on("mm_prefix", "two_tiles"), JNP_ONLY),
    "spans not clamped": Mutant(MASK, with_rule(clamp_spans=False), on("mm_prefix_clamped"), JNP_ONLY),
    "spans clamped": Mutant(MASK, with_rule(clamp_spans=True), on("mm_prefix_window"), JNP_ONLY),
    "mask_fn ignored": Mutant(MASK, with_rule(mask_fn=None), on("mask_fn"), JNP_ONLY),
    "key range drops the last key": Mutant(RANGE, range_end(lambda end: end - 1), on("plain")),
    "last page dropped": Mutant(RANGE, range_end(lambda end: (end - 1) // 4 * 4), on("plain")),
    "page tail attended": Mutant(RANGE, range_end(lambda end: -(-end // 4) * 4), on("non_causal")),
    "wrong default scale": Mutant(LOGITS, with_rule(scale=1.0), on("plain")),
    "scale two percent off": Mutant(LOGITS, with_rule(scale=lambda rule: rule.scale * 1.02), on("plain")),
    "soft cap ignored": Mutant(LOGITS, with_rule(soft_cap=None), on("soft_cap")),
    "alibi ignored": Mutant(LOGITS, with_rule(has_alibi=False), on("alibi")),
    "alibi with the wrong sign": Mutant(
        LOGITS, lambda original: lambda rule, x, h, q, kv, *traced: original(rule, x, h, kv, q, *traced), on("alibi")
    ),
    "alibi against the context, not the query": Mutant(
        LOGITS,
        lambda original: lambda rule, x, h, q, kv, *traced: original(rule, x, h, 0 * q, kv, *traced),
        on("alibi"),
    ),
    "square root forgotten": Mutant(LOGITS, with_rule(alibi_sqrt=False), on("alibi_sqrt")),
    "score_fn ignored": Mutant(LOGITS, with_rule(score_fn=None), on("score_fn"), JNP_ONLY),
    "sink ignored": Mutant(FINISH, finished(lambda f, m, l, acc, sink: f(m, l, acc)), on("sinks")),
    "sink counted twice": Mutant(
        FINISH, finished(lambda f, m, l, acc, sink: f(m, l, acc, sink + math.log(2))), on("sinks")
    ),
    "sink missing from the lse": Mutant(
        FINISH, finished(lambda f, m, l, acc, sink: (f(m, l, acc, sink)[0], f(m, l, acc)[1])), on("sinks")
    ),
    "lse in base 2": Mutant(
        FINISH,
        finished(lambda f, m, l, acc, sink: (f(m, l, acc, sink)[0], f(m, l, acc, sink)[1] / math.log(2))),
        on("plain"),
    ),
    "accumulator not rescaled": Mutant(WEIGHTS, no_rescale, Problem(case=LONG)),
    "-1 wraps to the last slot": Mutant(SPLIT_SLOT, wrapping_slot, on("plain")),
    "keys and values swapped": Mutant(WRITE, swapped, on("plain")),
    "query heads read the wrong kv head": Mutant(TILE, transposed_heads, on("plain"), JNP_ONLY),
    "bias among new tokens ignored": Mutant(TERMS, without("qq_bias"), on("qq_bias"), JNP_ONLY),
    "bias of the distance ignored": Mutant(TERMS, without("distance_bias"), on("distance_bias"), JNP_ONLY),
    "bias of the distance of the other direction": Mutant(
        TERMS, reversed_ends("distance_bias"), on("distance_bias"), JNP_ONLY
    ),
    "bias among new tokens transposed": Mutant(TERMS, transposed("qq_bias"), on("qq_bias"), JNP_ONLY),
    "k_scale ignored": Mutant(TERMS, without("k_scale"), on("scales"), JNP_ONLY),
    "v_scale ignored": Mutant(TERMS, without("v_scale"), on("scales"), JNP_ONLY),
    "output_scale ignored": Mutant(TERMS, without("output_scale"), on("output_fp8"), JNP_ONLY),
    "output wraps instead of saturating": Mutant(STORED, wrapping, on("output_int8")),
    "neighbouring page read": Mutant(PAGES, neighbour_page, on("plain"), JNP_ONLY),
}
