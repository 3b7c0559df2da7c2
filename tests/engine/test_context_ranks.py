"""Context ranks: each has some keys of every request, and the engine's tokens are those of one device."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jattn import UnsupportedError, models
from jattn.engine import Engine, SamplingParams, sizing
from jattn.engine.params import MAX_LOGPROBS
from tests.engine import test_mesh as on_mesh
from tests.engine.test_mesh import COMMON, GREEDY, LATENT, LLAMA, OPTIONS, PROMPT, WINDOWS, engine, mesh, of_one_device
from tests.models import tiny

SINKS = models.config_of(
    COMMON | dict(
        model_type="gpt_oss", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=9
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "data", "ranks", "context", "is_deterministic"),
    [(LLAMA, 1, 1, 2, False), (WINDOWS, 1, 2, 2, True), (SINKS, 1, 1, 4, True), (LATENT, 2, 1, 2, True)],
    ids=["keys alone", "keys and kv heads, windows", "sinks, experts", "a latent cache of two data ranks"],
)
def test_the_tokens_are_those_of_one_device_and_nothing_compiles(
    config, data, ranks, context, is_deterministic, compiles
):
    few = dict(max_num_seqs=2, num_blocks=16)  # few programs, and too few blocks
    served = engine(config, mesh=mesh(ranks, data, context), deterministic=is_deterministic, **few)
    served.warmup()
    with compiles() as seen:
        tokens = on_mesh.tokens_of_a_trace(served)
    assert seen.names == []
    assert tokens == of_one_device(config)


def test_each_rank_has_its_part_of_weights_and_cache():
    """The two kv heads are on the two tensor ranks, two of a block's four tokens on each of the context ranks."""
    served = engine(mesh=mesh(2, context=2))
    part = lambda x: {shard.data.shape for shard in x.addressable_shards}
    attn, mlp = served.params["layers"][1]["attn"], served.params["layers"][1]["mlp"]
    assert part(served.params["embed"]) == {(64 // 4, 32)} and part(mlp["up"]["kernel"]) == {(32, 16)}
    assert part(attn["q"]["kernel"]) == {(32, 16)} and part(attn["o"]["kernel"]) == {(16, 32)}
    assert part(attn["k"]["kernel"]) == {(32, 8)} and part(served.caches[0].k) == {(22, 1, 2, 8)}
    latent = engine(LATENT, mesh=mesh(1, context=2))
    assert part(latent.caches[0].v) == {(22, 1, 2, 24)} and part(latent.params["layers"][0]["attn"]["w_uk"]) == {
        (8, 6, 24)
    }


@pytest.mark.parametrize("config", [SINKS, LATENT], ids=["sinks", "latent cache"])
def test_ranks_send_queries_and_states_and_no_weights(config):
    """For each layer: queries of all heads; outputs with log-sum-exps; and the all-reduces of every mesh."""
    served = engine(config, mesh=mesh(1, context=2))
    tokens, layers, heads = OPTIONS["max_num_batched_tokens"], len(config.layers), 8
    found = on_mesh.collectives(served)
    assert {name for name, _ in found} == {"all-reduce", "all-gather", "all-to-all"}
    sent = -(-OPTIONS["max_num_seqs"] // 2) * config.vocab_size // 2  # logits of the other rank's rows
    assert {size for name, size in found if name == "all-to-all"} == {sent}
    width = config.layers[0].attention.head_dim if config is SINKS else 6 + 4  # of a query
    value = 8 if config is SINKS else 24  # of an output, of latent attention before w_uv
    likeliest = MAX_LOGPROBS * (OPTIONS["max_num_seqs"] + 1)  # tokens of each row, padded for two ranks, at most
    gathered = sorted(size for name, size in found if name == "all-gather" and size > likeliest)
    states = 2 * tokens * heads  # of both ranks; on a GPU, XLA gathers outputs and log-sum-exps together
    assert gathered == sorted([tokens * heads * width, states * value, states] * layers)
    reduced = [size for name, size in found if name == "all-reduce"]
    assert max(reduced) <= tokens * heads * 8, "hidden states and logits"


def test_the_steps_after_a_rows_end_leave_its_last_block_as_it_is():
    """The block is in the prefix cache; these steps compute the last sampled token at the last position."""
    served, alone = engine(mesh=mesh(1, context=2), deterministic=True), on_mesh.deterministic()
    ends, goes_on = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (11, 30))
    first, _ = served.generate([PROMPT[:6], PROMPT], [ends, goes_on])
    before = served.stats.cached_tokens
    again = [*PROMPT[:6], *first.token_ids]  # 16 tokens of it were computed
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    (found,), (wanted,) = (each.generate([again], params) for each in (served, alone))
    assert served.stats.cached_tokens - before == 16
    assert found.logprobs[0].logprob == pytest.approx(wanted.logprobs[0].logprob, abs=1e-5)


def test_a_cache_of_8_bits_has_its_scales_where_its_keys_are():
    options = dict(cache_dtype="int8", deterministic=True, backend="sdpa")
    served = engine(mesh=mesh(2, context=2), **options)
    (wanted,) = engine(**options).generate([PROMPT], GREEDY)
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids
    assert {shard.data.shape for shard in served.caches[0].k_token_scale.addressable_shards} == {(22, 1, 2)}


def test_a_folder_is_served_and_its_block_has_the_usual_tokens_on_each_rank(tmp_path):
    config = tiny.CONFIG | dict(vocab_size=64, head_dim=8)
    tiny.write(tmp_path, config, tiny.tensors(config))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    options = OPTIONS | dict(block_size=None, deterministic=True)
    served = Engine.from_pretrained(tmp_path, decode_context_parallel=2, **options)
    assert served.shapes.block_size == 2 * sizing.default_block_size()
    assert served.caches[0].k.sharding.shard_shape(served.caches[0].k.shape)[2] == sizing.default_block_size()
    (wanted,) = Engine.from_pretrained(tmp_path, **options).generate([PROMPT], GREEDY)
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids


# ------------------------------------------------------------------ what cannot be
def test_what_context_ranks_cannot_share_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="block_size=5 must be a multiple of the 2 ranks of the axis 'context'"):
        engine(mesh=mesh(1, context=2), block_size=5)
    six = models.config_of(
        COMMON | dict(model_type="llama", num_attention_heads=6, num_key_value_heads=2, vocab_size=60)
    )
    with pytest.raises(ValueError, match="6 query heads, which 4 ranks .2 tensor x 2 context. cannot share evenly"):
        models.ModelMesh.of(six, mesh(2, context=2))
    with pytest.raises(ValueError, match="the mesh has the axes"):
        engine(mesh=Mesh(np.array(jax.devices()[:2]), ("context",)))


@pytest.mark.parametrize("backend", ["cpu_native", "pallas_cpu"])
def test_a_backend_without_context_parallelism_is_refused_at_the_start(backend):
    with pytest.raises(UnsupportedError, match=f"{backend}.*DCP"):
        engine(mesh=mesh(1, context=2), backend=backend)
