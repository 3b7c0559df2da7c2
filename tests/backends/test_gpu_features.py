"""`pallas_gpu` beside the witness of the conformance suite, interpreted: every feature is honoured, or refused.

The options and the masks are computed by functions that the warp-level kernel shares with Hopper's.
"""

import contextlib
from typing import Any

import pytest

import jattn
from tests.backends.gpu_interpreted import INTERPRETS, interpreted_warps
from tests.cases import CASES, FEATURES
from tests.problem import Problem
from tests.running import conform

REFUSED = ("use_alibi_sqrt", "use_distance_bias")
QUICK = ("cap_sinks_window",)
"""Not left out by CI, which runs the interpreter only on the versions of JAX where it leaves out slow tests."""
BATCHES = {
    "chunk_lookback_non_causal": "decode",
    "mm_prefix": "chunked_prefill",
    "mm_prefix_clamped": "decode",
    "mm_prefix_chunk_mask_fn": "mixed",
    "rswa_per_request": "long_and_short",
    "qq_bias": "speculative",
    "qq_bias_alibi_score_fn": "decode",
    "output_fp8": "mixed",
    "output_int8": "decode",
}


@INTERPRETS
@pytest.mark.parametrize("feature", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FEATURES])
def test_an_option_is_as_the_witness_says_or_refused(feature):
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    problem = Problem(case=CASES[BATCHES.get(feature, "mixed_unsorted")], feature=FEATURES[feature], **sizes)
    refused = [option for option in REFUSED if problem.feature.spec.get(option)]
    with interpreted_warps(), pytest.raises(jattn.UnsupportedError) if refused else contextlib.nullcontext() as refusal:
        conform(problem, "pallas_gpu", 2.0**-15)
    assert all(f"{option}" in str(refusal.value) for option in refused)
