"""Engine: generates tokens for many requests at once. It checks what it is given, and its StepLoop computes it."""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jattn import device
from jattn.cache import PagedKV
from jattn.engine import (
    admission,
    callers,
    construction,
    data_ranks,
    interrupts,
    pretrained,
    shared_prefix,
    sizing,
    switch_interval,
    weights,
)
from jattn.engine.batch import stop_ids_of
from jattn.engine.flights import Flights
from jattn.engine.outputs import RequestOutput
from jattn.engine.params import SamplingParams
from jattn.engine.programs import BrokenProgramError
from jattn.engine.request import Request, Sequence, final_length, internal_error_message, seed_of
from jattn.engine.runner import Runner
from jattn.engine.scheduler import Limits
from jattn.engine.shapes import StepShapes
from jattn.engine.stats import Stats
from jattn.engine.step_loop import StepLoop
from jattn.errors.arguments import takes
from jattn.text.chat import ChatTemplate
from jattn.text.tokenizer import Tokenizer

log = logging.getLogger("jattn.engine")

Prompt = str | Many[int]

PLACES = "an engine places its arrays"
"""What an Engine does, in the error of device.check_context."""


class Engine:
    """Continuous batching over a paged cache. Call add_request, step and abort; or generate for a list of prompts.

    Not thread-safe: call it from one thread at a time; a call while another thread is inside one raises RuntimeError.
    Only `stats` may be read from others.

    deterministic=True: every dispatch has the same shape, and the attention backend is batch-invariant. A request then
    gets the same tokens and bits alone and in any batch, whether or not it is chunked, preempted or partly found in the
    prefix cache. docs/serving.md has the cost.

    An exception in a step fails the requests of that step only. If the device no longer computes, step raises
    EngineDeadError: start a new process. Ctrl-C takes effect between two changes of state, so no request is lost.
    """

    spans_processes = False  # True: the mesh has devices of several processes, see LockStepEngine

    @takes(**construction.OPTIONS)
    def __init__(
        self,
        config: Any,  # a jattn.models.ModelConfig
        params: Any,  # the model's weights, as jattn.models.load returns them
        tokenizer: Tokenizer | None = None,  # None: prompts are token ids, and outputs have no text
        *,
        num_blocks: int | None = None,  # blocks of the cache pool; None: as many as the free memory holds
        block_size: int | None = None,  # tokens of a block; None: per context rank 16 on a CPU, 64 on an accelerator
        max_num_seqs: int = 32,  # sequences in one step
        max_num_batched_tokens: int = 512,  # new tokens in one step, of all sequences together
        max_model_len: int | None = None,  # tokens of prompt and output; None: the most that model and pool allow
        max_burst: int | None = None,  # decode steps of one dispatch; None: 8 on a CPU, 16 on an accelerator
        cache_dtype: str | None = None,  # of the cached keys and values; None: the dtype of the weights
        cache_quant: str | None = None,  # scales of an 8-bit cache_dtype; None: "per_token_head", computed on writing
        backend: str = "auto",  # attention backend: "auto" or one of jattn.list_backends()
        prefix_caching: bool = True,  # share the blocks of equal beginnings between requests
        cascade_attention: bool = True,  # read a prefix that all decoding rows share once, where that is faster
        deterministic: bool = False,  # the same bits alone and in any batch; slower
        chat_template: ChatTemplate | None = None,  # for chats; from_pretrained reads the folder's
        forward: Callable | None = None,  # called in place of jattn.models.forward, with its arguments
        mesh: Mesh | None = None,  # axes "tensor": parts of the model, "context": of its cache, "data": copies of both
        expert_parallel: bool = False,  # data ranks share one set of experts
        seed: int | None = None,  # of the seeds of requests without one; None: random
    ):
        device.check_context(PLACES)
        self.caller_lock = callers.CallerLock()
        if forward is None:
            construction.check_decoder_only(config)
            construction.check_weights(config, params)
        config, params = construction.with_separate_qkv(config, params, mesh)
        model_mesh = construction.model_mesh_of(config, mesh, self.spans_processes, expert_parallel)
        if model_mesh is not None:  # before the free memory is measured
            params = weights.distributed(params, model_mesh.weight_shardings(config))
        block_size = sizing.default_block_size(model_mesh=model_mesh) if block_size is None else block_size
        max_burst = sizing.default_burst() if max_burst is None else max_burst
        cache_dtype = cache_dtype or sizing.dtype_of(params)
        storage = sizing.storage_of(cache_dtype, cache_quant, has_scales=forward is not None)
        pools, max_model_len = sizing.CacheSizing(
            config, storage, block_size, max_num_batched_tokens, max_burst, prefix_caching, model_mesh
        ).pools(max_num_seqs, max_model_len, num_blocks)
        waiting_burst = min(max_burst, sizing.default_waiting_burst())
        self.limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len, max_burst, waiting_burst)
        place = None if model_mesh is None else model_mesh.over_data(0)
        self.config, self.tokenizer, self.chat_template = config, tokenizer, chat_template
        make_caches = sizing.cache_maker(config, pools, block_size, storage, model_mesh, backend)
        caches = make_caches()
        model = construction.model_of(config, caches, forward, backend, deterministic, model_mesh)
        rule = None
        if cascade_attention and prefix_caching and not deterministic:  # a row's last bits depend on who shares with it
            rule = shared_prefix.rule_of(config, caches, backend, sizing.dtype_of(params), model_mesh, block_size)
        self.shapes = shared_prefix.with_sharing(
            StepShapes(self.limits, block_size, deterministic, admission.depends_on_length(config), place), rule
        )
        self.runner = Runner(model, params, caches, make_caches, self.shapes)
        make_tables = functools.partial(
            data_ranks.make_tables, model.data_ranks, pools, block_size, config.cache_groups, prefix_caching
        )
        self._loop = self._loop_of(make_tables, rule)
        self._seeds = np.random.default_rng(seed)
        self._next_id = self._next_seq_id = 0

    def _loop_of(self, make_tables: Callable[..., data_ranks.Tables], rule: shared_prefix.SharedPrefixRule | None):
        """The StepLoop of this engine. LockStepEngine has one of its own."""
        return StepLoop(self.runner, self.limits, make_tables, Flights(self.runner, self.config.eos_token_ids, rule))

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,  # a Hugging Face folder: config.json, *.safetensors, tokenizer.json
        *,
        progress: Callable[[int, int, str], None] | None = None,  # called before each weight: (done, total, name)
        tensor_parallel: int = 1,  # devices over which the model is distributed; `mesh` chooses them
        data_parallel: int = 1,  # copies of the model, each with its own requests and cache
        decode_context_parallel: int = 1,  # times as many devices, which share the keys of each request
        mesh: Mesh | None = None,  # see Engine
        dtype: str | None = None,  # of all weights: "float32", "bfloat16" or "float16"; None or "auto": as stored
        quantization: str | None = None,  # "int8", "int4" or "fp8": of large weights as they are read; None: as stored
        expert_parallel: bool = False,  # see Engine
        **options,  # of Engine
    ) -> "Engine":
        """An engine for a Hugging Face folder.

        With a mesh, threads read the mapped files and each weight goes straight into its parts: no device holds more
        than its part, and the host holds at most one weight of each thread besides.
        """
        device.check_context(PLACES)
        return pretrained.make(
            cls, directory, options, progress=progress, mesh=mesh, dtype=dtype, quantization=quantization,
            expert_parallel=expert_parallel, data_parallel=data_parallel, tensor_parallel=tensor_parallel,
            decode_context_parallel=decode_context_parallel,
        )  # fmt: skip

    # ------------------------------------------------------------------ a list of prompts
    @callers.one_at_a_time
    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | list[SamplingParams] | tuple[SamplingParams, ...] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in their order. params: for all prompts, or one for each.

        TypeError, before anything is queued, if params are no SamplingParams or nothing in prompts could be a prompt. A
        request that cannot be served fails alone: its output has the finish_reason "error", the reason in `error`, and
        no text.

        Requests that were added before are served at the same time; the next step returns their outputs. If an
        exception or an interrupt ends this call, its requests are aborted.
        """
        prompts = admission.prompts_of(prompts)
        many = admission.params_of(params, len(prompts))
        mine: dict[str, RequestOutput | None] = {}
        others: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(prompts, many, strict=True):
                id = self._new_id()
                mine[id] = None  # before add_request, so that it is aborted after an interrupt
                self.add_request(prompt, each, request_id=id)
            unfinished = set(mine)
            while unfinished:
                for output in self.step():
                    if output.id not in mine:
                        others[output.id] = output
                    elif output.finished:
                        mine[output.id] = output
                        unfinished.discard(output.id)
        finally:
            with interrupts.held():
                for id in [id for id, output in mine.items() if output is None]:
                    self.abort(id)
                unreturned = (output for output in self._loop.outputs if output.id not in mine)
                self._loop.outputs = [*others.values(), *unreturned]
        return [output for output in mine.values() if output is not None]

    def drain(self) -> Iterator[RequestOutput]:
        """Call step until no request is left; yields the final output of each.

        If the loop over it ends early, the next step returns the outputs that it has not had yet.
        """
        while self.has_work:
            finished = deque(output for output in self.step() if output.finished)
            try:
                while finished:
                    yield finished.popleft()
            finally:
                if finished:
                    self._loop.outputs = [*finished, *self._loop.outputs]

    # ------------------------------------------------------------------ step by step
    @property
    def has_work(self) -> bool:
        """Is there a request to compute, or an output to return?"""
        return self._loop.has_work

    @interrupts.held()
    @callers.one_at_a_time
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, salt: str = ""
    ) -> str:
        """Queue a prompt (text or token ids) and return the id of the request.

        A request that cannot be served ends in the next step, with finish_reason "error". Requests with different salts
        share no cached blocks, so the latency of a request does not show what another client sent.
        """
        self.runner.must_be_alive()
        params = SamplingParams() if params is None else params
        id = self._new_id() if request_id is None else request_id
        if not isinstance(id, str) or not id:
            raise ValueError(f"request_id={id!r} must be a string that is not empty")
        if self._is_taken(id):
            raise ValueError(f"request {id!r} is still running; choose another id")
        self._loop.count(requests=1)
        tokens, words, wrong = admission.check(
            prompt, params, self.tokenizer, self.config.vocab_size, self.limits, salt
        )
        if wrong:
            self._loop.refuse(admission.refused(id, tokens, wrong))
            return id
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        self._next_seq_id += 1
        root = admission.root_hash_of(salt, self.config, final_length(tokens, params, self.limits.max_model_len))
        seqs = [
            Sequence(f"{self._next_seq_id}.{i}", tokens, params, seed_of(seed, i), root, prompt_words=words)
            for i in range(params.n)
        ]
        eos = self.config.eos_token_ids
        try:
            request = Request.of(id, tokens, seqs, [stop_ids_of(seq, eos) for seq in seqs], self.tokenizer)
        except Exception as error:  # of a tokenizer that cannot decode the prompt
            log.error("request %s failed", id, exc_info=error)
            self._loop.refuse(admission.refused(id, tokens, {"prompt": internal_error_message(error)}))
            return id
        self._loop.add(request)  # last, because the lines before may raise
        return id

    @callers.one_at_a_time
    def step(self) -> list[RequestOutput]:
        """Take one step; returns the outputs so far of each request that has new tokens or has ended.

        The next step is sent to the device before the tokens of this one are read: see StepLoop.
        """
        self._take_step()
        outputs, self._loop.outputs = self._loop.outputs, []
        return outputs

    @interrupts.held()
    def _take_step(self) -> None:
        """Take a step, and keep its outputs until step() returns them, even if an interrupt comes before."""
        self._check_step()
        with switch_interval.short:
            self._loop.step()

    def _check_step(self) -> None:
        """Raise what step() raises before it changes anything."""
        device.check_context(PLACES)
        self._loop.must_not_read("step()")
        self.runner.must_be_awake("step()")

    @interrupts.held()
    @callers.one_at_a_time
    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks at once; returns False if there is no such request.

        If a tokenizer calls it from its decode, the request ends once the text of the step is read, unless it has ended
        by then.
        """
        request = self._loop.requests.get(request_id) if isinstance(request_id, str) else None
        if request is not None:
            self._loop.abort(request)
        return request is not None

    @property
    def caches(self) -> tuple[PagedKV, ...] | None:
        """The caches on the device, one for each layer; None while the engine sleeps."""
        return self.runner.caches

    @property
    def stats(self) -> Stats:
        """Counters and queue lengths; `.prometheus()` gives them as text."""
        return self._loop.stats

    @property
    def scheduler(self) -> data_ranks.AnyScheduler:
        """The queues of waiting and running sequences."""
        return self._loop.scheduler

    @property
    def tables(self) -> data_ranks.Tables:
        """The block pools."""
        return self._loop.tables

    @callers.one_at_a_time
    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile every program that requests can need, so that none is compiled later; returns their number.

        progress(index, total, name) is called after each; index: 0, 1, ..
        """
        self._check_warmup()
        self.runner.wait_until_sent()
        if self.runner.is_lost:  # an earlier warm-up failed
            self._renew_caches()
        try:
            return self.runner.warm(progress)
        except BrokenProgramError as error:  # it was removed, so it is compiled this time
            log.warning("%s", error)
            self._renew_caches()
            return self.runner.warm(progress)

    @interrupts.held()
    def _renew_caches(self) -> None:
        """Make new caches, and forget the blocks that held keys of earlier requests."""
        self._loop.restart(new_caches=True)

    def _check_warmup(self) -> None:
        """Raise what warmup() raises before it compiles anything."""
        device.check_context(PLACES)
        self.runner.must_be_awake("warmup()")
        if self.has_work:
            raise RuntimeError("warm up before the first request: the pool must be idle")

    # ------------------------------------------------------------------ between steps
    @property
    def params(self) -> Any:
        """The weights, in new containers. Change them with update_weights."""
        self.runner.must_be_awake("params")
        return jax.tree.map(lambda x: x, self.runner.params)

    @interrupts.held()
    @callers.one_at_a_time
    def update_weights(self, params: Any) -> None:
        """Replace the weights by others of the same structure, shapes and dtypes, from the next step on.

        Running requests keep their tokens; their keys and values are computed again with the new weights. The new
        weights are copied first, so the device needs memory for both.
        """
        self._loop.must_not_read("update_weights()")
        self.runner.must_be_awake("update_weights()")
        mesh = self.runner.model.model_mesh
        exchange = self.runner.update(construction.with_separate_qkv(self.config, params, mesh)[1])
        self._loop.finish_in_flight()
        exchange()
        self._loop.restart(weights_version=self.tables.weights_version + 1)

    @interrupts.held()
    @callers.one_at_a_time
    def sleep(self) -> None:
        """Free the device's memory: move the weights to the host and drop the caches.

        Requests may be added and aborted while the engine sleeps. They continue after wake().
        """
        self._loop.must_not_read("sleep()")
        self.runner.must_be_alive()
        if not self.runner.is_asleep:
            self._loop.finish_in_flight()
            self._loop.restart()
            self.runner.sleep()

    @interrupts.held()
    @callers.one_at_a_time
    def wake(self) -> None:
        """Put the weights and empty caches on the device again, after sleep()."""
        device.check_context(PLACES)
        self.runner.must_be_alive()
        self.runner.wake()

    def _new_id(self) -> str:
        """An id that no request has; a user may have given ids of the same form."""
        while self._is_taken(id := f"request-{self._next_id}"):
            self._next_id += 1
        self._next_id += 1
        return id

    def _is_taken(self, id: str) -> bool:
        return self._loop.knows(id)
