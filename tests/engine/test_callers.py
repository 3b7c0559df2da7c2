"""An engine refuses the calls of another thread while one uses it, and those of a fork; they change nothing."""

import os
import signal
import threading
import warnings

import numpy as np
import pytest

from jattn.engine import Engine, SamplingParams
from jattn.text import ByteTokenizer
from tests.engine import fake

CONFIG, GREEDY = fake.FakeConfig(vocab_size=258), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CALLS = {
    "generate": lambda engine: engine.generate([[5, 6]], GREEDY),
    "add_request": lambda engine: engine.add_request([5, 6], GREEDY),
    "step": lambda engine: engine.step(),
    "abort": lambda engine: engine.abort("a"),
    "warmup": lambda engine: engine.warmup(),
    "update_weights": lambda engine: engine.update_weights(engine.params),
    "sleep": lambda engine: engine.sleep(),
    "wake": lambda engine: engine.wake(),
}


class Waiting(ByteTokenizer):
    """Its first decode of a step waits."""

    def __init__(self):
        super().__init__(num_special=2)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def decode(self, token_ids):
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            assert self.go_on.wait(60)
        return super().decode(token_ids)


def make_engine(tokenizer):
    bias = np.where(np.arange(258) < 2, -1000, 0).astype(np.float32)
    sizes = dict(num_blocks=9, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    return Engine(CONFIG, {"bias": bias}, tokenizer, forward=fake.forward, **sizes)


def test_a_call_while_another_thread_is_inside_one_is_refused_and_changes_nothing():
    tokenizer, found = Waiting(), []
    engine = make_engine(tokenizer)
    alone = engine.generate([[5, 6, 7]], GREEDY)
    other = threading.Thread(target=lambda: found.extend(engine.generate([[5, 6, 7]], GREEDY)))
    other.start()
    assert tokenizer.inside.wait(60)
    before = engine.stats
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) while another thread calls this engine"):
            call(engine)
    assert engine.stats == before
    tokenizer.go_on.set()
    other.join(60)
    assert found[0].token_ids == alone[0].token_ids and found[0].text == alone[0].text
    assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids == alone[0].token_ids, "the next caller is served"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_fork_is_refused(name):
    """The fork would wait for ever for the engine's thread, which it does not have."""
    engine = make_engine(None)
    alone = engine.generate([[5, 6, 7]], GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of any fork
        child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            CALLS[name](engine)
        except RuntimeError as error:
            os._exit(0 if str(error).startswith(f"{name}() in a fork of the process") else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids == alone[0].token_ids
