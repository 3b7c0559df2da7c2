"""What a family of models is here: a reader of its config.json, and a table of its tensor names."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.keys import Keys
from jattn.models.names import Source


@dataclasses.dataclass(frozen=True)
class Family:
    """Two functions and the endings of tensor names that may be left unread."""

    translate: Callable[[Keys], ModelConfig]
    sources: Callable[[ModelConfig], dict[str, Source]]
    unused: tuple[str, ...] = ()
    prefix: str = "model."  # a checkpoint saved from the bare decoder lacks it
    packings: tuple[str, ...] = ()  # quantisations of the stored weights that are unpacked as they are read

    def read(self, keys: Keys) -> ModelConfig:
        """The config, every key accounted for."""
        if keys.get("quantization_config", {}).get("quant_method") not in self.packings:
            keys.only("quantization_config")
        config = self.translate(keys)
        keys.close()
        return config


def token_ids(c: Keys) -> dict[str, Any]:
    """The special tokens, which every family names alike."""
    end = c.get("eos_token_id", ())
    return dict(
        bos_token_id=c.get("bos_token_id"),
        eos_token_ids=(end,) if isinstance(end, int) else tuple(end),
        pad_token_id=c.get("pad_token_id"),
    )
