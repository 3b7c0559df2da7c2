"""No option is ignored: on each backend, each option changes the result or raises an error."""

import numpy as np
import pytest

import jattn
from tests.cases import FEATURES, Case, Feature
from tests.problem import Problem
from tests.running import run, takes

BASE = Problem(case=Case("few", (3, 1), (11, 14)), heads=4, kv_heads=2, head_dim=8)
OPTIONS = {
    "scale": Feature("scale", dict(scale=0.9)),
    "window": FEATURES["window_5"],
    "window_left": FEATURES["window_left"],
    "chunk_size": FEATURES["chunk"],
    "soft_cap": FEATURES["soft_cap"],
    "alibi": FEATURES["alibi"],
    "sinks": FEATURES["sinks"],
    "mask_fn": FEATURES["mask_fn"],
    "score_fn": FEATURES["score_fn"],
    "qq_bias": FEATURES["qq_bias"],
    "distance_bias": FEATURES["distance_bias"],
    "output_dtype": FEATURES["output_int8"],
    "q_scale": Feature("q_scale", params=("q_scale",)),
    "k_scale": Feature("k_scale", params=("k_scale",)),
    "v_scale": Feature("v_scale", params=("v_scale",)),
    "q_scale[]": Feature("q_scale[]", params=("q_scale[]",)),
    "k_scale[]": Feature("k_scale[]", params=("k_scale[]",)),
    "v_scale[]": Feature("v_scale[]", params=("v_scale[]",)),
    "causal": FEATURES["non_causal"],
    "causal[]": Feature("causal[]", causal="alternate"),
}
BACKENDS = jattn.list_backends()


def attend(backend: str, feature: Feature) -> np.ndarray:
    """The live rows over the same cache: a scale changes the values of the stored numbers."""
    problem = BASE.replace(feature=feature)
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
    state = attn.attend(problem.q, BASE.cache(), attn.build(problem.meta), problem.params)
    return np.asarray(state.out)[: problem.case.num_tokens]


def refused(backend: str, *features: Feature) -> bool:
    """Is one of them refused? If so, a call gives the same reasons. `takes` compares with the support matrix."""
    for feature in features:
        if not takes(backend, BASE.replace(feature=feature)):
            with pytest.raises(jattn.UnsupportedError) as refusal:
                attend(backend, feature)
            assert refusal.value.reasons[backend]
            return True
    return False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_moves_the_result_or_raises(backend, option):
    """causal=False has an effect only if keys follow the query: for the first tokens of request 0."""
    if refused(backend, FEATURES["plain"], OPTIONS[option]):
        return
    plain, moved = attend(backend, FEATURES["plain"]), attend(backend, OPTIONS[option])
    assert np.abs(plain - moved).max() > 1e-3


BESIDE = {  # options that need another option: (without, with)
    "chunk_lookback": (FEATURES["chunk"], FEATURES["chunk_lookback"]),
    "use_alibi_sqrt": (FEATURES["alibi"], FEATURES["alibi_sqrt"]),
    "use_rswa": (Feature("window_4", dict(sliding_window=4)), FEATURES["rswa"]),
    "use_mm_prefix": (FEATURES["window_5"], Feature("mm_window", dict(sliding_window=5, use_mm_prefix=True))),
    "mm_prefix_clamp_sliding_window": (
        Feature("free", dict(sliding_window=3, use_mm_prefix=True)),
        FEATURES["mm_prefix_clamped"],
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", BESIDE)
def test_an_option_of_an_option_moves_the_result_or_raises(backend, option):
    if refused(backend, *BESIDE[option]):
        return
    without, moved = (attend(backend, feature) for feature in BESIDE[option])
    assert np.abs(without - moved).max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quant", ["per_tensor", "per_head", "per_token_head"])
def test_a_cache_quantised_more_coarsely_moves_the_result_or_raises(backend, quant):
    problem = BASE.replace(cache_dtype="float8_e5m2", quant=quant)
    if not (takes(backend, BASE) and takes(backend, problem)):
        return
    fine, coarse = (np.asarray(run(each, backend)[1].out) for each in (BASE, problem))
    assert 1e-3 < np.abs(fine - coarse).max() < 1


def test_neutral_values_are_the_same_layer():
    """0 and None mean off. Defaults are replaced by their values, so that equal layers share one trace."""
    plain = jattn.AttentionSpec(num_heads=4, head_dim=8)
    filled = dict(num_kv_heads=4, v_head_dim=8, scale=8**-0.5, sliding_window=(-1, -1), logits_soft_cap=0.0)
    same = jattn.AttentionSpec(num_heads=4, head_dim=8, attn_type="decoder", **filled)
    assert same == plain and hash(same) == hash(plain)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_a_parameter_without_its_flag_and_a_flag_without_its_parameter_raise(name):
    feature = FEATURES[name.removesuffix("_slopes")]
    given, asked = BASE.replace(feature=Feature("given", params=(name,))), BASE.replace(feature=feature)
    for spec, params in ((given.spec, given.params), (asked.spec, jattn.AttentionParams())):
        with pytest.raises(ValueError, match=name):
            jattn.paged_attention(BASE.q, BASE.cache(), BASE.meta, spec, params)
