"""After warmup() no batch compiles a program, on the accelerator too if there is one."""

import random

import jax
import pytest

from jattn import models
from jattn.engine import Engine, SamplingParams
from jattn.text import ByteTokenizer

VALUES = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=300, hidden_size=128, intermediate_size=256,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
    rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, hidden_act="silu", eos_token_id=0,
)  # fmt: skip
CONFIG = models.config_of(VALUES)


@pytest.fixture(scope="module")
def served():
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    engine = Engine(
        CONFIG, models.init_params(CONFIG, 0, dtype), ByteTokenizer(), block_size=16, num_blocks=41, max_num_seqs=6,
        max_num_batched_tokens=64, max_model_len=256,
    )  # fmt: skip
    engine.warmup()
    return engine


KINDS = {
    "greedy": dict(temperature=0, ignore_eos=True),
    "sampled": dict(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01),
    "seeded": dict(temperature=1.0, seed=7, n=3),
    "penalties": dict(temperature=0, presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.1),
    "log-probabilities": dict(temperature=0.5, logprobs=3),
    "stop strings": dict(temperature=0.9, stop=["ab", "\n"]),
    "stop tokens": dict(temperature=0.9, stop_token_ids=list(range(20, 40))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_that_ends_in_one_row_compiles_nothing(served, compiles, kind):
    rng = random.Random(kind)
    shared = [rng.randrange(3, 259) for _ in range(40)]
    prompts = [shared * (i % 2) + [rng.randrange(3, 259) for _ in range(rng.randrange(1, 90))] for i in range(14)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 90), **KINDS[kind]) for _ in prompts]
    before = served.stats
    with compiles() as seen:
        ids = [served.add_request(*each) for each in zip(prompts, params, strict=True)]
        for i in range(6):
            served.step()
            served.abort(ids[i])
        outputs = list(served.drain())
    assert seen.names == [] and not any(output.error for output in outputs)
    assert served.stats.cached_tokens > before.cached_tokens and served.stats.aborted > before.aborted


def test_all_kinds_together_with_preemption_compile_nothing(served, compiles):
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 259) for _ in range(rng.randrange(90, 140))] for _ in range(12)]
    params = [SamplingParams(max_tokens=90, ignore_eos=True) for _ in range(6)]
    params += [SamplingParams(max_tokens=80, **KINDS[kind]) for kind in list(KINDS)[1:]]
    before = served.stats
    with compiles() as seen:
        outputs = served.generate(prompts, params)
        outputs += served.generate([[5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True))
    assert seen.names == [] and not any(output.error for output in outputs)
    assert served.stats.preemptions > before.preemptions
