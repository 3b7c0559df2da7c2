"""Tensors of a folder of *.safetensors, memory-mapped, one at a time."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.models.keys import read_json
from jattn.models.names import Source
from jattn.nn.weights import Weight, is_weight

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """The tensors by name; files stay mapped, nothing is read until a tensor is asked for."""

    def __init__(self, directory: pathlib.Path, stack: contextlib.ExitStack, prefix: str = ""):
        try:
            from safetensors import safe_open
        except ModuleNotFoundError:
            raise ModuleNotFoundError("reading *.safetensors needs that library: pip install 'jattn[models]'") from None
        self.where: dict[str, tuple[Any, str]] = {}
        for path in files_of(directory):
            if not path.is_file():
                raise FileNotFoundError(f"{path} is named by {INDEX} but missing: the download is not complete")
            handle = stack.enter_context(safe_open(path, framework="numpy"))
            self.where |= {name: (handle, name) for name in handle.keys()}
        if prefix and not any(name.startswith(prefix) for name in self.where):
            self.where = {prefix + name: place for name, place in self.where.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, as it is stored."""
        handle, stored = self.where[name]
        return handle.get_tensor(stored)


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    """Those of the index, or the single file, or whatever *.safetensors there are."""
    if (directory / INDEX).is_file():
        return [directory / name for name in sorted(set(read_json(directory / INDEX)["weight_map"].values()))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(
            f"{directory} holds no *.safetensors; a folder of *.bin or *.pth must be converted first "
            "(transformers: model.save_pretrained(directory))"
        )
    return found


def read_params(
    checkpoint: Checkpoint,
    table: dict[str, Source],
    wanted: Any,
    *,
    unused: tuple[str, ...] = (),
    dtype: Any = None,
    sharding: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Any:
    """The tree `wanted` (of Weights) as arrays. Every weight and every tensor is accounted for.

    sharding: one for all arrays, or a function (path, Weight) -> sharding or None. unused: endings of tensor names
    that hold nothing a forward pass needs. progress(done, total, path) is called before each weight.
    """
    leaves, structure = jax.tree.flatten_with_path(wanted, is_leaf=is_weight)
    weights = {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): w for path, w in leaves}
    table = {path: source.within(checkpoint.where) for path, source in table.items()}
    _account(checkpoint, table, weights, unused)
    arrays = []
    for done, (path, weight) in enumerate(weights.items()):
        if progress is not None:
            progress(done, len(weights), path)
        source = table[path]
        value = source.make(*(checkpoint.read(name) for name in source.names))
        if value.shape != weight.shape:
            raise ValueError(
                f"tensor {source.names[0]} gives {path} the shape {value.shape} but config.json says {weight.shape}"
            )
        value = np.ascontiguousarray(value, value.dtype if dtype is None else jnp.dtype(dtype))
        place = sharding(path, weight) if callable(sharding) else sharding
        arrays.append(jnp.array(value) if place is None else jax.device_put(value, place))
    return jax.tree.unflatten(structure, arrays)


def _account(checkpoint: Checkpoint, table: dict[str, Source], weights: dict[str, Weight], unused) -> None:
    """ValueError unless the checkpoint has what the model needs and nothing else."""
    problems = [f"the model needs {path} and its family's table has no row for it" for path in weights.keys() - table]
    names = {name for path in weights for name in table.get(path, Source((), lambda: None)).names}
    problems += [f"tensor {name} is missing" for name in sorted(names - checkpoint.where.keys())]
    left = sorted(n for n in checkpoint.where.keys() - names if not n.endswith(tuple(unused)))
    problems += [f"tensor {name} is there and nobody reads it" for name in left]
    if problems:
        shown = "\n  ".join(problems[:12]) + (f"\n  and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ValueError(f"the checkpoint does not fit its config.json:\n  {shown}")
