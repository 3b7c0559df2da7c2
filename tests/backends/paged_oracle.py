"""Attention over pages by numpy, in the place of the paged kernel of pallas_kernels.gpu."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
    """What build_work_list is given, in the place of its result."""

    starts: jax.Array
    lens: jax.Array


jax.tree_util.register_dataclass(Work, ("starts", "lens"), ())


def attention_over_pages(q, k, v, table, work, config):
    """The paged kernel's result, by numpy."""

    def attend(q, k, v, table, starts, lens):
        out = np.zeros((*q.shape[:2], v.shape[-1]), np.float32)
        lse = np.full(q.shape[:2], -np.inf, np.float32)
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        for r, n in enumerate(lens):
            keys, values = (x[table[r]].reshape(-1, *x.shape[2:])[:n] for x in (k, v))
            for t in range(starts[r], starts[r + 1]):
                stop = n - (starts[r + 1] - 1 - t) if config.mask.causal else n
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
    out, lse = jax.pure_callback(attend, kinds, q, k, v, table, work.starts, work.lens)
    return out.astype(config.result_dtype), lse


INSTEAD = dict(ragged_paged_attention=attention_over_pages, build_work_list=lambda starts, lens, *_: Work(starts, lens))
"""Names of a module that launches the kernel -> what computes the same without a GPU."""
