"""ConfigReader reads config.json key by key. A key that was neither read nor listed as harmless is an error."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short

HARMLESS = frozenset({
    # names, versions, and how others run it
    "_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "tokenizer_class",
    "prefix", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "use_return_dict",
    "torchscript", "tf_legacy_loss", "use_bfloat16", "use_cache", "is_decoder", "is_encoder_decoder",
    "unsloth_version", "unsloth_fixed", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "cache_implementation", "classifier_dropout", "init_device", "is_llama_config", "transformers.js_config",
    "_num_labels", "_commit_hash", "_flash_attn_2_enabled", "_attn_implementation_internal", "xla_device",
    "output_past", "custom_pipelines", "trust_remote_code", "author", "created_date", "internal_version", "language",
    "license", "name", "use_flash_attn", "use_flash_attention", "use_flash_attention_2", "flash_attn",
    "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side",  # of tokenizers
    "sbert_ce_default_activation_function", "sentence_transformers",  # of a classification head, which is not read
    # of embedding models: what a caller may ask for
    "matryoshka_dimensions", "matryoshka_dims", "is_matryoshka", "prompt_names", "task_names",
    # training only
    "initializer_range", "initializer_factor", "init_std", "attention_dropout", "hidden_dropout", "resid_pdrop",
    "embd_pdrop", "emb_pdrop", "attn_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob", "dropout",
    "activation_dropout", "router_aux_loss_coef", "router_jitter_noise", "gradient_checkpointing",
    "decoder_layerdrop", "encoder_layerdrop", "layerdrop", "use_mup", "embedding_dropout", "embed_dropout",
    "residual_dropout", "resid_dropout", "mlp_dropout", "expert_dropout", "classif_dropout", "qa_dropout",
    "seq_classif_dropout", "dropout_rate", "router_z_loss_coef",
    "max_sequence_length",  # of the training data; max_position_embeddings is the limit
    # generation; every family reads the bos, eos and pad ids
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "remove_invalid_values",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "decoder_start_token_id",
    "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
    # same results, computed in slices
    "chunk_size_feed_forward", "pretraining_tp",
    # of options that no family has
    "pruned_heads", "tie_encoder_decoder", "cross_attention_hidden_size", "add_cross_attention",
})  # fmt: skip
"""Keys that do not change the results of a forward pass."""


MISSING: Any = object()
"""The default of a key that is required."""

MAX_COUNT = 2**31 - 1
"""The largest count in a config, because token ids and lengths are int32."""
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-18, 1e18
"""Limits of the absolute value of nonzero numbers in a config: they and their squares must fit float32."""


class ConfigReader:
    """The contents of a config.json. Each value is checked when it is read; refuse_unread() raises for keys never read.

    defaults: the family's values of absent keys. A key that is null takes the default of the call instead.
    aliases: the names that a key has in this family's files, where they differ; of two the present one is read.
    """

    def __init__(
        self,
        values: dict[str, Any],
        where: str = "config.json",
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self.given, self.where, self.read = values, where, set()
        self.values, self.aliases = {**(defaults or {}), **values}, aliases or {}

    def get(self, name: str, default: Any = None) -> Any:
        """The value. Absent: the family's default. Null, or absent without such a default: `default`."""
        stored = self.stored_name(name)
        value = self.values.get(stored)
        if value is None and default is MISSING:
            raise ValueError(f"{self.where} has no {stored!r}, which this model_type needs")
        return default if value is None else value

    def fill(self, name: str, value: Any) -> None:
        """Give a key that is null or absent this value."""
        if self.get(name) is None:
            self.values[name] = value

    def stored_name(self, name: str) -> str:
        """The name of a key in this file; it counts as read."""
        names = self.aliases.get(name, (name,))
        self.read.update(names)
        found = [other for other in names if self.given.get(other) is not None]
        first = next(iter(found or [other for other in names if other in self.values] or names))
        for other in found[1:]:
            if self.given[other] != self.given[first]:
                value = short(self.given[other])
                raise ValueError(f"{self.where}: {other}={value} is another name of {first}, which has another value")
        return first

    def count(self, name: str, default: Any = MISSING, *, low: int = 1, high: int = MAX_COUNT) -> Any:
        """An integer from low to high."""
        fits = lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high
        return self._checked(name, default, fits, f"an integer from {low} to {high}")

    def number(self, name: str, default: Any = MISSING, *, above: float = -math.inf, most: float = math.inf) -> Any:
        """A finite number with above < x <= most, as a float; its magnitude is 0, or from MIN_ to MAX_MAGNITUDE."""
        limits = f"{f' above {above:g}' if above > -math.inf else ''} up to {min(most, MAX_MAGNITUDE):g}"
        zero = "" if above >= 0 else "0 or "
        fits = lambda x: _is_number(x) and above < x <= most
        wanted = f"a finite number{limits}, {zero}with an absolute value of at least {MIN_MAGNITUDE:g}"
        value = self._checked(name, default, fits, wanted)
        return float(value) if _is_number(value) else value

    def number_within(self, name: str, limits: tuple[float, float], default: Any = MISSING) -> Any:
        """A number from limits[0] to limits[1], as a float."""
        fits = lambda x: _is_number(x) and limits[0] <= x <= limits[1]
        value = self._checked(name, default, fits, "a number from {:g} to {:g}".format(*limits))
        return float(value) if _is_number(value) else value

    def numbers_within(self, name: str, limits: tuple[float, float]) -> tuple[float, ...]:
        """A list of numbers from limits[0] to limits[1]."""
        fits = lambda x: (
            isinstance(x, list | tuple) and x and all(_is_number(n) and limits[0] <= n <= limits[1] for n in x)
        )
        return tuple(
            map(float, self._checked(name, MISSING, fits, "a list of numbers from {:g} to {:g}".format(*limits)))
        )

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return self._checked(name, default, lambda x: isinstance(x, bool), "true or false")

    def choice(self, name: str, known: Iterable[str], default: Any = MISSING) -> Any:
        """One of the known names."""
        known = tuple(known)
        return self._checked(name, default, lambda x: isinstance(x, str) and x in known, f"one of {', '.join(known)}")

    def choices(self, name: str, known: Iterable[str], length: int) -> list[str] | None:
        """A list of known names, one per layer; None if absent."""
        known = tuple(known)
        fits = lambda x: isinstance(x, list | tuple) and len(x) == length and all(_is_one_of(n, known) for n in x)
        value = self._checked(name, None, fits, f"a list of {length} (one per layer), each one of {', '.join(known)}")
        return None if value is None else list(value)

    def counts(self, name: str, most: int) -> list[int] | None:
        """A list of integers from 0 to `most`; None if absent."""
        fits = lambda x: isinstance(x, list | tuple) and all(_is_index(n, most) for n in x)
        value = self._checked(name, None, fits, f"a list of integers from 0 to {most}")
        return None if value is None else list(value)

    def only(self, name: str, *allowed: Any) -> None:
        """UnsupportedError unless the key is absent, null, or one of these values: no other value is implemented."""
        value, name = self.get(name), self.stored_name(name)
        if value is not None and not any(value == x and type(value) is type(x) for x in allowed):
            wanted = " or ".join(map(repr, allowed)) or "absent"
            raise UnsupportedError(f"{self.where}: {name}={short(value)} is not supported; it must be {wanted}")

    def only_these(self, wanted: Mapping[str, Any]) -> None:
        """`only` for each key and its one value."""
        for name, value in wanted.items():
            self.only(name, value)

    def section(self, name: str, defaults: Mapping[str, Any] | None = None) -> "ConfigReader":
        """The reader of a nested object; an empty one if the key is absent."""
        value = self._checked(name, {}, lambda x: isinstance(x, dict), "an object")
        return ConfigReader(value, f"{self.where}, {name}", defaults)

    def ignore(self, *names: str) -> None:
        """Mark keys as read that have no effect in this family."""
        self.read.update(names)

    def refuse_unread(self) -> None:
        """UnsupportedError that names all keys that were neither read nor are HARMLESS."""
        left = {k: v for k, v in self.given.items() if k not in self.read and k not in HARMLESS and v is not None}
        if left:
            named = ", ".join(f"{k}={short(v)}" for k, v in sorted(left.items()))
            raise UnsupportedError(
                f"{self.where} has keys that are not used for this model_type and may change results: {named}. Remove "
                "those that are harmless, or add support in jattn/models/families"
            )

    def refuse(self, name: str, why: str) -> NoReturn:
        """ValueError for a value that does not fit the other keys."""
        name = self.stored_name(name)
        raise ValueError(f"{self.where}: {name}={short(self.values.get(name))} {why}")

    def _checked(self, name: str, default: Any, fits: Callable[[Any], Any], wanted: str) -> Any:
        value = self.get(name, default)
        if value is not default and not fits(value):
            raise ValueError(f"{self.where}: {self.stored_name(name)}={short(value)} must be {wanted}")
        return value


def _is_number(x: Any) -> bool:
    return (
        isinstance(x, int | float) and not isinstance(x, bool) and (x == 0 or MIN_MAGNITUDE <= abs(x) <= MAX_MAGNITUDE)
    )


def _is_index(x: Any, most: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= most


def _is_one_of(x: Any, known: tuple[str, ...]) -> bool:
    return isinstance(x, str) and x in known
