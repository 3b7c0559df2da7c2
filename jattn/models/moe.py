"""A mixture of experts. Rows are sorted by expert, so that each multiplies only its own rows; of up to 8 tokens on a
Hopper GPU each multiplies all: see mixture_launches.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.models.mixture_launches import MixtureLaunches
from jattn.models.mlp import MLP, activation
from jattn.nn.attention_layer import linear
from jattn.nn.norm import Norm
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs
from jattn.ops.expert_rows import ExpertRows, arrange, take_rows
from jattn.ops.experts import choose_tile_rows, expert_product, expert_products, silu_expert_product
from jattn.ops.product import product

SCORES = ("softmax", "softmax_over_all", "sigmoid", "sigmoid_of_input", "sparsemixer")
JITTER = 0.01
LEAST_SUM = 1e-20
"""Lower limit of the sum by which normalised scores are divided."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """The `top_k` experts with the largest router logits, each a gated MLP, weighted by their scores.

    scores   'softmax': over the chosen logits; 'softmax_over_all': over all logits; 'sigmoid': of each chosen logit.
             They multiply the experts' outputs. 'sigmoid_of_input': sigmoid, multiplies the experts' inputs.
             'sparsemixer': the two experts of Phi-3.5-MoE, see `_sparsemixer`.
    choice   The experts with the largest score are chosen, or the largest score + correction, a weight, if the router
             has one (`correction`); then only from the `top_groups` of `groups` with the largest sum of their
             `group_best` best experts.
    weights  normalised: the chosen scores are divided by their sum, at least `least_sum`. Then times `factor`, and
             times a weight of each expert, if there is one (`expert_scale`).
    identity_experts: so many further experts give their input as it is; they follow the others in the router.
    clamp    (alpha, limit): the gated unit of gpt-oss, (up + 1) * gate * sigmoid(alpha * gate), with gate and up
             clamped to the limit.
    """

    num_experts: int
    top_k: int
    width: int
    activation: str = "silu"
    clamp: tuple[float, float] | None = None
    scores: str = "softmax"
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    normalised: bool = False
    least_sum: float = LEAST_SUM
    factor: float = 1.0
    expert_scale: bool = False
    identity_experts: int = 0
    jitter: float = JITTER  # of 'sparsemixer'
    float32_router: bool = False  # the router's logits are not rounded to the dtype of x
    router_norm: Norm | None = None  # of the router's input
    router_bias: bool = False
    bias: bool = False
    shared: MLP | None = None  # an expert that processes every token, in addition
    shared_gate: bool = False  # the shared expert's output times sigmoid(linear(x))

    def __post_init__(self):
        activation(self.activation)
        if self.scores not in SCORES:
            raise ValueError(f"MoE scores={self.scores!r} is not known; use one of {', '.join(SCORES)}")
        if not 1 <= self.top_k <= self.num_routes:
            raise ValueError(f"MoE top_k={self.top_k!r} must be from 1 to num_experts={self.num_routes!r}")
        if self.identity_experts and (self.groups > 1 or self.scores == "sigmoid_of_input"):
            raise ValueError("MoE identity_experts have no group, and no input that a score could multiply")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"MoE groups={self.groups!r} must divide num_experts={self.num_experts!r}")
        size = self.num_experts // self.groups
        most = self.num_routes if self.groups == 1 else self.top_groups * size
        if not (1 <= self.top_groups <= self.groups and self.top_k <= most):
            raise ValueError(
                f"MoE top_groups={self.top_groups!r} must be from 1 to groups={self.groups!r}, with at least "
                f"top_k={self.top_k!r} experts in them"
            )
        if self.groups > 1 and not 1 <= self.group_best <= size:
            raise ValueError(f"MoE group_best={self.group_best!r} must be from 1 to {size}, the experts of a group")
        weighted = self.normalised or self.factor != 1.0 or self.expert_scale
        if self.scores == "sparsemixer" and (self.top_k != 2 or self.correction or self.groups > 1 or weighted):
            raise ValueError(
                "MoE scores='sparsemixer' is for top_k=2 and has its own weights: without correction, groups, "
                "normalised, factor and expert_scale"
            )
        if self.scores != "sparsemixer" and self.jitter != JITTER:
            raise ValueError(f"MoE jitter={self.jitter!r} has an effect with scores='sparsemixer' only")
        if self.shared_gate and self.shared is None:
            raise ValueError("MoE shared_gate has no effect without a shared expert; pass shared=, or leave it out")

    @property
    def num_routes(self) -> int:
        """The number of experts between which the router chooses."""
        return self.num_experts + self.identity_experts

    def weight_specs(self, hidden: int) -> dict:
        """router; gate, up and down of the experts with a leading expert axis; the shared MLP."""
        e, w, routes = self.num_experts, self.width, self.num_routes
        tree: dict = {"router": linear_weight_specs(hidden, routes, ("embed", None), self.router_bias)}
        if self.correction:
            tree["router"]["correction"] = WeightSpec((routes,), (None,), 0.0)
        if self.router_norm is not None:
            tree["router"]["norm"] = self.router_norm.weight_specs(hidden, "embed")
        if self.expert_scale:
            tree["router"]["expert_scale"] = WeightSpec((routes,), (None,), 1.0)
        axes = dict(gate=("expert", "embed", "mlp"), up=("expert", "embed", "mlp"), down=("expert", "mlp", "embed"))
        for name, axis in axes.items():
            shape = (e, w, hidden) if name == "down" else (e, hidden, w)
            tree[name] = {"kernel": WeightSpec(shape, axis)}
            if self.bias:
                tree[name]["bias"] = WeightSpec((e, shape[-1]), (axis[0], axis[-1]), 0.0)
        if self.shared_gate:
            tree["shared_gate"] = linear_weight_specs(hidden, 1, ("embed", None), False)
        return tree if self.shared is None else tree | {"shared": self.shared.weight_specs(hidden)}

    def __call__(
        self, weights: dict, x: jax.Array, routed_by: jax.Array | None = None, is_live: jax.Array | None = None
    ) -> jax.Array:
        """x [T, hidden] -> [T, hidden]; the result of a token does not depend on the other tokens.

        routed_by [T, hidden]: what the router reads; None: x.
        is_live bool[T]: False for padding, for which no expert is read; None: there is none.
        """
        y = self.routed(weights, x, routed_by=routed_by, is_live=is_live)
        return y if self.shared is None else y + self.of_shared(weights, x)

    def routed(
        self,
        weights: dict,
        x: jax.Array,
        first: "jax.Array | int" = 0,
        count: int | None = None,
        routed_by: jax.Array | None = None,
        is_live: jax.Array | None = None,
    ) -> jax.Array:
        """The weighted sum of the chosen experts among first .. first + count - 1; count None: among all experts.

        `weights` has these experts alone, and the router of all. The results of all ranges of experts add up to the
        mixture without its shared expert; the identity experts belong to the range that begins at 0.
        """
        launches = MixtureLaunches.of(self, weights, x, self.num_experts if count is None else count)
        by_rows = functools.partial(self._routed_by_rows, count=count)
        compute = by_rows if launches is None else launches.with_derivative_of(by_rows)
        return compute(weights, x, first, routed_by, is_live)

    def _routed_by_rows(
        self,
        weights: dict,
        x: jax.Array,
        first: "jax.Array | int",
        routed_by: jax.Array | None,
        is_live: jax.Array | None,
        count: int | None,
    ) -> jax.Array:
        """`routed`, with the rows of each expert brought together."""
        chosen, score = self._route(weights["router"], x if routed_by is None else routed_by)
        kept = jnp.where(chosen >= self.num_experts, score, 0).sum(axis=-1) if self.identity_experts else None
        flat, count = chosen.reshape(-1), self.num_experts if count is None else count
        is_range = count < self.num_routes
        may_be_absent = is_range or is_live is not None  # a choice's expert, from those that are computed
        if is_range:
            flat = jnp.where((flat >= first) & (flat < first + count), flat - first, count)  # count: not in this range
        if is_live is not None:
            flat = jnp.where(jnp.repeat(is_live, self.top_k), flat, count)  # count: of no expert
        x, score = jnp.asarray(x), score.reshape(-1, 1).astype(x.dtype)
        kernels = [weights[name]["kernel"] for name in ("gate", "up", "down")]
        tile_rows = choose_tile_rows(flat.shape[0], x.dtype, kernels, share=count / self.num_routes)
        rows = arrange(flat, count, tile_rows)
        given = take_rows(x, rows.choice // self.top_k)
        if on_input := self.scores == "sigmoid_of_input":
            given = given * score[rows.choice]
        most_rows = -(-x.shape[0] // tile_rows) * tile_rows  # a token chooses an expert once at most
        y = self._experts(weights, given, rows, tile_rows, most_rows)
        y = y.at[rows.row].get(mode="fill" if may_be_absent else "promise_in_bounds", fill_value=0)  # 0: absent
        y = y if on_input else y * score
        y = y.reshape(x.shape[0], self.top_k, x.shape[1]).sum(axis=1)
        return y if kept is None else y + x * jnp.where(first == 0, kept, 0)[:, None].astype(x.dtype)

    def logits(self, router: dict, x: jax.Array) -> jax.Array:
        """f32[T, num_routes], of the router."""
        x = x if self.router_norm is None else self.router_norm(router.get("norm", {}), x)
        if not self.float32_router:
            return linear(router, x).astype(jnp.float32)
        logits = product(x, router["kernel"])
        return logits + router["bias"].astype(jnp.float32)[None, :] if self.router_bias else logits

    def _route(self, router: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The chosen experts i32[T, top_k] and their scores f32[T, top_k]."""
        logits = self.logits(router, x)
        if self.scores == "sparsemixer":
            return _sparsemixer(logits, self.jitter)
        if self.scores == "softmax" and not self.correction and self.groups == 1:
            top, chosen = jax.lax.top_k(logits, self.top_k)
            return chosen, self._scaled(router, chosen, jax.nn.softmax(top, axis=-1))
        scores = jax.nn.softmax(logits, axis=-1) if self.scores.startswith("softmax") else jax.nn.sigmoid(logits)
        if self.correction:
            ranks = scores + router["correction"].astype(jnp.float32)[None, :]
        else:  # without groups, logits have the order of scores, also where scores are rounded to 0 or 1
            ranks = scores if self.groups > 1 else logits
        chosen = jax.lax.top_k(self._within_groups(ranks), self.top_k)[1]
        top = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalised or self.scores == "softmax":
            top = top / jnp.maximum(top.sum(axis=-1, keepdims=True), self.least_sum)
        return chosen, self._scaled(router, chosen, top)

    def _scaled(self, router: dict, chosen: jax.Array, scores: jax.Array) -> jax.Array:
        scores = scores * self.factor
        return scores * router["expert_scale"].astype(jnp.float32)[chosen] if self.expert_scale else scores

    def _within_groups(self, ranks: jax.Array) -> jax.Array:
        """ranks f32[T, E], with -inf for experts outside the best groups."""
        if self.groups == 1:
            return ranks
        grouped = ranks.reshape(ranks.shape[0], self.groups, self.num_experts // self.groups)
        best = jax.lax.top_k(grouped, self.group_best)[0].sum(axis=-1)
        kept = jax.lax.top_k(best, self.top_groups)[1]  # [T top_groups]
        is_kept = (kept[:, :, None] == jnp.arange(self.groups)[None, None, :]).any(axis=1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(ranks.shape)

    def of_shared(self, weights: dict, x: jax.Array) -> jax.Array:
        """The output of the shared expert, times its gate if it has one."""
        assert self.shared is not None
        y = self.shared(weights["shared"], x)
        return y * jax.nn.sigmoid(linear(weights["shared_gate"], x)) if self.shared_gate else y

    def _experts(self, weights: dict, x: jax.Array, rows: ExpertRows, tile_rows: int, most_rows: int) -> jax.Array:
        """The experts' MLPs of x [rows, hidden], arranged as `rows`, each expert's padded to tiles of `tile_rows`.

        most_rows: of an expert, with padding.
        """
        of_rows = rows.sizes, tile_rows, rows.tiles, most_rows
        gate, up, down = (weights[name]["kernel"] for name in ("gate", "up", "down"))

        def with_bias(name: str, y: jax.Array) -> jax.Array:
            if not self.bias:
                return y
            is_used = jnp.arange(y.shape[0]) < rows.sizes.sum()  # others may be NaN, and are derivatives of a bias too
            return jnp.where(is_used[:, None], y + weights[name]["bias"][rows.expert], 0)

        if self.is_plain_silu:
            inner = silu_expert_product(x, gate, up, *of_rows)
        else:
            of_gate, of_up = expert_products(x, (gate, up), *of_rows)
            inner = self.gated(with_bias("gate", of_gate), with_bias("up", of_up))
        return with_bias("down", expert_product(inner, down, *of_rows))

    @property
    def is_plain_silu(self) -> bool:
        """Is what `down` multiplies silu(x gate) * (x up)?"""
        return self.activation == "silu" and self.clamp is None and not self.bias

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """What `down` multiplies."""
        if self.clamp is None:
            return activation(self.activation)(gate) * up
        alpha, limit = self.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def _sparsemixer(logits: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The best expert, then the best of the others, each with its softmax over the logits near its own.

    An expert is near the best one if (best - logit) / max(|logit|, best) <= 2 * jitter; the others count as -inf.
    """
    chosen, scores, is_left = [], [], jnp.ones_like(logits, bool)
    for _ in range(2):
        left = jnp.where(is_left, logits, -jnp.inf)
        best = left.max(axis=-1, keepdims=True)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        share = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        at_least_min = jnp.maximum(logits, jnp.finfo(logits.dtype).min)  # -inf stays above an expert chosen before
        at = jnp.where(is_left, at_least_min, -jnp.inf).argmax(axis=-1)[:, None]
        chosen.append(at)
        scores.append(jnp.take_along_axis(share, at, axis=-1))
        is_left = is_left & (jnp.arange(logits.shape[-1])[None, :] != at)
    return jnp.concatenate(chosen, axis=-1), jnp.concatenate(scores, axis=-1)
