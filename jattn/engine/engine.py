"""The engine: requests in, tokens out; everything that changes while a model is served is in here."""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jattn.engine import admission, sizing, warming
from jattn.engine.batch import batch_of, lanes_of, stop_ids_of
from jattn.engine.chat import ChatTemplate, load_chat_template
from jattn.engine.flight import Flight, Landed, behind, kept_on_device, logprob_of, send
from jattn.engine.outputs import FinishReason, RequestOutput
from jattn.engine.params import SamplingParams
from jattn.engine.response import Request, Response
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Limits, Row, Scheduler, StepPlan
from jattn.engine.sequence import Sequence
from jattn.engine.shapes import StepShapes
from jattn.engine.stats import Stats
from jattn.engine.step import NOT_SAMPLED, Batch
from jattn.engine.tables import BlockTables, most_blocks
from jattn.engine.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Many[int]

log = logging.getLogger("jattn.engine")


class Engine:
    """Continuous batching over a paged cache: add_request, step, abort; or all at once, generate.

    Not for several threads: one thread calls it, as the server does.

    deterministic=True gives every dispatch one shape and takes a batch-invariant attention backend, so that a
    request's tokens are the same bits alone and in any batch, chunking, preemption or prefix hit; see docs/serving.md
    for what it costs.
    """

    def __init__(
        self,
        config: Any,
        params: Any,
        tokenizer: Tokenizer | None = None,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        max_burst: int | None = None,
        cache_dtype: str | None = None,
        backend: str = "auto",
        prefix_caching: bool = True,
        deterministic: bool = False,
        chat_template: ChatTemplate | None = None,
        forward: Callable | None = None,
        seed: int = 0,
    ):
        dtype = cache_dtype or sizing.dtype_of(params)
        max_burst = sizing.default_burst() if max_burst is None else max_burst
        ahead = 2 * max_burst  # a sequence may hold blocks for two dispatches
        groups, step = config.cache_groups, (block_size, max_num_seqs, max_num_batched_tokens, ahead)
        most = [most_blocks(group, *step, prefix_caching) for group in groups]
        pools, max_model_len = sizing.pools_of(config, dtype, num_blocks, block_size, most, max_num_seqs, max_model_len)
        self.limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len, max_burst)
        self.shapes = StepShapes(self.limits, block_size, deterministic, config.rope_depends_on_length)
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.config, self.params = config, params
        self.caches = config.make_caches(pools, block_size, dtype)
        self.model = admission.model_of(config, self.caches, forward, backend, deterministic)
        self.tables = BlockTables(pools, block_size, groups, prefix_caching)
        self.scheduler = Scheduler(self.limits, self.tables)
        self._requests: dict[str, Request] = {}
        self._responses: dict[str, Response] = {}  # by sequence
        self._ended: list[RequestOutput] = []  # refused at the door: told by the next step
        self._stats = Stats()
        self._flight: Flight | None = None  # sent before the one ahead of it was read
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="jattn-reader")
        self._seeds = np.random.default_rng(seed)
        self._next_id = 0

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, progress: Callable[[int, int, str], None] | None = None, **options
    ) -> "Engine":
        """From a Hugging Face folder: config.json, *.safetensors, tokenizer.json, tokenizer_config.json.

        progress(done, total, what) is called before each weight is read.
        """
        from jattn import models

        config, params = models.load(directory, progress=progress)
        if config.is_encoder or config.encoder is not None:
            raise ValueError(f"{config.family} is not a decoder alone, and only those are served; see jattn.models")
        tokenizer, template = load_tokenizer(directory), load_chat_template(directory)
        return cls(config, params, tokenizer, chat_template=template, **options)

    # ------------------------------------------------------------------ all at once
    def generate(
        self, prompts: Prompt | Many[Prompt], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Every prompt's completions, in the order of the prompts."""
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
            prompts = [prompts]  # type: ignore[assignment]
        many = [params or SamplingParams()] * len(prompts) if not isinstance(params, (list, tuple)) else params
        if len(many) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(many)} SamplingParams: give one, or one a prompt")
        ids = [self.add_request(prompt, each) for prompt, each in zip(prompts, many, strict=True)]
        found = {output.id: output for output in self.drain()}
        return [found[id] for id in ids]

    def drain(self) -> Iterator[RequestOutput]:
        """Step until nothing is left; every request as it ends."""
        while self.has_work:
            yield from (output for output in self.step() if output.finished)

    # ------------------------------------------------------------------ step by step
    @property
    def has_work(self) -> bool:
        """Is there anything for step() to do or to tell?"""
        return bool(self._requests or self._ended)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, salt: str = ""
    ) -> str:
        """Queue a prompt (text or token ids) and return its id; a request that cannot be served fails alone, with
        finish_reason "error", in the next step.

        Requests of different `salt` share no cached blocks (what one tenant sent cannot be timed by another).
        """
        params = SamplingParams() if params is None else params
        id = f"request-{self._next_id}" if request_id is None else request_id
        if id in self._requests:
            raise ValueError(f"request {id!r} is still running; choose another id")
        self._next_id += 1
        self._stats = self._stats.plus(requests=1)
        tokens, reasons = admission.check(prompt, params, self.tokenizer, self.config.vocab_size, self.limits)
        if reasons:
            self._ended.append(admission.refused(id, tokens, reasons))
            self._stats = self._stats.plus(failed=1)
            return id
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        request = Request(id, tokens, [])
        for index in range(params.n):
            name = f"{self._next_id}.{index}"  # ours: a user's ids may look like anything
            seq = Sequence(name, tokens, params, (seed + index) % 2**63)
            seq.salt = admission.salt_of(seq, salt, self.config, self.limits)
            stop_ids = stop_ids_of(seq, self.config.eos_token_ids)
            response = Response.of(id, seq, index, stop_ids, self.limits.max_model_len, self.tokenizer)
            request.responses.append(response)
            self._responses[name] = response
            self.scheduler.add(seq)
        self._requests[id] = request
        return id

    def step(self) -> list[RequestOutput]:
        """One dispatch: the outputs so far of every request that moved, and of every one that ended.

        Where all rows decode on, the next dispatch is sent while a thread of its own reads this one's tokens: what the
        host does takes no time of the device's. (On a GPU sending a loop takes as long as its steps but the last.) A
        row that the host ends is computed once more, and what comes of it dropped.
        """
        begin = time.perf_counter()
        outputs, self._ended = self._ended, []
        flight, self._flight = self._flight or self._send(self.scheduler.schedule()), None
        if flight is None:
            return outputs
        plan = self.scheduler.follow(flight.plan)
        if plan is None:
            landed = self._land(flight)
            busy = flight.seconds + landed.seconds
        else:
            batch = behind(flight, plan, self.scheduler.running, self.shapes)
            reading = self._reader.submit(self._land, flight)
            try:
                self._flight = self._fly(plan, plan.rows, batch)
            finally:
                landed = reading.result()
            busy = max(self._flight.seconds, landed.seconds)
        self._forget_finished(landed.moved)
        self._stats = self._stats.plus(
            dispatches=1, steps=landed.steps, device_seconds=busy, host_seconds=time.perf_counter() - begin - busy
        )
        return outputs + landed.outputs

    def _send(self, plan: StepPlan) -> Flight | None:
        """Compute a plan; None: there is nothing to do."""
        if not plan.rows:
            return None
        self._note(plan)
        seqs = {row.id: self._responses[row.id].seq for row in plan.rows}
        lanes = lanes_of(plan, self.shapes)
        batch = batch_of(plan, lanes, seqs, self.shapes, self.config.eos_token_ids)
        return self._fly(plan, lanes, kept_on_device(batch))

    def _fly(self, plan: StepPlan, lanes: tuple[Row, ...], batch: Batch) -> Flight:
        self.caches, flight = send(self.model, self.params, self.caches, plan, lanes, batch, self._stats.dispatches)
        return flight

    def _land(self, flight: Flight) -> Landed:
        """Wait for a flight's tokens, and bring every request up to date."""
        begin = time.perf_counter()
        tokens = np.asarray(flight.said.tokens)
        told = jax.device_get(flight.said) if flight.is_told else None
        seconds = time.perf_counter() - begin
        moved = self._accept(flight, tokens, told)
        steps = int((tokens != NOT_SAMPLED).any(axis=1).sum()) or 1
        return Landed(moved, [self._requests[id].output() for id in moved], steps, seconds)

    def abort(self, request_id: str) -> bool:
        """Stop a request and free its blocks at once; False where there is no such request any more."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for response in request.responses:
            if response.finish_reason is None:
                response.finish_reason = FinishReason.ABORT
                self.scheduler.remove(response.seq)
                self._stats = self._stats.plus(aborted=1)
        self._ended.append(request.output())
        self._drop(request)
        return True

    @property
    def stats(self) -> Stats:
        """Counters and queues, as a value; `.prometheus()` is the text format."""
        return dataclasses.replace(
            self._stats,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_usage=self.tables.usage,
            group_usage=self.tables.group_usage,
            evictions=sum(pool.evictions for pool in self.tables.pools),
        )

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile every program that serving can ask for; afterwards nothing compiles. Returns how many.

        progress(done, total, what) is called before each.
        """
        if self.has_work:
            raise RuntimeError("warm up before the first request: the pool must be idle")
        self.caches, count = warming.warm(
            self.model, self.params, self.caches, self.shapes, len(self.tables.groups), progress
        )
        return count

    # ------------------------------------------------------------------ after a dispatch
    def _accept(self, flight: Flight, tokens: np.ndarray, told: Sampled | None) -> list[str]:
        """Bring every row's sequence and response up to date; ids of the requests that have news."""
        moved, counts = dict[str, None](), Counter[str]()
        last_lane = {lane.id: r for r, lane in enumerate(flight.lanes)}
        for row in flight.plan.rows:
            r = last_lane[row.id]
            response = self._responses.get(row.id)
            if response is None or response.finish_reason is not None:  # ended while this was on its way
                continue
            accepted = response.accept([t for t in tokens[:, r] if t != NOT_SAMPLED] if row.samples else [])
            if told is not None and response.seq.params.logprobs is not None:
                response.logprobs += [
                    logprob_of(told, i, r, response.seq.params.logprobs) for i in range(len(accepted))
                ]
            self.scheduler.commit(response.seq, row, accepted)
            counts["output_tokens"] += len(accepted)
            if response.finish_reason is not None:
                failed = response.finish_reason is FinishReason.ERROR
                self.scheduler.remove(response.seq, trusted=not failed)
                counts["failed" if failed else "finished"] += 1
            if accepted or response.finish_reason is not None:
                moved[response.request_id] = None
        self._stats = self._stats.plus(**counts)
        return list(moved)

    def _forget_finished(self, ids: list[str]) -> None:
        for id in ids:
            if all(response.finish_reason is not None for response in self._requests[id].responses):
                self._drop(self._requests[id])

    def _drop(self, request: Request) -> None:
        del self._requests[request.id]
        for response in request.responses:
            del self._responses[response.seq.id]

    def _note(self, plan: StepPlan) -> None:
        for id, hit in plan.admitted:
            response = self._responses[id]
            if response.seq.num_preemptions == 0:
                response.num_cached = hit
                self._stats = self._stats.plus(prompt_tokens=len(response.seq.prompt), cached_tokens=hit)
        if plan.preempted:
            self._stats = self._stats.plus(preemptions=len(plan.preempted))
            log.info("preempted %s: the pool is full", ", ".join(plan.preempted))
