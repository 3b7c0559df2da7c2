"""cuDNN's gradient of packed attention as the derivative of a kernel that computes forward only: see `attend`.

If the lengths of the batch are not known while it is traced, both passes choose between cuDNN and the reference on the
device: cuDNN aligns the first query of a request with its first key.

A second derivative is that of the reference. JAX takes it through the rules of `attend`, so what they compute by cuDNN,
which has no derivative of its own, are functions with rules: `_with_statistics` and `_gradient`.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jattn.backends import cudnn
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.metadata.attention_type import queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.gradient import packed_gradient
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec


class PackedKernel(Protocol):
    """The impl of a layer; hashable."""

    @property
    def spec(self) -> AttentionSpec: ...

    @property
    def chip(self) -> Chip: ...

    @property
    def lengths(self) -> cudnn.Lengths:
        """What is known of the batch."""
        ...

    def forward_copied(
        self, q: jax.Array, k: jax.Array, v: jax.Array, meta: CommonAttentionMetadata, params: AttentionParams
    ) -> AttentionState:
        """The kernel's result for packed keys; no gradient is taken of it."""
        ...


def applies(impl: PackedKernel, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> bool:
    """Does cuDNN compute the gradient of this layer and batch, wherever its lengths are as cuDNN needs them?"""
    if impl.lengths is not cudnn.Lengths.EQUAL and not cudnn.takes_segments(impl.chip):
        return False
    plain = q.dtype == k.dtype == v.dtype and not jax.tree.leaves(params)
    reasons = cudnn.layer_reasons(impl.spec, q.dtype.name, impl.chip)
    return plain and not reasons and not cudnn.batch_reasons(impl.spec, meta, q.shape[0], k.shape[0])


def chosen(spec: AttentionSpec, cache_spec: KVCacheSpec | None, dtypes: tuple[str, ...], chip: Chip) -> str:
    """Whose gradient a layer takes, and why not cuDNN's. dtypes: of the queries first; empty: bfloat16."""
    if cache_spec is not None:
        return "sdpa, as cuDNN takes packed keys only"
    if reasons := cudnn.layer_reasons(spec, dtypes[0] if dtypes else "bfloat16", chip):
        return f"sdpa, as cuDNN takes no {', '.join(reasons)}"
    if cudnn.takes_segments(chip):
        return "cuDNN"
    return (
        f"sdpa; cuDNN where all requests are known to have one even length, as it takes no others on {chip.generation}"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(impl: PackedKernel, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
    """impl.forward_copied; if a gradient is taken, cuDNN computes both passes where it is right for the batch."""
    return impl.forward_copied(q, k, v, meta, params)


def _forward(impl: PackedKernel, q, k, v, meta, params):
    """By cuDNN, so that its backward pass has what it needs and nothing is computed twice."""
    q, k, v, meta, params = _primals((q, k, v, meta, params))
    found: Any = _with_statistics(impl, q, k, v, meta, params)
    state, statistics = found
    return state, (q, k, v, meta, params, state.out, statistics)


def _backward(impl: PackedKernel, saved, cotangent: AttentionState):
    """A gradient of lse is that of the reference: cuDNN has none."""
    q, k, v, meta, params, out, statistics = saved
    filled = jax.tree.map(_instantiated, cotangent, is_leaf=_is_symbolic_zero)
    grads: Any
    if _is_symbolic_zero(cotangent.lse):
        grads = _gradient(impl, q, k, v, meta, params, out, statistics, filled)
    else:
        grads = _of_reference(impl, q, k, v, meta, params, filled)
    return *grads, None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_statistics(impl: PackedKernel, q, k, v, meta, params) -> Any:
    """(state, what cuDNN's backward pass needs besides; zeros where it is not right for the batch)"""

    def by_cudnn():
        return cudnn.forward(impl.spec, q, k, v, meta, impl.lengths)

    def by_kernel():
        _, statistics = jax.eval_shape(by_cudnn)
        return impl.forward_copied(q, k, v, meta, params), jnp.zeros(statistics.shape, statistics.dtype)

    return _where_cudnn_is_right(impl, meta, by_cudnn, by_kernel)


def _derivative_of_state(impl: PackedKernel, saved, cotangent):
    """The statistics are used by `_gradient` alone, which has a derivative of its own."""
    q, k, v, meta, params = saved
    return *_of_reference(impl, q, k, v, meta, params, cotangent[0]), None, None


_with_statistics.defvjp(lambda impl, *args: (_with_statistics(impl, *args), args), _derivative_of_state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient(impl: PackedKernel, q, k, v, meta, params, out, statistics, cotangent) -> Any:
    """(dq, dk, dv) for a cotangent whose lse is zero."""
    of_cudnn = lambda: cudnn.backward(impl.spec, q, k, v, meta, impl.lengths, out, statistics, cotangent.out)
    return _where_cudnn_is_right(impl, meta, of_cudnn, lambda: _of_reference(impl, q, k, v, meta, params, cotangent))


def _second_derivative(impl: PackedKernel, saved, cotangents):
    """Of `_gradient`, whose values depend on out and statistics only by q, k and v."""
    q, k, v, meta, params, cotangent = saved
    of = lambda q, k, v, cotangent: _of_reference(impl, q, k, v, meta, params, cotangent)
    dq, dk, dv, dcotangent = jax.vjp(of, q, k, v, cotangent)[1](cotangents)
    return dq, dk, dv, None, None, None, None, dcotangent


_gradient.defvjp(lambda impl, *args: (_gradient(impl, *args), (*args[:5], args[-1])), _second_derivative)


def _of_reference(impl: PackedKernel, q, k, v, meta, params, cotangent) -> tuple[jax.Array, ...]:
    """(dq, dk, dv)"""
    dq, (dk, dv), _ = packed_gradient(impl.spec, meta, (q, (k, v), params), cotangent)
    return dq, dk, dv


def _where_cudnn_is_right(impl: PackedKernel, meta: CommonAttentionMetadata, yes: Callable, no: Callable):
    """yes() if the lengths of the batch are as cuDNN needs them, else no()."""
    if impl.lengths is not cudnn.Lengths.UNKNOWN or not cudnn.needs_all_new(impl.spec, meta):
        return yes()
    batch = queries_of(meta, impl.spec.attn_type)
    return jax.lax.cond(jnp.all(batch.query_lens() == jnp.asarray(batch.seq_lens)), yes, no)


def _primals(args: tuple) -> tuple:
    """The arguments of a forward rule with symbolic_zeros: JAX wraps each array."""
    is_wrapped = lambda x: hasattr(x, "perturbed")  # noqa: E731
    return jax.tree.map(lambda x: x.value, args, is_leaf=is_wrapped)


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiated(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype) if _is_symbolic_zero(x) else x


attend.defvjp(_forward, _backward, symbolic_zeros=True)
