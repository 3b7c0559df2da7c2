"""The reference: transformers (torch, CPU), with small random models of each family, saved as a user would do it."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

COMMON: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Example:
    """One small model: its model_type, its changes to COMMON, and whether COMMON applies."""

    family: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    common: bool = True

    def config(self):
        from transformers import CONFIG_MAPPING

        values = (COMMON if self.common else {}) | self.changes
        return CONFIG_MAPPING[self.family](**values, attn_implementation="eager")

    def save(self, directory: pathlib.Path, seed: int = 0, **options: Any):
        """Write the model to a folder and return it; weights are random, so that every norm and bias has an effect."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config()).eval().float()
        shake(model)
        model.save_pretrained(directory, **options)
        return model


def saved(values: dict[str, Any], directory: pathlib.Path, seed: int = 0):
    """The random model of a config.json, written to a folder with exactly this config."""
    import copy
    import json

    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Mistral4ForCausalLM

    given = {key: value for key, value in copy.deepcopy(values).items() if key != "model_type"}
    given.setdefault("pad_token_id", 0)  # their own default may lie outside the small vocabulary
    config = CONFIG_MAPPING[known(values["model_type"])](**given, initializer_range=0.3, attn_implementation="eager")
    torch.manual_seed(seed)
    # AutoModel has Mistral 4 only as a part of a model with vision.
    make = Mistral4ForCausalLM if values["model_type"] == "mistral4" else AutoModelForCausalLM.from_config
    model = make(config).eval().float()
    shake(model)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(values))
    return model


def known(model_type: str) -> str:
    """The model_type under which transformers knows a model: Kimi K2 is DeepSeek V3."""
    return {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)


def shake(model) -> None:
    """Add noise to every norm scale, layer scale, bias and sink, which start as ones and zeros."""
    import torch

    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq") or not parameter.is_floating_point():
                continue
            if name.endswith(("bias", "layer_scalar")) or (
                parameter.ndim == 1 and isinstance(parameter, torch.nn.Parameter)
            ):
                parameter.add_(0.3 * torch.randn_like(parameter))


def logits(model, token_ids: np.ndarray) -> np.ndarray:
    """f32[len, vocab] of one prompt."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(token_ids))[None], use_cache=False).logits[0].float().numpy()
