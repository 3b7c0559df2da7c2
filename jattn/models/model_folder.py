"""ModelFolder: what the config.json of a folder says, with the settings that stand in other files beside it."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, NoReturn

from jattn.errors import UnsupportedError
from jattn.errors.arguments import boolean, check_kind, dtype_name, short
from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families import CODE_OF_FOLDERS, FAMILIES, RECURRENT
from jattn.models.families.family import Family
from jattn.models.files import is_there, read_json
from jattn.models.hub_formats import method_of, scheme_of
from jattn.models.hub_modelopt import SETTINGS
from jattn.models.hub_scheme import Scheme

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of weights in params that are not quantised."""


def weights_dtype(dtype: Any) -> str | None:
    """The name of a dtype that a caller asks for; None, as for "auto": as stored. ValueError if weights cannot have
    it."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    name = dtype_name("dtype", dtype)
    if name not in FLOATS:
        raise ValueError(f"dtype={name} of weights must be None or one of {', '.join(FLOATS)}")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder, its config and its family, and the contents of its config.json."""

    directory: Path
    config: ModelConfig
    family: Family
    values: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.directory / "config.json"

    @property
    def method(self) -> str | None:
        """The quant_method of its quantization_config; None if it has none."""
        return method_of(self.values)

    @functools.cached_property
    def scheme(self) -> Scheme | None:
        """How weights are stored; None if they are floats, or if the family's table reads the method."""
        return None if self.method in self.family.quant_methods else scheme_of(self.values, str(self.path))

    @property
    def method_of_weights(self) -> str | None:
        """The quant_method, but None if it quantises the cache or activations alone."""
        return self.method if self.method in self.family.quant_methods or self.scheme is not None else None

    @property
    def stored_dtype(self) -> str:
        """The dtype that config.json or its text_config names; else bfloat16."""
        text = self.values.get("text_config")
        sections = [self.values, text if isinstance(text, dict) else {}]
        found = next((each[key] for each in sections for key in ("dtype", "torch_dtype") if each.get(key)), "bfloat16")
        if found not in FLOATS:
            raise ValueError(f"{self.path}: dtype={short(found)} must be one of {', '.join(FLOATS)}")
        return found


def read_model_folder(directory: str | Path, *, head: bool = True) -> ModelFolder:
    """The config of a folder. head: False for embeddings: the family may have an encoder that is read alone."""
    boolean("head", head)
    folder = path_of_folder(directory)
    if not any(folder.glob("*.safetensors")) and (files := sorted(folder.glob("*.gguf"))):
        _refuse_gguf(files[0])
    if is_there(folder / "adapter_config.json"):
        raise UnsupportedError(f"{folder} is a LoRA adapter (adapter_config.json), which is not served; merge it first")
    path = folder / "config.json"
    if not is_there(path):
        inside = [str(each.parent) for each in sorted(folder.glob("snapshots/*/config.json"))]  # in the hub's cache
        way = f"; pass {' or '.join(inside)}" if inside else ""
        raise FileNotFoundError(f"{path} is missing: a model folder has config.json and *.safetensors{way}")
    values = _with_other_files(folder, read_json(path))
    family = _family_of(values)
    if not head and family.encoder is not None:
        family = family.encoder
    config = family.read(ConfigReader(values, str(path)))
    return ModelFolder(directory=folder, config=config, family=family, values=_with_quantization_of_text(values))


def path_of_folder(directory: str | Path) -> Path:
    """The path of a folder that exists; raises if it is none."""
    check_kind("directory", directory, (str, os.PathLike), "pass the path of a folder with config.json")
    folder = Path(directory)
    if not folder.is_dir():
        if folder.suffix == ".gguf":
            _refuse_gguf(folder)
        raise FileNotFoundError(
            f"{folder} is not a folder; pass one with config.json and *.safetensors (jattn downloads no models: "
            "`hf download NAME --local-dir DIR` of the package huggingface_hub does)"
        )
    return folder


def load_config(directory: str | Path, *, head: bool = True) -> ModelConfig:
    """The ModelConfig of a folder, without reading tensors. head: as in `load`."""
    config = read_model_folder(directory, head=head).config
    return config if head else config.without_head()


def config_of(values: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the contents of a config.json."""
    return _family_of(values).read(ConfigReader(values))


def _family_of(values: dict[str, Any]) -> Family:
    """The family of a config's model_type."""
    name = values.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    own = "; the code that auto_map names is never run" if values.get("auto_map") else ""
    if "model_type" not in values:
        raise UnsupportedError(
            "config.json has no model_type, as in folders of old releases; add that of its architecture, such as "
            f'"model_type": "bert"{own}'
        )
    if isinstance(name, str) and name in CODE_OF_FOLDERS:
        raise UnsupportedError(
            f"config.json: model_type={short(name)} is defined by code of its folder, which is never run; "
            f"{CODE_OF_FOLDERS[name]}"
        )
    why = (
        ", because some of its layers have a state (state-space or linear attention) instead of keys"
        if name in RECURRENT
        else ""
    )
    raise UnsupportedError(
        f"config.json: model_type={short(name)} is not supported{why}; supported are {', '.join(FAMILIES)}{own}"
    )


def _refuse_gguf(file: Path) -> NoReturn:
    raise UnsupportedError(
        f"{file}: GGUF is not supported; pass the model's folder of config.json and *.safetensors, with quantization= "
        "(--quantization) to keep its weights in 4 or 8 bits"
    )


def _with_other_files(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """config.json with the settings of ModelOpt's own file, and with the end tokens of generation_config.json."""
    settings, generation = folder / SETTINGS, folder / "generation_config.json"
    if is_there(settings) and not _with_quantization_of_text(values).get("quantization_config"):
        values = values | dict(quantization_config=read_json(settings) | dict(quant_method="modelopt"))
    if is_there(generation):  # chat models list more end tokens there
        more = _end_ids(generation, read_json(generation))
        ends = list(dict.fromkeys(_end_ids(folder / "config.json", values) + more))
        values = values | ({"eos_token_id": ends} if ends else {})  # if neither file has any: the family's default
    return values


def _end_ids(path: Path, values: dict[str, Any]) -> list[int]:
    """The end tokens of a file: eos_token_id is an id, a list of ids, or absent."""
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    ids = [id for id in ids if type(id) is not int or id != -1]  # some configs have -1 for none
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(
            f"{path}: eos_token_id={short(found)} must be a token id (an integer >= 0), or a list of token ids"
        )
    return ids


def _with_quantization_of_text(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json whose quantization_config may stand in its text_config, as in Kimi K2.5."""
    text, name = values.get("text_config"), "quantization_config"
    found = values.get(name) or (text.get(name) if isinstance(text, dict) else None)
    return {**values, name: found} if found else values
