"""The second half of the demo: the embedded model serves requests of different lengths with too few cache blocks."""

import dataclasses
import importlib.util
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.embedded import directory
from jattn.embedded.dense import dense_logits
from jattn.embedded.problems import END, Problem, few_shot, problems
from jattn.engine import Engine, RequestOutput, SamplingParams

REQUESTS = 96
OPTIONS: dict[str, Any] = dict(num_blocks=25, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
GREEDY = SamplingParams(temperature=0, max_tokens=8, stop=[END])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The results of all requests."""

    right: int
    same_as_dense: int
    worst_gap: float  # largest difference of the dense model's logits: its best token minus the generated one


def run(warm: Callable[[Engine], int] = Engine.warmup) -> int:
    """Serve, check, print. Returns 0 if every token is that of the dense model and at least 99 % of the sums are right.

    warm(engine) -> number of programs compiles all steps, and may show its progress.
    """
    if importlib.util.find_spec("safetensors") is None:
        print("reading the embedded model needs the safetensors package: pip install 'jattn[models]'")
        print("jattn demo --backends-only needs none of it.")
        return 1
    asked, prompts = requests()
    engine = Engine.from_pretrained(directory(), **OPTIONS)
    size = f"{len(engine.config.layers)} layers of width {engine.config.hidden_size}"
    blocks, tokens = OPTIONS["num_blocks"] - 1, OPTIONS["block_size"]  # block 0 is never dealt out
    print(f"{REQUESTS} requests to a model of {size} that ships with jattn and adds two numbers.")
    print(f"Its cache has {blocks} blocks of {tokens} tokens, too few for {OPTIONS['max_num_seqs']} requests:")
    print("the engine has to pause requests and resume them.")
    print("Each answer is compared with what the model says without a cache.")
    print("\nThe step of each batch size is compiled first, which takes about 15 s on two cores ...", flush=True)
    begin = time.perf_counter()
    programs = warm(engine)
    print(f"compiled {programs} programs in {time.perf_counter() - begin:.1f} s\n")
    begin, peak, found = time.perf_counter(), 0.0, {}
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    while engine.has_work:
        found |= {output.id: output for output in engine.step() if output.finished}
        peak = max(peak, engine.stats.cache_usage)
    seconds = time.perf_counter() - begin
    outputs = [found[id] for id in ids]
    print("Three of the answers; the model reads and writes each number with its lowest digit first:")
    for problem, output in list(zip(asked, outputs, strict=True))[:3]:
        print(f"  {problem.question}{output.text}   ({problem.a} + {problem.b} = {output.text[::-1].lstrip('0') or 0})")
    verdict = judge(engine, asked, outputs)
    _print_summary(engine, seconds, peak, verdict)
    good = verdict.same_as_dense == REQUESTS and verdict.right >= 0.99 * REQUESTS
    print("\nAll answers are those of the model without a cache." if good else "\nWRONG: see above")
    return 0 if good else 1


def requests(seed: int = 0) -> tuple[list[Problem], list[str]]:
    """Held-out problems after zero to two solved examples, taken from a few: many prompts share a prefix."""
    rng = random.Random(seed)
    source, shown = problems(seed, held_out=True), problems(seed, held_out=False)
    histories = [[next(shown) for _ in range(count)] for count in (0, 1, 2, 2)]
    asked = [next(source) for _ in range(REQUESTS)]
    return asked, [few_shot(rng.choice(histories), problem) for problem in asked]


def judge(engine: Engine, asked: list[Problem], outputs: list[RequestOutput]) -> Verdict:
    """Compare with the correct sums, and token by token with the same weights without a cache."""
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    longest = max(map(len, texts))
    padded = np.asarray([text + [0] * (longest - len(text)) for text in texts], np.int32)
    logits = np.asarray(jax.jit(dense_logits, static_argnums=0)(engine.config, engine.params, jnp.asarray(padded)))
    same, worst = 0, 0.0
    for output, rows in zip(outputs, logits, strict=True):
        first = len(output.prompt_token_ids) - 1
        rows = rows[first : first + len(output.token_ids)]
        gaps = rows.max(axis=-1) - rows[np.arange(len(rows)), list(output.token_ids)]
        same += bool((gaps == 0).all())
        worst = max(worst, float(gaps.max()))
    right = sum(output.text == problem.answer for problem, output in zip(asked, outputs, strict=True))
    return Verdict(right, same, worst)


def _print_summary(engine: Engine, seconds: float, peak: float, verdict: Verdict) -> None:
    stats, caches = engine.stats, engine.caches
    assert caches is not None  # the engine is awake
    layer = jattn.PagedAttention(engine.config.layers[0].attention, caches[0].spec, engine.runner.model.backend)
    rows = {
        "attention backend": layer.backend_name,
        "correct sums": f"{verdict.right} of {REQUESTS}; none of these sums was in the training data",
        "same tokens as without a cache": f"{verdict.same_as_dense} of {REQUESTS} requests",
        "output tokens/s": f"{stats.output_tokens / seconds:.0f}",
        "prompt tokens/s": f"{stats.prompt_tokens / seconds:.0f}",
        "dispatches to the device": f"{stats.dispatches}, for {stats.steps} steps of the model",
        "cache in use": f"at most {peak:.0%} of {engine.tables.pools[0].num_blocks - 1} blocks",
        "prefix cache": f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were already in the cache",
        "preemptions": f"requests paused for lack of blocks and resumed: {stats.preemptions}",
    }
    print()
    for name, value in rows.items():
        print(f"  {name:32}{value}")
