"""Many clients with random pauses and disconnects: every text equals that of a run without load, and memory stays flat.

    python -m tests.serve.load --clients 512 --seconds 120

The server runs in this process with the embedded model in float32. A quarter of the clients disconnect before the end.
The exit code is 1 if a text differs, a stream is lost, or a request, block, task or file is left at the end.
"""

import argparse
import asyncio
import json
import random
import sys
import time

import jax
import jax.numpy as jnp

from jattn import embedded, models
from jattn.engine import Engine, SamplingParams
from jattn.text import load_tokenizer
from tests.serve.fuzz import leaks
from tests.serve.running import serving

CANCELLED = 0.25
"""The share of requests whose client disconnects."""

PATIENCE = 120
"""Seconds without a response that count as a lost stream."""

GROWTH = 64
"""Megabytes that the process may grow by in the second half."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.load", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=512, help="default: 512")
    parser.add_argument("--seconds", type=float, default=120, help="default: 120")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args(argv)
    return load(args.clients, args.seconds, args.seed)


def load(num_clients: int, seconds: float, seed: int, engine: Engine | None = None) -> int:
    """Returns the exit code."""
    if engine is None:
        engine = float32_engine()
        engine.warmup()
    jobs = make_jobs(engine, random.Random(seed))
    options = dict(model_name="adder", max_queue=2 * num_clients, max_connections=2 * num_clients)
    with serving(engine, **options) as (_, server, url):
        run = Run(int(url.rpartition(":")[2]), jobs, seconds)
        asyncio.run(run.all([run.one(job, random.Random(0), leaves=False) for job in jobs[:4]]))  # warms what stays
        before = leaks.resources(server)
        run.begin = time.monotonic()
        rngs = [random.Random(f"{seed} {c}") for c in range(num_clients)]
        asyncio.run(run.all([*(run.client(rng) for rng in rngs), run.watch(server)]))
        wrong = [*run.wrong, *leaks.find(engine, server, before)]
    grown = run.megabytes[-1] - run.megabytes[len(run.megabytes) // 2]
    if grown > GROWTH:
        wrong.append(f"memory grew by {grown} MB in the second half: {run.megabytes}")
    print(
        f"{num_clients} clients, {seconds:.0f} s, seed {seed}: {run.num_equal} texts as without load, "
        f"{run.num_disconnected} clients disconnected, {engine.stats.preemptions} preemptions; "
        f"memory {run.megabytes[0]} to {run.megabytes[-1]} MB"
    )
    for line in wrong[:20]:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


def float32_engine() -> Engine:
    """The embedded model in float32, over a pool that is too small for all its rows."""
    config, params = models.load(embedded.directory())
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    sizes = dict(num_blocks=97, block_size=8, max_num_seqs=16, max_num_batched_tokens=128, backend="sdpa")
    return Engine(config, params, load_tokenizer(embedded.directory()), **sizes)


def make_jobs(engine: Engine, rng: random.Random) -> list[tuple[dict, list[str]]]:
    """(body, its texts, each computed alone)."""
    problems = embedded.problems(rng.randrange(2**31), held_out=False)
    jobs = []
    for i in range(40):
        examples = [next(problems) for _ in range(rng.choice([0, 1, 4]))]
        prompt = embedded.few_shot(examples, next(problems))
        asked = dict(max_tokens=rng.choice([5, 16, 40]), temperature=rng.choice([0, 1.0]), seed=i, ignore_eos=True)
        if asked["temperature"] and rng.random() < 0.3:
            asked["n"] = 3
        if rng.random() < 0.2:
            asked["logprobs"] = 2
        (output,) = engine.generate(prompt, SamplingParams(**asked))
        jobs.append((asked | {"prompt": prompt, "model": "adder"}, [done.text for done in output.outputs]))
    return jobs


class Run:
    """The state that the clients share."""

    def __init__(self, port: int, jobs: list[tuple[dict, list[str]]], seconds: float):
        self.port, self.jobs, self.seconds = port, jobs, seconds
        self.begin = time.monotonic()
        self.num_equal = self.num_disconnected = 0
        self.wrong: list[str] = []
        self.megabytes: list[int] = []

    @staticmethod
    async def all(coroutines: list) -> None:
        await asyncio.gather(*coroutines)

    async def watch(self, server) -> None:
        """Measure memory ten times, after all clients have begun."""
        while not self._is_over():
            await asyncio.sleep(self.seconds / 10)
            self.megabytes.append(leaks.resources(server)["megabytes"])

    async def client(self, rng: random.Random) -> None:
        """Send requests with random pauses until the end."""
        while not self._is_over() and not self.wrong:
            await asyncio.sleep(rng.uniform(0, 0.5))
            await self.one(rng.choice(self.jobs), rng, rng.random() < CANCELLED)

    async def one(self, job: tuple[dict, list[str]], rng: random.Random, leaves: bool) -> None:
        body, want = job
        body = body | {"stream": rng.random() < 0.5}
        raw = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(raw)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head + raw)
            patience = rng.choice([0, 0.01, 0.3, 3]) if leaves else PATIENCE
            said = await asyncio.wait_for(reader.read(-1), patience)
            texts = texts_of(said, body["stream"], len(want))
            if texts == want:
                self.num_equal += 1
            else:
                self.wrong.append(f"{texts} is not {want}: {said[:200]!r} for {body}")
        except TimeoutError:
            if leaves:
                self.num_disconnected += 1
            else:
                self.wrong.append(f"a stream was lost: nothing in {PATIENCE} s for {body}")
        finally:
            writer.close()

    def _is_over(self) -> bool:
        return time.monotonic() - self.begin > self.seconds


def texts_of(said: bytes, is_stream: bool, count: int) -> list[str]:
    """The texts of a response, from its bytes."""
    head, _, body = said.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return [head.decode("latin-1")]
    if not is_stream:
        return [choice["text"] for choice in json.loads(body)["choices"]]
    texts, whole = [""] * count, b""
    while body:  # chunked: a length in hexadecimal, so many bytes, and again
        length, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    *events, last, _ = whole.split(b"\n\n")
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts if last == b"data: [DONE]" else [*texts, last.decode()]


if __name__ == "__main__":
    sys.exit(main())
