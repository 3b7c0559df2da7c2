"""XLA's options for dispatches, and PlatformJit: jax.jit with options that depend on the platform.

The engine sets them; the environment (XLA_FLAGS) does not have to. Figures: docs/notebook/nvidia_h200.md.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION"
"""What XLA may record in CUDA graphs. With WHILE and CONDITIONAL the steps of a dispatch are one graph, and the device
decides without the host whether there is another step."""

CUDA_OPTIONS = {
    "xla_gpu_enable_command_buffer": COMMAND_BUFFERS,
    "xla_gpu_graph_min_graph_size": 1,
}
"""Each is used if the installed XLA knows it."""


@functools.cache
def options_of(platform: str) -> dict[str, Any]:
    """The options of dispatches on a platform, as jax.default_backend names it."""
    if platform != "gpu":
        return {}
    return {name: value for name, value in CUDA_OPTIONS.items() if _is_known(name, value)}


def _is_known(name: str, value: Any) -> bool:
    """Does the installed XLA have this option, with this value?"""
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0).compile()
    except (RuntimeError, ValueError):  # an unknown option, a value that is not allowed
        return False
    return True


class PlatformJit:
    """jax.jit of a function, with the options of the platform; which is known at the first call, not at import."""

    def __init__(self, function: Callable, **options):
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    @functools.cached_property
    def _jitted(self):
        compiler_options = options_of(jax.default_backend())
        return jax.jit(self._function, compiler_options=compiler_options or None, **self._options)

    def __call__(self, *args):
        return self._jitted(*args)

    def lower(self, *args):
        """As that of a jitted function. A later call with arguments of these shapes finds the compiled program."""
        return self._jitted.lower(*args)

    def clear_cache(self) -> None:
        """Forget all traces and compiled programs."""
        self._jitted.clear_cache()
