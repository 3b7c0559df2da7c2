"""Attention over pages by numpy, in the place of the paged kernel of pallas_kernels.gpu."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backends import mla_gpu_prefill, mla_gpu_prompts


@dataclasses.dataclass(frozen=True)
class Work:
    """What build_work_list is given, in the place of its result."""

    starts: jax.Array
    query_lens: jax.Array
    lens: jax.Array


jax.tree_util.register_dataclass(Work, ("starts", "query_lens", "lens"), ())


def attention_over_pages(q, k, v, table, work, config):
    """The paged kernel's result, by numpy."""

    def attend(q, k, v, table, starts, query_lens, lens):
        out = np.full((*q.shape[:2], v.shape[-1]), np.nan, np.float32)  # rows of requests that are left out
        lse = np.full(q.shape[:2], np.nan, np.float32)
        out[starts[-1] :], lse[starts[-1] :] = 0, -np.inf
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        for r, n in enumerate(lens):
            keys, values = (x[table[r]].reshape(-1, *x.shape[2:])[:n] for x in (k, v))
            for t in range(starts[r], starts[r] + query_lens[r]):
                stop = n - (starts[r] + query_lens[r] - 1 - t) if config.mask.causal else n
                out[t], lse[t] = 0, -np.inf
                if stop <= 0:
                    continue
                x = np.einsum("hd,nhd->hn", q[t], keys[:stop]) * config.logits.scale
                top = x.max(axis=1)
                p = np.exp(x - top[:, None])
                out[t] = np.einsum("hn,nhv->hv", p / p.sum(axis=1, keepdims=True), values[:stop])
                lse[t] = top + np.log(p.sum(axis=1))
        return out, lse

    kinds = tuple(
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*q.shape[:2], config.v_head_dim), (q.shape[0], q.shape[1]))
    )
    out, lse = jax.pure_callback(attend, kinds, q, k, v, table, work.starts, work.query_lens, work.lens)
    return out.astype(config.result_dtype), lse


@contextlib.contextmanager
def by_numpy(joined: bool = True, **constants):
    """Long prompts over latents without a GPU. joined: JOINED of mla_gpu_prefill. constants: of mla_gpu_prompts."""
    lists = mock.patch.multiple(mla_gpu_prompts, build_work_list=_work, **constants)
    layers = mock.patch.multiple(mla_gpu_prefill, ragged_paged_attention=attention_over_pages, JOINED=joined)
    mla_gpu_prompts.windows_of.clear_cache()  # of work lists that the kernel reads
    try:
        with lists, layers:
            yield
    finally:
        mla_gpu_prompts.windows_of.clear_cache()


def _work(starts, lens, *_, query_lens) -> Work:
    return Work(starts, query_lens, lens)
