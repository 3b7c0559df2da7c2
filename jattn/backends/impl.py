"""AttentionImpl: the frozen, hashable callable that computes one layer's attention."""

import abc
import dataclasses
from typing import ClassVar, Generic

import jax

from jattn.backends.metadata import M
from jattn.backends.parallel import ContextParallel
from jattn.cache import KVCacheSpec, PagedKV, write_kv
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec, Window
from jattn.types import AttentionType


@dataclasses.dataclass(frozen=True)
class AttentionImpl(abc.ABC, Generic[M]):
    """A layer on a chip: equal values share one trace. Inputs were checked at the door (jattn.attention)."""

    can_return_lse_for_decode: ClassVar[bool] = False
    supports_pcp: ClassVar[bool] = False
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = False
    supports_quant_query_input: ClassVar[bool] = False  # then its backend lists the dtypes

    spec: AttentionSpec
    cache_spec: KVCacheSpec | None  # None: packed attention only
    chip: Chip
    parallel: ContextParallel = ContextParallel()

    @abc.abstractmethod
    def forward(self, q: jax.Array, cache: PagedKV, m: M, params: AttentionParams) -> AttentionState:
        """q [T H D] over the pages that m names; m is what the backend's builder made."""

    def forward_packed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, meta: CommonAttentionMetadata, params: AttentionParams
    ) -> AttentionState:
        """q [T H D] over packed k [Tk K D], v [Tk K V]; request r owns keys cumsum(seq_lens)[r-1] onwards."""
        raise UnsupportedError(f"{type(self).__name__} attends over pages only; use backend='sdpa' for packed k, v")

    def do_kv_cache_update(self, cache: PagedKV, k: jax.Array, v: jax.Array, m: M, params: AttentionParams) -> PagedKV:
        """Store k, v at m's slots; a cache layout of the backend's own overrides it."""
        return write_kv(cache, k, v, m.slot_mapping, params)

    def update_and_forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: PagedKV, m: M, params: AttentionParams
    ) -> tuple[PagedKV, AttentionState]:
        """Write, then attend; a kernel that does both at once overrides it."""
        cache = self.do_kv_cache_update(cache, k, v, m, params)
        return cache, self.forward(q, cache, m, params)

    def prepare_params(self, params: AttentionParams) -> AttentionParams:
        """Once after loading, before serving: a layer that folds its weights (MLA) does it here."""
        return params

    def fused_output_quant_supported(self, quant_key: str) -> bool:
        """True where the kernel can write its output already quantised to `quant_key`."""
        return False

    @property
    def num_heads(self) -> int:
        """H."""
        return self.spec.num_heads

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.spec.num_kv_heads

    @property
    def num_queries_per_kv(self) -> int:
        """G."""
        return self.spec.group_size

    @property
    def head_size(self) -> int:
        """D."""
        return self.spec.head_dim

    @property
    def scale(self) -> float:
        """Factor on q.k."""
        return self.spec.scale

    @property
    def sliding_window(self) -> Window:
        """(left, right) extra keys, -1 = unlimited."""
        return self.spec.window

    @property
    def logits_soft_cap(self) -> float | None:
        """None is off."""
        return self.spec.logits_soft_cap

    @property
    def attn_type(self) -> AttentionType:
        """Who attends to whom."""
        return self.spec.attn_type

    @property
    def kv_cache_dtype(self) -> str:
        """'auto' where there is no cache."""
        return "auto" if self.cache_spec is None else self.cache_spec.dtype

    @property
    def need_to_return_lse_for_decode(self) -> bool:
        """Ranks that hold parts of a request's keys merge their states, which takes an lse."""
        return self.parallel.dcp_world_size > 1 and self.can_return_lse_for_decode
