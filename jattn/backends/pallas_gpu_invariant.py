"""`pallas_gpu_invariant`: the kernel of `pallas_gpu` with the same bits for a request in every batch.

It launches one kernel for batches of any lengths, in which one CTA computes each tile of a request over all its keys.
With needs=(Feature.BATCH_INVARIANCE,) it is chosen.
"""

import dataclasses

from jattn.backends.gpu_plan import PallasGpuMetadataBuilder
from jattn.backends.pallas_gpu import PallasGpuBackend, PallasGpuImpl
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.spec import AttentionSpec
from jattn.types import Feature


@dataclasses.dataclass(frozen=True)
class InvariantGpuMetadataBuilder(PallasGpuMetadataBuilder):
    """Gives every unit out whole. A common prefix changes nothing: it is in the keys of each request."""

    supports_cascade = False
    invariant: bool = True


@dataclasses.dataclass(frozen=True)
class InvariantGpuImpl(PallasGpuImpl):
    """Launches the kernel that serves batches of any lengths."""

    invariant: bool = True


class InvariantGpuBackend(PallasGpuBackend):
    """`pallas_gpu` with the same bits for a request in every batch; slower for few requests of many keys."""

    name = "pallas_gpu_invariant"
    impl_cls = InvariantGpuImpl
    builder_cls = InvariantGpuMetadataBuilder
    features = (PallasGpuBackend.features | {Feature.BATCH_INVARIANCE}) - {Feature.CASCADE, Feature.DCP, Feature.RSWA}

    @classmethod
    def gradient_by(
        cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, dtypes: tuple[str, ...] = ()
    ) -> str:
        return "sdpa"
