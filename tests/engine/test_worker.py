"""The threads of an engine: their order, their errors, and their end."""

import gc
import subprocess
import sys
import threading

import pytest

from jattn.engine.worker import Worker
from tests.rooms.tree import ROOT


def test_calls_are_in_order_and_an_exception_belongs_to_its_caller():
    worker, seen = Worker("test"), []
    futures = [worker.submit(seen.append, i) for i in range(100)]
    failed = worker.submit(lambda: 1 / 0)
    worker.wait()
    assert seen == list(range(100)) and all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_the_thread_ends_with_the_worker():
    worker = Worker("test-that-ends")
    worker.wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "test-that-ends"]
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


SCRIPT = """
import threading, time
from jattn.engine import Engine, SamplingParams
from tests.engine import fake

engine = Engine(fake.FakeConfig(eos_token_ids=()), fake.PARAMS, forward=fake.forward, num_blocks=60, block_size=4,
                max_num_seqs=2, max_num_batched_tokens=16)
params = SamplingParams(max_tokens=40, temperature=0)
"""
ENDINGS = {
    "a thread that outlives the main one": """
def serve():
    threading.main_thread().join()
    print(len(engine.generate([[5, 6]], params)[0].token_ids))

threading.Thread(target=serve).start()
""",
    "dispatches in flight": """
engine.add_request([5, 6], params)
engine.step()
print(40)
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_well_with(ending):
    run = [sys.executable, "-c", SCRIPT + ENDINGS[ending]]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr
