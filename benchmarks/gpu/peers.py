"""Attention of other projects on the same card, over dense contiguous keys, without pages.

Each takes a benchmark case and returns microseconds, or a reason why not. JAX's are timed by CUPTI like ours, torch's
by CUDA events around calls in a row. Paged ones (FlashInfer, FlashAttention-3, vLLM) are not here.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cupti


def measure(case) -> dict[str, float | str]:
    """Name -> microseconds, or the reason why there is no figure."""
    shapes = set(case.lengths)
    (q_len, seq), *rest = shapes
    if rest or case.options or case.kv_dtype != "bfloat16":
        return {"all": "one length, no feature and bfloat16 only"}
    if q_len not in (1, seq):
        return {"all": "dense kernels align causal masks in their own way: whole prefills and decodes only"}
    found = {}
    for name, run in PEERS.items():
        try:
            found[name] = run(case, len(case.lengths), q_len, seq)
        except Exception as error:  # one that is absent or refuses does not stop the others
            found[name] = f"{type(error).__name__}: {error}"[:160]
    return found


def _jax_inputs(case, batch, q_len, seq):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((q_len, case.num_heads), (seq, case.num_kv_heads), (seq, case.num_kv_heads))
    return [
        jax.random.normal(key, (batch, length, heads, case.head_dim), jnp.bfloat16)
        for key, (length, heads) in zip(keys, shapes, strict=True)
    ]


def _cupti(f, *args) -> float:
    return cupti.micros(jax.jit(f), *args, iterations=5)[0]


def _jax_cudnn(case, batch, q_len, seq) -> float:
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=q_len > 1)
    return _cupti(attend, *_jax_inputs(case, batch, q_len, seq))


def _jax_mosaic(case, batch, q_len, seq) -> float:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    if q_len == 1:
        raise NotImplementedError("prefill only")
    config = mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    return _cupti(lambda q, k, v: mgpu.attention(q, k, v, config), *_jax_inputs(case, batch, q_len, seq))


def _torch(backend: str):
    def run(case, batch, q_len, seq) -> float:
        import torch
        from torch.nn import attention, functional

        make = lambda heads, n: torch.randn(batch, heads, n, case.head_dim, device="cuda", dtype=torch.bfloat16)
        q, k, v = make(case.num_heads, q_len), make(case.num_kv_heads, seq), make(case.num_kv_heads, seq)
        call = lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=q_len > 1, enable_gqa=True)
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            times = []
            for _ in range(3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(3):
                    call()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 3 * 1e3)
                time.sleep(0.3)  # the card cools, as between ours
        torch.cuda.empty_cache()
        return float(np.median(times))

    return run


PEERS = {
    "jax_cudnn": _jax_cudnn,
    "jax_mosaic": _jax_mosaic,
    "torch_cudnn": _torch("CUDNN_ATTENTION"),
    "torch_flash": _torch("FLASH_ATTENTION"),
}
