"""What an Engine is made of: the rules of its options, its model, and its mesh. A refusal lists every reason."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import jax
from jax.sharding import Mesh

from jattn.backends import Feature, explain, resolve
from jattn.engine import weights
from jattn.engine.dispatch import Model
from jattn.errors import UnsupportedError
from jattn.errors.arguments import boolean, check_kind, dtype_name, function, integer, kind, optional, text
from jattn.text.chat import ChatTemplate
from jattn.text.tokenizer import Tokenizer

OPTIONS = dict(
    num_blocks=optional(integer(1)), block_size=optional(integer(1)), max_num_seqs=integer(1),
    max_num_batched_tokens=integer(1), max_model_len=optional(integer(1)), max_burst=optional(integer(1)),
    cache_dtype=optional(dtype_name), backend=text, cache_quant=optional(text),
    prefix_caching=boolean, cascade_attention=boolean, deterministic=boolean, expert_parallel=boolean,
    seed=optional(integer(0, 2**63 - 1)), mesh=optional(kind(Mesh)), forward=optional(function),
    tokenizer=optional(kind(Tokenizer, way_out="give one with encode and decode, as jattn.text.load_tokenizer does")),
    chat_template=optional(kind(ChatTemplate)),
)  # fmt: skip
"""The rule of each option of the Engine."""


def check_decoder_only(config: Any) -> None:
    """ValueError for an encoder or an encoder-decoder, with what runs it; TypeError if it is not a ModelConfig."""
    from jattn.models.config import ModelConfig

    check_kind(
        "config", config, ModelConfig, "pass what jattn.models.load returns, or forward= for a model of your own"
    )
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
    if deterministic or backend != "auto":
        specs = _rank_specs(config, caches, model_mesh)
        needs = () if model_mesh is None else model_mesh.parallel.needs
        if deterministic:
            backend = _invariant_backend(backend, specs, needs)
        else:
            for spec, cache_spec in specs:  # raises now if it does not support a layer, not at the first request
                resolve(spec, cache_spec, backend=backend, needs=needs)
    return Model(forward, config, backend, model_mesh)


def _rank_specs(config: Any, caches: Many, model_mesh: Any) -> list[tuple]:
    """(spec of the attention, spec of its cache) of each layer, as one device computes it."""
    cache_of = getattr(config, "cache_of", lambda layer: layer)  # several layers of a ModelConfig may read one cache
    specs = [(layer.attention, caches[cache_of(i)].spec) for i, layer in enumerate(config.layers)]
    if model_mesh is None:
        return specs
    return [(model_mesh.rank_spec(spec), model_mesh.rank_cache_spec(cache)) for spec, cache in specs]


def _invariant_backend(backend: str, specs: Many[tuple], needs: tuple[Feature, ...]) -> str:
    """The backend, or the first for "auto", that gives a row the same bits in every batch, in every layer."""
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
    return able[0] if backend == "auto" else backend


def check_weights(config: Any, params: Any) -> None:
    """ValueError unless params have the containers and the shapes of the model's weights."""
    from jattn.models.config import ModelConfig
    from jattn.models.weight_tree import weight_paths, weight_specs

    if isinstance(config, ModelConfig):
        weights.check(params, {path: spec.shape for path, spec in weight_paths(weight_specs(config)).items()})


def with_separate_qkv(config: Any, params: Any, mesh: Any) -> tuple[Any, Any]:
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
            f"the mesh has devices of the processes {found} only, and must have some of each of the "
            f"{jax.process_count()}: all of them have {jax.device_count()} devices, which must be the product of "
            "tensor_parallel, decode_context_parallel and data_parallel"
        )
    return models.ModelMesh.of(config, mesh, expert_parallel)
