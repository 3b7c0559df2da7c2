"""config.json, read key by key: what nobody read and nobody knows to be harmless is an error, never ignored."""

import json
from typing import Any

from jattn.errors import UnsupportedError

HARMLESS = frozenset({
    # names, versions, book-keeping
    "_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "tokenizer_class",
    "prefix", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "use_return_dict",
    "torchscript", "tf_legacy_loss", "use_bfloat16", "use_cache", "is_decoder", "is_encoder_decoder",
    "unsloth_version", "unsloth_fixed", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "cache_implementation", "classifier_dropout", "init_device",
    # training only
    "initializer_range", "initializer_factor", "init_std", "attention_dropout", "hidden_dropout", "resid_pdrop",
    "embd_pdrop", "emb_pdrop", "attn_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob", "dropout",
    "activation_dropout", "router_aux_loss_coef", "router_jitter_noise", "gradient_checkpointing",
    "decoder_layerdrop", "encoder_layerdrop", "use_mup",
    # generation; the ids of tokens are read by everyone
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "remove_invalid_values",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "sep_token_id", "decoder_start_token_id",
    "chunk_size_feed_forward",  # the same numbers, computed in slices
    "pretraining_tp",  # the same numbers, in slices again
    "pruned_heads", "tie_encoder_decoder", "cross_attention_hidden_size", "add_cross_attention",
})  # fmt: skip
"""Keys that change no number of a forward pass."""


class Keys:
    """A config.json being read. Ask with get, need and only; close() says what was left over."""

    def __init__(self, values: dict[str, Any], where: str = "config.json"):
        self.values, self.where, self.read = values, where, set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The value, which must be there."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.where} has no {name!r}, which this family needs")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """The key must be absent, null, or one of these: nothing else is built."""
        value = self.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "absent"
            raise UnsupportedError(f"{self.where}: {name}={value!r} is not supported; it must be {wanted}")

    def part(self, name: str) -> "Keys":
        """A nested object, read like this one."""
        return Keys(self.get(name, {}), f"{self.where}, {name}")

    def ignore(self, *names: str) -> None:
        """Keys that this family is known not to use."""
        self.read.update(names)

    def close(self) -> None:
        """Raise for every key that was neither read nor harmless."""
        left = {k: v for k, v in self.values.items() if k not in self.read and k not in HARMLESS and v is not None}
        if left:
            named = ", ".join(f"{k}={_short(v)}" for k, v in sorted(left.items()))
            raise UnsupportedError(
                f"{self.where} has keys that may change the numbers and that nobody here reads: {named}. Remove those "
                "that you know to be harmless, or add support in jattn/models/families"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
