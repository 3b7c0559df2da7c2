"""FlashAttention-2, as torch has it, over keys without pages; it runs in a process of its own.

python -m benchmarks.gpu.flash2 pre_1x8k ...    one JSON row a case: {"case", "us"} or {"case", "error"}

Requests of one size are one batch of scaled_dot_product_attention. Requests of several sizes, or a window, are packed.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time

from benchmarks.gpu import cases, cupti

ITERATIONS = 10


def measure(names: list[str], seconds: float = 60) -> list[dict]:
    """The rows of these cases, from a process of its own: torch and JAX each keep the memory of the card."""
    command = [sys.executable, "-m", "benchmarks.gpu.flash2", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [dict(case="all", error=f"not done after {seconds} s")]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows or [dict(case="all", error=done.stderr[-200:])]


def case_of(name: str) -> cases.KernelCase:
    """The case of this name; `_d64` at its end changes the head dimension."""
    named = {case.name: case for case in cases.TIMED}
    plain, _, dim = (name, "", "") if name in named else name.rpartition("_d")
    found = named[plain]
    return dataclasses.replace(found, name=name, head_dim=int(dim), v_head_dim=int(dim)) if dim else found


def _equal(torch, case: cases.KernelCase):
    """A call for requests of one size."""
    from torch.nn.functional import scaled_dot_product_attention as attend

    ((q_len, seq),) = set(case.lengths)
    make = lambda heads, n: torch.randn(len(case.lengths), heads, n, case.head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(case.num_heads, q_len), make(case.num_kv_heads, seq), make(case.num_kv_heads, seq)
    return lambda: attend(q, k, v, is_causal=q_len > 1, enable_gqa=True)


def _packed(torch, case: cases.KernelCase):
    """A call for requests of any size; a request's last query is at its last key."""
    q_lens, seqs = zip(*case.lengths, strict=True)
    make = lambda heads, n: torch.randn(n, heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(case.num_heads, sum(q_lens)), *(make(case.num_kv_heads, sum(seqs)) for _ in range(2))
    starts = [torch.tensor([0, *lens]).cumsum(0).int().cuda() for lens in (q_lens, seqs)]
    window = dict(case.options).get("window")
    sides = {} if window is None else dict(window_size_left=window - 1, window_size_right=0)
    attend = torch.ops.aten._flash_attention_forward  # arguments: the largest lengths, dropout, causal, debug mask
    return lambda: attend(q, k, v, *starts, max(q_lens), max(seqs), 0.0, True, False, **sides)


def _micros(case: cases.KernelCase) -> float:
    import torch
    from torch.nn import attention

    call = (_packed if case.options or len(set(case.lengths)) > 1 else _equal)(torch, case)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION), contextlib.ExitStack() as stack:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        stack.enter_context(cupti.alone())
        time.sleep(0.3)  # the card cools, as between ours
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(ITERATIONS):
                call()
            torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / ITERATIONS


def main(names: list[str]) -> None:
    """Prints the rows."""
    for name in names:
        try:
            row = dict(us=_micros(case_of(name)))
        except Exception as error:  # a refused case does not stop the others
            row = dict(error=f"{type(error).__name__}: {error}"[:200])
        print(json.dumps(dict(case=name) | row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
