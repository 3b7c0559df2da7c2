"""Reading a Hugging Face folder: (config, params)."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jattn.errors import UnsupportedError
from jattn.models.checkpoint import Checkpoint, read_params
from jattn.models.config import ModelConfig
from jattn.models.families import FAMILIES
from jattn.models.families.family import Family
from jattn.models.files import is_there, read_json, shown
from jattn.models.keys import Keys
from jattn.models.names import tensors_of
from jattn.models.shapes import weights_of


def load(
    directory: str | Path,
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
    folder = Path(directory)
    config, family = _translated(folder)
    with contextlib.ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack, family.prefix)
        _compare_sizes(folder, tensors_of(config, family.sources), len(checkpoint.where))
        params = read_params(
            checkpoint, family.sources(config), weights_of(config), unused=family.unused, dtype=dtype,
            sharding=sharding, progress=progress,
        )  # fmt: skip
    return config, params


MOST_MISSING = 10_000
"""Up to so many missing tensors are looked for one by one, and named."""


def _compare_sizes(folder: Path, wanted: int, there: int) -> None:
    """ValueError if a config asks for far more than the files have: to list it could take minutes and all memory."""
    if wanted > there + MOST_MISSING:
        raise ValueError(
            f"{folder / 'config.json'} asks for {wanted} tensors in its layers and experts, and the *.safetensors "
            f"beside it have {there}: the two do not belong together"
        )


def config_of(values: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json's contents."""
    return family_of(values).read(Keys(values))


def load_config(directory: str | Path) -> ModelConfig:
    """The config alone, without reading a tensor."""
    return _translated(Path(directory))[0]


def family_of(values: dict[str, Any]) -> Family:
    """The family of a config's model_type."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        own = "; the code that its auto_map names is never run here" if values.get("auto_map") else ""
        raise UnsupportedError(
            f"config.json: model_type={shown(name)} is not supported; known are {', '.join(FAMILIES)}{own}"
        )
    return FAMILIES[name]


def _translated(folder: Path) -> tuple[ModelConfig, Family]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder: give one with config.json and *.safetensors (download it first)"
        )
    path, generation = folder / "config.json", folder / "generation_config.json"
    if not is_there(path):
        raise FileNotFoundError(f"{path} is missing: a model folder holds config.json and *.safetensors")
    values = read_json(path)
    if is_there(generation):  # chat models name more end tokens there
        more = _end_ids(generation, read_json(generation))
        ends = list(dict.fromkeys(_end_ids(path, values) + more))
        values |= {"eos_token_id": ends} if ends else {}  # neither file has any: the family's default
    family = family_of(values)
    return family.read(Keys(values, str(path))), family


def _end_ids(path: Path, values: dict[str, Any]) -> list[int]:
    """The end tokens that a file names: a number, a list of them, or nothing."""
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{path}: eos_token_id={shown(found)} must be a token's id from 0 up, or a list of those")
    return ids
