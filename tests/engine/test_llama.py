"""The engine with a real decoder, compared with the model without a cache."""

import random

import jax
import numpy as np
import pytest

from jattn import models
from jattn.engine import Engine, SamplingParams
from tests.models import tiny

CONFIG = models.config_of(
    dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=67, hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, hidden_act="silu", eos_token_id=0,
    )
)  # fmt: skip
PARAMS = models.init_params(CONFIG, 3, "float32")
OPTIONS = dict(block_size=4, num_blocks=26, max_num_seqs=4, max_num_batched_tokens=16, deterministic=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


def requests(count=8):
    rng = random.Random(0)
    shared = [rng.randrange(1, 67) for _ in range(16)]
    return [shared[: rng.randrange(17)] + [rng.randrange(1, 67) for _ in range(1 + i * 3)] for i in range(count)]


@pytest.fixture(scope="module")
def crowd():
    """All requests at once, in a pool with too few blocks for all."""
    served = Engine(CONFIG, PARAMS, backend="sdpa", **OPTIONS | dict(num_blocks=15, max_model_len=56))
    outputs = served.generate(requests(), GREEDY)
    assert served.stats.preemptions and served.stats.cached_tokens
    return outputs


def test_greedy_is_the_model_without_a_cache_token_by_token(crowd):
    ids = [[*output.prompt_token_ids, *output.token_ids] for output in crowd[::3]]
    for output, tokens in zip(crowd[::3], ids, strict=True):
        padded = np.pad(tokens, (0, 56 - len(tokens)))
        logits = np.asarray(models.prompt_logits(CONFIG, PARAMS, padded, backend="sdpa"))
        wanted = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        for i, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            at = len(output.prompt_token_ids) + i - 1
            assert token == np.argmax(logits[at])
            assert told.logprob == pytest.approx(wanted[at, token], abs=1e-4)


def test_alone_or_in_a_crowd_every_bit_is_the_same(crowd):
    """In other batches and chunks, without preemption or cached prefix: exactly the same log-probabilities."""
    served = Engine(
        CONFIG, PARAMS, backend="sdpa", **OPTIONS | dict(num_blocks=15, max_model_len=56), prefix_caching=False
    )
    for prompt, output in zip(requests(), crowd, strict=True):
        (alone,) = served.generate([prompt], GREEDY)
        assert alone.token_ids == output.token_ids
        assert alone.logprobs == output.logprobs
    assert not served.stats.preemptions and not served.stats.cached_tokens


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_every_bit_of_float16_is_the_same_alone_and_in_a_crowd(tmp_path, backend):
    tiny.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    sizes = OPTIONS | dict(num_blocks=15, max_model_len=56, backend=backend, dtype="float16")
    served, other = (Engine.from_pretrained(tmp_path, prefix_caching=share, **sizes) for share in (True, False))
    prompts = [[token % 31 for token in prompt] for prompt in requests()]
    together = served.generate(prompts, GREEDY)
    assert served.stats.preemptions and served.stats.cached_tokens and served.caches[0].spec.dtype == "float16"
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = other.generate([prompt], GREEDY)
        assert alone.token_ids == output.token_ids and alone.logprobs == output.logprobs


def test_a_burst_gives_the_tokens_of_single_steps(crowd):
    served = Engine(CONFIG, PARAMS, backend="sdpa", **OPTIONS | dict(num_blocks=15, max_model_len=56))
    outputs = served.generate(requests(), SamplingParams(temperature=0, max_tokens=12))
    assert served.stats.steps > served.stats.dispatches
    assert [output.token_ids for output in outputs] == [output.token_ids for output in crowd]


def test_a_backend_that_varies_with_the_batch_is_refused():
    with pytest.raises(ValueError, match="pallas_gpu.*does not give the same bits.*use one of .*sdpa"):
        Engine(CONFIG, PARAMS, backend="pallas_gpu", **OPTIONS)


def test_the_pool_is_sized_from_free_memory(monkeypatch):
    from jattn.engine import sizing

    per_block = 2 * 2 * 4 * 8 * 4  # layers, k and v, slots, head dim, bytes
    monkeypatch.setattr(sizing, "free_bytes", lambda: 10 * per_block + 5)
    served = Engine(CONFIG, PARAMS, **OPTIONS | dict(num_blocks=None))
    assert served.tables.pools[0].num_blocks == 10 and served.limits.max_model_len == 36
    with pytest.raises(RuntimeError, match="10 blocks.*needs 17"):
        Engine(CONFIG, PARAMS, **OPTIONS | dict(num_blocks=None, max_model_len=64))
    monkeypatch.setattr(sizing, "free_bytes", lambda: 10**9)
    served = Engine(CONFIG, PARAMS, **OPTIONS | dict(num_blocks=None))
    assert served.tables.pools[0].num_blocks == 4 * 32 + 1, "no more than all sequences at full length can use"


def test_a_hybrids_pools_share_free_memory_by_what_each_can_use(monkeypatch):
    """Layers with a window of 9 get the blocks that it needs; the other layers get the rest of the memory."""
    from jattn.engine import sizing
    from jattn.engine.tables import max_blocks_of_group

    config = models.config_of(
        dict(
            model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], vocab_size=67, hidden_size=16, head_dim=8,
            intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0,
            max_position_embeddings=512, sliding_window=9, query_pre_attn_scalar=8, rope_theta=1e4, rms_norm_eps=1e-5,
            hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=1e4,
        )
    )  # fmt: skip
    window, full = config.cache_groups
    assert (window.sliding_window, full.sliding_window, len(window.layers), len(full.layers)) == (9, None, 5, 1)
    layer, most = 2 * 4 * 8 * 4, max_blocks_of_group(window, 4, 4, 16, 2 * 8, True)
    memory = layer * (200 + 5 * (most + 1))
    monkeypatch.setattr(sizing, "free_bytes", lambda: memory + 5)
    params = models.init_params(config, 3, "float32")
    served = Engine(config, params, **OPTIONS | dict(num_blocks=None))
    assert [pool.num_blocks for pool in served.tables.pools] == [most + 1, 200]
    assert sum(cache.k.nbytes + cache.v.nbytes for cache in served.caches) == memory
    output, *_ = served.generate(requests()[-1:], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens = [*output.prompt_token_ids, *output.token_ids]
    logits = np.asarray(models.prompt_logits(config, params, tokens, backend="sdpa"))
    assert output.token_ids == tuple(logits[len(output.prompt_token_ids) - 1 : -1].argmax(axis=1))


def test_a_window_frees_blocks_behind_it_and_the_model_does_not_notice():
    window = dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=9, head_dim=8)
    same = dict(
        vocab_size=67, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=1e4,
        tie_word_embeddings=False, hidden_act="silu", eos_token_id=0,
    )  # fmt: skip
    config = models.config_of(window | same)
    params = models.init_params(config, 3, "float32")
    served = Engine(config, params, backend="sdpa", **OPTIONS | dict(num_blocks=15, max_model_len=56))
    served.add_request(requests()[-1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    held = []
    while served.has_work:
        (output, *_) = served.step() or [None]
        held.append(served.tables.pools[0].num_held)
    tokens = [*output.prompt_token_ids, *output.token_ids]
    logits = np.asarray(models.prompt_logits(config, params, np.pad(tokens, (0, 56 - len(tokens))), backend="sdpa"))
    first = len(output.prompt_token_ids) - 1
    assert output.token_ids == tuple(logits[first : len(tokens) - 1].argmax(axis=1))
    assert max(held) <= 8 < len(tokens) // 4, "a window of 9, and 16 tokens of a step, in blocks of 4"


@pytest.mark.parametrize(
    ("options", "most"),
    [(dict(cache_dtype="int8"), 0.05), (dict(cache_dtype="float8_e4m3fn", cache_quant="per_tensor"), 0.2)],
    ids=["int8", "fp8"],
)
def test_a_cache_of_8_bits_is_served_and_gives_nearly_the_same_numbers(options, most, crowd):
    """The first tokens' log-probabilities, before a token can differ. fp8 keeps 4 bits of a number, int8 8 of a row."""
    served = Engine(CONFIG, PARAMS, **OPTIONS | dict(deterministic=False) | options)
    outputs = served.generate(requests(), GREEDY)
    assert {cache.spec.quant for cache in served.caches} == {options.get("cache_quant", "per_token_head")}
    for output, wanted in zip(outputs, crowd, strict=True):
        assert abs(output.logprobs[0].logprob - wanted.logprobs[0].logprob) < most


def test_scales_of_a_cache_that_needs_none_are_refused():
    with pytest.raises(ValueError, match="cache_quant='per_head' needs a cache_dtype of 8 bits, one of float8_e4m3fn"):
        Engine(CONFIG, PARAMS, **OPTIONS, cache_quant="per_head")
    with pytest.raises(ValueError, match="cache_quant='none' must be one of per_tensor, per_head, per_token_head"):
        Engine(CONFIG, PARAMS, **OPTIONS, cache_dtype="int8", cache_quant="none")
    for quant in ("per_tensor", "per_head"):  # without scales, keys and values would be rounded to integers
        with pytest.raises(ValueError, match=f"cache_quant='{quant}' with cache_dtype='int8': the weights have no"):
            Engine(CONFIG, PARAMS, **OPTIONS, cache_dtype="int8", cache_quant=quant)
