"""SharedPrefixRule: when the decode dispatches of an engine read the keys that all their rows share once.

Rows share keys if their block tables begin with the same blocks, which prefix caching gives them. A dispatch of such
rows can be sent to a second program, in which the attention of each layer that allows it takes the prefix of all rows
in one pass, and the rest of each row in another. The length of the prefix is an array, so there is one such program for
each number of rows, and only where the longest prefix would pay.
"""

import dataclasses
import functools
from array import array
from collections import Counter
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from jattn import device
from jattn.backends import resolve
from jattn.engine.request import Sequence
from jattn.engine.scheduler import Row
from jattn.engine.shapes import StepShapes
from jattn.metadata.cascade import USUAL_SMS, saved_us
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionSpec

PLAN_US = 40
"""What a plan with a prefix costs a step beyond a flat one: 31 to 54 us against 15 to 23 on an H200, for all layers
together."""


@dataclasses.dataclass(frozen=True)
class SharedPrefixRule:
    """Compares what a prefix saves in the layers that allow it with what its plan costs."""

    layers: tuple[AttentionSpec, ...]  # that read a shared prefix once; with a mesh, of one device's heads
    group: int  # the cache group of these layers: the one that needs all tokens
    block_size: int
    num_sms: int  # multiprocessors

    def pays(self, rows: Many[int], prefixes: Many[int]) -> bool:
        """Is a step faster? rows, prefixes: of each data rank; the slowest decides."""
        saved = [self._saved_us(count, prefix) for count, prefix in zip(rows, prefixes, strict=True) if count]
        return min(saved, default=0.0) > PLAN_US

    def shared(self, rows: Many[Row], seqs: Many[Sequence]) -> int:
        """The first tokens that these rows have in the same blocks, and have all computed: whole blocks."""
        if not rows:
            return 0
        blocks = common_blocks([seq.tables[self.group] for seq in seqs])
        return min(blocks * self.block_size, min(row.start for row in rows) // self.block_size * self.block_size)

    def _saved_us(self, rows: int, prefix_len: int) -> float:
        lens = np.ones(rows, np.int64)
        return sum(
            count * saved_us(prefix_len, lens, heads, kv_heads, dim, self.num_sms)
            for (heads, kv_heads, dim), count in self._sizes.items()
        )

    @functools.cached_property
    def _sizes(self) -> Counter:
        """(query heads, kv heads, head dim) -> the number of layers."""
        dim = lambda spec: (spec.head_dim + spec.v_head_dim) // 2
        return Counter((spec.num_heads, spec.num_kv_heads, dim(spec)) for spec in self.layers)


def common_blocks(tables: Many[array]) -> int:
    """How many first blocks all tables have in common."""
    first, count = tables[0], min(map(len, tables))
    for table in tables:
        if table[:count] != first[:count]:
            count = next(i for i in range(count) if table[i] != first[i])
        if not count:
            break
    return count


def rule_of(
    config: Any, caches: Many, backend: str, dtype: str, model_mesh: Any, block_size: int
) -> SharedPrefixRule | None:
    """The rule of a model; None if no layer reads a shared prefix once, or if the layers are not known.

    dtype: of the queries.
    """
    from jattn.models import ModelConfig

    if not isinstance(config, ModelConfig):
        return None
    is_whole = lambda group: group.sliding_window is None and group.chunk_size is None
    whole = [g for g, group in enumerate(config.cache_groups) if is_whole(group)]
    layers = []
    for i, layer in enumerate(config.layers):
        spec, at = layer.attention, config.cache_of(i)
        if isinstance(spec, MLASpec) or not any(at in config.cache_groups[g].layers for g in whole):
            continue
        cache_spec = caches[at].spec
        if model_mesh is not None:  # each device computes some of the heads
            spec, cache_spec = model_mesh.rank_spec(spec), model_mesh.rank_cache_spec(cache_spec)
        chosen = resolve(spec, cache_spec, backend, preferred_dtypes=(dtype,))
        if chosen.get_builder_cls()(spec, cache_spec, device.detect()).shares_prefixes:
            layers.append(spec)
    return SharedPrefixRule(tuple(layers), whole[0], block_size, device.processors() or USUAL_SMS) if layers else None


def with_sharing(shapes: StepShapes, rule: SharedPrefixRule | None) -> StepShapes:
    """The shapes, with those of decodes for which the longest prefix would pay."""
    if rule is None:
        return shapes
    longest = shapes.limits.max_model_len
    least = next((rows for rows in sorted(shapes.buckets.reqs) if rule.pays([rows], [longest])), None)
    return dataclasses.replace(shapes, least_sharing_rows=least, sharing_group=rule.group)
