"""Warm-up: what it traces, lowers and compiles, and how often."""

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading

import jax
import pytest

from jattn import models
from jattn.engine import Engine, SamplingParams, dispatch, programs, sampling, warming
from jattn.models import decoder
from tests.rooms.tree import ROOT

CONFIG = models.config_of(
    dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, hidden_act="silu", eos_token_id=0,
    )
)  # fmt: skip

FIRST_START = """
import json
from collections import Counter
import jax
from jattn import models
from tests.engine.test_warming import engine

seen = Counter()
def listen(event, duration, **tags):
    if str(tags.get("fun_name", "?")).removeprefix("jit(").removesuffix(")") == "dispatch":
        seen[event.rpartition("/")[2]] += 1
jax.monitoring.register_event_duration_secs_listener(listen)
programs = engine(prefix_caching=False).warmup()
print(json.dumps([programs, seen]))
"""


def engine(config=CONFIG, **options) -> Engine:
    sizes = dict(num_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)  # few programs
    return Engine(config, models.init_params(config, 0, "float32"), **sizes, **options)


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of a module's functions: counted(module, name), then counted.calls[name]."""

    def count(module, name: str) -> None:
        function = getattr(module, name)

        def counting(*args, **kwargs):
            count.calls[name] = count.calls.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    count.calls = {}
    return count


def test_in_a_new_process_each_program_is_traced_lowered_and_compiled_once():
    """On JAX 0.11 and later the import of a backend registers a setting, and what was traced before is not found.

    With prefix caching the engine asks all backends when it is made, so the first trace would find them imported.
    """
    done = subprocess.run([sys.executable, "-c", FIRST_START], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    programs, seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == dict.fromkeys(
        ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration"), programs
    )


def test_equal_layers_are_traced_once_a_program_and_sampling_once_a_number_of_rows(counted):
    # Not jax.clear_caches(): engines of other tests in this process would compile again.
    for function in (
        decoder._self_attention,
        decoder._finish_layer,
        sampling.choose,
        sampling._sample_on_devices,
        dispatch.dispatch.function,
    ):
        if hasattr(function, "clear_cache"):
            function.clear_cache()
    counted(decoder, "project_and_attend")
    counted(decoder, "finish_layer")
    counted(sampling, "_logprobs")
    counted(sampling, "_sample")
    served = engine(dataclasses.replace(CONFIG, eos_token_ids=(1,)))  # no other test has traced this model
    programs, rows = served.warmup(), {shape.num_rows for shape in served.shapes.all()}
    assert len(rows) < programs
    assert counted.calls == dict(
        project_and_attend=programs, finish_layer=programs, _logprobs=len(rows), _sample=len(rows)
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_programs_are_lowered_and_is_as_before_afterwards(monkeypatch, enabled):
    lower, seen = dispatch.dispatch.lower, []
    monkeypatch.setattr(dispatch.dispatch, "lower", lambda *args: (seen.append(gc.isenabled()), lower(*args))[1])
    served, before = engine(), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        served.warmup()
        assert seen and not any(seen) and gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_after_ctrl_c_no_other_program_is_compiled_and_the_engine_still_serves(monkeypatch):
    """The programs compile in other threads, which an exception in the main thread does not reach."""
    begun, released, compiled = threading.Event(), threading.Event(), []

    def compile_slowly(self, args, lowered):
        begun.set()
        assert released.wait(120)
        compiled.append(lowered)

    made, handler = engine(), signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    with monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        patch.setattr(programs.Programs, "load", lambda self, args: False)
        patch.setattr(programs.Programs, "lower", lambda self, args: args)
        patch.setattr(programs.Programs, "compile", compile_slowly)
        sender = threading.Thread(target=lambda: begun.wait(120) and os.kill(os.getpid(), signal.SIGINT))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            made.warmup()
        signal.signal(signal.SIGINT, handler)
        sender.join()
        released.set()
        made.runner.wait_until_sent()
        assert len(compiled) == 1
    (output,) = made.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.token_ids) == 2


def test_a_dispatch_takes_caches_and_row_state_in_place():
    """On a GPU, a row state with an address of its own costs 0.9 ms a dispatch: the CUDA graph is updated."""
    served = engine()
    served.warmup()
    runner = served.runner
    before = jax.tree.leaves((runner._caches, runner._row_state))
    served.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0))
    assert all(leaf.is_deleted() for leaf in before)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner._row_state)]
    assert len(set(places)) == len(places)


def test_programs_of_prompts_are_compiled_first(monkeypatch):
    """They compile longest; what is lowered first compiles while the others are lowered."""
    order, lower, served = [], programs.Programs.lower, engine()
    padding = functools.partial(warming._padding, served.runner.model, served.shapes)
    shape_of = {padding(shape).tree: shape for shape in served.shapes.all()}

    def lowering(self, args):
        order.append(shape_of[args[-1].tree])
        return lower(self, args)

    monkeypatch.setattr(programs.Programs, "lower", lowering)
    served.warmup()
    assert len(order) == len(shape_of)
    assert [shape.is_decode for shape in order] == sorted(shape.is_decode for shape in order)
    prompts = [shape.num_tokens for shape in order if not shape.is_decode]
    assert len(prompts) > 1 and prompts == sorted(prompts, reverse=True)
