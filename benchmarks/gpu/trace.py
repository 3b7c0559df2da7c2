"""Realistic load on one engine: throughput, latencies, the floor beside them, and where the device's time goes.

    python -m benchmarks.gpu.trace [--only CASE,...] [--write | --out DIR] [--no-profile] [--small]

trace_1b_r64, trace_1b_r256   128 and 512 requests at once, prompts of 128 to 511 tokens, outputs of 128 to 383, greedy
ttft_1b_8k                    milliseconds to the first token of one prompt of 8192 tokens, in an idle engine

The model is the random Llama of benchmarks.gpu.engine_step. Each trace is timed without a profiler, then served again
under jax.profiler. Of a loop inside a CUDA graph CUPTI shows the first step only, so `device_busy` is the share of that
run in which the device had begun a dispatch and not ended it, by its first and its last kernel; benchmarks.gpu.programs
has the kernels within a step. What a client sees is the time at which a step() returns with new tokens: `gap` is the
time between two such returns of a request, `itl` that time spread evenly over the tokens that arrive together.

The floor is what no engine can beat with these rows: each decode step reads the weights once and the keys and values of
its rows once, at the rate at which this card reads memory; prompts are matrix products at this card's rate. Requests
start in order as soon as a row is free. That of a first token is products, and this repository's attention over the
prompt. All are measured in the same run, in a process of its own.

--small is a model for trying the script on a CPU; it has no floor and no profile.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import numpy as np

import jattn
from benchmarks import name_lists, records
from benchmarks.gpu import cupti, timeline
from benchmarks.gpu.engine_step import LLAMA, SMALL
from jattn import models
from jattn.cli.serve import collect_rarely
from jattn.engine import runner as engine_runner
from jattn.text import ByteTokenizer

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The load of one case: lengths are uniform, from the first number up to but not including the second."""

    name: str
    requests: int
    rows: int
    budget: int = 2048
    prompts: tuple[int, int] = (128, 512)
    outputs: tuple[int, int] = (128, 384)
    seed: int = 0

    def work(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """(prompt, tokens to generate) of each request."""
        rng = np.random.default_rng(self.seed)
        lengths = rng.integers(*self.prompts, self.requests), rng.integers(*self.outputs, self.requests)
        return [(rng.integers(2, vocab_size, prompt).tolist(), int(new)) for prompt, new in zip(*lengths, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest possible request, as a multiple of 64."""
        return -(-(self.prompts[1] + self.outputs[1]) // 64) * 64


TRACES = (Trace("trace_1b_r64", 128, 64), Trace("trace_1b_r256", 512, 256))
SMALL_TRACE = Trace("trace_small", 8, 4, 64, (8, 32), (8, 24))
TTFT_PROMPT, TTFT_ROUNDS = 8192, 7
TTFT_PAUSE = 0.05  # seconds before each prompt: the card is then cool, as where its ceilings are measured


# ---------------------------------------------------------------------- the engine and what it does
def model_of(small: bool, positions: int, **more):
    """(config, weights) of the random Llama. more: fields of its config."""
    fields = LLAMA | more | (SMALL if small else {}) | dict(max_position_embeddings=positions)
    config = models.config_of(fields)
    return config, jax.block_until_ready(models.init_params(config, 0, "float32" if small else "bfloat16"))


def engine_of(config, params, rows: int, budget: int, longest: int) -> jattn.Engine:
    """An engine with the default pool: as many blocks as the rows can use, or as fit the memory."""
    return jattn.Engine(
        config, params, ByteTokenizer(), max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=longest,
        prefix_caching=False,
    )  # fmt: skip


@dataclasses.dataclass
class Seen:
    """What a run did: programs compiled, by the function's name, and the shape 'TxR' of each dispatch, in order."""

    compiled: Counter = dataclasses.field(default_factory=Counter)
    sent: list[str] = dataclasses.field(default_factory=list)

    @property
    def programs(self) -> int:
        """Compilations of the engine's own program."""
        return self.compiled["dispatch"]

    @property
    def dispatches(self) -> dict[str, int]:
        """The number of dispatches of each shape, most frequent first."""
        return dict(Counter(self.sent).most_common())


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Counts compilations and dispatches."""
    seen, send = Seen(), engine_runner.Runner.send

    def count(event: str, duration: float, **tags) -> None:
        if event == COMPILED:
            seen.compiled[str(tags.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")] += 1

    def counting_send(self, plan, device_rows, batches, number):
        batch = batches[0]  # those of all data ranks have one shape
        seen.sent.append(f"{batch.token_ids.shape[0]}x{batch.metas[0].max_num_reqs}")
        return send(self, plan, device_rows, batches, number)

    jax.monitoring.register_event_duration_secs_listener(count)
    engine_runner.Runner.send = counting_send
    try:
        yield seen
    finally:
        engine_runner.Runner.send = send
        jax.monitoring.unregister_event_duration_listener(count)


# ---------------------------------------------------------------------- a trace
@dataclasses.dataclass
class Served:
    """The seconds of a run, and of each request: when new tokens came, and how many there were then."""

    seconds: float
    arrivals: dict[str, list[tuple[float, int]]]

    @property
    def tokens(self) -> int:
        return sum(seen[-1][1] for seen in self.arrivals.values())

    def figures(self) -> dict[str, float]:
        """Throughput, and percentiles in milliseconds."""
        first, gaps, itl = [], [], []
        for seen in self.arrivals.values():
            first.append(seen[0][0])
            for (before, had), (now, has) in zip(seen, seen[1:], strict=False):
                gaps.append(now - before)
                itl += [(now - before) / (has - had)] * (has - had)
        row = dict(output_tokens_per_s=self.tokens / self.seconds, seconds=self.seconds, output_tokens=self.tokens)
        for name, values in dict(ttft=first, gap=gaps, itl=itl).items():
            found = np.percentile(values, (50, 90, 99)) * 1e3 if values else ()
            row |= {f"{name}_ms_p{p}": float(ms) for p, ms in zip((50, 90, 99), found, strict=False)}
        return row


def serve(
    engine: jattn.Engine, work: list[tuple[list[int], int]], params: list[jattn.SamplingParams] | None = None
) -> Served:
    """All requests at once, until the last has ended. params: of each request; None: greedy."""
    greedy = [jattn.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in work]
    arrivals: dict[str, list[tuple[float, int]]] = {}
    begin = time.perf_counter()
    for (prompt, _), each in zip(work, params or greedy, strict=True):
        arrivals[engine.add_request(prompt, each)] = []
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            if output.error:
                raise RuntimeError(f"request {output.id} failed: {output.error}")
            seen, count = arrivals[output.id], len(output.token_ids)
            if count > (seen[-1][1] if seen else 0):
                seen.append((now, count))
    served = Served(time.perf_counter() - begin, arrivals)
    assert served.tokens == sum(new for _, new in work)
    return served


def difference(after, before) -> dict[str, float]:
    """What the counters of engine.stats grew by."""
    pairs = {
        field.name: (getattr(after, field.name), getattr(before, field.name)) for field in dataclasses.fields(after)
    }
    return {name: round(a - b, 6) for name, (a, b) in pairs.items() if isinstance(a, int | float) and a != b}


def trace_row(trace: Trace, small: bool, ceilings: dict) -> tuple[dict, Callable[[], dict]]:
    """(the row of one trace, what measures its figures under a profiler)."""
    config, params = model_of(small, 4096)
    engine = engine_of(config, params, trace.rows, trace.budget, trace.longest)
    begin = time.perf_counter()
    programs = engine.warmup()
    row: dict = dict(case=trace.name, requests=trace.requests, rows=trace.rows, budget=trace.budget, programs=programs)
    row["warmup_seconds"] = round(time.perf_counter() - begin, 1)
    collect_rarely()  # as `jattn serve` does
    work, before = trace.work(config.vocab_size), engine.stats
    with watched() as seen:
        served = serve(engine, work)
    row |= served.figures() | dict(compiled_later=seen.programs, compiled_later_all=dict(seen.compiled))
    row["stats"] = difference(engine.stats, before)
    row["dispatches"] = seen.dispatches
    if ceilings:
        floor = floor_of(config, params, work, trace.rows, ceilings)
        row |= floor | dict(share_of_floor=floor["floor_seconds"] / served.seconds)
    if small:
        print(f"{trace.name}: no profile of a CPU", flush=True)
    return row, functools.partial(profiled, engine, work)


def profiled(engine: jattn.Engine, work: list[tuple[list[int], int]]) -> dict:
    """Figures of a further run under jax.profiler."""
    found, wall, seen = under_profiler(engine, work)
    shapes = found.shapes
    for shape, figures in shapes.items():
        if count := seen.dispatches.get(shape):
            figures |= dict(count=count, busy_ms_each=figures["busy_seconds"] / count * 1e3)
    return dict(
        device_busy=found.occupied / wall, kernels=found.kernels, profiled_seconds=wall, kernel_seconds=found.top(20),
        profiled_dispatches=shapes, compiled_in_profile=seen.programs,
    )  # fmt: skip


def under_profiler(engine: jattn.Engine, work) -> tuple[timeline.Timeline, float, Seen]:
    """(the profile of a run, its seconds, what it did)."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 1, 0
    options.advanced_configuration = {
        "gpu_max_activity_api_events": 8 << 20, "gpu_max_callback_api_events": 8 << 20,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        with watched() as seen, jax.profiler.trace(folder, profiler_options=options):
            again = serve(engine, work)
        return timeline.read(folder, seen.sent), again.seconds, seen


# ---------------------------------------------------------------------- the floor
def sizes_of(config, params) -> tuple[int, float, int]:
    """(bytes of the weights that a step reads, FLOP of a token's products without the head, KV bytes of a token)."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    table = next(leaf for path, leaf in leaves if "embed" in jax.tree_util.keystr(path))  # rows of it are read
    total = sum(leaf.nbytes for _, leaf in leaves) - table.nbytes
    products = sum(leaf.size for _, leaf in leaves if leaf.ndim > 1) - 2 * table.size  # the head is as large
    cache = sum(spec.bytes_per_block for spec in config.cache_specs(2, 16, dtype=str(table.dtype))) // 16
    return total, 2.0 * products, cache


def decode_keys(work: list[tuple[list[int], int]], rows: int) -> list[list[int]]:
    """Of each decode step, the keys that each row reads, if each request starts in order as soon as a row is free.

    A prompt's own pass gives the first token, and costs only its products.
    """
    waiting, running, steps = list(reversed(work)), [], []
    while waiting or running:
        while waiting and len(running) < rows:
            prompt, new = waiting.pop()
            running.append([len(prompt) + 1, new - 1])  # keys of the next step, steps left
        running = [row for row in running if row[1] > 0]
        if running:
            steps.append([length for length, _ in running])
            running = [[length + 1, left - 1] for length, left in running]
    return steps


def decode_steps(work: list[tuple[list[int], int]], rows: int) -> tuple[int, int]:
    """(decode steps, keys read in all of them): see decode_keys."""
    steps = decode_keys(work, rows)
    return len(steps), sum(map(sum, steps))


def floor_of(config, params, work, rows: int, ceilings: dict) -> dict:
    """The least seconds of a trace on this card, and their parts."""
    weights, flop, kv = sizes_of(config, params)
    steps, keys = decode_steps(work, rows)
    read, product = ceilings["ceiling_read_tb_s"] * 1e12, ceilings["ceiling_mm_tflop_s"] * 1e12
    parts = dict(
        floor_weights_seconds=steps * weights / read,
        floor_kv_seconds=keys * kv / read,
        floor_prompts_seconds=sum(len(prompt) for prompt, _ in work) * flop / product,
    )
    seconds = sum(parts.values())
    tokens = sum(new for _, new in work)
    return parts | dict(floor_seconds=seconds, floor_tokens_per_s=tokens / seconds, floor_steps=steps)


def prompt_attention_ms() -> float:
    """Milliseconds that one layer of the Llama attends to a prompt of TTFT_PROMPT tokens, on a cool card."""
    heads, kv_heads, dim = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]
    spec = jattn.KVCacheSpec(num_blocks=TTFT_PROMPT // 16, block_size=16, num_kv_heads=kv_heads, head_dim=dim)
    attn = jattn.PagedAttention(jattn.AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim), spec)
    table = np.arange(spec.num_blocks, dtype=np.int32)[None]
    plan = attn.build(jattn.CommonAttentionMetadata.from_lengths([TTFT_PROMPT], [TTFT_PROMPT], table, 16))
    normal = lambda key, shape: jax.random.normal(jax.random.key(key), shape, jax.numpy.bfloat16)
    empty = jattn.empty_cache(spec, storage="native")
    cache = dataclasses.replace(empty, k=normal(1, empty.k.shape), v=normal(2, empty.v.shape))
    q = normal(0, (TTFT_PROMPT, heads, dim))
    return cupti.micros(jax.jit(attn.attend), q, cache, plan)[0] / 1e3


def ceilings_of_this_card() -> dict:
    """`check.ceilings()`, and a prompt's attention, in a process of its own: it ends before this one takes the card's
    memory and its profiler."""
    code = (
        "import json; from benchmarks.gpu import check, trace; "
        "print('FOUND', json.dumps(check.ceilings() | dict(prompt_attention_ms=trace.prompt_attention_ms())))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.split("FOUND ")[-1])


# ---------------------------------------------------------------------- one long prompt
def first_token_ms(engine: jattn.Engine, prompt: list[int]) -> float:
    """Milliseconds from add_request to the step() that returns the first token; the request then ends."""
    begin, found = time.perf_counter(), None
    engine.add_request(prompt, jattn.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    while engine.has_work:
        outputs = engine.step()
        if found is None and any(output.token_ids for output in outputs):
            found = (time.perf_counter() - begin) * 1e3
    assert found is not None
    return found


def ttft_row(small: bool, ceilings: dict) -> tuple[dict, Callable[[], dict]]:
    """(the row of the long prompt: the median of several, each of other tokens; what measures one under a profiler)."""
    length = 48 if small else TTFT_PROMPT
    config, params = model_of(small, length + 64)
    engine = engine_of(config, params, 1, length, length + 64)
    rng = np.random.default_rng(0)
    prompt = lambda: rng.integers(2, config.vocab_size, length).tolist()
    for _ in range(2):  # instead of warmup(): only the programs that such a prompt needs
        first_token_ms(engine, prompt())
    before, times = engine.stats, []
    with watched() as seen:
        for _ in range(TTFT_ROUNDS):
            time.sleep(TTFT_PAUSE)
            times.append(first_token_ms(engine, prompt()))
    row: dict = dict(
        case="ttft_small" if small else "ttft_1b_8k", ms=statistics.median(times), best_ms=min(times), rounds_ms=times,
        prompt=length, compiled_later=seen.programs,
        dispatches=seen.dispatches, stats=difference(engine.stats, before),
    )  # fmt: skip
    row |= ttft_floor(config, params, length, row["ms"], ceilings) if ceilings else {}
    return row, functools.partial(profiled, engine, [(prompt(), 4)])


def ttft_floor(config, params, length: int, ms: float, ceilings: dict) -> dict:
    """Products at the card's rate, and one layer's attention times the number of layers."""
    products = length * sizes_of(config, params)[1] / ceilings["ceiling_mm_tflop_s"] / 1e9
    attention = ceilings["prompt_attention_ms"] * len(config.layers)
    floor = products + attention
    return dict(floor_products_ms=products, floor_attention_ms=attention, floor_ms=floor, over_floor=ms / floor)


# ---------------------------------------------------------------------- the command
def show(row: dict) -> None:
    """One figure a line."""
    for name, value in row.items():
        if isinstance(value, dict):
            print(f"  {name}", *(f"\n    {key:24} {json.dumps(entry)}" for key, entry in value.items()), flush=True)
        else:
            print(f"  {name} {value:.4g}" if isinstance(value, float) else f"  {name} {value}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run and print every case; 1 if one failed or a program was compiled after warm-up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--no-profile", action="store_true", help="only the timed run")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    records.add_options(parser)
    args = parser.parse_args(argv)
    traces, first_token = [SMALL_TRACE] if args.small else TRACES, "ttft_small" if args.small else "ttft_1b_8k"
    wanted = name_lists.known(parser, "--only", args.only, [*(t.name for t in traces), first_token], "case")
    ceilings = {} if args.small else ceilings_of_this_card()
    base = dict(ceilings)
    profile = not (args.small or args.no_profile)
    work: dict = {t.name: lambda t=t: trace_row(t, args.small, ceilings) for t in traces}
    work |= {first_token: lambda: ttft_row(args.small, ceilings)}
    failed = 0
    for name in wanted or work:
        measure = work[name]
        found = cupti.attempt(lambda measure=measure: dict(zip(("row", "profile"), measure(), strict=True)))
        profiling = found.pop("profile", None)
        row = dict(case=name) | found.pop("row", {}) | found
        print(name, flush=True)
        show(row)
        keep = lambda row: records.write([base | row | records.provenance()], "trace", records.folder_of(args))
        keep(row)  # before the profile, which may end the process
        if profile and profiling is not None:
            figures = cupti.attempt(profiling)
            show(figures)
            row |= {name: value for name, value in figures.items() if name != "wall_s"}
            keep(row)
        failed += "error" in row or row["compiled_later"] != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
