"""jattn.nn.linen.PagedAttention: the flax.linen twin of the nnx layer."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jattn.cache import PagedKV
from jattn.metadata import CommonAttentionMetadata
from jattn.nn.call import call
from jattn.nn.layer import AttentionLayer
from jattn.nn.weights import Weight, attention_weights


class PagedAttention(nn.Module):
    """The same layer and the same tree of weights; each is a logically partitioned param.

    module = jattn.nn.linen.PagedAttention(AttentionLayer(spec=spec, hidden_size=512, rope=Rope(dim=64)))
    cache, y = module.apply(variables, x, meta, cache)
    """

    layer: AttentionLayer
    backend: str = "auto"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, meta: CommonAttentionMetadata, cache: PagedKV | None = None, *, plan: Any = None,
        keys_from: jax.Array | None = None,
    ) -> tuple[PagedKV | None, jax.Array]:  # fmt: skip
        """x [T, hidden] -> (cache, [T, hidden]); see jattn.nn.call."""
        weights = {
            name: _param(self, name, weight, self.param_dtype)
            if isinstance(weight, Weight)
            else _Group(weight, self.param_dtype, name=name)()
            for name, weight in attention_weights(self.layer).items()
        }
        return call(self.layer, weights, x, meta, cache, plan=plan, keys_from=keys_from, backend=self.backend)


class _Group(nn.Module):
    """The weights of one projection or norm, under its name."""

    weights: dict[str, Weight]
    param_dtype: Any

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        return {name: _param(self, name, weight, self.param_dtype) for name, weight in self.weights.items()}


def _param(module: nn.Module, name: str, weight: Weight, dtype: Any) -> jax.Array:
    return module.param(name, nn.with_logical_partitioning(lambda key: weight.draw(key, dtype), weight.axes))
