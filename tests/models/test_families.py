"""Random configs of every family in options.TABLE agree with transformers, in prefill, chunks, decoding and serving."""

import numpy as np
import pytest

from jattn import models
from jattn.engine import Engine, SamplingParams, dispatch
from tests.engine.rows import likeliest
from tests.models import options
from tests.models.serving import Server
from tests.models.witness import logits, saved

pytest.importorskip("transformers", reason="the witness needs the extra 'parity': pip install -e '.[parity]'")

LONG, SHORT = 21, 13
SCHEDULES = {
    "whole": [(LONG, 0), (0, SHORT)],
    "chunked and ragged": [(12, 10), (9, 3)],
    "token by token": [(11, 9), *[(1, 1)] * 4, *[(1, 0)] * 6],
}
DRAWS = [(name, draw) for name, row in options.FAMILIES.items() for draw in range(row.draws)]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SIZES = dict(block_size=4, num_blocks=24, max_num_seqs=2, max_num_batched_tokens=16, max_burst=3, max_model_len=40)


@pytest.fixture(scope="module", params=DRAWS, ids=lambda row: f"{row[0]} {row[1]}")
def folder(request, tmp_path_factory):
    """(config, params, transformers' model, whether to serve it) of a random model that transformers saved."""
    name, draw = request.param
    path = tmp_path_factory.mktemp(name)
    theirs = saved(options.FAMILIES[name].config(draw), path, seed=draw)
    return *models.load(path), theirs, draw == 0


def test_logits_agree_by_every_schedule(folder):
    config, params, theirs, _ = folder
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, config.vocab_size, n) for n in (LONG, SHORT)]
    wanted = [logits(theirs, prompt) for prompt in prompts]
    for name, schedule in SCHEDULES.items():
        for mine, exact in zip(Server(config, params).run(prompts, schedule), wanted, strict=True):
            worst, spread = np.abs(mine - exact).max(), exact.std()
            assert worst <= 1e-4 * spread, f"{name}: off by {worst / spread:.2e} of the spread {spread:.3f}"


def test_the_engines_greedy_tokens_are_theirs(folder, monkeypatch):
    config, params, theirs, is_served = folder
    if not is_served:
        return  # one config of each family goes through the engine
    monkeypatch.setattr(dispatch, "choose", likeliest)
    prompts = [list(range(3, 12)), list(range(20, 43))]
    for prompt, output in zip(prompts, Engine(config, params, **SIZES).generate(prompts, GREEDY), strict=True):
        rows = logits(theirs, np.array([*prompt, *output.token_ids]))[len(prompt) - 1 : -1]
        told = rows[np.arange(len(rows)), list(output.token_ids)]
        assert len(told) == GREEDY.max_tokens and (rows.max(axis=1) - told).max() <= 1e-4 * rows.std()
