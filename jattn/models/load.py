"""Loading a Hugging Face folder: its tensors to params."""

import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jattn.errors import UnsupportedError
from jattn.errors.arguments import check_kind, function, optional
from jattn.models.checkpoint import Checkpoint, as_floats, is_finite, tensor_text
from jattn.models.config import ModelConfig
from jattn.models.families.family import Family
from jattn.models.hub_scheme import CACHE_SCALES, Scheme, check_range
from jattn.models.model_folder import FLOATS, ModelFolder, read_model_folder, weights_dtype
from jattn.models.placing import placed
from jattn.models.quantising import check_quantization, quantised
from jattn.models.tensor_names import TensorSource, count_layer_tensors
from jattn.models.weight_tree import weight_paths, weight_specs
from jattn.nn.weight_spec import WeightSpec, is_weight_spec
from jattn.ops.quantised import QuantisedArray, is_quantised

WRONG_TENSORS = ValueError, TypeError, IndexError, ArithmeticError
"""What conversions raise for ranks, shapes or dtypes that do not fit."""
CODES = (".qweight", ".weight_packed", ".weight_scale_inv", ".weight_scale")
"""Endings of the names of tensors that only quantised weights have."""
CLASSIFIERS = ("classifier.", "pre_classifier.", "score.", "qa_outputs.", "classification_head.")
"""Beginnings of the names of tensors of heads that give scores: of rerankers, reward models and other classifiers."""
COPIES = ("lm_head.weight", "embed_out.weight", "decoder.weight", "vocab_projector.weight", "embed_tokens.weight")
"""Endings of the names of tensors that repeat the embeddings where a model ties them."""
MAX_THREADS = 8
"""Threads that read weights, at most. Reading is limited by memory, which a few cores fill."""
MAX_MISSING_LISTED = 10_000
"""If a checkpoint lacks more tensors than this, the error does not list them."""


def load(
    directory: str | Path,
    *,
    dtype: Any = None,
    sharding: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
    quantization: str | None = None,
    head: bool = True,
) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, params) of a folder with config.json and *.safetensors.

    dtype: of all weights; None or "auto": as stored. sharding: a jax.sharding.Sharding for all weights, or a function
    (path, WeightSpec) -> Sharding or None; `WeightSpec.axes` has the logical axis names. progress(done, total, path)
    is called before each weight is read. quantization: one of QUANTIZATIONS; each weight is quantised when it is read.
    head: read the weights that only logits need; False for embeddings, where folders often lack them. Of T5 False reads
    the encoder alone.
    """
    dtype = weights_dtype(dtype)
    if quantization is not None:
        check_quantization(quantization)
    optional(function)("progress", progress)
    folder = read_model_folder(directory, head=head)
    config, family, method, scheme = folder.config, folder.family, folder.method, folder.scheme
    if folder.method_of_weights is not None and quantization is not None:
        raise UnsupportedError(f"{directory}: its weights are quantised ({method}) already; leave quantization out")
    checkpoint = _checkpoint(folder)
    table, beginnings = family.tensors(config), family.skipped(config)
    ignored: set[str] = set()  # names of tensors
    if scheme is None and method is None:
        _refuse_codes(checkpoint)
    if method is not None:
        ignored |= _cache_scales(checkpoint)
    if head:
        _check_copies(checkpoint, table, family)
    if scheme is not None:
        try:
            table = scheme.sources(table, checkpoint.locations, folder.stored_dtype if dtype is None else dtype)
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from None
        ignored |= _zeros(checkpoint, _names_in(table), scheme.ignored_if_zero)
        ignored |= _parts_of_unused(checkpoint, scheme, family)
    if not head:
        config, ignored = config.without_head(), ignored | _names_in(table)
    unused = lambda name: name in ignored or name.endswith(family.unused) or name.startswith(beginnings)
    params = _read_params(checkpoint, table, weight_specs(config), unused, dtype, sharding, progress, quantization)
    return config, params


def stored_weights(directory: str | Path, *, dtype: Any = None) -> dict[str, Any]:
    """The leaves of params by path as `load` makes them, as shapes. dtype: as in `load`.

    It reads the headers of *.safetensors, and the scales and zero points of weights that are stored quantised.
    """
    asked, folder = weights_dtype(dtype), read_model_folder(directory)
    config, scheme, checkpoint = folder.config, folder.scheme, _checkpoint(folder)
    stored, dtype = checkpoint.locations, jax.numpy.dtype(folder.stored_dtype if asked is None else asked)
    table = {path: source.stored_form(stored) for path, source in folder.family.tensors(config).items()}

    def form(path: str, shape: tuple[int, ...]) -> Any:
        source, tensor = table[path], table[path].names[0]
        if source.form is not None:
            made = source.form(shape)
            return made if asked is None else dataclasses.replace(made, dtype=jax.dtypes.canonicalize_dtype(asked))
        try:
            found = None if scheme is None else scheme.form(path, source, shape, stored, checkpoint.read, dtype)
        except WRONG_TENSORS as error:
            raise ValueError(f"{directory}: the scales of {path} cannot be read: {error}") from error
        if found is None and (dtype_stored := checkpoint.dtype_of(tensor)).name not in FLOATS:
            raise ValueError(
                f"{directory}: tensor {tensor_text(tensor)} of {path} has dtype {dtype_stored} and no scales"
            )
        if found is not None:
            return found
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(asked or checkpoint.dtype_of(tensor)))

    return {path: form(path, spec.shape) for path, spec in weight_paths(weight_specs(config)).items()}


def _checkpoint(folder: ModelFolder) -> Checkpoint:
    """The tensors of a folder; ValueError if they are far fewer than the config needs, as listing them could exhaust
    memory."""
    checkpoint = Checkpoint(folder.directory, folder.family.prefix, folder.family.renames)
    needed, stored = count_layer_tensors(folder.config, folder.family.tensors), len(checkpoint.locations)
    if needed > stored + MAX_MISSING_LISTED:
        raise ValueError(
            f"{folder.path} asks for {needed} tensors in its layers and experts, but the *.safetensors in the folder "
            f"have {stored}: they are not of the same model"
        )
    _name_embeddings(checkpoint, folder)
    return checkpoint


def _name_embeddings(checkpoint: Checkpoint, folder: ModelFolder) -> None:
    """Give the embeddings their name where the folder has them under another name alone, such as that of a tied head:
    save_model of safetensors keeps one of several names of a tensor."""
    table, stored = folder.family.tensors(folder.config), checkpoint.locations
    embed = table["embed"].names[0]
    if _has_part_of(embed, stored):
        return
    used = _names_in(table)
    is_copy = lambda name: name.endswith(COPIES) and name.endswith(folder.family.unused) and name not in used
    if (copy := min(filter(is_copy, stored), default=None)) is not None:
        stored[embed] = stored.pop(copy)


def _has_part_of(weight: str, stored: Iterable[str]) -> bool:
    """Is a tensor of the module of this weight stored: the weight, or codes of it?"""
    return any(name.startswith(weight.removesuffix("weight")) for name in stored)


def check_cache_quant(directory: str | Path, quant: str | None) -> None:
    """UnsupportedError if a cache with one scale for many tokens should use the folder's scales, which are not read."""
    if quant not in ("per_tensor", "per_head"):
        return
    if found := min(_cache_scales(Checkpoint(Path(directory))), default=None):
        raise UnsupportedError(
            f"cache_quant={quant!r}: the folder's scales of keys and values ({tensor_text(found)}) are not used, and 1 "
            "would take their place; leave cache_quant out, with which the scales are computed as the cache is written"
        )


def _cache_scales(checkpoint: Checkpoint) -> set[str]:
    return {name for name in checkpoint.locations if name.endswith(CACHE_SCALES)}


def _zeros(checkpoint: Checkpoint, used: set[str], endings: tuple[str, ...]) -> set[str]:
    """The names of unused tensors with these endings that hold zeros: such tensors change nothing."""
    names = [name for name in checkpoint.locations if name not in used and endings and name.endswith(endings)]
    return {name for name in names if not checkpoint.read(name).any()}


def _parts_of_unused(checkpoint: Checkpoint, scheme: Scheme, family: Family) -> set[str]:
    """The names of the tensors of quantised modules that the model does not need. A head that would repeat the
    embeddings is none of them: its numbers are not compared."""
    weight_of = {name: scheme.weight_of(name) for name in checkpoint.locations}
    is_unused = lambda name: name is not None and name.endswith(family.unused) and not name.endswith(COPIES)
    return {name for name, weight in weight_of.items() if is_unused(weight)}


def _names_in(table: dict[str, TensorSource]) -> set[str]:
    return {name for source in table.values() for name in source.names}


def _refuse_codes(checkpoint: Checkpoint) -> None:
    """ValueError if there are tensors of quantised weights; the folder's config.json has no quantization_config."""
    found = next((name for name in checkpoint.locations if name.endswith(CODES)), None)
    if found is not None:
        raise ValueError(
            f"{checkpoint.directory / 'config.json'} has no quantization_config, but the folder has the quantised "
            f"weight {tensor_text(found)}: add the settings with which it was made (some programs write them to a file "
            "beside it)"
        )


def _check_copies(checkpoint: Checkpoint, table: dict[str, TensorSource], family: Family) -> None:
    """ValueError if a tensor that is not read, because it repeats the embeddings, has other numbers than these."""
    used, embed, stored = _names_in(table), table["embed"].names[0], checkpoint.locations
    if not _has_part_of(embed, stored):
        return  # the embeddings are missing
    for name in stored.keys() - used:
        is_copy = name.endswith(COPIES) and name.endswith(family.unused)
        # codes of embeddings have other names, and floats do not repeat them
        if is_copy and not (embed in stored and np.array_equal(checkpoint.read(name), checkpoint.read(embed))):
            raise ValueError(
                f"{checkpoint.locations[name].path}: tensor {tensor_text(name)} differs from {tensor_text(embed)}, "
                "which this model uses in its place (tie_word_embeddings): set tie_word_embeddings to false in "
                "config.json to use it, or remove the tensor"
            )


def _read_params(
    checkpoint: Checkpoint,
    table: dict[str, TensorSource],
    specs: Any,
    unused: Callable[[str], bool],
    dtype: Any,
    sharding: Any,
    progress: Callable[[int, int, str], None] | None,
    quantization: str | None,
) -> Any:
    """The tree `specs` of WeightSpecs as arrays. Missing and unknown tensors are errors; other arguments as in `load`.

    unused: whether the model does not need a tensor of this name. Weights of the same tensors in the same place are one
    array (ALBERT).
    """
    structure, by_path = jax.tree.structure(specs, is_leaf=is_weight_spec), weight_paths(specs)
    table = {path: source.stored_form(checkpoint.locations) for path, source in table.items()}
    _check_names(checkpoint, table, by_path, unused)
    place_of: Callable[..., Any] = sharding if callable(sharding) else lambda path, spec: sharding
    if isinstance(sharding, jax.sharding.Mesh):  # it can be called, as a decorator
        place_of = lambda path, spec: sharding
    places = {path: _checked_place(path, place_of(path, spec)) for path, spec in by_path.items()}
    begun, copying = _jax_context(), threading.Lock()
    firsts: dict[Any, str] = {}  # the first path of each array
    array_of = lambda path: (table[path].names, table[path].make, places[path])
    first_of = {path: firsts.setdefault(array_of(path), path) for path in by_path}
    own = {path: spec for path, spec in by_path.items() if first_of[path] == path}

    def read(path: str, spec: WeightSpec) -> Any:
        with begun():
            return _read_weight(checkpoint, table[path], path, spec, dtype, places[path], copying)

    arrays: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "jattn-load") as pool:
        # one thread: `quantised` needs memory for one weight, and read-ahead weights would wait in memory
        many = map if quantization is not None else pool.map
        weights = many(read, own, own.values())
        try:
            for done, path in enumerate(own):
                if progress is not None:
                    progress(done, len(own), path)
                array = next(weights)
                if quantization is not None:
                    array = quantised(path, array, quantization)
                    array = placed(array, places[path]) if is_quantised(array) else array
                arrays[path] = array
        except BaseException:  # an error or Ctrl-C: do not read the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return jax.tree.unflatten(structure, [arrays[first_of[path]] for path in by_path])


def _checked_place(path: str, place: Any) -> jax.sharding.Sharding | None:
    way_out = "on a mesh, pass ModelMesh.of(config, mesh).weight_sharding(config)"
    return check_kind(f"the sharding of {path}", place, (jax.sharding.Sharding, type(None)), way_out)


def _jax_context() -> Callable[[], contextlib.AbstractContextManager]:
    """Makes a context in which another thread has this thread's default device and width of floats."""
    device = getattr(jax.config, "jax_default_device", None)
    is_wide = jax.dtypes.canonicalize_dtype(float).itemsize == 8

    @contextlib.contextmanager
    def begun():
        with jax.default_device(device), jax.enable_x64(is_wide):
            yield

    return begun


def _read_weight(
    checkpoint: Checkpoint, source: TensorSource, path: str, spec: WeightSpec, dtype: Any, place: Any, copying: Any
) -> Any:
    """One weight on its devices.

    copying: a lock. It is held while the weight is made and, unless it is a view of the files, until it is on the
    devices: so the host has at most one weight besides those that the files and the devices have.
    """
    stored = [checkpoint.read(name) for name in source.names]
    file, first, *_ = checkpoint.locations[source.names[0]]
    with copying:
        value = _made(source, stored, path, spec, dtype, f"{file}: tensor {tensor_text(first)}")
        if is_quantised(value) or not any(np.may_share_memory(value, x) for x in stored):
            return placed(value, place)
    return placed(value, place)


def _made(source: TensorSource, stored: list[np.ndarray], path: str, spec: WeightSpec, dtype: Any, tensor: str) -> Any:
    """A weight made of its tensors; ValueError unless its shape is right and its values are finite floats."""
    try:
        value = source.make(*stored)
    except UnsupportedError as error:
        raise UnsupportedError(f"{tensor}: {error}") from error
    except WRONG_TENSORS as error:
        kinds = ", ".join(sorted({f"{x.dtype}{list(x.shape)}" for x in stored})[:4])
        raise ValueError(f"{tensor} ({kinds}) cannot be converted to {path}: {error}") from error
    if value.shape != spec.shape:
        raise ValueError(f"{tensor} gives {path} the shape {value.shape} but config.json says {spec.shape}")
    if is_quantised(value):
        return _of_dtype(value, dtype, tensor)
    if value.dtype.name not in FLOATS:
        alone = " without scales" if value.dtype.itemsize == 1 else ""
        raise ValueError(f"{tensor} gives {path} as {value.dtype}{alone}; weights must be one of {', '.join(FLOATS)}")
    made = as_floats(value, value.dtype if dtype is None else dtype)
    was_converted = made.dtype != value.dtype or any(x.dtype.name not in FLOATS for x in stored)
    if was_converted and not is_finite(made):
        raise ValueError(f"{tensor} does not fit in {made.dtype}: some values are too large")
    return made


def _of_dtype(weight: QuantisedArray, dtype: Any, tensor: str) -> QuantisedArray:
    """The weight with this dtype, if it is not None; ValueError if its numbers do not fit."""
    dtype = weight.dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    if jax.numpy.finfo(dtype).max < jax.numpy.finfo(weight.dtype).max:  # others were checked when they were made
        try:
            check_range(weight, weight.format, dtype)
        except ValueError as error:
            raise ValueError(f"{tensor}: {error}") from None
    return dataclasses.replace(weight, dtype=dtype)


def _check_names(
    checkpoint: Checkpoint,
    table: dict[str, TensorSource],
    specs: dict[str, WeightSpec],
    unused: Callable[[str], bool],
) -> None:
    """ValueError unless the checkpoint has exactly the tensors that the model needs, apart from those `unused`."""
    problems = [f"the model needs {path}, for which its family's table has no row" for path in specs.keys() - table]
    names = {name for path in specs if path in table for name in table[path].names}
    problems += [f"tensor {tensor_text(name)} is missing" for name in sorted(names - checkpoint.locations.keys())]
    absent = [path for path in specs if path in table and not all(n in checkpoint.locations for n in table[path].names)]
    if absent and all(path.startswith("head.") for path in absent):
        problems.append("these are the head's, which embeddings do not need: pass head=False to load without it")
    left = sorted(n for n in checkpoint.locations.keys() - names if not unused(n))
    stored = [checkpoint.locations[name].name for name in left]
    if found := next((name for name in stored if name.startswith(CLASSIFIERS)), None):
        raise UnsupportedError(
            f"{checkpoint.directory} has the head of a classifier (tensor {tensor_text(found)}): a reranker, a reward "
            "model or the like, whose scores are not computed; what is computed are embeddings and next tokens, so use "
            "a folder of an embedding model, or of a reranker that answers with a token (Qwen3-Reranker)"
        )
    problems += [f"tensor {tensor_text(name)} is not used by this model" for name in left]
    if problems:
        listed = "\n  ".join(problems[:12]) + (f"\n  and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ValueError(f"{checkpoint.directory}: the checkpoint does not fit its config.json:\n  {listed}")
