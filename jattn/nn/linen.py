"""jattn.nn.linen.PagedAttention: the flax.linen module; the same layer as jattn.nn.PagedAttention."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jattn.cache import PagedKV
from jattn.errors.arguments import check_kind
from jattn.metadata import CommonAttentionMetadata
from jattn.nn.apply import apply_attention
from jattn.nn.attention_layer import AttentionConfig
from jattn.nn.weight_spec import WeightSpec, check_param_dtype


class PagedAttention(nn.Module):
    """jattn.nn.PagedAttention as a linen module: the same tree of weights, each param with logical partitioning.

    module = jattn.nn.linen.PagedAttention(AttentionConfig(spec=spec, hidden_size=512, rope=Rope(dim=64)))
    cache, y = module.apply(variables, x, meta, cache)

    Params k_scale and v_scale, if there are any, are the scales of a quantised cache.
    """

    config: AttentionConfig
    backend: str = "auto"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, meta: CommonAttentionMetadata, cache: PagedKV | None = None, *, plan: Any = None,
        keys_from: jax.Array | None = None,
    ) -> tuple[PagedKV | None, jax.Array]:  # fmt: skip
        """x [T, hidden] -> (cache, [T, hidden]); see jattn.nn.apply_attention."""
        config = check_kind("config", self.config, AttentionConfig, "AttentionConfig(spec=spec, hidden_size=...)")
        dtype = check_param_dtype(self.param_dtype)
        weights = {
            name: _param(self, name, weight, dtype)
            if isinstance(weight, WeightSpec)
            else _Group(weight, dtype, name=name)()
            for name, weight in config.weight_specs().items()
        }
        scales = [name for name in ("k_scale", "v_scale") if self.has_variable("params", name)]
        weights |= {name: nn.unbox(self.get_variable("params", name)) for name in scales}
        return apply_attention(config, weights, x, meta, cache, plan=plan, keys_from=keys_from, backend=self.backend)


class _Group(nn.Module):
    """The weights of one projection or norm, under its name."""

    weights: dict[str, WeightSpec]
    param_dtype: Any

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        return {name: _param(self, name, weight, self.param_dtype) for name, weight in self.weights.items()}


def _param(module: nn.Module, name: str, weight: WeightSpec, dtype: Any) -> Any:
    return module.param(name, nn.with_logical_partitioning(lambda key: weight.draw(key, dtype), weight.axes))
