"""The rotary embedding of a config.json, in the old keys (rope_theta, rope_scaling) or the new (rope_parameters)."""

import math
from typing import Any

from jattn.errors import UnsupportedError
from jattn.models.keys import MISSING, Keys
from jattn.nn import DynamicNTK, Linear, Llama3, LongRope, Rope, Scaling, Yarn
from jattn.nn.rope_scaling import FACTORS, MOST_THETA, yarn_magnitude

KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers; rope_parameters may hold an object for each."""


def rope_of(
    c: Keys, head_dim: int, max_positions: int, *, interleaved: bool = False, partial: bool = False, usual: Any = None
) -> Rope:
    """The Rope of all layers. partial: allow a partial_rotary_factor. usual: parameters for a config that has none."""
    name, stored = parameters_of(c)
    stored = stored or (usual or {})
    if kinds := [kind for kind in KINDS if kind in stored]:
        raise UnsupportedError(f"{c.where}: {name} of {', '.join(kinds)} apart is not built for this family")
    trained = c.count("original_max_position_embeddings", None, low=2)
    beside = {key: c.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    values = {key: value for key, value in beside.items() if value is not None} | stored
    return rope_from(Keys(values, f"{c.where}, {name}"), head_dim, max_positions, trained, interleaved, partial)


def rope_of_kind(c: Keys, kind: str, theta: float, head_dim: int, max_positions: int, old: Any = None) -> Rope:
    """The Rope of one kind of layers: rope_parameters[kind], overridden by `old`, the object of rope_scaling.

    theta: the default of rope_theta. Parameters that are not under a kind's name are refused.
    """
    stored = c.part("rope_parameters").given
    if loose := sorted(set(stored) - set(KINDS)):
        raise UnsupportedError(f"{c.where}: rope_parameters has {loose[0]!r} beside {' and '.join(KINDS[:2])}")
    own = Keys(stored, f"{c.where}, rope_parameters").part(kind).given
    values = {"rope_theta": theta, **{k: v for k, v in own.items() if v is not None}, **(old or {})}
    name = "rope_scaling" if old else f"rope_parameters of {kind}"
    return rope_from(Keys(values, f"{c.where}, {name}"), head_dim, max_positions)


def parameters_of(c: Keys) -> tuple[str, dict[str, Any]]:
    """(key, parameters): rope_scaling if it is there and not empty, else rope_parameters."""
    old, new = c.part("rope_scaling").given, c.part("rope_parameters").given
    name, found = ("rope_scaling", old) if old else ("rope_parameters", new)
    return name, {key: value for key, value in found.items() if value is not None}


def rope_from(
    r: Keys, head_dim: int, max_positions: int, trained: int | None = None, interleaved=False, partial=False
) -> Rope:
    """The Rope of one flat object. trained: original_max_position_embeddings beside it, which comes first."""
    theta, scaling = theta_of(r, "rope_theta"), scaling_of(r, max_positions, trained)
    fraction = r.number("partial_rotary_factor", 1.0, above=0, most=1)
    r.close()
    dim = int(head_dim * fraction)
    if fraction != 1 and not partial:
        raise UnsupportedError(f"{r.where}: partial_rotary_factor={fraction} is not built for this family: use 1")
    if dim % 2 or dim < 2:
        raise ValueError(f"{r.where}: {dim} numbers of a head_dim={head_dim} are to be turned, in pairs: not even")
    if isinstance(scaling, LongRope) and (len(scaling.short), len(scaling.long)) != (dim // 2, dim // 2):
        raise ValueError(
            f"{r.where}: short_factor and long_factor have {len(scaling.short)} and {len(scaling.long)} divisors; "
            f"{dim // 2} pairs of a head are turned"
        )
    return Rope(dim=dim, theta=theta, scaling=scaling, interleaved=interleaved)


def theta_of(r: Keys, name: str, default: Any = MISSING) -> float:
    """The base of the frequencies."""
    return r.number(name, default, above=1, most=MOST_THETA)


def scaling_of(r: Keys, max_positions: int, trained: int | None = None) -> Scaling:
    """The Scaling of one flat object, by its rope_type."""
    name = r.get("rope_type", r.get("type", "default"))
    r.ignore("rope_type", "type")
    if not isinstance(name, str) or name not in METHODS:
        raise UnsupportedError(f"{r.where}: rope_type={name!r} is not supported; known are {', '.join(METHODS)}")
    return METHODS[name](r, max_positions, trained)


def trained_length(r: Keys, max_positions: int, trained: int | None) -> int:
    """The length before stretching: `trained`, else the object's own, else max_positions."""
    inner = r.count("original_max_position_embeddings", max_positions, low=2)
    return inner if trained is None else trained


def _default(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    r.ignore("original_max_position_embeddings")
    return Scaling()


def _linear(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    return Linear(factor=r.within("factor", FACTORS))


def _dynamic(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    r.ignore("original_max_position_embeddings")  # transformers stretches from max_position_embeddings on
    return DynamicNTK(factor=r.within("factor", FACTORS), trained_length=max_positions)


def _llama3(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    low, high = r.within("low_freq_factor", FACTORS), r.within("high_freq_factor", FACTORS)
    if low >= high:
        r.refuse("low_freq_factor", f"must be below high_freq_factor={high:g}")
    length = trained_length(r, max_positions, trained)
    return Llama3(factor=r.within("factor", FACTORS), low_freq_factor=low, high_freq_factor=high, trained_length=length)


def _yarn(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    trained = trained_length(r, max_positions, trained)
    factor = _factor(r, max_positions, trained)
    magnitude = r.within("attention_factor", FACTORS, None)
    weight, weight_all = (r.within(name, MSCALES, None) for name in ("mscale", "mscale_all_dim"))
    if magnitude is None and weight and weight_all:
        magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_all)
    return Yarn(
        factor=factor,
        trained_length=trained,
        beta_fast=r.within("beta_fast", FACTORS, 32.0),
        beta_slow=r.within("beta_slow", FACTORS, 1.0),
        truncate=r.flag("truncate", True),
        magnitude=magnitude,
    )


def _longrope(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    trained = trained_length(r, max_positions, trained)
    factor = _factor(r, max_positions, trained)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    short, long = (r.numbers_within(f"{name}_factor", FACTORS) for name in ("short", "long"))
    magnitude = r.within("attention_factor", FACTORS, usual)
    return LongRope(short=short, long=long, trained_length=trained, magnitude=magnitude)


MSCALES = (0.0, 1000.0)
"""Limits of yarn's mscale and mscale_all_dim: a negative one could make a magnitude of 0."""


def _factor(r: Keys, max_positions: int, trained: int) -> float:
    """The factor; where it is absent, what makes the positions of the trained length."""
    usual = max_positions / trained
    factor = r.within("factor", FACTORS, usual)
    if not FACTORS[0] <= factor <= FACTORS[1]:
        raise ValueError(
            f"{r.where}: factor is absent, and max_position_embeddings={max_positions} / "
            f"original_max_position_embeddings={trained} is not a number from {FACTORS[0]:g} to {FACTORS[1]:g}"
        )
    return factor


METHODS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
