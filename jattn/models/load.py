"""A Hugging Face folder to (config, params)."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

from jattn.errors import UnsupportedError
from jattn.models.checkpoint import Checkpoint, read_params
from jattn.models.config import ModelConfig
from jattn.models.families import FAMILIES
from jattn.models.families.family import Family
from jattn.models.keys import Keys, read_json
from jattn.models.shapes import weights_of


def load(
    directory: str | pathlib.Path,
    *,
    dtype: Any = None,
    sharding: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, params) of a folder with config.json and *.safetensors.

    dtype: of all weights, None: as stored. sharding: a jax.sharding.Sharding for all, or a function
    (path, Weight) -> Sharding or None; `Weight.axes` has logical axis names. progress(done, total, path) is called
    before each weight is read.
    """
    folder = pathlib.Path(directory)
    config, family = _translated(folder)
    table = family.sources(config)
    with contextlib.ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack, family.prefix)
        params = read_params(
            checkpoint, table, weights_of(config), unused=family.unused, dtype=dtype, sharding=sharding,
            progress=progress,
        )  # fmt: skip
    return config, params


def config_of(values: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json's contents."""
    return family_of(values).read(Keys(values))


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """The config alone, without reading a tensor."""
    return _translated(pathlib.Path(directory))[0]


def family_of(values: dict[str, Any]) -> Family:
    """The translator by model_type."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(f"config.json: model_type={name!r} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _translated(folder: pathlib.Path) -> tuple[ModelConfig, Family]:
    values = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():  # chat models name more end tokens there
        ends = _both(values.get("eos_token_id"), read_json(generation).get("eos_token_id"))
        values |= {"eos_token_id": ends} if ends else {}  # none anywhere: the family's own
    family = family_of(values)
    return family.read(Keys(values, str(folder / "config.json"))), family


def _both(*ids: Any) -> list[int]:
    """Ids from several places, each an int, a list or None, in order and once."""
    found: dict[int, None] = {}
    for some in ids:
        found |= dict.fromkeys([] if some is None else [some] if isinstance(some, int) else some)
    return list(found)
