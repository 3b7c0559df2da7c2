"""The location of the embedded model, a Hugging Face folder inside the package."""

from pathlib import Path


def directory() -> Path:
    """The folder with config.json, model.safetensors and tokenizer_config.json."""
    return Path(__file__).parent / "adder"
