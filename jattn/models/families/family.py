"""A family of models: a translator of its config.json, and a table of its tensor names."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.keys import MOST, Keys
from jattn.models.names import Source


@dataclasses.dataclass(frozen=True)
class Family:
    """Two functions, and data about the family's checkpoints and configs."""

    translate: Callable[[Keys], ModelConfig]
    sources: Callable[[ModelConfig], dict[str, Source]]
    unused: tuple[str, ...] = ()  # endings of the names of tensors that are not read
    prefix: str = "model."  # a checkpoint saved from the bare decoder lacks it
    packings: tuple[str, ...] = ()  # quant_methods whose weights are unpacked when read
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # values of absent keys, as in transformers

    def read(self, keys: Keys) -> ModelConfig:
        """The ModelConfig; an unknown key or a wrong value is an error that names it."""
        keys = Keys(keys.given, keys.where, self.defaults)
        method = keys.part("quantization_config").given.get("quant_method")
        if not isinstance(method, str) or method not in self.packings:
            keys.only("quantization_config")
        try:
            config = self.translate(keys)
        except ValueError as error:  # e.g. AttentionSpec's, which does not name the file
            raise error if keys.where in str(error) else ValueError(f"{keys.where}: {error}") from error
        keys.close()
        return config


def token_ids(c: Keys) -> dict[str, Any]:
    """bos, eos and pad ids, under the same keys in every family; some configs write -1 for none."""
    ends = c.get("eos_token_id", ())
    ends = ends if isinstance(ends, list | tuple) else (ends,)
    if not all(isinstance(end, int) and not isinstance(end, bool) and -1 <= end <= MOST for end in ends):
        c.refuse("eos_token_id", "must be a token id, or a list of them")
    return dict(
        bos_token_id=c.count("bos_token_id", None, low=-1),
        eos_token_ids=tuple(ends),
        pad_token_id=c.count("pad_token_id", None, low=-1),
    )
