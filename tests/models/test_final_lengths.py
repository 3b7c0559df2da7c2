"""The engine with longrope and dynamic NTK generates what transformers does, on each side of the trained length."""

import numpy as np
import pytest

from jattn import models
from jattn.engine import Engine, SamplingParams
from tests.models.test_parity import agree
from tests.models.witness import Example, logits

transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
torch = pytest.importorskip("torch", reason="the witness needs the extra 'parity'")

TRAINED = 20
LONGROPE = dict(
    rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.25, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0, 8.0]
)
PHIMOE = dict(short_mscale=1.1, long_mscale=1.4, original_max_position_embeddings=TRAINED)
EXAMPLES = {
    "longrope": Example(
        "phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=TRAINED, eos_token_id=None)
    ),
    "phimoe": Example(
        "phimoe",
        dict(rope_parameters=LONGROPE | PHIMOE, eos_token_id=None, num_local_experts=4, num_experts_per_tok=2),
    ),
    "dynamic": Example(
        "llama",
        dict(max_position_embeddings=TRAINED, eos_token_id=None,
             rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=100.0)),
    ),
}  # fmt: skip
RNG = np.random.default_rng(2)
BEGINNING = RNG.integers(3, 61, 8).tolist()
SHORT = [([*BEGINNING, 5, 6, 7], 9), ([*BEGINNING, 9], 6), ([4, 5], 18)]  # end at 20, 15 and 20
LONG = [([*BEGINNING, *RNG.integers(3, 61, n).tolist()], most) for n, most in ((13, 9), (20, 12))]  # prompts of 21, 28
CROSSING = [([*BEGINNING, 5, 6, 7], 14), ([*BEGINNING, *range(30, 42)], 1)]  # end at 25 and, just, at 21
REQUESTS = [*LONG, *SHORT, *CROSSING, *LONG]


@pytest.fixture(scope="module", params=EXAMPLES)
def served(request, tmp_path_factory):
    """(transformers' model, our config and params, the outputs of REQUESTS run together with too few blocks)."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = EXAMPLES[request.param].save(folder)
    if request.param == "phimoe":  # transformers updates inv_freq for longer requests, but then computes the short one
        rotary = theirs.model.rotary_emb
        rotary.rope_init_fn = lambda config: (rotary.inv_freq, 1.0)
    config, params = models.load(folder)
    engine = Engine(
        config, params, block_size=4, num_blocks=17, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=44
    )
    asked = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for _, most in REQUESTS]
    outputs = engine.generate([prompt for prompt, _ in REQUESTS], asked)
    assert engine.stats.preemptions and engine.stats.cached_tokens
    return request.param, theirs, config, params, [list(output.token_ids) for output in outputs]


def generated(theirs, prompt: list[int], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    config = transformers.GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        found = theirs.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    return found[0].tolist()[len(prompt) :]


@pytest.mark.filterwarnings("ignore")  # transformers warns of requests past max_position_embeddings
def test_a_request_that_stays_on_one_side_is_what_transformers_generates(served):
    """Not dynamic NTK past the trained length: transformers rotates each token there by the length so far."""
    name, theirs, _, _, outputs = served
    for (prompt, most), mine in zip(REQUESTS, outputs, strict=True):
        short, long = len(prompt) + most <= TRAINED, len(prompt) > TRAINED
        if short or (long and name != "dynamic"):
            assert mine == generated(theirs, prompt, most)


@pytest.mark.filterwarnings("ignore")
def test_every_request_is_transformers_forward_at_its_final_length(served):
    """Padding tokens after it, up to its final length, tell transformers that length and have no other effect."""
    _, theirs, config, params, outputs = served
    for (prompt, most), mine in zip(REQUESTS, outputs, strict=True):
        ids = np.array([*prompt, *mine])
        assert len(ids) == len(prompt) + most
        logits(theirs, ids[:2])  # its dynamic NTK remembers the longest request until it meets a short one
        wanted = logits(theirs, ids)
        assert mine == wanted[len(prompt) - 1 : -1].argmax(axis=1).tolist()
        agree(np.asarray(models.prompt_logits(config, params, ids, chunk=7)), wanted)
