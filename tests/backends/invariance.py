"""What the tests of batch-invariant backends share: the bits of one request, and the backend that an engine takes."""

import jax
import numpy as np

from jattn import models
from jattn.engine import construction
from tests.problem import Problem
from tests.running import run

CONFIG = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=512, intermediate_size=64,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
"""A Llama with heads of 128, which the kernels of both chips take."""


def bits(problem: Problem, backend: str) -> list[bytes]:
    """Of each request's out and lse."""
    _, state = run(problem, backend)
    ends = np.cumsum(problem.case.query_lens)
    parts = [np.split(np.asarray(x), ends)[:-1] for x in (state.out, state.lse)]  # behind them is padding
    return [out.tobytes() + lse.tobytes() for out, lse in zip(*parts, strict=True)]


def backend_of_engine(deterministic: bool) -> str:
    """The backend of an engine with the model of CONFIG and pages of 16 in bfloat16, on the chip that is detected."""
    config = models.config_of(CONFIG)
    caches = jax.eval_shape(lambda: config.make_caches(8, 16, "bfloat16"))
    return construction.model_of(config, caches, None, "auto", deterministic).backend
