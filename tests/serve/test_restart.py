"""A server that is killed during a stream: the client gets an error, and the next server works."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from tests.serve.running import PATIENCE, free_port

ENGINE = ["--num-blocks", "65", "--block-size", "16", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]


@contextlib.contextmanager
def command(port: int):
    """`jattn serve` with the embedded model in a separate process that answers requests."""
    arguments = ["serve", "--port", str(port), "--deterministic", "--backend", "sdpa", *ENGINE]
    environment = os.environ | {"JATTN_TEST_KEY": "k", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jattn", *arguments, "--api-key-env", "JATTN_TEST_KEY", "--grace", "0"], env=environment
    )
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_server_breaks_its_streams_aloud_and_the_next_one_serves():
    port = free_port()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
        ask = lambda **more: client.completions.create(model="adder", prompt="740+583=", temperature=0, **more)
        with command(port) as process:
            stream = iter(ask(max_tokens=1000, stream=True, extra_body={"ignore_eos": True}))
            next(stream)
            process.send_signal(signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx.TransportError)):
                list(stream)
        with command(port) as process:
            assert ask(max_tokens=8, stop="\n").choices[0].text == "2340"
            stream = iter(ask(max_tokens=1000, stream=True, extra_body={"ignore_eos": True}))
            next(stream)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            assert process.wait(PATIENCE) == 0
