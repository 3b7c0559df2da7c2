"""The parameters and the cache layout that layers with a common plan have in common."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence

from jattn.errors.arguments import boolean, check_kind, sequence_of, short, takes
from jattn.spec import AttentionSpec, PerLayerParameters

PHYSICAL_LAYOUTS = ("HND", "NHD")
"""Layouts of a cache, the default first."""


@dataclasses.dataclass(frozen=True)
class GlobalHyperparameters(PerLayerParameters):
    """The first layer's parameters, and whether all layers have the same."""

    has_same_window_lefts: bool = True  # window_left
    has_same_all_params: bool = True


def _mapping_of(wanted: type):
    def check(name: str, layers: Mapping) -> Mapping:
        check_kind(name, layers, Mapping, f"layer names to {wanted.__name__}")
        for layer, value in layers.items():
            check_kind(f"{name}[{layer!r}]", value, wanted)
        return layers

    return check


_LAYERS = _mapping_of(PerLayerParameters)


@takes(specs=_mapping_of(AttentionSpec))
def get_per_layer_parameters(specs: Mapping[str, AttentionSpec]) -> dict[str, PerLayerParameters]:
    """Layer name -> the parameters that a plan depends on."""
    return {name: PerLayerParameters.of(spec) for name, spec in specs.items()}


@takes(per_layer_params=_LAYERS, strict=boolean)
def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters], strict: bool = False
) -> GlobalHyperparameters:
    """The first layer's parameters, with flags that say whether all layers have the same.

    strict: ValueError if they differ. A model with different layers needs a plan for each group of
    group_by_parameters.
    """
    if not per_layer_params:
        raise ValueError("No attention layers found in the model: per_layer_params is empty")
    (first_name, first), *others = per_layer_params.items()
    same_window = all(p.window_left == first.window_left for _, p in others)
    different = [name for name, p in others if p != first]
    if strict and not same_window:
        raise ValueError(
            "Window left is not the same for all layers. One potential fix is to set "
            "disable_sliding_window=True; "
            "here the better one is to plan each group of group_by_parameters on its own"
        )
    if strict and different:
        raise ValueError(
            f"layer {different[0]!r} has {per_layer_params[different[0]]} but "
            f"layer {first_name!r} has {first}; plan each group of group_by_parameters on its own"
        )
    shared = {f.name: getattr(first, f.name) for f in dataclasses.fields(PerLayerParameters)}
    return GlobalHyperparameters(**shared, has_same_window_lefts=same_window, has_same_all_params=not different)


@takes(per_layer_params=_LAYERS)
def group_by_parameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> dict[PerLayerParameters, tuple[str, ...]]:
    """Parameters -> the names of the layers that have them, in order of appearance. Each group can share a plan."""
    groups: dict[PerLayerParameters, tuple[str, ...]] = {}
    for name, params in per_layer_params.items():
        groups[params] = (*groups.get(params, ()), name)
    return groups


def _layout(name: str, layout: str) -> str:
    if not isinstance(layout, str) or layout not in PHYSICAL_LAYOUTS:
        known = ", ".join(PHYSICAL_LAYOUTS)
        raise ValueError(f"kv cache layout {short(layout)} is not known; use one of {known} or 'auto' as {name}")
    return layout


def _optional_layout(name: str, layout: str | None) -> str | None:
    """None for None and 'auto'."""
    return None if layout is None or (isinstance(layout, str) and layout == "auto") else _layout(name, layout)


_SETS = sequence_of(sequence_of(_layout))


def get_kv_cache_layout(
    requested: str | None = None,
    *,
    supported: Iterable[Sequence[str]] = (PHYSICAL_LAYOUTS,),
    preferred: str | None = None,
) -> str:
    """The layout of the cache, "HND" or "NHD": one that all sets in `supported` contain.

    supported: the layouts that each backend or worker supports. requested: the result, if it is not None or "auto";
    ValueError if a set does not contain it. preferred: used if all sets contain it, else a warning is given. By default
    the result is the first common layout of the first set.
    """
    sets = _SETS("supported", supported)
    requested, preferred = _optional_layout("requested", requested), _optional_layout("preferred", preferred)
    candidates = [x for x in (sets[0] if sets else PHYSICAL_LAYOUTS) if all(x in s for s in sets)]
    if not candidates:
        raise ValueError(f"no kv cache layout satisfies every supported set {sets}; choose backends that share one")
    if requested is not None:
        if requested not in candidates:
            raise ValueError(
                f"kv cache layout {requested!r} does not satisfy every supported set; "
                f"valid layouts: {', '.join(candidates)}"
            )
        return requested
    if preferred is not None and preferred in candidates:
        return preferred
    if preferred is not None:
        warnings.warn(
            f"preferred kv cache layout {preferred!r} is not supported, using {candidates[0]!r}", stacklevel=2
        )
    return candidates[0]
