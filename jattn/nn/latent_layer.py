"""A multi-head latent attention layer (MLA, as in DeepSeek) as data and a pure function, like attention_layer.

weights  q_a, q_b, or q alone: the queries;  kv_a [hidden, L + rope]: latent and rotated key;  o [H * V, hidden]
         q_a_norm, kv_a_norm {'scale': ..};  w_uk [H nope L], w_uv [H L V]: the two halves of kv_b_proj
         kv_c_scale, k_pe_scale of a cache
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.errors.arguments import boolean, check_fields, integer, kind, number, optional
from jattn.mla_spec import MLAParams, MLASpec
from jattn.nn.attention_layer import (
    Multiply,
    check_temperature_tuning,
    multiply,
    temperature_tuned,
)
from jattn.nn.norm import Norm
from jattn.nn.rope import Angles, Rope, rotate
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs

AttendLatent = Callable[[jax.Array, jax.Array, jax.Array, MLAParams], tuple]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Static description of a latent attention layer. It is hashable, so equal layers share one trace.

    q = q_b(norm(q_a x)), or q x if spec.q_lora_rank is None; [kv_c | k_pe] = kv_a x, and kv_c is normalised, then times
    kv_factor. The last rope.dim dimensions of each query, and k_pe, are rotated.
    """

    spec: MLASpec
    hidden_size: int  # width of the input and of the output
    rope: Rope
    norm: Norm  # of the latents of queries and keys
    kv_factor: float = 1.0
    bias: bool = False  # of q_a, kv_a and o
    temperature_tuning: tuple[float, float] | None = None  # see AttentionConfig
    temperature_tuning_offset: int = 1

    def __post_init__(self):
        check_fields(
            self, spec=kind(MLASpec), hidden_size=integer(1), rope=kind(Rope), norm=kind(Norm), bias=boolean,
            kv_factor=number(above=0),
            temperature_tuning=optional(check_temperature_tuning), temperature_tuning_offset=integer(0),
        )  # fmt: skip
        if self.rope.dim != self.spec.qk_rope_head_dim:
            raise ValueError(f"{self.rope.dim=} must equal qk_rope_head_dim={self.spec.qk_rope_head_dim}")

    def weight_specs(self) -> dict[str, Any]:
        """The tree of its WeightSpecs. The weights of latents are on no axis: every rank has them whole."""
        s, hidden = self.spec, self.hidden_size
        heads, q_rank = s.num_heads, s.q_lora_rank
        kv_a = linear_weight_specs(hidden, s.head_dim, ("embed", None), self.bias)
        tree: dict[str, Any] = {"kv_a": kv_a, "kv_a_norm": self.norm.weight_specs(s.kv_lora_rank)}
        if q_rank is None:
            tree["q"] = linear_weight_specs(hidden, heads * s.qk_head_dim, ("embed", "heads"), False)
        else:
            tree["q_a"] = linear_weight_specs(hidden, q_rank, ("embed", None), self.bias)
            tree["q_a_norm"] = self.norm.weight_specs(q_rank)
            tree["q_b"] = linear_weight_specs(q_rank, heads * s.qk_head_dim, (None, "heads"), False)
        tree["w_uk"] = WeightSpec((heads, s.qk_nope_head_dim, s.kv_lora_rank), ("attention_heads", None, None))
        tree["w_uv"] = WeightSpec((heads, s.kv_lora_rank, s.v_head_dim), ("attention_heads", None, None))
        tree["o"] = linear_weight_specs(heads * s.v_head_dim, hidden, ("heads", "embed"), self.bias)
        return tree


def project_and_attend_latent(
    config: LatentConfig,
    weights: dict,
    x: jax.Array,
    attend: AttendLatent,
    *,
    positions: jax.Array,
    angles: Angles,
    multiply: Multiply = multiply,
) -> tuple:
    """x [T, hidden] -> (cache, [T, hidden]): queries and rows of x, `attend`, and the output projection.

    attend(q [T H nope+rope], kv_c [T L], k_pe [T rope], params) -> (cache, AttentionState).
    """
    q, kv_c, k_pe = project_latent(config, weights, x, angles, multiply)
    if config.temperature_tuning is not None:
        q = temperature_tuned(q, positions, config.temperature_tuning, config.temperature_tuning_offset)
    cache, state = attend(q, kv_c, k_pe, latent_params_of(weights))
    out = state.out.reshape(-1, config.spec.num_heads * config.spec.v_head_dim).astype(x.dtype)
    return cache, multiply(weights, ("o",), out)[0]


def project_latent(
    config: LatentConfig, weights: dict, x: jax.Array, angles: Angles, multiply: Multiply = multiply
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q [T H nope+rope], kv_c [T L], k_pe [T rope]) of x: normalised and rotated."""
    spec = config.spec
    if spec.q_lora_rank is None:
        q, row = multiply(weights, ("q", "kv_a"), x)
    else:
        q, row = multiply(weights, ("q_a", "kv_a"), x)
        q = multiply(weights, ("q_b",), config.norm(weights["q_a_norm"], q))[0]
    nope, rope = jnp.split(q.reshape(-1, spec.num_heads, spec.qk_head_dim), [spec.qk_nope_head_dim], axis=-1)
    kv_c, k_pe = jnp.split(row, [spec.kv_lora_rank], axis=-1)
    kv_c = config.norm(weights["kv_a_norm"], kv_c)
    kv_c = kv_c if config.kv_factor == 1 else kv_c * jnp.asarray(config.kv_factor, kv_c.dtype)
    return jnp.concatenate([nope, rotate(rope, angles)], axis=-1), kv_c, rotate(k_pe[:, None], angles)[:, 0]


def latent_params_of(weights: dict) -> MLAParams:
    """The traced parameters of the attention operation: both halves of kv_b_proj, and cache scales."""
    return MLAParams(
        w_uk=weights["w_uk"],
        w_uv=weights["w_uv"],
        kv_c_scale=weights.get("kv_c_scale"),
        k_pe_scale=weights.get("k_pe_scale"),
    )
