"""DenseLayer: a linear layer after pooling, as a Dense module of a folder of the sentence-transformers library."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors import UnsupportedError
from jattn.errors.arguments import check_kind, choice, optional, reals, short
from jattn.models.checkpoint import Checkpoint, as_floats, is_finite, tensor_text
from jattn.models.config_reader import ConfigReader
from jattn.models.files import read_json
from jattn.types import AnyArray, pytree, static

DENSE_ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
    "Sigmoid": jax.nn.sigmoid,
}
"""Activations by the names of their classes in torch.nn."""
KERNEL, BIAS = "linear.weight", "linear.bias"
"""The names of the tensors."""


@pytree
class DenseLayer:
    """Embeddings f32[R, in] -> activation(x @ kernel + bias), f32[R, out]."""

    kernel: AnyArray  # float [in, out]
    bias: AnyArray | None = None  # float [out]
    activation: str = static(default="Identity")

    @property
    def in_features(self) -> int:
        return self.kernel.shape[0]

    @property
    def out_features(self) -> int:
        return self.kernel.shape[1]

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, jnp.asarray(self.kernel, jnp.float32), precision="highest")
        y = y if self.bias is None else y + jnp.asarray(self.bias, jnp.float32)[None, :]
        return DENSE_ACTIVATIONS[self.activation](y)


def dense_layer(name: str, value: Any) -> DenseLayer:
    """A DenseLayer whose arrays fit one another; lists become arrays."""
    check_kind(name, value, DenseLayer)
    kernel, bias = reals(2)(f"{name}.kernel", value.kernel), optional(reals(1))(f"{name}.bias", value.bias)
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"{name}.bias has {len(bias)} numbers, but its kernel gives {kernel.shape[1]} dimensions")
    choice(*DENSE_ACTIVATIONS)(f"{name}.activation", value.activation)
    return dataclasses.replace(value, kernel=kernel, bias=bias)


def read_dense(folder: Path, dtype: Any = None) -> DenseLayer:
    """The layer of a Dense module's folder: config.json and model.safetensors. dtype: None: as stored."""
    path = folder / "config.json"
    c = ConfigReader(read_json(path), str(path))
    shape, has_bias = (c.count("out_features"), c.count("in_features")), c.flag("bias", True)
    activation = _activation(c)
    c.only("use_residual", False)
    for name in ("module_input_name", "module_output_name"):
        c.only(name, "sentence_embedding")
    c.refuse_unread()
    _refuse_pickles(folder)
    checkpoint = Checkpoint(folder)
    wanted = {KERNEL: shape, **({BIAS: shape[:1]} if has_bias else {})}
    found = {tensor_text(name) for name in checkpoint.locations}
    if checkpoint.locations.keys() != wanted.keys():
        raise ValueError(f"{folder} has the tensors {', '.join(sorted(found))}; {path} asks for {', '.join(wanted)}")
    read = lambda name: jnp.asarray(_read(checkpoint, path, name, wanted[name], dtype))
    return DenseLayer(kernel=read(KERNEL).T, bias=read(BIAS) if has_bias else None, activation=activation)


def _activation(c: ConfigReader) -> str:
    """The name of the class; the library's default is Tanh."""
    name = c.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("torch.nn.") else None
    if kind not in DENSE_ACTIVATIONS:
        raise UnsupportedError(
            f"{c.where}: activation_function={short(name)} is not supported; supported are "
            f"{', '.join(DENSE_ACTIVATIONS)} of torch.nn"
        )
    return kind


def _refuse_pickles(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise FileNotFoundError(
            f"{folder} has no model.safetensors, and *.bin files are never opened, because they can run code: "
            "SentenceTransformer(folder).save(directory) of the sentence-transformers library writes one"
        )


def _read(checkpoint: Checkpoint, config: Path, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A tensor of this shape, as finite floats."""
    value, file = checkpoint.read(name), checkpoint.locations[name].path
    if value.shape != shape:
        raise ValueError(f"{file}: tensor {name} has the shape {value.shape}, but {config} says {shape}")
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize < 2:
        raise ValueError(f"{file}: tensor {name} has the dtype {value.dtype}; it must be a float of 16, 32 or 64 bits")
    made = as_floats(value, value.dtype if dtype is None else dtype)
    if not is_finite(made):
        raise ValueError(f"{file}: tensor {name} does not fit in {made.dtype}: some values are too large")
    return made
