"""Eight devices give the tokens of one over long traces, in a process of its own: other tests have four devices."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import count_compiles
from tests.engine.test_data_ranks import SHARED_HEAD
from tests.engine.test_mesh import EXPERTS, LATENT, LLAMA, WINDOWS, engine, mesh, tokens_of_a_trace
from tests.rooms import tree

LAYOUTS = {  # (data, tensor, context) ranks
    "llama": (LLAMA, 500, [(1, 8, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2)]),
    "windows": (WINDOWS, 60, [(1, 8, 1)]),
    "shared head": (SHARED_HEAD, 60, [(2, 4, 1)]),
    "experts": (EXPERTS, 60, [(4, 2, 1)]),
    "latent": (LATENT, 60, [(2, 2, 2)]),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_devices_give_the_tokens_of_one_over_a_long_trace():
    flags = re.sub(r"(device_count)=\d+", r"\1=8", os.environ["XLA_FLAGS"])
    program = [sys.executable, "-m", "tests.engine.test_eight_devices"]
    subprocess.run(program, cwd=tree.ROOT, env=os.environ | {"XLA_FLAGS": flags}, check=True)


def compare(name: str) -> None:
    """AssertionError where a layout's tokens differ from those of one device, or a program is compiled late."""
    config, requests, layouts = LAYOUTS[name]
    one_program = name != "llama"
    wanted = tokens_of_a_trace(engine(config, deterministic=one_program), requests)
    for data, tensor, context in layouts:
        served = engine(config, mesh=mesh(tensor, data, context), num_blocks=16, deterministic=one_program)
        served.warmup()
        with count_compiles() as seen:
            tokens = tokens_of_a_trace(served, requests)
        assert tokens == wanted, (name, data, tensor, context)
        assert seen.names == [], (name, data, tensor, context)


if __name__ == "__main__":
    for each in LAYOUTS:
        compare(each)
