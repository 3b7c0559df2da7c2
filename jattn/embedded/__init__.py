"""The embedded model: a small Llama that adds numbers, trained by `jattn.embedded.train` with jattn's own layers."""

from pathlib import Path

from jattn.embedded.problems import Problem, few_shot, problems

__all__ = ["Problem", "directory", "few_shot", "problems"]


def directory() -> Path:
    """The model's folder inside the package: config.json, model.safetensors and tokenizer_config.json."""
    return Path(__file__).parent / "adder"
