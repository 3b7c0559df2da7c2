"""`pallas_gpu` beside the witness of the conformance suite, interpreted.

The options and the masks are computed by functions that the warp-level kernel shares with Hopper's.
"""

from typing import Any

import pytest

from tests.backends.gpu_interpreted import INTERPRETS, interpreted_warps
from tests.cases import CASES, FEATURES
from tests.problem import Problem
from tests.running import conform

CHECKED = {
    "chunk_lookback": "mixed_unsorted",
    "chunk_lookback_non_causal": "decode",
    "mm_prefix": "chunked_prefill",
    "mm_prefix_window": "mixed_unsorted",
    "mm_prefix_clamped": "decode",
    "mm_prefix_chunk_mask_fn": "mixed",
    "rswa": "mixed_unsorted",
    "rswa_per_request": "long_and_short",
    "qq_bias": "speculative",
    "qq_bias_alibi_score_fn": "decode",
    "output_fp8": "mixed",
    "output_int8": "decode",
}


@pytest.mark.slow
@INTERPRETS
@pytest.mark.parametrize("feature", CHECKED)
def test_an_option_is_as_the_witness_says(feature):
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    with interpreted_warps():
        conform(Problem(case=CASES[CHECKED[feature]], feature=FEATURES[feature], **sizes), "pallas_gpu", 2.0**-15)
