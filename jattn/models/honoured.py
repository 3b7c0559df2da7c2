"""The options of config.json that each family reads, found by recording the keys while an example is read."""

from collections.abc import Iterable
from typing import Any

from jattn.models.config_reader import ConfigReader
from jattn.models.families import FAMILIES

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=32, intermediate_size=32,
    max_position_embeddings=64, rms_norm_eps=1e-6, layer_norm_eps=1e-6, layer_norm_epsilon=1e-6, norm_eps=1e-6,
    norm_epsilon=1e-6, num_local_experts=4, num_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2,
    moe_k=2, moe_topk=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, n_shared_experts=1,
    intermediate_size_mlp=32, n_embd=256, n_layer=2, n_head=32, n_positions=64, d_model=256, n_layers=2, n_heads=32,
    num_layers=2, num_heads=32, ffn_dim=32, dim=256, hidden_dim=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=32, decoder_attention_heads=32, encoder_ffn_dim=32, decoder_ffn_dim=32, type_vocab_size=2,
    d_ff=32, expert_ffn_hidden_size=32,
)  # fmt: skip
"""Keys that some family requires, with values that are consistent. They are not listed as options."""
SAMPLES: dict[str, Any] = dict(
    rotary_dim=8, attention_types=[[["global", "local"], 1]], rope_theta=10000.0, use_sliding_window=True,
    n_group=1, topk_group=1, qk_rope_head_dim=64, num_kv_shared_layers=0, enable_moe_block=True, top_k_experts=2,
    ffn_hidden_size=32,
)  # fmt: skip
"""Values of options with which each family reads SIZES without an error, and takes the branches that read options."""
EVERYWHERE = frozenset({"model_type", "bos_token_id", "eos_token_id", "pad_token_id"})
"""Keys that every family reads."""


class _Recorder(ConfigReader):
    """A ConfigReader that records the keys that are read, except where one value alone is accepted (`only`)."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.asked: set[str] = set()
        self._is_check = False

    def get(self, name: str, default: Any = None) -> Any:
        if not self._is_check:
            self.asked.add(self.stored_name(name))
        return super().get(name, default)

    def choices(self, name: str, known: Iterable[str], length: int) -> list[str] | None:
        known = tuple(known)
        self._is_check = len(known) == 1
        found = super().choices(name, known, length)
        self._is_check = False
        return found

    def only(self, name: str, *allowed: Any) -> None:
        self.stored_name(name)

    def ignore(self, *names: str) -> None:
        super().ignore(*names)
        self.asked -= set(names)  # of values that are only checked


def honoured_options(model_type: str) -> tuple[str, ...]:
    """The keys of config.json, besides sizes, whose value this family honours; sorted."""
    family = FAMILIES[model_type]
    if family.texts:
        return ("text_config", *sorted(set(family.outer_keys) - EVERYWHERE))
    taken = {name for names in family.aliases.values() for name in names[1:]}  # one name of each key is enough
    sizes = {key: value for key, value in (SIZES | SAMPLES).items() if key not in taken}
    c = _Recorder(sizes | dict(model_type=model_type), "config.json", family.defaults, family.aliases)
    family.config(c)
    return tuple(sorted(c.asked - SIZES.keys() - EVERYWHERE))
