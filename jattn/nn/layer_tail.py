"""A decoder layer after attention, and the next layer's projections, for few tokens: one launch on a Hopper GPU.

x1 = x + a o;   h = act(n1 gate) * (n1 up), n1 = norm(x1);   x2 = x1 + h down;   rows = norm(x2) [q k v]

Both norms are optional, each product may have biases, and a o and h down may be normalised and multiplied by a factor
before they are added.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.nn.norm import Norm
from jattn.ops.many_rows import GATES
from jattn.ops.partitioner import is_partitioned
from jattn.ops.product import products
from pallas_kernels.gpu.layer_tail_arrivals_sm90 import WORDS
from pallas_kernels.gpu.layer_tail_config import KEPT_SUMS, LayerTailConfig, TailAttention, choose
from pallas_kernels.gpu.layer_tail_ranks_sm90 import exchange
from pallas_kernels.gpu.layer_tail_sm90 import layer_tail as launch

Counters = tuple[jax.Array, ...]
"""What CTAs count their arrivals in: the first is zero at a launch, which clears the second for the next one. With
several ranks also what they send to one another."""


@dataclasses.dataclass(frozen=True)
class TailFormula:
    """What a layer's tail computes besides its products."""

    mlp_norm: Norm | None  # RMS, before the MLP
    next_norm: Norm | None  # RMS, before the next projections; not used without those
    activation: str = "silu"  # of the gate, one of GATES
    factors: tuple[float, float] = (1.0, 1.0)  # of what attention and the MLP add to x
    after: tuple[Norm | None, Norm | None] = (None, None)  # RMS, after attention and after the MLP, before the factors


def new_counters(config: LayerTailConfig | None = None) -> Counters:
    """For the first launch of a step. config: of the launches of several ranks; then call it in shard_map on each."""
    shared = () if config is None or config.ranks == 1 else exchange(config)
    return jnp.zeros(WORDS, jnp.int32), jnp.zeros(WORDS, jnp.int32), *shared


def config_of(
    tokens: int,
    dtype: Any,
    weights: tuple[tuple[jax.Array, ...], ...],
    scales: tuple[jax.Array | None, ...],
    formula: TailFormula,
    attention: TailAttention | None = None,
    *,
    ranks: int = 1,
    kv_ranks: int = 1,
    biases: tuple = (),
) -> LayerTailConfig | None:
    """The launch for so many tokens and the weights and biases of each product; None if the kernel cannot serve them.

    attention: of the tokens, if the launch computes that too. ranks: devices that share the weights, of k and v
    `kv_ranks`. With several, it is a launch in shard_map on each.
    """
    processors = device.processors()
    if device.detect().generation != "sm_90" or processors is None or (is_partitioned() and ranks == 1):
        return None
    arrays = (*(w for group in (*weights, *biases) for w in group), *scales)
    if {dtype, *(y.dtype for y in arrays if y is not None)} != {jnp.dtype(jnp.bfloat16)}:
        return None
    (o,), (gate, _), _, *rest = weights
    pair, following = (formula.mlp_norm, formula.next_norm), rest[0] if rest else ()
    eps = lambda norms: tuple(None if norm is None else norm.eps for norm in norms)
    one_plus = lambda norms: tuple(norm is not None and norm.one_plus for norm in norms)
    sharing = (ranks, *(kv_ranks,) * (len(following) - 1))
    config = choose(
        tokens, o.shape[1], o.shape[0] // ranks, gate.shape[1] // ranks,
        tuple(w.shape[1] // count for w, count in zip(following, sharing, strict=False)), processors, attention,
        ranks=ranks,
        eps=eps(pair), one_plus=one_plus(pair), after_eps=eps(formula.after), after_one_plus=one_plus(formula.after),
        activation=formula.activation, factors=formula.factors,
    )  # fmt: skip
    return None if config is not None and config.sums > KEPT_SUMS and not device.keeps_registers() else config


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def layer_tail(
    formula: TailFormula, config: LayerTailConfig, a, x, weights, scales, counters: Counters, biases=()
) -> Any:
    """(x2 [T, hidden], rows [T, width of the next projections] or None, counters of the next launch).

    a [T, heads * dim]: the joined heads of attention; x [T, hidden]; weights: ((o,), (gate, up), (down,), (q, k, v)) or
    without the last; scales: of mlp_norm, next_norm and the norms `after`, None where there is no norm (the last two
    may be left out); biases: for each product () or the bias [width] of each weight, or () if there are none. Its
    gradient is that of `in_steps`.
    """
    return launch(a, x, weights, scales, counters, config, (), biases)[:3]


def _backward(formula: TailFormula, config: LayerTailConfig, inputs, cotangent):
    _, pull = jax.vjp(lambda a, x, weights, scales, biases: in_steps(a, x, weights, scales, formula, biases), *inputs)
    *of_inputs, of_biases = pull(cotangent[:2])
    return *of_inputs, None, of_biases


def _forward(formula: TailFormula, config: LayerTailConfig, a, x, weights, scales, counters: Counters, biases):
    return layer_tail(formula, config, a, x, weights, scales, counters, biases), (a, x, weights, scales, biases)


layer_tail.defvjp(_forward, _backward)


def in_steps(a, x, weights, scales, formula: TailFormula, biases=()) -> tuple:
    """(x2, rows or None) by one product after the other."""
    (o, into, down, *rest), biases = weights, biases or ((),) * len(weights)
    norms = formula.mlp_norm, formula.next_norm, *formula.after
    normed = lambda i, y: y if (norm := norms[i]) is None else norm({"scale": scales[i]}, y)
    of_attention, of_mlp = (jnp.asarray(factor, x.dtype) for factor in formula.factors)
    x = x + of_attention * normed(2, _products(a, o, biases[0])[0])
    gate, up = _products(normed(0, x), into, biases[1])
    x = x + of_mlp * normed(3, _products(GATES[formula.activation](gate) * up, down, biases[2])[0])
    if not rest:
        return x, None
    return x, jnp.concatenate(_products(normed(1, x), rest[0], biases[3]), axis=1)


def _products(x: jax.Array, kernels: tuple, biases: tuple) -> tuple[jax.Array, ...]:
    if not biases:
        return products(x, kernels, dtype=x.dtype)
    rows = products(x, kernels, dtype=jnp.float32)
    return tuple((y + bias[None]).astype(x.dtype) for y, bias in zip(rows, biases, strict=True))
