"""Train the embedded model: `python -m jattn.embedded.train OUT`. It takes some minutes on one core and needs optax.

The layers are those of `jattn.models`, with dense attention instead of paged attention. Weights are saved in bfloat16.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jattn import models
from jattn.embedded.dense import dense_logits
from jattn.embedded.problems import problems
from jattn.text.tokenizer import ByteTokenizer

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16", vocab_size=384, hidden_size=128,
    intermediate_size=320, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
    max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, attention_bias=False,
    bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
TOKENIZER = dict(tokenizer_class="ByT5Tokenizer", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", extra_ids=125)
LINES = 3  # problems per training text
CODE = ByteTokenizer()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of a training run."""

    steps: int = 1000
    batch: int = 48
    peak_rate: float = 2e-3
    warmup: int = 100
    seed: int = 0


def texts(seed: int, batch: int):
    """An endless iterator over (tokens i32[B L], mask f32[B L]); mask is 1 for the tokens of answers."""
    source = problems(seed, held_out=False)
    while True:
        rows, masks = [], []
        for _ in range(batch):
            lines = [next(source) for _ in range(LINES)]
            rows.append(CODE.encode("".join(p.line for p in lines)))
            masks.append([c for p in lines for c in [0] * len(p.question) + [1] * (len(p.line) - len(p.question))])
        yield np.asarray(rows, np.int32), np.asarray(masks, np.float32)


def train(recipe: Recipe, report=print):
    """(config, float32 params) after training."""
    import optax

    config = models.config_of(CONFIG)
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.peak_rate, recipe.warmup, recipe.steps, 1e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    params = models.init_params(config, recipe.seed, "float32")

    def loss_of(params, tokens, mask):
        logits = dense_logits(config, params, tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        right = (jnp.argmax(logits, axis=-1) == tokens[:, 1:]) * mask[:, 1:]
        return jnp.sum(loss * mask[:, 1:]) / jnp.sum(mask[:, 1:]), jnp.sum(right) / jnp.sum(mask[:, 1:])

    @jax.jit
    def update(params, state, tokens, mask):
        (loss, right), grads = jax.value_and_grad(loss_of, has_aux=True)(params, tokens, mask)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss, right

    state, source, begin = optimizer.init(params), texts(recipe.seed + 1, recipe.batch), time.time()
    for step in range(recipe.steps):
        params, state, loss, right = update(params, state, *next(source))
        if step % 100 == 0 or step == recipe.steps - 1:
            report(f"step {step}: loss {loss:.4f}, digits right {right:.4f}, {time.time() - begin:.0f} s", flush=True)
    return config, params


def save(directory: Path, params, config: dict = CONFIG, tokenizer: dict = TOKENIZER) -> None:
    """Write a Hugging Face folder: a Llama with tied embeddings, weights in bfloat16."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    as_stored = lambda x, transpose: np.ascontiguousarray(np.asarray(x.T if transpose else x).astype(jnp.bfloat16))
    tensors = {"model.embed_tokens.weight": as_stored(params["embed"], False)}
    tensors["model.norm.weight"] = as_stored(params["final_norm"]["scale"], False)
    for i, layer in enumerate(params["layers"]):
        at = f"model.layers.{i}."
        for ours, theirs in (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            tensors[f"{at}{theirs}.weight"] = as_stored(layer[ours]["scale"], False)
        for name in "qkvo":
            tensors[f"{at}self_attn.{name}_proj.weight"] = as_stored(layer["attn"][name]["kernel"], True)
        for name in ("gate", "up", "down"):
            tensors[f"{at}mlp.{name}_proj.weight"] = as_stored(layer["mlp"][name]["kernel"], True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    args = parser.parse_args()
    _, params = train(Recipe(steps=args.steps))
    save(args.directory, params)


if __name__ == "__main__":
    main()
