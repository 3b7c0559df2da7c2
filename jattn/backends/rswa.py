"""R-SWA in two launches: what a row sees is a window and, before it, a prefix. Nothing between them is read."""

import dataclasses

from jattn.spec import AttentionSpec


def launches_of(spec: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """The layers of the two launches, over the prefix and over the window, whose states are merged. The sinks are not
    theirs. A launch's list of work must be built for its own layer."""
    window = dataclasses.replace(spec, use_rswa=False, has_sinks=False)
    return dataclasses.replace(window, use_mm_prefix=True, mm_prefix_clamp_sliding_window=False), window
