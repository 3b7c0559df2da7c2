"""The memory and the shortest step times of a model in each layout of some devices, or why the engine refuses it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jattn.engine import sizing
from jattn.engine.device_kinds import DeviceKind
from jattn.engine.footprint import Footprint
from jattn.engine.scheduler import Limits
from jattn.errors import CacheFullError, UnsupportedError
from jattn.models import ModelConfig
from jattn.models.model_mesh import ModelMesh
from pallas_kernels.algebra.paging import cdiv

MAX_CONTEXT = 2**24
"""Tokens of a sequence that are tried, if the model has no limit."""
MAX_BATCH = 2**16
"""Sequences that are tried."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The options of the Engine that decide its memory; those of a data rank."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_model_len: int | None = None
    quantization: str | None = None
    cache_dtype: str | None = None
    cache_quant: str | None = None
    prefix_caching: bool = True
    expert_parallel: bool = False  # in layouts with several data ranks
    memory_fraction: float | None = None  # of the devices' memory that JAX may use; None: its default


@dataclasses.dataclass(frozen=True)
class DeviceLayout:
    """How the devices are used."""

    tensor: int
    data: int
    context: int

    def __str__(self) -> str:
        return f"tensor {self.tensor}, data {self.data}, context {self.context}"


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
    """Bytes on each device, and times. refused: why the engine does not run this; the other fields are then None."""

    layout: DeviceLayout
    refused: str | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    cache_bytes: int | None = None  # that the engine takes with these options
    max_model_len: int | None = None  # tokens of the longest sequence with these options
    largest_batch: int | None = None  # sequences of max_model_len that fit together, on all data ranks
    largest_context: int | None = None  # tokens of one sequence, alone
    decode_seconds: dict[int, float] | None = (
        None  # by the number of sequences on all data ranks, each of max_model_len
    )
    prefill_seconds: float | None = None  # of the first max_num_batched_tokens of a prompt


def layouts(count: int) -> list[DeviceLayout]:
    """Every layout of so many devices."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    found = [DeviceLayout(t, d, count // t // d) for t in divisors for d in divisors if count % (t * d) == 0]
    return sorted(found, key=lambda layout: (layout.context, layout.data))


def plan_layouts(
    config: ModelConfig, dtype: str, kind: DeviceKind, count: int, options: PlanOptions,
    stored: Mapping[str, Any] | None = None,
) -> list[LayoutPlan]:  # fmt: skip
    """The plan of each layout. stored: see Footprint."""
    return [_plan_of(config, dtype, kind, layout, options, stored) for layout in layouts(count)]


def _plan_of(
    config: ModelConfig, dtype: str, kind: DeviceKind, layout: DeviceLayout, options: PlanOptions,
    stored: Mapping[str, Any] | None,
) -> LayoutPlan:  # fmt: skip
    try:
        return _Planner(config, dtype, kind, layout, options, stored).plan()
    except (UnsupportedError, CacheFullError, ValueError) as error:
        return LayoutPlan(layout, refused=str(error))


class _Planner:
    """One layout. It calls what the engine calls, in the same order; errors are those of the engine."""

    def __init__(
        self, config: ModelConfig, dtype: str, kind: DeviceKind, layout: DeviceLayout, options: PlanOptions,
        stored: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.config, self.kind, self.layout, self.options = config, kind, layout, options
        self.model_mesh = None
        if layout != DeviceLayout(1, 1, 1):
            self.model_mesh = ModelMesh.without_devices(
                config, dataclasses.asdict(layout), options.expert_parallel and layout.data > 1
            )
        self.footprint = Footprint(config, dtype, options.quantization, self.model_mesh, stored)
        self.weight_bytes = self.footprint.weight_bytes()
        fraction = kind.memory_fraction if options.memory_fraction is None else options.memory_fraction
        self.free = int(kind.memory * fraction) - self.weight_bytes  # bytes on each device, once it has the weights
        cache_dtype = options.cache_dtype or sizing.dtype_of(self.footprint.params)
        storage = sizing.storage_of(cache_dtype, options.cache_quant)
        block_size = sizing.default_block_size(kind.platform, self.model_mesh)
        step = options.max_num_batched_tokens, sizing.default_burst(kind.platform)
        self.cache = sizing.CacheSizing(config, storage, block_size, *step, options.prefix_caching, self.model_mesh)

    def plan(self) -> LayoutPlan:
        options, kind = self.options, self.kind
        seqs, tokens = options.max_num_seqs, options.max_num_batched_tokens
        activations = self.footprint.activation_bytes(seqs, tokens, kind.platform)
        if self.free < activations:
            raise CacheFullError(f"{self.needs(activations)} do not fit the {self.usable_text} of each device")
        share = int(self.free * sizing.CPU_SHARE) if kind.platform == "cpu" else sizing.share_for_cache(self.free)
        pools, longest = self.cache.pools(seqs, options.max_model_len, memory=share)
        Limits(seqs, tokens, longest)  # its errors
        cache = sum(n * size for n, size in zip(pools, self.cache.block_bytes, strict=True))
        if cache + activations > self.free:
            raise CacheFullError(
                f"{self.needs(activations)} and the {size_text(cache)} of cache that the engine takes do not fit the "
                f"{self.usable_text} of each device; lower max_num_seqs or max_num_batched_tokens"
            )
        memory = min(share, self.free - activations)
        fits = lambda batch, length: self.cache.bytes_for(batch, length) <= memory
        seconds = functools.partial(self.footprint.step_seconds, kind, self.cache.storage)
        data, most = self.layout.data, seqs * self.layout.data
        chunk = min(tokens, longest)
        return LayoutPlan(
            self.layout,
            weight_bytes=self.weight_bytes,
            activation_bytes=activations,
            cache_bytes=cache,
            max_model_len=longest,
            largest_batch=data * _largest(lambda batch: fits(batch, longest), MAX_BATCH),
            largest_context=_largest(lambda length: fits(1, length), self.config.max_positions or MAX_CONTEXT),
            decode_seconds={
                rows: seconds(cdiv(rows, data), 1, longest) for rows in sorted({1, min(4, most), min(16, most), most})
            },
            prefill_seconds=seconds(1, chunk, chunk),
        )

    def needs(self, activations: int) -> str:
        """Weights and activations, in an error."""
        return f"{size_text(self.weight_bytes)} of weights, about {size_text(activations)} of activations"

    @property
    def usable_text(self) -> str:
        """The memory that JAX may use, in an error."""
        return f"{size_text(self.free + self.weight_bytes)} that JAX may use"


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which is true up to some number; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def size_text(size: float) -> str:
    """A number of bytes as text: in GiB, and less than one in MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def as_dict(plan: LayoutPlan) -> dict[str, Any]:
    """For JSON: the fields that are known."""
    return {name: value for name, value in dataclasses.asdict(plan).items() if value is not None}
