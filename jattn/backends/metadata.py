"""What every backend's metadata shows, whatever else it holds."""

from typing import Protocol, TypeVar

import jax


class AttentionMetadata(Protocol):
    """A pytree, made by the backend's builder once a step: its queries, the pages it reads, the slots it writes."""

    @property
    def num_tokens(self) -> int:
        """Padded query tokens, T."""
        ...

    @property
    def block_table(self) -> jax.Array | None:
        """i32[R B]; the encoder's for an encoder_decoder layer, the last level's for a cascade; None: packed keys."""
        ...

    @property
    def slot_mapping(self) -> jax.Array:
        """i32[T] where k, v are written: one a row of k; the encoder's for an encoder_decoder layer."""
        ...


M = TypeVar("M", bound=AttentionMetadata)
