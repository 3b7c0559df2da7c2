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

CUDA_OPTIONS_ON_MESH: dict[str, Any] = {}
"""For dispatches on several devices: none. benchmarks.gpu.two_cards adds those that it compares."""

CUDA_OPTIONS_MANY_TOKENS_ON_MESH = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
}
"""The same with more than FEW_TOKENS: one half of the tokens is computed during the all-reduces of the other, which
must then stay apart (jattn.models.halves)."""

FEW_TOKENS = 64


@functools.cache
def options_of(platform: str, few: bool, on_mesh: bool = False) -> dict[str, Any]:
    """The options of a dispatch of at most FEW_TOKENS, or of more, on a platform as jax.default_backend names it.

    on_mesh: of a dispatch on several devices.
    """
    if platform != "gpu":
        return {}
    wanted = CUDA_OPTIONS if few else CUDA_OPTIONS | CUDA_OPTIONS_MANY_TOKENS
    if on_mesh:
        wanted = wanted | CUDA_OPTIONS_ON_MESH | ({} if few else CUDA_OPTIONS_MANY_TOKENS_ON_MESH)
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

    num_tokens(*args): T of a call. is_on_mesh(*args): does it run on several devices?
    """

    def __init__(
        self,
        function: Callable,
        num_tokens: Callable[..., int],
        is_on_mesh: Callable[..., bool] = lambda *_: False,
        **options,
    ):
        functools.update_wrapper(self, function)
        self.function, self._options = function, options
        self._num_tokens, self._is_on_mesh = num_tokens, is_on_mesh
        self._jitted: dict[tuple, Any] = {}  # by options: one function where they are the same

    def _of(self, args: tuple) -> Any:
        chosen = self.options(*args)
        key = tuple(chosen.items())
        if key not in self._jitted:
            self._jitted[key] = jax.jit(self.function, compiler_options=chosen or None, **self._options)
        return self._jitted[key]

    def __call__(self, *args):
        return self._of(args)(*args)

    def options(self, *args) -> dict[str, Any]:
        """The options of XLA for these arguments."""
        return options_of(jax.default_backend(), self._num_tokens(*args) <= FEW_TOKENS, self._is_on_mesh(*args))

    def lower(self, *args):
        """As that of a jitted function. A later call with arguments of these shapes finds the compiled program."""
        return self._of(args).lower(*args)

    def clear_cache(self) -> None:
        """Forget all traces and compiled programs."""
        for jitted in self._jitted.values():
            jitted.clear_cache()
