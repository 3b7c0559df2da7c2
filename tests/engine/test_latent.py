"""The engine with a latent cache (MLA): prefixes, chunks, preemption, bursts, no compilation, and the pool's size."""

import dataclasses
import random

import numpy as np
import pytest

import jattn
from jattn import models
from jattn.engine import Engine, SamplingParams, sizing
from tests.kernels.cpu.native_setup import needs_library
from tests.models import examples

VOCAB = 67
CONFIG = models.config_of(
    dict(
        model_type="deepseek_v3", vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, rms_norm_eps=1e-5, eos_token_id=0, kv_lora_rank=24,
        q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_group=2, topk_group=1,
    )
)  # fmt: skip
PARAMS = examples.params_of(CONFIG, 3)
OPTIONS = dict(block_size=4, num_blocks=15, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=56, max_burst=4)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BACKENDS = ("auto", "mla_sdpa")


def requests(count: int = 8) -> list[list[int]]:
    """Prompts with a common beginning; most are longer than a step's tokens, or than mha_threshold."""
    rng = random.Random(0)
    shared = [rng.randrange(1, VOCAB) for _ in range(16)]
    return [shared[: rng.randrange(17)] + [rng.randrange(1, VOCAB) for _ in range(1 + i * 3)] for i in range(count)]


def assert_greedy(outputs, tolerance: float = 1e-4) -> None:
    """Each token's logit, of the model without a cache, is the largest up to `tolerance` of the logits' spread."""
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        padded = np.pad(tokens, (0, 56 - len(tokens))).astype(np.int32)
        meta = jattn.CommonAttentionMetadata.from_lengths([56], [56], None, 4)
        logits = np.asarray(models.uncached_logits(CONFIG, PARAMS, padded, meta, backend="sdpa"))
        rows = logits[len(output.prompt_token_ids) - 1 : len(tokens) - 1]
        told = rows[np.arange(len(rows)), list(output.token_ids)]
        assert len(told) == GREEDY.max_tokens and (rows.max(axis=1) - told).max() <= tolerance * rows.std()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crowd_with_preemption_and_shared_prefixes_is_greedy_and_compiles_nothing(backend, compiles):
    served = Engine(CONFIG, PARAMS, backend=backend, **OPTIONS | dict(max_num_seqs=2))  # few programs
    served.warmup()
    with compiles() as seen:
        outputs = served.generate(requests(), GREEDY)
    assert seen.names == []
    stats = served.stats
    assert stats.preemptions and stats.cached_tokens and stats.steps > stats.dispatches
    assert_greedy(outputs)


def test_prompts_are_longer_and_shorter_than_the_limit_between_the_two_forms():
    """Otherwise the test above would see one form only."""
    limit, lengths = CONFIG.layers[0].attention.mha_threshold, [len(prompt) for prompt in requests()]
    assert min(lengths) <= limit < min(max(lengths), OPTIONS["max_num_batched_tokens"])


@pytest.mark.slow
def test_alone_without_prefixes_the_tokens_are_the_same():
    crowd = Engine(CONFIG, PARAMS, **OPTIONS).generate(requests(), GREEDY)
    served = Engine(CONFIG, PARAMS, **OPTIONS, prefix_caching=False)
    for prompt, output in zip(requests(), crowd, strict=True):
        assert served.generate([prompt], GREEDY)[0].token_ids == output.token_ids
    assert not served.stats.preemptions and not served.stats.cached_tokens


@pytest.mark.parametrize("backend", [pytest.param("mla_cpu_native", marks=needs_library), "mla_sdpa"])
def test_a_deterministic_engine_gives_the_same_bits_alone_and_in_a_crowd(backend):
    """Each of its rows has one token, and is computed in the absorbed form."""
    options, ask = OPTIONS | dict(backend=backend, deterministic=True), dataclasses.replace(GREEDY, logprobs=2)
    served, alone = Engine(CONFIG, PARAMS, **options), Engine(CONFIG, PARAMS, **options, prefix_caching=False)
    crowd = served.generate(requests(), ask)
    assert served.stats.preemptions and served.stats.cached_tokens
    for prompt, output in zip(requests(), crowd, strict=True):
        (again,) = alone.generate([prompt], ask)
        assert again.token_ids == output.token_ids and again.logprobs == output.logprobs


@pytest.mark.slow
def test_a_cache_of_8_bits_is_nearly_greedy():
    assert_greedy(Engine(CONFIG, PARAMS, cache_dtype="int8", **OPTIONS).generate(requests(3), GREEDY), tolerance=0.05)


def test_the_pool_is_sized_by_the_bytes_of_latent_rows(monkeypatch):
    per_block = 2 * 4 * (24 + 4) * 4  # layers, slots, latent and rotated key, bytes
    monkeypatch.setattr(sizing, "free_bytes", lambda devices=None: 10 * per_block + 5)
    served = Engine(CONFIG, PARAMS, **OPTIONS | dict(num_blocks=None, max_model_len=None))
    assert served.tables.pools[0].num_blocks == 10
    assert sum(cache.k.nbytes + cache.v.nbytes for cache in served.caches) == 10 * per_block


def test_a_backend_for_keys_and_values_is_refused():
    with pytest.raises(jattn.UnsupportedError, match="'sdpa' does not support this layer .supported by .*mla_sdpa"):
        Engine(CONFIG, PARAMS, backend="sdpa", **OPTIONS)
