"""What a family of models is here: a reader of its config.json, and a table of its tensor names."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.keys import MOST, Keys
from jattn.models.names import Source


@dataclasses.dataclass(frozen=True)
class Family:
    """Two functions and the endings of tensor names that may be left unread."""

    translate: Callable[[Keys], ModelConfig]
    sources: Callable[[ModelConfig], dict[str, Source]]
    unused: tuple[str, ...] = ()
    prefix: str = "model."  # a checkpoint saved from the bare decoder lacks it
    packings: tuple[str, ...] = ()  # quantisations of the stored weights that are unpacked as they are read
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # what an absent key means: transformers' own

    def read(self, keys: Keys) -> ModelConfig:
        """The config, every key accounted for; a value that is wrong is named."""
        keys = Keys(keys.given, keys.where, self.defaults)
        method = keys.part("quantization_config").given.get("quant_method")
        if not isinstance(method, str) or method not in self.packings:
            keys.only("quantization_config")
        try:
            config = self.translate(keys)
        except ValueError as error:  # of a part, which knows nothing of files
            raise error if keys.where in str(error) else ValueError(f"{keys.where}: {error}") from error
        keys.close()
        return config


def token_ids(c: Keys) -> dict[str, Any]:
    """The special tokens, which every family names alike; -1 is what some write for none."""
    ends = c.get("eos_token_id", ())
    ends = ends if isinstance(ends, list | tuple) else (ends,)
    if not all(isinstance(end, int) and not isinstance(end, bool) and -1 <= end <= MOST for end in ends):
        c.refuse("eos_token_id", "must be a token id, or a list of them")
    return dict(
        bos_token_id=c.count("bos_token_id", None, low=-1),
        eos_token_ids=tuple(ends),
        pad_token_id=c.count("pad_token_id", None, low=-1),
    )
