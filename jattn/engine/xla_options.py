"""XLA's options for dispatches, and PlatformJit: jax.jit with options that depend on the platform.

They need no XLA_FLAGS in the environment. Figures: docs/notebook/nvidia_h200.md.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION"
"""What XLA may record in CUDA graphs. With WHILE and CONDITIONAL all steps of a dispatch are one graph, and the device
decides without the host whether there is another step. If XLA cannot record one operation, it launches every kernel by
itself, and the host reads the condition of each step. Such an operation is the copy of a slice whose place depends on a
loop counter."""

CUDA_OPTIONS = {
    "xla_gpu_enable_command_buffer": COMMAND_BUFFERS,
    "xla_gpu_graph_min_graph_size": 1,
}
"""For every dispatch, if the installed XLA knows them."""

CUDA_OPTIONS_MANY_TOKENS = {
    "xla_gpu_dot_merger_threshold_mb": 32,
}
"""For batches of more than FEW_TOKENS. XLA merges products with the same rows, such as gate and up, if their weights
are smaller than this. It gives a merged product of many tokens to cuBLAS and concatenates the weights in every step, so
the limit leaves only small ones (q, k and v) merged."""

FEW_TOKENS = 64


@functools.cache
def options_of(platform: str, few: bool) -> dict[str, Any]:
    """The options of a dispatch of at most FEW_TOKENS, or of more, on a platform as jax.default_backend names it."""
    if platform != "gpu":
        return {}
    wanted = CUDA_OPTIONS if few else CUDA_OPTIONS | CUDA_OPTIONS_MANY_TOKENS
    return {name: value for name, value in wanted.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Does the installed XLA have this option, with this value?"""
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0).compile()
    except (RuntimeError, ValueError):  # an unknown option, a value that is not allowed
        return False
    return True


class PlatformJit:
    """jax.jit of a function, with the options of the platform. They are chosen at the first call, because asking for
    the platform starts JAX.

    num_tokens(*args): T of a call.
    """

    def __init__(self, function: Callable, num_tokens: Callable[..., int], **options):
        functools.update_wrapper(self, function)
        self.function, self._num_tokens, self._options = function, num_tokens, options

    @functools.cached_property
    def _jitted(self) -> dict[bool, Any]:
        """The jitted function for few tokens (True) and for many; one function where the options are the same."""
        platform = jax.default_backend()
        few, many = (options_of(platform, few) for few in (True, False))
        jit = lambda chosen: jax.jit(self.function, compiler_options=chosen or None, **self._options)
        one = jit(few)
        return {True: one, False: one if few == many else jit(many)}

    def _of(self, args: tuple) -> Any:
        return self._jitted[self._num_tokens(*args) <= FEW_TOKENS]

    def __call__(self, *args):
        return self._of(args)(*args)

    def options(self, *args) -> dict[str, Any]:
        """The options of XLA for these arguments."""
        return options_of(jax.default_backend(), self._num_tokens(*args) <= FEW_TOKENS)

    def lower(self, *args):
        """As that of a jitted function. A later call with arguments of these shapes finds the compiled program."""
        return self._of(args).lower(*args)

    def clear_cache(self) -> None:
        """Forget all traces and compiled programs."""
        for jitted in self._jitted.values():
            jitted.clear_cache()
