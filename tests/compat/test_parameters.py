"""The parameters that layers have in common, and the cache layout."""

import pytest

from jattn.compat.vllm import (
    get_kv_cache_layout,
    get_per_layer_parameters,
    group_by_parameters,
    infer_global_hyperparameters,
)
from jattn.spec import AttentionSpec, PerLayerParameters


def layers(**windows):
    specs = {name: AttentionSpec(num_heads=2, head_dim=16, sliding_window=w) for name, w in windows.items()}
    return get_per_layer_parameters(specs)


def test_parameters_are_those_of_the_layer():
    spec = AttentionSpec(num_heads=2, head_dim=16, sliding_window=8, logits_soft_cap=30.0, scale=0.5, has_sinks=True)
    assert get_per_layer_parameters({"a": spec})["a"] == PerLayerParameters(7, 30.0, 0.5, True)
    assert layers(a=None)["a"].window_left == -1


def test_agreement_is_flagged_on_a_new_object():
    per_layer = layers(a=8, b=8)
    shared = infer_global_hyperparameters(per_layer, strict=True)
    assert (shared.window_left, shared.sm_scale) == (7, 0.25)
    assert shared.has_same_window_lefts and shared.has_same_all_params
    assert shared is not per_layer["a"] and type(per_layer["a"]) is PerLayerParameters


def test_disagreement_is_flagged_or_raised():
    mixed = layers(a=8, b=None)
    flags = infer_global_hyperparameters(mixed)
    assert not flags.has_same_window_lefts and not flags.has_same_all_params and flags.window_left == 7
    with pytest.raises(ValueError, match="Window left is not the same for all layers. One potential fix is to set"):
        infer_global_hyperparameters(mixed, strict=True)
    capped = layers(a=8) | {"b": PerLayerParameters(7, 30.0, 0.25)}
    assert infer_global_hyperparameters(capped).has_same_window_lefts
    with pytest.raises(ValueError, match="layer 'b' has .* but layer 'a' has .* plan each group"):
        infer_global_hyperparameters(capped, strict=True)


def test_a_model_without_attention_layers_is_an_error():
    with pytest.raises(ValueError, match="No attention layers found in the model."):
        infer_global_hyperparameters({})


def test_mixed_models_are_planned_by_group():
    groups = group_by_parameters(layers(a=8, b=None, c=8))
    assert list(groups.values()) == [("a", "c"), ("b",)]


def test_a_requested_layout_wins_then_a_preference_then_the_default():
    assert get_kv_cache_layout() == get_kv_cache_layout("auto") == "HND"
    assert get_kv_cache_layout("NHD", preferred="HND") == "NHD"
    assert get_kv_cache_layout(preferred="NHD") == "NHD"
    assert get_kv_cache_layout(supported=[("NHD", "HND"), ("NHD",)]) == "NHD"


def test_layouts_that_cannot_be_had_are_refused_and_preferences_dropped_aloud():
    with pytest.raises(ValueError, match="'HND' does not satisfy every supported set; valid layouts: NHD"):
        get_kv_cache_layout("HND", supported=[("NHD", "HND"), ("NHD",)])
    with pytest.raises(ValueError, match="no kv cache layout satisfies every supported set"):
        get_kv_cache_layout(supported=[("HND",), ("NHD",)])
    with pytest.raises(ValueError, match="'NDH' is not known; use one of HND, NHD or 'auto'"):
        get_kv_cache_layout("NDH")
    with pytest.warns(UserWarning, match="preferred kv cache layout 'HND' is not supported, using 'NHD'"):
        assert get_kv_cache_layout(supported=[("NHD",)], preferred="HND") == "NHD"
