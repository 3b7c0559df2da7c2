"""Checks of the engine's options and of each request. A refusal lists every reason."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jattn import device
from jattn.backends import Feature, explain, resolve
from jattn.engine import weights
from jattn.engine.blocks import request_root
from jattn.engine.dispatch import Model
from jattn.engine.params import SamplingParams, is_encodable
from jattn.engine.request import Completion, FinishReason, RequestOutput
from jattn.engine.scheduler import Limits
from jattn.errors import UnsupportedError
from jattn.errors.arguments import boolean, dtype_name, integer, kind, optional, text
from jattn.text.tokenizer import Tokenizer

OPTIONS = dict(
    num_blocks=optional(integer(1)), block_size=optional(integer(1)), max_num_seqs=integer(1),
    max_num_batched_tokens=integer(1), max_model_len=optional(integer(1)), max_burst=optional(integer(1)),
    cache_dtype=optional(dtype_name), backend=text, cache_quant=optional(text),
    prefix_caching=boolean, cascade_attention=boolean, deterministic=boolean, expert_parallel=boolean,
    seed=optional(integer(0, 2**63 - 1)), mesh=optional(kind(Mesh)),
)  # fmt: skip
"""The rule of each option of the Engine."""

MESH_AXES = dict(data_parallel="data", tensor_parallel="tensor", decode_context_parallel="context")
"""Option of from_pretrained -> the mesh axis of that size, outermost first."""


def check_decoder_only(config: Any) -> None:
    """ValueError for an encoder or an encoder-decoder, with what runs it."""
    if config.encoder is not None:
        raise ValueError(
            f"{config.family} is an encoder-decoder, which the engine does not serve; call jattn.models.forward with "
            "encoder_ids in a request's first step, and a batch made with encoder_seq_lens"
        )
    if config.is_encoder:
        raise ValueError(
            f"{config.family} is an encoder, which the engine does not serve; use jattn.Embedder for embeddings, or "
            "jattn.models.encode and jattn.models.head"
        )


def model_of(
    config: Any, caches: Many, forward: Callable | None, backend: str, deterministic: bool, model_mesh: Any = None
) -> Model:
    """The model that a dispatch calls. deterministic: with a batch-invariant backend; ValueError if there is none."""
    if forward is None:
        from jattn import models

        forward = models.forward
    if not deterministic and backend == "auto":
        return Model(forward, config, backend, model_mesh)
    cache_of = getattr(config, "cache_of", lambda layer: layer)  # several layers of a ModelConfig may read one cache
    specs = [(layer.attention, caches[cache_of(i)].spec) for i, layer in enumerate(config.layers)]
    needs = () if model_mesh is None else model_mesh.parallel.needs
    if model_mesh is not None:  # each device computes some of the heads, over some of the keys
        specs = [(model_mesh.rank_spec(spec), model_mesh.rank_cache_spec(cache)) for spec, cache in specs]
    if not deterministic:
        for spec, cache_spec in specs:  # raises now if it does not support a layer, not at the first request
            resolve(spec, cache_spec, backend=backend, needs=needs)
        return Model(forward, config, backend, model_mesh)
    able = None
    for spec, cache_spec in specs:
        reports = explain(spec, cache_spec, needs=(Feature.DECODE_BATCH_INVARIANCE, *needs))  # a row has one token
        names = [report.name for report in reports if report.supported]
        able = names if able is None else [name for name in able if name in names]
    if not able or backend not in ("auto", *able):
        raise ValueError(
            f"{backend=} does not give the same bits in every batch, which deterministic=True needs; "
            f"{'use one of ' + ', '.join(able) if able else 'no backend does for every layer of this model'}"
        )
    return Model(forward, config, able[0] if backend == "auto" else backend, model_mesh)


def mesh_of(mesh: Mesh | None, **sizes: int) -> Mesh | None:
    """The mesh that the options of from_pretrained mean, which are the sizes of MESH_AXES; None: one device."""
    count = math.prod(integer(1)(name, sizes[name]) for name in MESH_AXES)
    told = " and ".join(f"{name}={sizes[name]}" for name in MESH_AXES if sizes[name] > 1)
    if mesh is not None and count > 1:
        raise ValueError(f"give mesh= or {told}, not both")
    if mesh is not None or count == 1:
        return mesh
    devices = device.devices()
    if count > len(devices):
        raise ValueError(
            f"{told}: {count} devices are needed, and JAX has {len(devices)}"
            + ("; for a trial: XLA_FLAGS=--xla_force_host_platform_device_count=N" * (devices[0].platform == "cpu"))
        )
    shape, names = tuple(sizes[name] for name in MESH_AXES), tuple(MESH_AXES.values())
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names), devices=devices[:count])


def check_weights(config: Any, params: Any) -> None:
    """ValueError unless params have the containers and the shapes of the model's weights."""
    from jattn.models.config import ModelConfig
    from jattn.models.weight_tree import weight_paths, weight_specs

    if isinstance(config, ModelConfig):
        weights.check(params, {path: spec.shape for path, spec in weight_paths(weight_specs(config)).items()})


def with_heads_apart(config: Any, params: Any, mesh: Any) -> tuple[Any, Any]:
    """(config, params) with separate projections of q, k and v, which a mesh needs; unchanged without a mesh."""
    from jattn.models.config import ModelConfig
    from jattn.models.fused_qkv import split_qkv, without_fused_qkv

    if mesh is None or not isinstance(config, ModelConfig):
        return config, params
    config = without_fused_qkv(config)
    return config, split_qkv(config, params)


def model_mesh_of(config: Any, mesh: Mesh | None, spans_processes: bool = False, expert_parallel: bool = False) -> Any:
    """The jattn.models.ModelMesh of a model on a mesh, None without one; an error if it cannot be distributed so.

    spans_processes: the mesh must have devices of every process; else of this one only.
    """
    if mesh is None and expert_parallel:
        raise ValueError("expert_parallel=True distributes experts over data ranks: give data_parallel, or a mesh")
    if mesh is None:
        return None
    from jattn import models

    found = sorted({device.process_index for device in mesh.devices.flat})
    if not spans_processes and set(found) - {jax.process_index()}:
        raise UnsupportedError(
            f"the mesh has devices of the processes {found}, and an Engine runs in process {jax.process_index()} only; "
            "use jattn serve --coordinator, or jattn.engine.LockStepEngine"
        )
    if spans_processes and found != list(range(jax.process_count())):
        raise ValueError(
            f"the mesh has devices of the processes {found}, and must have some of each of the {jax.process_count()}: "
            f"tensor_parallel={jax.device_count()} uses all devices"
        )
    return models.ModelMesh.of(config, mesh, expert_parallel)


def check(
    prompt: str | Many[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    limits: Limits,
    salt: str = "",
) -> tuple[tuple[int, ...], dict[str, str]]:
    """(the prompt's tokens, the argument -> why it is wrong). The request can be served if the dict is empty."""
    wrong = {}
    if not isinstance(params, SamplingParams):
        wrong["params"] = f"params is {type(params).__name__}, not jattn.SamplingParams"
    if not isinstance(salt, str) or not is_encodable(salt):
        wrong["salt"] = f"salt={salt!a} must be text without surrogates"
    try:
        tokens = tuple(_tokens(prompt, tokenizer))
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a JAX array that was deleted
        return (), wrong | {"prompt": str(error)}
    if not tokens:
        wrong["prompt"] = "the prompt is empty: there is no token to continue from"
    elif outside := _outside(tokens, vocab_size):
        wrong["prompt"] = f"tokens {outside}"
    elif len(tokens) >= limits.max_model_len:
        most = limits.max_model_len
        wrong["prompt"] = f"the prompt has {len(tokens)} tokens, and prompt and output together may have {most}"
    if "params" in wrong:
        return tokens, wrong
    if outside := _outside(params.stop_token_ids, vocab_size):
        wrong["stop_token_ids"] = f"stop_token_ids {outside}"
    if params.stop and tokenizer is None:
        wrong["stop"] = "stop strings need a tokenizer; use stop_token_ids"
    return tokens, wrong


def _outside(ids: Many[int], vocab_size: int) -> str:
    """The error for ids that are not tokens; empty if there are none."""
    with contextlib.suppress(OverflowError):  # of a number beyond 64 bits
        known = np.fromiter(ids, np.int64, len(ids))  # half the time of min and max: a prompt may have 100,000 tokens
        if not ids or (known.min() >= 0 and known.max() < vocab_size):
            return ""
    bad = sorted({token for token in ids if not 0 <= token < vocab_size})
    return f"{bad[:5]} are outside the vocabulary of {vocab_size}" if bad else ""


def prompts_of(prompts: Any) -> list:
    """One prompt (a text, or token ids) or several of them, as a list."""
    if isinstance(prompts, (str, bytes, bytearray)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    if isinstance(prompts, (np.ndarray, jax.Array)):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    prompts = list(prompts)
    is_token = lambda x: isinstance(x, (int, np.integer)) or getattr(x, "ndim", None) == 0
    return [prompts] if prompts and all(map(is_token, prompts)) else prompts


def depends_on_length(config: Any) -> bool:
    """Do a request's keys depend on its final length? No for a config without the attribute, e.g. a user's own."""
    return getattr(config, "rope_depends_on_length", False)


def root_hash_of(salt: str, config: Any, final_length: int) -> bytes:
    """A hash of a request's salt and rope variant: its cached blocks depend on both, besides its tokens."""
    variant = config.rope_variant(final_length) if depends_on_length(config) else ()
    return request_root(hashlib.blake2b(salt.encode()).digest(), variant)


def refused(id: str, tokens: tuple[int, ...], wrong: dict[str, str]) -> RequestOutput:
    """The output of a request that cannot be served."""
    error = "; ".join(wrong.values())
    return RequestOutput(id, tokens, (Completion(0, "", (), finish_reason=FinishReason.ERROR, error=error),))


def _tokens(prompt: str | Many[int], tokenizer: Tokenizer | None) -> Many[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; this engine has none: give token ids")
        if not is_encodable(prompt):
            raise ValueError("the prompt holds a surrogate, which is no character and cannot be encoded as UTF-8")
        return tokenizer.encode(prompt)
    if isinstance(prompt, (bytes, bytearray)):
        raise ValueError("a prompt of bytes is neither text nor token ids: decode it, or give list(prompt)")
    types = set(map(type, prompt)) if isinstance(prompt, (list, tuple)) else set()
    if not types.isdisjoint({bool, np.bool_}):
        raise ValueError("a prompt must be text or a list of token ids, and a bool is no token id")
    if types == {int}:  # the usual case; through numpy it takes three times as long
        return prompt
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"a prompt must be text or a list of token ids, not shape {ids.shape} of {ids.dtype}")
    return ids.astype(np.int64).tolist()
