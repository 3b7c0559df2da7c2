"""The rotary embedding that a config.json asks for, in its old spelling (rope_theta, rope_scaling) and its new one
(rope_parameters)."""

import math
from typing import Any

from jattn.errors import UnsupportedError
from jattn.models.keys import Keys
from jattn.nn import DynamicNTK, Linear, Llama3, LongRope, Rope, Scaling, Yarn
from jattn.nn.rope_scaling import yarn_magnitude


def rope_of(c: Keys, head_dim: int, max_positions: int, *, kind: str | None = None, interleaved: bool = False) -> Rope:
    """The rope of a model, or of its layers of one `kind` ('full_attention' ...) where each has its own."""
    values = dict(c.get("rope_parameters", {}))
    if kind is not None and kind in values:
        values = dict(values[kind])
    old = dict(c.get("rope_scaling", {}))
    values = {"rope_theta": c.get("rope_theta", 10000.0), **old, **values}
    fraction = values.pop("partial_rotary_factor", None) or c.get("partial_rotary_factor", 1.0)
    trained = c.get("original_max_position_embeddings")
    where = Keys(values, f"{c.where}, rope parameters")
    theta, scaling = float(where.get("rope_theta")), scaling_of(where, max_positions, trained)
    where.close()
    return Rope(dim=int(head_dim * fraction), theta=theta, scaling=scaling, interleaved=interleaved)


def scaling_of(r: Keys, max_positions: int, trained: int | None = None) -> Scaling:
    """How frequencies are stretched."""
    name = r.get("rope_type", r.get("type", "default"))
    r.ignore("rope_type", "type")
    if name not in METHODS:
        raise UnsupportedError(f"{r.where}: rope_type={name!r} is not supported; known are {', '.join(METHODS)}")
    return METHODS[name](r, max_positions, trained)


def _default(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    return Scaling()


def _linear(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    return Linear(factor=float(r.need("factor")))


def _dynamic(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    r.ignore("original_max_position_embeddings")  # transformers stretches from max_position_embeddings on
    return DynamicNTK(factor=float(r.need("factor")), trained_length=max_positions)


def _llama3(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    values: dict[str, Any] = {name: float(r.need(name)) for name in names}
    return Llama3(**values, trained_length=r.need("original_max_position_embeddings"))


def _yarn(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    trained = r.get("original_max_position_embeddings", trained or max_positions)
    factor = float(r.get("factor", max_positions / trained))
    magnitude, weight, weight_all = (r.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if magnitude is None and weight and weight_all:
        magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_all)
    return Yarn(
        factor=factor,
        trained_length=trained,
        beta_fast=float(r.get("beta_fast", 32.0)),
        beta_slow=float(r.get("beta_slow", 1.0)),
        truncate=r.get("truncate", True),
        magnitude=magnitude,
    )


def _longrope(r: Keys, max_positions: int, trained: int | None) -> Scaling:
    trained = r.get("original_max_position_embeddings", trained or max_positions)
    factor = r.get("factor", max_positions / trained)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    short, long = (tuple(map(float, r.need(f"{name}_factor"))) for name in ("short", "long"))
    return LongRope(short=short, long=long, trained_length=trained, magnitude=r.get("attention_factor", usual))


METHODS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
