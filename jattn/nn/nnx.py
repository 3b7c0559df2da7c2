"""jattn.nn.PagedAttention: the flax.nnx module."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.cache import PagedKV
from jattn.errors.arguments import check_kind, no_arguments
from jattn.metadata import CommonAttentionMetadata
from jattn.nn.apply import apply_attention
from jattn.nn.attention_layer import AttentionConfig
from jattn.nn.weight_spec import WeightSpec, check_param_dtype
from jattn.spec import AttentionSpec


class PagedAttention(nnx.Module):
    """Projections, norms, rotary embedding, cache write, attention. It owns its weights, and no cache.

        spec = jattn.AttentionSpec(num_heads=8, head_dim=64)
        attn = jattn.nn.PagedAttention(spec, 512, rope=Rope(dim=64), rngs=rngs)
        cache, y = attn(x, meta, cache)  # serving: x [T, hidden] packed, cache in, cache out
        _, y = attn(x, meta)  # training: the same layer without a cache

    Options are the fields of AttentionConfig. Each nnx.Param names its logical axes. k_scale and v_scale, set as
    Variables, are the scales of a quantised cache.
    """

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, *, rngs: nnx.Rngs, backend: str = "auto",
        param_dtype: Any = jnp.float32, **options: Any,
    ):  # fmt: skip
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise no_arguments("jattn.nn.PagedAttention", unknown, _OPTIONS)
        self.config = AttentionConfig(spec=spec, hidden_size=hidden_size, **options)
        self.backend = backend
        check_kind("rngs", rngs, nnx.Rngs, "e.g. nnx.Rngs(0)")
        param_dtype = check_param_dtype(param_dtype)
        for name, weight in self.config.weight_specs().items():
            if isinstance(weight, WeightSpec):
                setattr(self, name, _param(weight, rngs, param_dtype))
            else:
                setattr(self, name, nnx.Dict({part: _param(w, rngs, param_dtype) for part, w in weight.items()}))

    @property
    def weights(self) -> dict[str, Any]:
        """The arrays of its Variables of any class, as the pure functions of jattn.nn take them."""
        return nnx.to_pure_dict(nnx.state(self))

    def __call__(
        self, x: jax.Array, meta: CommonAttentionMetadata, cache: PagedKV | None = None, *, plan: Any = None,
        keys_from: jax.Array | None = None,
    ) -> tuple[PagedKV | None, jax.Array]:  # fmt: skip
        """x [T, hidden] -> (cache, [T, hidden]); see jattn.nn.apply_attention."""
        return apply_attention(
            self.config, self.weights, x, meta, cache, plan=plan, keys_from=keys_from, backend=self.backend
        )


_OPTIONS = tuple(f.name for f in dataclasses.fields(AttentionConfig) if f.name not in ("spec", "hidden_size"))


def _param(spec: WeightSpec, rngs: nnx.Rngs, dtype: Any) -> nnx.Param:
    return nnx.Param(spec.draw(rngs.params(), dtype), out_sharding=spec.axes, eager_sharding=False)
