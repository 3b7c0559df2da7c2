"""The routed experts of up to 8 tokens on a Hopper GPU: each expert that a token chose multiplies all tokens.

So few tokens fit in the smallest tile, and the rows of experts need not be brought together. The launches after the
router are: the choice; gate and up, one or two; down. XLA adds biases, the activation where it is not in a launch, and
the weighted sum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops import mixture_products
from jattn.ops.expert_packed import are_alike
from jattn.ops.partitioner import is_partitioned
from pallas_kernels.gpu.expert_choice_sm80 import TILE_ROWS, ChoiceConfig, ChosenExperts, supports

KERNEL_SCORES = {"softmax": "softmax_over_all", "softmax_over_all": "softmax_over_all", "sigmoid": "sigmoid"}
"""By the scores of a MoE. A softmax over all logits, divided by the sum of the chosen, is one over the chosen."""


def _choice_config(moe: Any, tokens: int, count: int) -> ChoiceConfig | None:
    """The launch that chooses; None where there is none."""
    is_hopper = device.detect().generation == "sm_90" and not is_partitioned()
    if not is_hopper or moe.scores not in KERNEL_SCORES:
        return None
    has_groups = moe.groups > 1
    # MoE computes a softmax of the chosen logits itself, and has no least sum for it.
    is_of_chosen = moe.scores == "softmax" and not moe.correction and not has_groups
    of_groups = dict(groups=moe.groups, top_groups=moe.top_groups, group_best=moe.group_best) if has_groups else {}
    is_divided = moe.normalised or moe.scores == "softmax"
    config = ChoiceConfig(
        tokens=tokens, routes=moe.num_routes, top_k=moe.top_k, experts=count, scores=KERNEL_SCORES[moe.scores],
        has_correction=moe.correction, identity_experts=moe.identity_experts, factor=moe.factor,
        has_scale=moe.expert_scale, **of_groups,
        least_sum=(0.0 if is_of_chosen else moe.least_sum) if is_divided else None,
    )  # fmt: skip
    return None if supports(config) else config


def _used_tiles(config: ChoiceConfig) -> tuple[float, ...]:
    """The expected number of tiles with rows, if a quarter of the tokens are of requests, and if all are.

    Steps are padded: one of 4 tokens serves up to 4 requests, and often has only one. At least 1: a launch without any
    takes the same time however its work is divided.
    """
    expected = lambda tokens: max(1.0, config.experts * (1 - (1 - config.top_k / config.routes) ** tokens))
    return expected(-(-config.tokens // 4)), expected(config.tokens)


@dataclasses.dataclass(frozen=True)
class MixtureLaunches:
    """The launches of a mixture."""

    moe: Any  # a MoE
    choice_config: ChoiceConfig
    gate_up: tuple[mixture_products.ProductConfig, ...]  # one for both, or one for each
    down: mixture_products.ProductConfig

    @classmethod
    def of(cls, moe: Any, weights: dict, x: jax.Array, count: int) -> "MixtureLaunches | None":
        """None where there are no such launches. count: the experts whose matrices `weights` has."""
        names = "gate", "up", "down"
        kernels = gate, up, down = [weights[name]["kernel"] for name in names]
        choice = _choice_config(moe, x.shape[0], count)
        if choice is None or {kernel.shape[0] for kernel in kernels} != {count}:  # `MoE.routed` refuses others
            return None
        biases = [weights[name]["bias"].dtype for name in names] if moe.bias else []
        if any(jnp.promote_types(x.dtype, dtype) != x.dtype for dtype in biases):  # the next launch takes that of x
            return None
        launch = functools.partial(
            mixture_products.config_of, tokens=x.shape[0], tiles=choice.tiles, used=_used_tiles(choice),
            dtype=x.dtype.name,
        )  # fmt: skip
        both = launch((gate, up), is_shared=True) if moe.is_plain_silu or are_alike((gate, up)) else None
        of_gate_up = [both] if both is not None else [launch((each,), is_shared=True) for each in (gate, up)]
        of_down = launch((down,), is_shared=False)
        served = tuple(config for config in of_gate_up if config is not None)
        return cls(moe, choice, served, of_down) if of_down is not None and len(served) == len(of_gate_up) else None

    def with_derivative_of(self, other: Callable) -> Callable:
        """`routed`, differentiated by another function of the same arguments."""
        compute = jax.custom_jvp(self.routed)
        compute.defjvp(lambda primals, tangents: (compute(*primals), jax.jvp(other, primals, tangents)[1]))
        return compute

    def routed(
        self, weights: dict, x: jax.Array, first: Any, routed_by: jax.Array | None, is_live: jax.Array | None
    ) -> jax.Array:
        """As `MoE.routed`."""
        router, c = weights["router"], self.choice_config
        as_f32 = lambda name, has: router[name].astype(jnp.float32) if has else None
        chosen = mixture_products.choose_experts(
            self.moe.logits(router, x if routed_by is None else routed_by),
            as_f32("correction", c.has_correction), as_f32("expert_scale", c.has_scale),
            jnp.ones(c.tokens, jnp.int32) if is_live is None else (is_live != 0).astype(jnp.int32),
            jnp.asarray(first if c.experts < c.routes else 0, jnp.int32).reshape(1), c,
        )  # fmt: skip
        y = self._experts(weights, x, chosen)
        y = y.at[chosen.row.reshape(-1)].get(mode="fill", fill_value=0)  # 0: of a choice without a tile
        y = (y.reshape(*chosen.row.shape, -1) * chosen.scores[:, :, None].astype(x.dtype)).sum(axis=1)
        if not c.identity_experts:
            return y
        of_identity = jnp.where(chosen.row == TILE_ROWS * c.tiles + 1, chosen.scores, 0).sum(axis=1)
        return y + x * of_identity[:, None].astype(x.dtype)

    def _experts(self, weights: dict, x: jax.Array, chosen: ChosenExperts) -> jax.Array:
        """[8 * tiles, hidden]: all tokens by the expert of each tile; what no token chose is undefined."""

        def with_bias(name: str, y: jax.Array) -> jax.Array:
            if not self.moe.bias:
                return y
            of_tile = weights[name]["bias"][chosen.plain_tiles[1:, 0]]
            return (y.reshape(-1, TILE_ROWS, y.shape[1]) + of_tile[:, None, :]).reshape(y.shape)

        gate, up, down = (weights[name]["kernel"] for name in ("gate", "up", "down"))
        launched = [(gate, up)] if len(self.gate_up) == 1 else [(gate,), (up,)]
        results = [mixture_products.products(x, one, chosen, c) for one, c in zip(launched, self.gate_up, strict=True)]
        inner, *of_up = (y for some in results for y in some)  # one result: silu(x gate) * (x up)
        if of_up:
            inner = self.moe.gated(with_bias("gate", inner), with_bias("up", *of_up))
        return with_bias("down", mixture_products.products(inner, (down,), chosen, self.down)[0])
