"""Settings that several methods have in their quantization_config."""

from typing import Any

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_scheme import WHOLE

USE_FLOATS = "or a folder that is not quantised, with quantization='int8', 'int4' or 'fp8'"
"""The way out of a refusal."""
STRATEGIES = ("tensor", "channel", "token", "group", "tensor_group", "block", "attn_head")
"""What shares a scale of activations."""


def group_size(c: ConfigReader) -> int | None:
    """The key group_size: a count, WHOLE, or None if it is absent."""
    return WHOLE if c.get("group_size") == WHOLE else c.count("group_size", None)


def ignore_calibration(w: ConfigReader) -> None:
    """Mark the keys as read that tell how scales were found and stored."""
    w.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def check_activations(group: ConfigReader, is_fp4: bool = False) -> None:
    """UnsupportedError unless a config group rounds nothing but inputs, and those to 8 bits.

    That rounding is left out. is_fp4: so is that to 4-bit floats, beside weights in NVFP4.
    """
    if group.get("output_activations") is not None:
        raise UnsupportedError(
            f"{group.where}: output_activations={short(group.get('output_activations'))} is not supported: use a "
            f"folder in which only weights and inputs are quantised, {USE_FLOATS}"
        )
    if group.get("input_activations") is None:
        return
    a = group.section("input_activations")
    kind, bits = a.choice("type", ("int", "float"), "int"), a.count("num_bits", 8)
    a.choice("strategy", STRATEGIES, "tensor")
    a.only("dynamic", True, False, "local")
    a.flag("symmetric", True)
    a.only("actorder", False)
    group_size(a)
    a.ignore("block_structure")
    ignore_calibration(a)
    a.refuse_unread()
    if bits != 8 and not (is_fp4 and (kind, bits) == ("float", 4)):
        raise UnsupportedError(
            f"{a.where}: {kind} activations of {bits} bits are not supported: those of 8 bits, and of 4-bit floats "
            f"beside weights in NVFP4, are left unrounded; use a folder with these, {USE_FLOATS}"
        )


def config_groups(c: ConfigReader) -> dict[str, ConfigReader]:
    """The readers of the groups of modules by name, which quantise something each."""
    given: Any = c.get("config_groups")
    if not isinstance(given, dict) or not given:
        raise UnsupportedError(f"{c.where}: config_groups={short(given)} must be an object of groups, at least one")
    for name, group in given.items():
        if not isinstance(group, dict) or not (group.get("weights") or group.get("input_activations")):
            raise UnsupportedError(f"{c.where}, {name}: {short(group)} must have weights or input_activations")
    return {name: ConfigReader(group, f"{c.where}, {name}") for name, group in given.items()}
