"""The routed experts of up to 8 tokens on a Hopper GPU: each expert that a token chose multiplies all tokens.

So the rows of experts need not be brought together: what follows the router is one launch that chooses, one or two for
gate and up, one for down, and the sum. Others do the same in about ten, with more tokens in the same time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops import expert_few
from jattn.ops.expert_packed import are_alike
from jattn.ops.partitioner import is_partitioned
from pallas_kernels.gpu.expert_choice_sm80 import TILE_ROWS, Choice, ChoiceConfig, supports

KERNEL_SCORES = {"softmax": "softmax", "softmax_over_all": "softmax", "sigmoid": "sigmoid"}


@dataclasses.dataclass(frozen=True)
class FewTokens:
    """The launches of a mixture."""

    moe: Any  # a MoE
    choice: ChoiceConfig
    gate_up: tuple[expert_few.Config, ...]  # one for both, or one for each
    down: expert_few.Config

    @classmethod
    def of(cls, moe: Any, weights: dict, x: jax.Array, count: int) -> "FewTokens | None":
        """None where there are no such launches. count: the experts whose matrices `weights` has."""
        is_hopper = device.detect().generation == "sm_90" and not is_partitioned()
        if not is_hopper or moe.scores not in KERNEL_SCORES or moe.groups > 1 or moe.identity_experts:
            return None
        names = "gate", "up", "down"
        kernels = gate, up, down = [weights[name]["kernel"] for name in names]
        if any(kernel.shape[0] != count for kernel in kernels):  # `_routed_by_rows` raises an error then
            return None
        biases = [weights[name]["bias"].dtype for name in names] if moe.bias else []
        if any(jnp.promote_types(x.dtype, dtype) != x.dtype for dtype in biases):  # the next launch takes that of x
            return None
        is_of_chosen = moe.scores == "softmax" and not moe.correction  # their sum is that of the softmax, at least 1 / E
        least_sum = 0.0 if is_of_chosen else moe.least_sum
        choice = ChoiceConfig(
            tokens=x.shape[0], routes=moe.num_experts, top_k=moe.top_k, experts=count,
            scores=KERNEL_SCORES[moe.scores], has_correction=moe.correction,
            least_sum=least_sum if moe.normalised or moe.scores == "softmax" else None, factor=moe.factor,
            has_scale=moe.expert_scale,
        )  # fmt: skip
        if supports(choice):
            return None
        launch = functools.partial(expert_few.config_of, tokens=x.shape[0], tiles=choice.tiles, dtype=x.dtype.name)
        config_of = functools.partial(launch, is_shared=True)
        together = config_of((gate, up)) if moe.is_plain_silu or are_alike((gate, up)) else None
        of_gate_up = [together] if together is not None else [config_of((gate,)), config_of((up,))]
        of_down = launch((down,), is_shared=False)
        found = tuple(config for config in of_gate_up if config is not None)
        return cls(moe, choice, found, of_down) if of_down is not None and len(found) == len(of_gate_up) else None

    def with_derivative_of(self, other: Callable) -> Callable:
        """`routed`, differentiated by another function of the same arguments."""
        compute = jax.custom_jvp(self.routed)
        compute.defjvp(lambda primals, tangents: (compute(*primals), jax.jvp(other, primals, tangents)[1]))
        return compute

    def routed(
        self, weights: dict, x: jax.Array, first: Any, routed_by: jax.Array | None, is_live: jax.Array | None
    ) -> jax.Array:
        """As `MoE.routed`."""
        router, c = weights["router"], self.choice
        number = lambda name, has: router[name].astype(jnp.float32) if has else None
        found = expert_few.choose(
            self.moe.logits(router, x if routed_by is None else routed_by),
            number("correction", c.has_correction), number("expert_scale", c.has_scale),
            jnp.ones(c.tokens, jnp.int32) if is_live is None else (is_live != 0).astype(jnp.int32),
            jnp.asarray(first if c.experts < c.routes else 0, jnp.int32).reshape(1), c,
        )  # fmt: skip
        y = self._experts(weights, x, found)
        y = y.at[found.row.reshape(-1)].get(mode="fill", fill_value=0)  # 0: of an expert without a tile
        y = y.reshape(*found.row.shape, -1) * found.scores[:, :, None].astype(x.dtype)
        return y.sum(axis=1)

    def _experts(self, weights: dict, x: jax.Array, found: Choice) -> jax.Array:
        """[8 * tiles, hidden]: all tokens by the expert of each tile; what no token chose is undefined."""

        def with_bias(name: str, y: jax.Array) -> jax.Array:
            if not self.moe.bias:
                return y
            of_tile = weights[name]["bias"][found.tiles[1:, 0]]
            return (y.reshape(-1, TILE_ROWS, y.shape[1]) + of_tile[:, None, :]).reshape(y.shape)

        gate, up, down = (weights[name]["kernel"] for name in ("gate", "up", "down"))
        launched = [(gate, up)] if len(self.gate_up) == 1 else [(gate,), (up,)]
        results = [expert_few.products(x, one, found, c) for one, c in zip(launched, self.gate_up, strict=True)]
        inner, *of_up = (y for some in results for y in some)  # one result: silu(x gate) * (x up)
        if of_up:
            inner = self.moe.gated(with_bias("gate", inner), with_bias("up", *of_up))
        return with_bias("down", expert_few.products(inner, (down,), found, self.down)[0])
