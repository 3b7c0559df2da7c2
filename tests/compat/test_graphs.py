"""Which batches a compiled step covers."""

import jax
import pytest

from jattn.compat.vllm import can_run_in_cudagraph, required_support
from jattn.types import AttentionCGSupport
from tests.metadata.batches import plain


@pytest.mark.parametrize(
    "query, support",
    [
        ([1, 1], "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([1, 0], "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([0, 0], "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([3, 3], "UNIFORM_BATCH"),
        ([3, 0, 3], "UNIFORM_BATCH"),
        ([3, 1], "ALWAYS"),
    ],
)
def test_a_batch_needs_the_least_that_covers_it(query, support):
    meta = plain(query, [9] * len(query)).padded(12, 5)
    assert required_support(meta) is AttentionCGSupport[support]
    for program in AttentionCGSupport:
        assert can_run_in_cudagraph(meta, program) is (program >= AttentionCGSupport[support])


def test_asking_inside_jit_points_to_the_host():
    with pytest.raises(ValueError, match="this array is traced; call it before jit"):
        jax.jit(lambda meta: int(required_support(meta)))(plain([1], [4]))
