"""Engine.from_pretrained: an engine for a Hugging Face folder. Its options are checked before a weight is read."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jattn import device
from jattn.engine import construction
from jattn.errors.arguments import function, integer, no_arguments, optional
from jattn.text.chat import load_chat_template
from jattn.text.tokenizer import load_tokenizer

FROM_FOLDER = {"config", "params", "tokenizer", "chat_template"}
"""Arguments of an Engine that are read from the folder."""

MESH_AXES = dict(data_parallel="data", tensor_parallel="tensor", decode_context_parallel="context")
"""Option of from_pretrained -> the mesh axis of that size, outermost first."""


def make(
    engine: Any,  # the class
    directory: str | Path,
    options: dict[str, Any],  # of the class
    *,
    progress: Callable[[int, int, str], None] | None,
    mesh: Mesh | None,
    dtype: str | None,
    quantization: str | None,
    expert_parallel: bool,
    **sizes: int,  # of MESH_AXES
) -> Any:
    """An engine of this class for the folder: see Engine.from_pretrained."""
    from jattn import models
    from jattn.models.load import check_cache_quant

    if unknown := unknown_names(engine, options):
        known = {*_names(engine), *MESH_AXES, "dtype", "quantization", "progress"} - FROM_FOLDER
        raise no_arguments(f"{engine.__name__}.from_pretrained", unknown, known)
    weight_options: dict[str, Any] = dict(dtype=dtype, quantization=quantization)
    check_options(options | dict(mesh=mesh, expert_parallel=expert_parallel, progress=progress) | weight_options)
    mesh = mesh_of(mesh, **sizes)
    config, sharding = models.load_config(directory), None
    construction.check_decoder_only(config)
    check_cache_quant(directory, options.get("cache_quant"))
    if mesh is not None:
        sharding = construction.model_mesh_of(config, mesh, engine.spans_processes, expert_parallel)
        sharding = sharding.weight_sharding(config)
    # before the weights, because a folder without a tokenizer is refused
    tokenizer, template = load_tokenizer(directory), load_chat_template(directory)
    config, params = models.load(directory, sharding=sharding, progress=progress, **weight_options)
    return engine(
        config, params, tokenizer, chat_template=template, mesh=mesh, expert_parallel=expert_parallel, **options
    )


def unknown_names(engine: type, names: Iterable[str]) -> list[str]:
    """The names that are not arguments of this class, or that are read from the folder."""
    return sorted({*names} - (_names(engine) - FROM_FOLDER))


def _names(engine: type) -> set[str]:
    """The arguments of this class."""
    taken: set[str] = set()
    for owner in (each for each in engine.__mro__ if "__init__" in vars(each)):
        arguments = inspect.signature(owner).parameters.values()
        taken |= {each.name for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
        if not any(each.kind is each.VAR_KEYWORD for each in arguments):  # it passes no options on to the next class
            break
    return taken


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as their rules return them; raises the error of the first that breaks its rule."""
    from jattn.models.model_folder import weights_dtype
    from jattn.models.quantising import check_quantization

    weight_rules = dict(
        dtype=lambda _, dtype: weights_dtype(dtype), quantization=optional(lambda _, name: check_quantization(name)),
        progress=optional(function),
    )  # fmt: skip
    rules = construction.OPTIONS | weight_rules | dict.fromkeys(MESH_AXES, integer(1))
    return {name: rules[name](name, value) if name in rules else value for name, value in options.items()}


def mesh_of(mesh: Mesh | None, **sizes: int) -> Mesh | None:
    """The mesh that from_pretrained was given, or one of the sizes given for MESH_AXES; None: one device."""
    count = math.prod(integer(1)(name, sizes[name]) for name in MESH_AXES)
    given = " and ".join(f"{name}={sizes[name]}" for name in MESH_AXES if sizes[name] > 1)
    if mesh is not None and count > 1:
        raise ValueError(f"give mesh= or {given}, not both")
    if mesh is not None or count == 1:
        return mesh
    devices = device.devices()
    devices_are_cpus = devices[0].platform == "cpu"
    if count > len(devices):
        of_process = -(-count // jax.process_count())
        raise ValueError(
            f"{given}: {count} devices are needed, and JAX has {len(devices)}"
            + (f"; for a trial: XLA_FLAGS=--xla_force_host_platform_device_count={of_process}" * devices_are_cpus)
        )
    shape, names = tuple(sizes[name] for name in MESH_AXES), tuple(MESH_AXES.values())
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names), devices=devices[:count])
