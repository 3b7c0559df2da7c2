"""The plan of long prompts over a latent cache, made once a step for all layers: pages of their tokens, and work lists.

    new tokens        in pages of their own; each query sees those before it
    earlier tokens    in windows of two sizes, whole pages of all requests end to end; every query of a request sees
                      its request's. The number of windows is traced: it depends on the lengths, not on the shapes

A layer projects the rows of one part after the other, and lets the paged kernel attend to them: mla_gpu_prefill.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import device
from jattn.backends.gpu_kernel import fields_for_equal_registers
from jattn.mla_spec import MLASpec
from jattn.ops.mla import MLAMetadata
from jattn.types import pytree, static
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.work_columns import TILE_ROWS
from pallas_kernels.gpu.work_list import GpuWorkList, build_work_list

PAGE = 128  # tokens of a page of earlier tokens
NEW_PAGES = (128, 64, 32, 16)  # tokens of a page of new tokens: the largest of which padding is at most a quarter
WINDOW_BYTES = 5 << 28  # of projected keys and values: 16384 tokens with 128 heads of 192 and 128
LARGE_WINDOW, SMALL_WINDOW = 128, 32  # pages; a window is projected whole, whatever it holds


@pytree
class Pages:
    """Rows in pages: a page belongs to one request, whose tokens fill it from its first place on."""

    request: jax.Array  # i32[P]
    first: jax.Array  # i32[P] which of its request's tokens is in its first place
    held: jax.Array  # i32[P] how many tokens it has
    begin: jax.Array  # i32[R] the first page of each request
    lens: jax.Array  # i32[R] tokens of each request in these pages
    size: int = static()  # places of a page
    most: int = static()  # pages of a request, at most

    @property
    def position(self) -> jax.Array:
        """i32[P, size]: which of its request's tokens is in each place."""
        return self.first[:, None] + self._places

    @property
    def live(self) -> jax.Array:
        """bool[P, size]: is there a token?"""
        return self._places < self.held[:, None]

    @property
    def table(self) -> jax.Array:
        """i32[R, most]: the pages of each request."""
        pages = self.begin[:, None] + jnp.arange(self.most, dtype=jnp.int32)[None]
        return jnp.minimum(pages, self.request.shape[0] - 1)

    @property
    def _places(self) -> jax.Array:
        return jnp.arange(self.size, dtype=jnp.int32)[None]


def pages_of(counts: jax.Array, low, num_pages: int, page: int, most: int) -> Pages:
    """Pages low .. low + num_pages - 1 of all requests' pages, which lie end to end.

    counts: i32[R] tokens of each request; the first begins a page. page: tokens of a page. most: bound of counts.
    """
    pages = cdiv(counts, page)
    ends = jnp.cumsum(pages, dtype=jnp.int32)
    starts = ends - pages
    number = low + jnp.arange(num_pages, dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=jnp.int32), counts.shape[0] - 1)
    first = (number - starts[request]) * page
    begin, end = (jnp.clip(x, low, low + num_pages) for x in (starts, ends))
    return Pages(
        request=request,
        first=first,
        held=jnp.clip(counts[request] - first, 0, page),
        begin=begin - low,
        lens=jnp.clip(counts - (begin - starts) * page, 0, (end - begin) * page),
        size=page,
        most=min(num_pages, cdiv(most, page)),
    )


@pytree
class PromptPart:
    """Tokens that are projected together, and the launch of the paged kernel over them."""

    pages: Pages
    work: GpuWorkList
    config: GpuKernelConfig = static()


@pytree
class PromptQueries:
    """The packed queries of each request."""

    starts: jax.Array  # i32[R+1] the first token of each request; then that of the batch's padding
    lens: jax.Array  # i32[R] 0: the request is left out
    num_tokens: int = static()  # of the batch, with padding

    def part(self, pages: Pages, config: GpuKernelConfig, causal: jax.Array | None = None) -> PromptPart:
        """causal: bool[R] of each request; None: as config has it."""
        work = build_work_list(self.starts, pages.lens, self.num_tokens, config, causal, query_lens=self.lens)
        return PromptPart(pages=pages, work=work, config=config)


@pytree
class Windows:
    """Parts of equal size, one after the other."""

    parts: PromptPart  # each array with one more axis in front; what is past `count` may hold anything
    count: jax.Array  # i32[]

    def part(self, index) -> PromptPart:
        """Window number `index`, which may be traced."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.parts)


@pytree
class PromptPlan:
    """The parts of a batch's long prompts. It has no rows, weights or blocks: layers of equal specs share it."""

    earlier: jax.Array  # i32[R] tokens of each request before its new ones; 0 of a request without queries
    new: PromptPart
    windows: tuple[Windows, ...]  # of the earlier tokens: large ones, then small ones

    def is_for(self, dtype: str) -> bool:
        """Was it made for queries of this dtype?"""
        return self.new.config.dtype == dtype


def prompt_plan(spec: MLASpec, dtype: str, m: MLAMetadata, block_size: int) -> PromptPlan:
    """The plan of the requests of m that have queries. dtype: of the queries."""
    batch, most, num_tokens = m.level.batch, m.level.max_query_len, m.num_tokens
    lens, requests = batch.query_lens, batch.num_reqs
    earlier = jnp.where(lens > 0, jnp.maximum(batch.seq_lens - lens, 0), 0)
    own = jnp.where(lens > 0, batch.seq_lens - earlier, 0)
    starts = jnp.append(batch.start, jnp.max(batch.start + lens))
    queries = PromptQueries(starts=starts, lens=lens, num_tokens=num_tokens)
    kind: dict[str, Any] = dict(rows=most, num_tokens=num_tokens)

    page = next((n for n in NEW_PAGES if n * requests * 4 <= num_tokens), NEW_PAGES[-1])
    causal = None if batch.rows.causal is None else batch.rows.causal[jnp.minimum(batch.start, num_tokens - 1)]
    config = projection_config(spec, dtype, page, causal=m.is_causal, per_request=causal is not None, **kind)
    new = queries.part(pages_of(own, 0, num_tokens // page + requests, page, most), config, causal)

    longest = m.block_table.shape[1] * block_size
    config = projection_config(spec, dtype, PAGE, causal=False, out_dtype="float32", **kind)
    width = PAGE * spec.num_heads * (spec.qk_head_dim + spec.v_head_dim) * jnp.dtype(dtype).itemsize
    total, capacity = jnp.sum(cdiv(earlier, PAGE), dtype=jnp.int32), requests * cdiv(longest, PAGE)
    large = max(min(WINDOW_BYTES // width, LARGE_WINDOW, capacity), 1)
    small, low, windows = min(SMALL_WINDOW, large), jnp.int32(0), []
    of_earlier = functools.partial(windows_of, queries, earlier, config=config, longest=longest)
    if small < large:  # until what is left takes at most half of a large one
        windows.append(of_earlier(low, total - large // 2, size=large, most=capacity - large // 2))
        low, capacity = windows[0].count * large, large // 2
    windows.append(of_earlier(low, total, size=small, most=capacity))
    return PromptPlan(earlier=earlier, new=new, windows=tuple(windows))


@functools.partial(jax.jit, static_argnames=("config", "longest", "size", "most"), inline=True)
def windows_of(
    queries: PromptQueries, earlier: jax.Array, low: jax.Array, end: jax.Array, *,
    config: GpuKernelConfig, longest: int, size: int, most: int,
) -> Windows:  # fmt: skip
    """Windows of `size` pages of earlier tokens, from page `low` until `end`.

    longest: static bound of a request's tokens. most: of end - low. Jitted, so that a plan that is built outside jit
    does not compile the loop again: JAX keeps the program of a loop for the functions that it was given.
    """
    count, bound = jnp.maximum(cdiv(end - low, size), 0), max(cdiv(most, size), 1)

    def part(low) -> PromptPart:
        return queries.part(pages_of(earlier, low, size, config.page_size, longest), config)

    empty = jax.tree.map(lambda x: jnp.zeros((bound, *x.shape), x.dtype), jax.eval_shape(part, low))

    def fill(i, parts: PromptPart) -> PromptPart:
        return jax.tree.map(lambda x, one: x.at[i].set(one), parts, part(low + i * size))

    return Windows(parts=lax.fori_loop(0, count, fill, empty), count=count)


def projection_config(
    spec: MLASpec, dtype: str, page: int, rows: int | None = None, causal: bool = True, per_request: bool = False,
    out_dtype: str | None = None, num_tokens: int = 0,
) -> GpuKernelConfig:  # fmt: skip
    """The paged kernel's config over projected keys and values. num_tokens: of the batch, to choose heads_together."""
    heads = spec.num_heads
    most = max(GpuKernelConfig.num_ctas // max(cdiv(num_tokens, TILE_ROWS), 1), 1)
    together = next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)
    return default_config(
        rows=rows, num_heads=heads, num_kv_heads=heads, head_dim=spec.qk_head_dim, v_head_dim=spec.v_head_dim,
        page_size=page, layout="NHD", dtype=dtype, kv_dtype=dtype, out_dtype=out_dtype, mask=MaskRule(causal=causal),
        logits=spec.materialised.logit_rule(), per_request_causal=per_request, heads_together=together,
        **fields_for_equal_registers(device.detect()),
    )  # fmt: skip
