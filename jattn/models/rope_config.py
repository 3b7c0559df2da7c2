"""The Rope of a config.json, from its old keys (rope_theta, rope_scaling) or its new one (rope_parameters)."""

import math
from typing import Any

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import MISSING, ConfigReader
from jattn.nn import (
    DynamicNTKRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnRopeScaling,
)
from jattn.nn.rope_scaling import FACTORS, MAX_THETA, yarn_magnitude

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Values of layer_types; rope_parameters may hold one object for each."""


def rope_of(
    c: ConfigReader,
    head_dim: int,
    max_positions: int,
    *,
    interleaved: bool = False,
    partial: bool = False,
    fraction: float | None = None,
    default: Any = None,
    unused: tuple[str, ...] = (),
) -> Rope:
    """The Rope of all layers. partial: allow partial_rotary_factor. default: parameters if the config has none.

    fraction: default of partial_rotary_factor. unused: names of parameters that the family reads itself, or does not
    use.
    """
    name, stored = parameters_of(c)
    stored = {key: value for key, value in (stored or (default or {})).items() if key not in unused}
    if found := [layer_type for layer_type in LAYER_TYPES if layer_type in stored]:
        raise UnsupportedError(
            f"{c.where}: separate {name} for {', '.join(found)} are not supported for this model_type"
        )
    trained = c.count("original_max_position_embeddings", None, low=2)
    outer = dict(rope_theta=c.get("rope_theta"))
    if partial:
        outer["partial_rotary_factor"] = c.get("partial_rotary_factor", fraction)
    else:
        c.only("partial_rotary_factor", 1, 1.0)
    used = {c.stored_name(key): value for key, value in outer.items() if value is not None and key not in stored}
    aliases = {key: (c.stored_name(key), key) for key in outer if c.stored_name(key) != key}
    r = ConfigReader(used | stored, f"{c.where}, {name}", aliases=aliases)
    return rope_from(r, head_dim, max_positions, trained, interleaved, partial)


def rope_of_layer_type(
    c: ConfigReader, layer_type: str, theta: float, head_dim: int, max_positions: int, old: Any = None
) -> Rope:
    """The Rope of the layers of one type: rope_parameters[layer_type], overridden by `old`, the object of rope_scaling.

    theta: the default of rope_theta. Parameters that are not in the object of a layer type are refused.
    """
    stored = c.section("rope_parameters").given
    if loose := sorted(set(stored) - set(LAYER_TYPES)):
        raise UnsupportedError(
            f"{c.where}: rope_parameters has {loose[0]!r}; in this model_type it has {' and '.join(LAYER_TYPES[:2])}"
        )
    own = ConfigReader(stored, f"{c.where}, rope_parameters").section(layer_type).given
    values = {"rope_theta": theta, **{k: v for k, v in own.items() if v is not None}, **(old or {})}
    name = "rope_scaling" if old else f"rope_parameters of {layer_type}"
    r = ConfigReader(values, f"{c.where}, {name}")
    r.only("truncate", True)  # transformers ignores it in the parameters of a layer type
    return rope_from(r, head_dim, max_positions)


def parameters_of(c: ConfigReader) -> tuple[str, dict[str, Any]]:
    """(key, parameters): rope_scaling if the config has it and it is not empty, else rope_parameters."""
    old, new = c.section("rope_scaling").given, c.section("rope_parameters").given
    name, found = ("rope_scaling", old) if old else ("rope_parameters", new)
    return name, {key: value for key, value in found.items() if value is not None}


def rope_from(
    r: ConfigReader, head_dim: int, max_positions: int, trained: int | None = None, interleaved=False, partial=False
) -> Rope:
    """The Rope of one object of parameters. trained: original_max_position_embeddings of the outer object, if any."""
    theta, scaling = theta_of(r, "rope_theta"), scaling_of(r, max_positions, trained)
    fraction = r.number("partial_rotary_factor", 1.0, above=0, most=1)
    r.refuse_unread()
    dim = int(head_dim * fraction)
    if fraction != 1 and not partial:
        raise UnsupportedError(
            f"{r.where}: partial_rotary_factor={fraction} is not supported for this model_type; it must be 1"
        )
    if dim % 2 or dim < 2:
        raise ValueError(
            f"{r.where}: the number of rotated dimensions, {dim} of head_dim={head_dim}"
            + (f" with partial_rotary_factor={fraction:g}" if fraction != 1 else "")
            + ", must be even and at least 2"
        )
    if isinstance(scaling, LongRopeScaling) and (len(scaling.short), len(scaling.long)) != (dim // 2, dim // 2):
        raise ValueError(
            f"{r.where}: short_factor and long_factor have {len(scaling.short)} and {len(scaling.long)} divisors; "
            f"they must have {dim // 2}, one per pair of rotated dimensions"
        )
    return Rope(dim=dim, theta=theta, scaling=scaling, interleaved=interleaved)


def theta_of(r: ConfigReader, name: str, default: Any = MISSING) -> float:
    """The base of the frequencies, checked."""
    return r.number(name, default, above=1, most=MAX_THETA)


def scaling_of(r: ConfigReader, max_positions: int, trained: int | None = None) -> RopeScaling:
    """The RopeScaling of one object of parameters, by its rope_type."""
    name = r.get("rope_type", r.get("type", "default"))
    r.ignore("rope_type", "type")
    if not isinstance(name, str) or name not in METHODS:
        raise UnsupportedError(
            f"{r.where}: rope_type={short(name)} is not supported; supported are {', '.join(METHODS)}"
        )
    return METHODS[name](r, max_positions, trained)


def trained_length(r: ConfigReader, max_positions: int, trained: int | None) -> int:
    """The context length before scaling: `trained`, else the object's own value, else max_positions."""
    inner = r.count("original_max_position_embeddings", max_positions, low=2)
    return inner if trained is None else trained


def _default(r: ConfigReader, max_positions: int, trained: int | None) -> RopeScaling:
    r.ignore("original_max_position_embeddings")
    r.only("factor", 1, 1.0)
    return RopeScaling()


def _linear(r: ConfigReader, max_positions: int, trained: int | None) -> RopeScaling:
    r.ignore("original_max_position_embeddings")
    return LinearRopeScaling(factor=r.number_within("factor", FACTORS))


def _dynamic(r: ConfigReader, max_positions: int, trained: int | None) -> RopeScaling:
    r.ignore("original_max_position_embeddings")  # transformers scales from max_position_embeddings on
    return DynamicNTKRopeScaling(factor=r.number_within("factor", FACTORS), trained_length=max_positions)


def _llama3(r: ConfigReader, max_positions: int, trained: int | None) -> RopeScaling:
    low, high = r.number_within("low_freq_factor", FACTORS), r.number_within("high_freq_factor", FACTORS)
    if low > high:
        r.refuse("low_freq_factor", f"must be at most high_freq_factor={high:g}")
    length = trained_length(r, max_positions, trained)
    return Llama3RopeScaling(
        factor=r.number_within("factor", FACTORS), low_freq_factor=low, high_freq_factor=high, trained_length=length
    )


def _yarn(r: ConfigReader, max_positions: int, trained: int | None) -> RopeScaling:
    if trained is None and r.get("original_max_position_embeddings") is None:
        r.number_within("factor", FACTORS)  # required: nothing else tells it
    trained = trained_length(r, max_positions, trained)
    factor = _factor(r, max_positions, trained)
    magnitude = r.number_within("attention_factor", FACTORS, None)
    weight, weight_all = (r.number_within(name, MSCALES, None) for name in ("mscale", "mscale_all_dim"))
    if magnitude is None and weight and weight_all:
        magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_all)
    # As in the code of YaRN's authors, and vLLM. transformers ignores it; DeepSeek's Qwen 3 has 1 / yarn_magnitude.
    if (more := r.number_within("attn_factor", FACTORS, None)) is not None:
        magnitude = more * (yarn_magnitude(factor) if magnitude is None else magnitude)
    r.only("extrapolation_factor", 1, 1.0)
    r.ignore("finetuned")  # it matters to the dynamic variant alone
    return YarnRopeScaling(
        factor=factor,
        trained_length=trained,
        beta_fast=r.number_within("beta_fast", FACTORS, 32.0),
        beta_slow=r.number_within("beta_slow", FACTORS, 1.0),
        truncate=r.flag("truncate", True),
        magnitude=magnitude,
    )


def _longrope(r: ConfigReader, max_positions: int, trained: int | None) -> RopeScaling:
    trained = trained_length(r, max_positions, trained)
    factor = _factor(r, max_positions, trained)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return LongRopeScaling(
        short=r.numbers_within("short_factor", FACTORS),
        long=r.numbers_within("long_factor", FACTORS),
        trained_length=trained,
        magnitude=r.number_within("attention_factor", FACTORS, default),
    )


MSCALES = (0.0, 1000.0)
"""Limits of yarn's mscale and mscale_all_dim. A negative value could make the magnitude 0."""


def _factor(r: ConfigReader, max_positions: int, trained: int) -> float:
    """The factor; if it is absent, max_positions / trained."""
    factor = r.number_within("factor", FACTORS, max_positions / trained)
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
