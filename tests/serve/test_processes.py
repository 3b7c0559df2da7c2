"""`jattn serve` and `jattn generate` as two processes over loopback: one answer, and one end for both."""

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from jattn.engine import Engine, SamplingParams
from tests.models import tiny
from tests.rooms import tree
from tests.serve.running import answered, connection, free_port, post, until_closed, wait_until

SIZES = {"num-blocks": 24, "block-size": 4, "max-num-seqs": 4, "max-num-batched-tokens": 16, "max-model-len": 64}
SECONDS = 60
"""The time-out of a process."""

PROMPTS = [list(range(3, 3 + n)) for n in (5, 12, 19, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "tiny"
    path.mkdir()
    config = tiny.CONFIG | dict(vocab_size=64, head_dim=8, eos_token_id=0)
    tiny.write(path, config, tiny.tensors(config))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """The engine of one process."""
    sizes = {name.replace("-", "_"): size for name, size in SIZES.items()}
    return Engine.from_pretrained(folder, deterministic=True, **sizes)


@contextlib.contextmanager
def pair(port, *command, layout=("--tensor-parallel", "2"), seconds=SECONDS):
    """Two processes that run a command together, with one device each; killed if they run at the end."""
    flags = re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(tree.ROOT)}
    common = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-timeout", str(seconds)]
    common += [*layout, "--deterministic"]  # deterministic: one program to compile
    common += [str(word) for name, size in SIZES.items() for word in (f"--{name}", size)]
    with contextlib.ExitStack() as stack:
        both = []
        for id in range(2):
            words = [sys.executable, "-m", "jattn", *command, *common, "--process-id", str(id)]
            pipe = subprocess.PIPE
            both.append(subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True))
            stack.enter_context(both[-1])
            stack.callback(both[-1].kill)
        yield both


def url_of(server):
    """The server's address, as soon as it accepts connections."""
    said = ""
    for line in server.stderr:
        said += line
        if found := re.search(r"serving tiny on (http://[^/]+)/v1", line):
            wait_until(lambda: accepts(found[1]))
            return found[1]
    pytest.fail(f"process 0 ended with code {server.wait()} before it served: {said}")


def accepts(url):
    with contextlib.suppress(ConnectionRefusedError), connection(url):
        return True


def end_of(child):
    """(exit code, stderr) of a process that ends, within the test's time-out."""
    said = child.stderr.read()
    return child.wait(), said


def completion(prompt, **options):
    return post("/v1/completions", dict(prompt=prompt, temperature=0, max_tokens=16) | options)


def text_of(url, prompt):
    with connection(url, completion(prompt)) as raw:
        status, answer = answered(raw)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_two_processes_serve_what_one_does_until_one_is_killed(folder, alone):
    with pair(free_port(), "serve", "--model", str(folder), "--port", "0") as (server, other):
        url = url_of(server)
        with connection(url, completion(PROMPTS[0], stream=True, max_tokens=50)) as raw:
            assert raw.recv(10)  # then the client disconnects
        with concurrent.futures.ThreadPoolExecutor() as pool:
            told = list(pool.map(lambda prompt: text_of(url, prompt), PROMPTS * 3))
        wanted = alone.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
        assert told == [output.text for output in wanted] * 3
        with contextlib.ExitStack() as stack:
            long = completion(PROMPTS[1], stream=True, max_tokens=50)
            streams = [stack.enter_context(connection(url, long)) for _ in range(40)]  # for seconds
            assert streams[0].recv(10)
            other.kill()
            ends = [until_closed(raw) for raw in streams]
        code, said = end_of(server)
    assert code == 1 and re.search(r"\njattn: .*process 0 of 2 ends: start all of them again\n$", said), said
    assert all(b"[DONE]" in end or b'"error"' in end for end in ends) and b'"error"' in ends[-1]


def test_they_start_again_at_the_same_address_and_process_0_is_killed(folder, alone):
    port = free_port()
    command = ("generate", "--model", str(folder), "--max-tokens", "4", "!!")
    with pair(port, *command, layout=("--data-parallel", "2")) as (first, other):
        text, said = first.communicate()
        assert end_of(other)[0] == first.returncode == 0, said
        (wanted,) = alone.generate("!!", SamplingParams(temperature=0, max_tokens=4))
        assert text.endswith(f"\n{wanted.text}\n")  # after a line of gloo's
    with pair(port, "serve", "--model", str(folder), "--port", "0", "--no-warmup") as (server, other):
        url_of(server)
        server.kill()
        code, said = end_of(other)
    assert code not in (0, None) and ("process 0 cannot be reached" in said or "another task died" in said), said


@pytest.mark.parametrize("id", ["0", "1"])
def test_a_process_that_stays_alone_ends_with_a_sentence(id):
    port = free_port()
    program = (
        "import sys; from jattn import cli; from jattn.engine import processes; "
        "processes.CONNECT_SECONDS = 1.0; sys.exit(cli.main())"
    )
    words = ["generate", "x", "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", id]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 2 and done.stdout == "" and "\n    @ " not in done.stderr, done.stderr
    assert done.stderr.endswith(
        f"jattn: process {id} of 2 has waited 1 s for the others at 127.0.0.1:{port}: start each of them once, with "
        "--num-processes 2 and its own --process-id\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_sigterm_in_either_lets_requests_finish_and_ends_both(folder, which):
    with pair(free_port(), "serve", "--model", str(folder), "--port", "0") as both:
        url = url_of(both[0])
        with connection(url, completion(PROMPTS[0], max_tokens=50)) as raw:
            text_of(url, PROMPTS[1])  # the first one is accepted
            both[which].send_signal(signal.SIGTERM)
            assert answered(raw)[0] == 200
        assert [end_of(each)[0] for each in both] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_hangs_ends_the_other(folder, which):
    """Process 0 has the store, whose calls hang with it."""
    with pair(free_port(), "serve", "--model", str(folder), "--port", "0", "--no-warmup", seconds=10) as both:
        url_of(both[0])
        both[which].send_signal(signal.SIGSTOP)
        code, said = end_of(both[1 - which])
    assert code == 1 and f"process {which} has given no sign of life for 10 s" in said
