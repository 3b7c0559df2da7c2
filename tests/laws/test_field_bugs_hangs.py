"""R-45: a deadlock if producer and consumer compute different tiles of a window over an 8-bit cache."""

import pytest

from tests.cases import COMBINED, Case
from tests.laws.judge import judge
from tests.problem import Problem

WINDOWED = (
    *("everything", "per_request_causal_window", "rswa_mm_prefix_sqrt"),
    *("mm_prefix_window", "qq_bias_alibi_score_fn", "everything_e5m2"),
)
CACHES = (("float8_e4m3fn", "per_tensor"), ("int8", "per_token_head"), ("float8_e5m2", "per_head"))
# 257 new tokens are one more than any tile; the keys before them begin inside a window, and end inside a page.
LONG = Problem(case=Case("long", (257, 1, 3), (290, 275, 3)), heads=2, kv_heads=1, head_dim=8, block_size=16)


def test_every_option_meets_a_window():
    options = {field for name in WINDOWED for field in COMBINED[name].spec}
    assert all(COMBINED[name].spec["sliding_window"] for name in WINDOWED)
    assert options >= {"chunk_size", "logits_soft_cap", "has_alibi", "has_sinks", "mask_fn", "score_fn", "use_rswa"}
    assert options >= {"use_mm_prefix", "use_qq_bias", "output_dtype"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", WINDOWED)
def test_r45_a_window_over_8_bits_ends_and_is_right_with_every_option(name):
    """On each backend that supports it here. A timeout names this test if it hangs."""
    held, quant = CACHES[WINDOWED.index(name) % len(CACHES)]
    judge(LONG.replace(feature=COMBINED[name], cache_dtype=held, quant=quant))
