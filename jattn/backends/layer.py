"""What a layer that calls attention looks like from here: the user brings it, so it is a Protocol."""

from typing import Any, Protocol, runtime_checkable

import jax

from jattn.cache import PagedKV
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec


@runtime_checkable
class AttentionLayer(Protocol):
    """Static spec, traced params (whose scales are None for exactly 1), state in and state out."""

    spec: AttentionSpec
    params: AttentionParams

    def __call__(
        self, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: PagedKV, m: Any
    ) -> tuple[PagedKV, AttentionState]:
        """Write k, v unless they are None, then attend."""
        ...
