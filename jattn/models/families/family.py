"""Family: what differs between model_types when a folder is read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.hub_formats import method_of, scheme_of
from jattn.models.tensor_names import TensorSource


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read the config.json and the tensors of one model_type.

    config: its ModelConfig. tensors: the TensorSource of every weight, by the weight's path in params.
    encoder: of an encoder-decoder, the family of its encoder, if that alone makes embeddings.
    """

    config: Callable[[ConfigReader], ModelConfig]
    tensors: Callable[[ModelConfig], dict[str, TensorSource]]
    unused: tuple[str, ...] = ()  # endings of the names of tensors that the model does not need
    skipped: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()  # and beginnings of such names
    texts: tuple[str, ...] = ()  # of a model with vision: the model_types of its text part
    outer_keys: tuple[str, ...] = ()  # and keys beside text_config that take precedence over those in it
    renames: tuple[tuple[str, str], ...] = ()  # beginnings of tensor names in files -> as `tensors` has them
    prefix: str = "model."  # of tensor names; a checkpoint saved without the head lacks it
    quant_methods: tuple[str, ...] = ()  # besides METHODS of hub_formats: `tensors` reads their weights
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # values of absent keys, as in transformers
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # other names of the usual keys
    encoder: "Family | None" = None

    def read(self, reader: ConfigReader) -> ModelConfig:
        """The ModelConfig; an unknown key or a wrong value is an error that names it."""
        c = ConfigReader(reader.given, reader.where, self.defaults, self.aliases)
        quantization = c.section("quantization_config")  # an object, if it is there
        method = method_of(c.values)
        if not isinstance(method, str) or method not in self.quant_methods:
            scheme_of(c.values, c.where)  # raises for an unknown method
        else:
            quantization.ignore("quant_method", "modules_to_not_convert", "dequantize")
            quantization.refuse_unread()
        try:
            config = self.config(c)
        except ValueError as error:  # of AttentionSpec and the like, which do not know the file
            raise error if c.where in str(error) else ValueError(f"{c.where}: {error}") from error
        c.refuse_unread()
        return config


def token_ids(c: ConfigReader) -> dict[str, Any]:
    """The bos, eos and pad ids, whose keys are the same in every family. Some configs have -1 for none."""
    ends = c.get("eos_token_id", ())
    ends = ends if isinstance(ends, list | tuple) else (ends,)
    if not all(isinstance(end, int) and not isinstance(end, bool) and -1 <= end <= MAX_COUNT for end in ends):
        c.refuse("eos_token_id", "must be a token id, or a list of token ids")
    return dict(
        bos_token_id=c.count("bos_token_id", None, low=-1),
        eos_token_ids=tuple(ends),
        pad_token_id=c.count("pad_token_id", None, low=-1),
    )
