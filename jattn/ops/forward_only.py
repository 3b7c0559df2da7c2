"""A sentence where someone differentiates what has no gradient."""

from typing import TypeVar

import jax

from jattn.errors import UnsupportedError

X = TypeVar("X")


def forward_only(tree: X, who: str, way_out: str = "use backend='sdpa' to differentiate") -> X:
    """The tree itself; UnsupportedError as soon as a derivative with respect to any of it is taken."""

    @jax.custom_jvp
    def same(x):
        return x

    @same.defjvp
    def refuse(primals, tangents):
        raise UnsupportedError(f"{who} computes forward only; {way_out}")

    return same(tree)
