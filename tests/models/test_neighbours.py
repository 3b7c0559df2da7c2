"""A request's tokens do not depend on other requests, chunks, preemption or prefix hits; all families and scalings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.engine import Engine, SamplingParams, dispatch
from tests.engine.rows import likeliest
from tests.models import examples
from tests.models.examples import TRAINED

# Two requests fit in the pool only while both are short; prompts share steps of 16 tokens.
SIZES = dict(block_size=4, num_blocks=12, max_num_seqs=2, max_num_batched_tokens=16, max_burst=3, max_model_len=40)
BEGINNING = list(range(3, 12))
REQUESTS = [  # (prompt, max_tokens): the trained length of the scalings is 20
    ([*BEGINNING, 40, 41, 42], 16),  # ends at 28, grows past 20
    ([*BEGINNING, 40, 41, 42], 8),  # the same prompt, ends at 20 at most
    ([*BEGINNING, 50, 51, 52, 53, 54, 55, 56], 20),  # ends at 36
    ([*BEGINNING, *range(30, 45)], 6),  # cut into other chunks here than alone, some of them short of 20
    ([7, 8, 9], 5),
    ([*BEGINNING, 40, 41, 42], 16),  # the first again, its prompt cached
    ([*BEGINNING, 13], 10),
]
WHOLE = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in REQUESTS]
TOLD = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=1) for _, n in REQUESTS]


@pytest.fixture(autouse=True)
def quick_sampling(monkeypatch):
    """Choose the most likely token. The full sampler is tested in tests/engine; it compiles longer than a model."""
    monkeypatch.setattr(dispatch, "choose", likeliest)


def logprobs_of(output) -> np.ndarray:
    return np.array([told.logprob for told in output.logprobs])


@pytest.mark.parametrize("name", examples.DECODERS)
def test_a_requests_tokens_do_not_depend_on_neighbours_chunks_preemption_or_prefix_hits(name):
    config = models.config_of(examples.DECODERS[name])
    params = examples.params_of(config)
    new = lambda **options: Engine(config, params, **SIZES | options)
    alone = [new().generate([prompt], p)[0] for (prompt, _), p in zip(REQUESTS, TOLD, strict=True)]
    assert len({output.token_ids for output in alone}) >= 4, "the requests tell nothing apart"
    prompts = [prompt for prompt, _ in REQUESTS]
    crowded = new()
    told = crowded.generate(prompts, TOLD)
    quiet = crowded.generate(prompts[::-1], WHOLE[::-1])[::-1]  # in bursts, dispatches following one another
    stats = crowded.stats
    assert stats.cached_tokens and stats.steps > stats.dispatches
    assert stats.preemptions or len(config.cache_groups) > 1 or config.cache_groups[0].sliding_window
    for mine, other, third in zip(told, alone, quiet, strict=True):
        assert mine.token_ids == other.token_ids == third.token_ids
        np.testing.assert_allclose(logprobs_of(mine), logprobs_of(other), atol=2e-5)


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic"])
def test_a_request_is_turned_by_its_final_length_from_its_first_token_on(name):
    """Compared with one call without the engine. Both prompts are equal; final length 20 is short, 28 is long."""
    config = models.config_of(examples.DECODERS[name])
    params = examples.params_of(config)
    assert config.rope_depends_on_length
    assert config.rope_variant(TRAINED) == config.rope_variant(3) != config.rope_variant(TRAINED + 1)
    served = Engine(config, params, **SIZES)
    found = served.generate([prompt for prompt, _ in REQUESTS[:2]], TOLD[:2])
    run = jax.jit(models.uncached_logits, static_argnums=0)
    firsts = []
    for output, (prompt, most) in zip(found, REQUESTS, strict=False):
        ids = np.array([*prompt, *output.token_ids])
        meta = jattn.CommonAttentionMetadata.from_lengths(
            [len(ids)], [len(ids)], None, 4, num_tokens=32, final_seq_lens=[len(prompt) + most]
        )
        logits = np.asarray(run(config, params, np.pad(ids, (0, 32 - len(ids))), meta))
        told = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(prompt) - 1, len(ids) - 1)]
        assert output.token_ids == tuple(told.argmax(axis=1))
        np.testing.assert_allclose(logprobs_of(output), told.max(axis=1), atol=2e-5)
        firsts.append(told[0])
    assert np.abs(firsts[0] - firsts[1]).max() > 0.01, "short and long look alike"


def test_every_bit_of_a_longrope_request_is_the_same_in_a_deterministic_engine():
    """Each prompt token is then a row of its own in the batch, and each row has its request's final length."""
    config = models.config_of(examples.DECODERS["phi3, longrope"])
    new = lambda: Engine(config, examples.params_of(config), **SIZES, deterministic=True, backend="sdpa")
    crowded = new().generate([prompt for prompt, _ in REQUESTS], TOLD)
    for (prompt, _), asked, output in list(zip(REQUESTS, TOLD, crowded, strict=True))[::2]:
        (alone,) = new().generate([prompt], asked)
        assert (alone.token_ids, alone.logprobs) == (output.token_ids, output.logprobs)


def test_pages_of_other_turns_are_never_shared():
    config = models.config_of(examples.DECODERS["phi3, longrope"])
    served = Engine(config, examples.params_of(config), **SIZES | dict(num_blocks=30))
    prompt, hits = list(range(3, 16)), []
    for most in (3, 20, 5, 21, 7, 8):  # final lengths 16, 33, 18, 34, 20, 21
        before = served.stats.cached_tokens
        served.generate([prompt], SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
        hits.append(served.stats.cached_tokens - before)
    assert hits == [0, 0, 12, 12, 12, 12]


def test_warming_up_compiles_all_that_a_longrope_model_asks_for(compiles):
    config = models.config_of(examples.DECODERS["phi3, longrope"] | dict(vocab_size=59))  # traced by no other test
    served = Engine(config, examples.params_of(config), **SIZES)
    assert served.warmup() == 3
    with compiles() as seen:
        served.generate([prompt for prompt, _ in REQUESTS], WHOLE)
    assert seen.names == []


def test_an_encoders_request_does_not_depend_on_neighbours():
    config = models.config_of(examples.ENCODERS["bert"])
    params, run = examples.params_of(config), jax.jit(models.encode, static_argnums=0)
    rows = [np.arange(3, 3 + n) for n in (9, 5, 2)]

    def encoded(some):
        lengths = [len(row) for row in some]
        meta = jattn.CommonAttentionMetadata.from_lengths(lengths, lengths, None, 4, num_tokens=16, num_reqs=3)
        ids = np.concatenate(some)
        hidden = run(config, params, np.pad(ids, (0, 16 - len(ids))), meta.replace(max_query_len=16, max_seq_len=16))
        return np.split(np.asarray(hidden)[: len(ids)], np.cumsum(lengths)[:-1])

    for row, mine in zip(rows, encoded(rows), strict=True):
        np.testing.assert_allclose(mine, encoded([row])[0], atol=2e-6)


def test_an_encoder_decoders_request_does_not_depend_on_neighbours():
    config = models.config_of(examples.ENCODERS["bart"])
    params, run = examples.params_of(config), jax.jit(models.forward, static_argnums=0)
    sources, targets = [np.arange(3, 3 + n) for n in (9, 5)], [np.arange(20, 20 + n) for n in (4, 6)]

    def logits(which):
        q, e = [len(targets[i]) for i in which], [len(sources[i]) for i in which]
        tables = np.arange(16, dtype=np.int32).reshape(4, 4)
        meta = jattn.CommonAttentionMetadata.from_lengths(
            q, q, tables[which], 4, num_tokens=16, num_reqs=2, encoder_seq_lens=e,
            cross_block_table=tables[2:][which], num_encoder_tokens=16,
        )  # fmt: skip
        meta = meta.replace(max_query_len=16, cross=meta.cross.replace(max_query_len=16))
        pad = lambda rows: jnp.asarray(np.pad(np.concatenate(rows), (0, 16 - sum(map(len, rows)))))
        ids, encoder_ids = pad([targets[i] for i in which]), pad([sources[i] for i in which])
        caches = config.make_caches(16, 4, "float32")
        _, rows = run(config, params, ids, caches, meta, encoder_ids=encoder_ids)
        return np.split(np.asarray(rows)[: sum(q)], np.cumsum(q)[:-1])

    for i, mine in enumerate(logits([0, 1])):
        np.testing.assert_allclose(mine, logits([i])[0], atol=2e-5)
