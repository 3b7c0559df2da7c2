"""An engine that one thread uses refuses the calls of another, which change nothing."""

import threading

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


def test_a_call_while_another_thread_is_inside_one_is_refused_and_changes_nothing():
    tokenizer, found = Waiting(), []
    bias = np.where(np.arange(258) < 2, -1000, 0).astype(np.float32)
    engine = Engine(
        CONFIG, {"bias": bias}, tokenizer, forward=fake.forward, num_blocks=9, block_size=4, max_num_seqs=2,
        max_num_batched_tokens=8,
    )  # fmt: skip
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
