"""Times FlashAttention-3 on given batches: python -m benchmarks.gpu.fa3 BATCHES.json OUT.json LIBRARY [SECONDS]

LIBRARY: vLLM's `_vllm_fa3_C.abi3.so`, unpacked from its wheel; torch 2.11 loads it. OUT: a dict by name. `fa3_graph_us`
is a CUDA graph of ten calls, over ten: kernels and the gaps between them, keys in L2 where they fit, the scheduler's
metadata prepared before. `fa3_us`, where that is less than SHORT_US: the sum of the kernels of a call by CUPTI. `fa3`:
the reason why there is no figure. `benchmarks.gpu.sweep` runs it.
"""

import json
import sys
import time

CALLS = 10
LEAST_US = 20_000  # of replays in one measurement
SHORT_US = 200.0


def arguments(torch, ops, batch: dict):
    """The arguments of one call of `fwd`."""
    heads, kv_heads, page = batch["num_heads"], batch["num_kv_heads"], batch["page"]
    q_lens, seqs = zip(*batch["lengths"], strict=True)
    kind = dict(device="cuda", dtype=torch.bfloat16)
    pages = [-(-seq // page) for seq in seqs]
    order, used = torch.randperm(sum(pages)).int(), 0
    table = torch.zeros(len(seqs), max(pages), dtype=torch.int32)
    for request, count in enumerate(pages):
        table[request, :count], used = order[used : used + count], used + count
    stored = getattr(torch, batch["kv_dtype"])
    eight_bits = stored != torch.bfloat16
    dims = batch["head_dim"], batch["v_head_dim"]
    k, v = (torch.randn(sum(pages), page, kv_heads, dim, **kind).to(stored) for dim in dims)
    q = torch.randn(sum(q_lens), heads, dims[0], **kind).to(stored)
    out = torch.empty(sum(q_lens), heads, dims[1], **kind)
    scale = torch.ones(len(seqs), kv_heads, device="cuda") if eight_bits else None
    starts = torch.tensor([0, *q_lens]).cumsum(0).int().cuda()
    lengths, cap = torch.tensor(seqs, dtype=torch.int32, device="cuda"), batch["soft_cap"] or 0.0
    left = -1 if batch["window"] is None else batch["window"] - 1
    window = (left, 0 if left >= 0 else -1)
    longest = max(q_lens), max(seqs)
    metadata = ops.get_scheduler_metadata(
        len(seqs), *longest, heads, kv_heads, *dims, stored, lengths, starts, None, None, None, None, page, 0, True,
        *window, cap > 0, 0, None, 0,
    )  # fmt: skip
    return (
        q, k, v, None, None, None, out, starts, None, None, None, lengths, *longest, table.cuda(), None, None, None,
        None, None, scale, scale, scale, dims[0] ** -0.5, True, *window, cap, True, metadata, 0, None, 0, None, 1, 0,
        None,
    )  # fmt: skip


def micros(torch, call) -> float:
    """The median over replays of a graph of CALLS calls, cool, as for ours."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def once() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    first = once()
    times = sorted(once() for _ in range(max(3, min(int(LEAST_US / first), 20))))
    return times[len(times) // 2] / CALLS


def kernel_micros(torch, call) -> float:
    """The sum of the kernels of a call by CUPTI, the mean of CALLS."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.self_device_time_total for e in on_gpu) / CALLS


def figures(torch, call) -> dict:
    """The columns of a batch."""
    row = dict(fa3_graph_us=micros(torch, call))
    try:
        own = kernel_micros(torch, call) if row["fa3_graph_us"] < SHORT_US else 0.0
    except Exception as error:  # CUPTI may be taken
        return row | dict(fa3=f"no kernel times: {error}"[:120])
    return row | (dict(fa3_us=own) if own > 0 else {})


def main(batches: str, out: str, library: str, seconds: str = "60"):
    import torch

    begin, found = time.time(), {}
    torch.ops.load_library(library)
    ops = torch.ops._vllm_fa3_C
    torch.manual_seed(0)
    with open(batches, encoding="utf-8") as file:
        todo = json.load(file)
    for batch in todo:
        if time.time() - begin > float(seconds):
            found[batch["name"]] = dict(fa3="out of time")
            continue
        try:
            given = arguments(torch, ops, batch)
            found[batch["name"]] = figures(torch, lambda given=given: ops.fwd(*given))
        except Exception as error:  # a batch that it refuses does not stop the others
            found[batch["name"]] = dict(fa3=f"{type(error).__name__}: {error}".splitlines()[0][:120])
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
