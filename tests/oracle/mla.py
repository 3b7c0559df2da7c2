"""Multi-head latent attention by its definition: materialise every head's keys and values, then attend.

k_h = [kv_c W_UK_h | k_pe]        v_h = kv_c W_UV_h        kv_b_proj[:, h] = [W_UK_h | W_UV_h]
"""

import numpy as np

from tests.oracle.attention import ragged


def materialise(kv_c, k_pe, kv_b_proj, nope):
    """(k [L H nope+rope], v [L H V]) of cached rows kv_c [L lora], k_pe [L rope]; kv_b_proj [lora H nope+V]."""
    kv_c, k_pe, w = (np.asarray(x, np.float64) for x in (kv_c, k_pe, kv_b_proj))
    keys, values = [], []
    for h in range(w.shape[1]):
        keys.append(np.concatenate([kv_c @ w[:, h, :nope], k_pe], axis=1))
        values.append(kv_c @ w[:, h, nope:])
    return np.stack(keys, axis=1), np.stack(values, axis=1)


def latent_attention(q, latents, ropes, kv_b_proj, query_lens, *, nope, **options):
    """A batch: q [T H nope+rope] and one kv_c, k_pe pair a request -> (out [T H V], lse [T H])."""
    pairs = [materialise(kv_c, k_pe, kv_b_proj, nope) for kv_c, k_pe in zip(latents, ropes, strict=True)]
    keys, values = zip(*pairs, strict=True)
    return ragged(q, keys, values, query_lens, **{"scale": q.shape[2] ** -0.5, **options})
