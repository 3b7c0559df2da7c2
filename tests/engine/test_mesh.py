"""An engine on a mesh, compared with one on a single device."""

import dataclasses
import functools
import gc
import logging
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jattn import UnsupportedError, models
from jattn.engine import Engine, SamplingParams, sizing, warming
from jattn.engine.dispatch import dispatch
from jattn.engine.footprint import Footprint
from jattn.engine.params import MAX_LOGPROBS
from jattn.engine.programs import Programs
from jattn.models import sharded_products
from jattn.models.load import stored_weights
from jattn.ops import product
from jattn.ops.quantised import is_quantised, plain
from pallas_kernels.cpu.native import library
from tests.models import test_hub_formats, test_hub_nvfp4, tiny

VOCAB = 64
COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, head_dim=8,
    max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=1e4, eos_token_id=0,
)  # fmt: skip
LLAMA = models.config_of(COMMON | dict(model_type="llama", num_key_value_heads=2))
WINDOWS = models.config_of(
    COMMON | dict(model_type="gemma2", num_key_value_heads=2, sliding_window=9, query_pre_attn_scalar=8)
)
EXPERTS = models.config_of(
    COMMON | dict(model_type="mixtral", num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2)
)
LATENT_SIZES = COMMON | dict(
    model_type="deepseek_v3", head_dim=4, kv_lora_rank=24, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=8, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
    n_group=2, topk_group=1,
)  # fmt: skip
LATENT = models.config_of(LATENT_SIZES)
# Too few blocks for all sequences, so some are preempted.
OPTIONS = dict(block_size=4, num_blocks=22, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=56, max_burst=4)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


PROMPT = list(range(1, 20))


def mesh(ranks: int, data: int = 1, context: int = 1) -> Mesh:
    if len(jax.devices()) < data * ranks * context:
        pytest.skip(f"needs {data * ranks * context} devices")
    devices = np.array(jax.devices()[: data * ranks * context])
    return Mesh(devices.reshape(data, ranks, context), ("data", "tensor", "context"))


@functools.cache
def params_of(config, quantization: str | None = None):
    params = models.init_params(config, 3, "float32")
    return params if quantization is None else models.quantise(params, quantization)


def engine(config=LLAMA, quantization: str | None = None, **options) -> Engine:
    return Engine(config, params_of(config, quantization), **OPTIONS | options)


def tokens_of_a_trace(served: Engine, requests: int = 24) -> dict[str, tuple[int, ...]]:
    """The tokens of random greedy requests, some with a common beginning; of those that are not aborted."""
    rng, before = random.Random(0), served.stats
    shared = [rng.randrange(1, VOCAB) for _ in range(20)]
    outputs, aborted = {}, set()
    for i in range(requests):
        prompt = shared[: rng.randrange(21)] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 20), ignore_eos=True)
        served.add_request(prompt, params, request_id=str(i))
        if i % 2:
            outputs |= {output.id: output for output in served.step()}
        if i % 7 == 3:
            aborted.add(str(i - 1))
            served.abort(str(i - 1))
    outputs |= {output.id: output for output in served.drain()}
    stats = served.stats
    assert stats.preemptions > before.preemptions and stats.cached_tokens > before.cached_tokens
    assert stats.steps - before.steps > stats.dispatches - before.dispatches, "no dispatch had several steps"
    assert not any(output.error for output in outputs.values())
    return {id: output.token_ids for id, output in outputs.items() if id not in aborted}


@functools.cache
def of_one_device(config):
    """Of a deterministic engine: it has one program, and another engine four."""
    return tokens_of_a_trace(engine(config, deterministic=True))


@pytest.mark.parametrize(
    ("config", "ranks", "is_deterministic"),
    [(LLAMA, 2, False), (WINDOWS, 4, True), (EXPERTS, 2, True), (LATENT, 2, True)],
    ids=["kv heads shared out", "two ranks for each kv head, windows", "experts shared out", "a latent cache"],
)
def test_the_tokens_are_those_of_one_device_and_nothing_compiles(config, ranks, is_deterministic, compiles):
    """A deterministic engine has one program, which is soon compiled."""
    few = dict(max_num_seqs=2, num_blocks=16)  # few programs, and too few blocks
    served = engine(config, mesh=mesh(ranks), deterministic=is_deterministic, **few)
    served.warmup()
    with compiles() as seen:
        tokens = tokens_of_a_trace(served)
    assert seen.names == []
    assert tokens == of_one_device(config)


def test_a_latent_layer_whose_queries_are_one_projection():
    """As DeepSeek V2 Lite. Its "q" is no part of a projection of q, k and v."""
    config = models.config_of(LATENT_SIZES | dict(q_lora_rank=None))
    wanted, found = (
        engine(config, mesh=on, deterministic=True).generate([PROMPT], GREEDY)[0].token_ids for on in (None, mesh(2))
    )
    assert found == wanted


# ------------------------------------------------------------------ options; a deterministic engine has one program
@functools.cache
def deterministic(ranks: int = 1) -> Engine:
    return engine(deterministic=True, backend="sdpa", mesh=mesh(ranks) if ranks > 1 else None)


KINDS = {
    "log-probabilities": dict(temperature=0, logprobs=3),
    "penalties": dict(temperature=0, presence_penalty=0.9, frequency_penalty=0.3, repetition_penalty=1.3),
    "drawn": dict(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=5, n=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_over_a_distributed_vocabulary(kind):
    params = SamplingParams(max_tokens=10, **KINDS[kind])
    prompts = [PROMPT[:i] for i in (3, 9, 17)]
    for a, b in zip(deterministic().generate(prompts, params), deterministic(2).generate(prompts, params), strict=True):
        assert [x.token_ids for x in a.outputs] == [x.token_ids for x in b.outputs]
        for told, wanted in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert told.top.keys() == wanted.top.keys() and told.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_alone_or_in_a_crowd_every_bit_is_the_same():
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2)
    prompts = [PROMPT[:i] for i in (3, 9, 17, 12)]
    for prompt, wanted in zip(prompts, deterministic(2).generate(prompts, params), strict=True):
        (alone,) = deterministic(2).generate([prompt], params)
        assert alone.token_ids == wanted.token_ids and alone.logprobs == wanted.logprobs


def test_sleep_and_new_weights():
    served = deterministic(2)
    (wanted,) = served.generate([PROMPT], GREEDY)
    places = [x.sharding for x in jax.tree.leaves(served.params)]
    served.sleep()
    served.wake()
    assert [x.sharding for x in jax.tree.leaves(served.params)] == places
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids
    other = models.init_params(LLAMA, 4, "float32")
    served.update_weights(other)
    assert [x.sharding for x in jax.tree.leaves(served.params)] == places
    alone = Engine(LLAMA, other, **OPTIONS, deterministic=True, backend="sdpa")
    assert served.generate([PROMPT], GREEDY)[0].token_ids == alone.generate([PROMPT], GREEDY)[0].token_ids
    served.update_weights(params_of(LLAMA))


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (1, 2)])
def test_a_dispatch_that_fails_with_the_caches_fails_its_rows_and_nobody_else(monkeypatch, caplog, ranks, data):
    """The next dispatch was sent already: XLA would end the process that gives it deleted caches."""
    caplog.set_level(logging.CRITICAL, "jattn.engine")
    served = engine(deterministic=True, backend="sdpa", mesh=mesh(ranks, data))
    (wanted,) = served.generate([PROMPT], GREEDY)
    real, calls = Programs.__call__, iter(range(1, 10**6))

    def failing(*args):
        results = real(*args)
        if next(calls) == 1:
            raise RuntimeError("after donation")
        return results

    monkeypatch.setattr(Programs, "__call__", failing)
    assert served.generate([PROMPT], GREEDY)[0].error
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids


def test_a_warm_up_that_fails_with_the_caches_can_be_repeated(monkeypatch):
    served, real = deterministic(2), warming._run
    monkeypatch.setattr(warming, "_run", lambda *args: real(*args) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.warmup()
    monkeypatch.undo()
    assert served.warmup() == 1 and not served.generate([PROMPT], GREEDY)[0].error


def test_a_cache_of_8_bits_has_its_scales_where_its_heads_are():
    served = engine(mesh=mesh(4), cache_dtype="int8", deterministic=True, backend="sdpa")
    (wanted,) = engine(cache_dtype="int8", deterministic=True, backend="sdpa").generate([PROMPT], GREEDY)
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids
    assert {shard.data.shape for shard in served.caches[0].k_token_scale.addressable_shards} == {(22, 1, 4)}


# ------------------------------------------------------------------ what lies where, and what is sent
def program_of(served: Engine) -> str:
    """The compiled program of the largest batch."""
    runner = served.runner
    batch = warming._padding(runner.model, served.shapes, served.shapes.all()[-1])
    return dispatch.lower(runner.model, runner.params, runner.caches, runner._row_state, batch).compile().as_text()


def collectives(served: Engine) -> list[tuple[str, int]]:
    """(operation, numbers in its result) of each collective in the program of the largest batch."""
    program = program_of(served)
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = []
    for shapes, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", program):
        sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in re.findall(r"\w+\[([\d,]*)\]", shapes)]
        found.append((name, int(max(sizes))))
    return found


@pytest.mark.parametrize(
    ("config", "quantization"),
    [(LLAMA, None), (EXPERTS, None), (LATENT, None), (LLAMA, "int4")],
    ids=["dense", "experts", "latent cache", "quantised"],
)
def test_no_weight_and_no_logits_are_gathered(config, quantization):
    served = engine(config, quantization, mesh=mesh(4))
    rows, layers = OPTIONS["max_num_seqs"], len(config.layers)
    found = collectives(served)
    assert {name for name, _ in found} == {"all-reduce", "all-gather", "all-to-all"}
    padded = -(-rows // 4) * 4  # as many rows for each of the 4 ranks
    most = MAX_LOGPROBS * padded  # the likeliest tokens of each row
    assert max(size for name, size in found if name == "all-gather") <= most
    sent = padded // 4 * config.vocab_size // 4  # a rank sends to each its part of that rank's rows
    assert {size for name, size in found if name == "all-to-all"} == {sent}
    hidden = OPTIONS["max_num_batched_tokens"] * config.hidden_size
    assert sum(size == hidden for _, size in found) == 2 * layers and max(size for _, size in found) == hidden
    wanted = sum(name == "all-reduce" and size == rows * config.hidden_size for name, size in found)
    assert wanted == 1, "the last MLP computes one token of each row"


def test_a_product_that_xla_cannot_divide_would_gather_its_weights(monkeypatch):
    """The test above would see it."""
    if len(product.IMPLEMENTATIONS) < 2 or not product._supports_native(
        "cpu", np.ones((1, 1), np.float32), (), np.dtype("float32")
    ):
        pytest.skip("the C++ product is not built here")
    monkeypatch.setattr(sharded_products, "is_divided", lambda mesh: False)
    monkeypatch.setattr(product, "is_partitioned", lambda: False)
    served = engine(models.config_of(COMMON | dict(model_type="llama", num_key_value_heads=8)), mesh=mesh(4))
    assert max(size for name, size in collectives(served) if name == "all-gather") >= 32 * 64


def test_each_rank_has_its_part_of_weights_and_cache():
    served = engine(mesh=mesh(4))
    part = lambda x: {shard.data.shape for shard in x.addressable_shards}
    params, cache = served.params, served.caches[0]
    attn, mlp = params["layers"][1]["attn"], params["layers"][1]["mlp"]
    assert part(params["embed"]) == {(VOCAB // 4, 32)} and part(params["head"]["kernel"]) == {(32, VOCAB // 4)}
    assert part(attn["q"]["kernel"]) == {(32, 16)} and part(attn["o"]["kernel"]) == {(16, 32)}
    assert part(attn["k"]["kernel"]) == {(32, 8)} and part(cache.k) == {(22, 1, 4, 8)}, "the one head that it needs"
    assert part(mlp["up"]["kernel"]) == {(32, 16)} and part(mlp["down"]["kernel"]) == {(16, 32)}


def test_each_rank_has_some_heads_of_latent_attention_and_the_whole_cache():
    served = engine(LATENT, mesh=mesh(4))
    part = lambda x: {shard.data.shape for shard in x.addressable_shards}
    attn, cache = served.params["layers"][1]["attn"], served.caches[0]
    assert part(attn["q_b"]["kernel"]) == {(10, 2 * 10)} and part(attn["o"]["kernel"]) == {(2 * 8, 32)}
    assert part(attn["w_uk"]) == {(2, 6, 24)} and part(attn["w_uv"]) == {(2, 24, 8)}
    assert part(attn["q_a"]["kernel"]) == {(32, 10)} and part(attn["kv_a"]["kernel"]) == {(32, 24 + 4)}
    assert part(cache.k) == {(22, 1, 4, 4)} and part(cache.v) == {(22, 1, 4, 24)}


def test_the_pool_is_sized_for_each_rank(monkeypatch):
    per_block = 2 * 2 * 4 * 8 * 4  # layers, k and v, slots, head dim, bytes of one kv head
    count = lambda: sum(len(x.sharding.device_set) == 4 for x in jax.live_arrays())
    gc.collect()  # of engines before, which would else be missed below
    before, placed = count(), []

    def free_bytes(devices):
        placed.append(count() - before)
        return 10 * per_block + 5 if len(devices) == 4 else 0

    monkeypatch.setattr(sizing, "free_bytes", free_bytes)
    served = engine(mesh=mesh(4), num_blocks=None, max_model_len=None)
    assert served.tables.pools[0].num_blocks == 10
    assert placed == [len(jax.tree.leaves(served.params))], "the weights are placed before memory is measured"


def test_a_folder_is_loaded_straight_into_its_parts(tmp_path):
    """While it loads, no device ever has more than its part of the weights."""
    config = tiny.CONFIG | dict(vocab_size=64, head_dim=8)
    tiny.write(tmp_path, config, tiny.tensors(config))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    before = jax.live_arrays()  # kept, so that no id is used again
    known, seen = set(map(id, before)), []

    def look(done, total, name):
        new = [x for x in jax.live_arrays() if id(x) not in known]
        seen.append(sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in new))
        assert all(len(x.sharding.device_set) == 2 for x in new)

    served = Engine.from_pretrained(tmp_path, tensor_parallel=2, progress=look, **OPTIONS)
    whole = sum(x.nbytes for x in jax.tree.leaves(served.params))
    assert len(seen) == len(jax.tree.leaves(served.params)) and whole / 2 < max(seen) < whole * 0.6
    wanted = Engine.from_pretrained(tmp_path, **OPTIONS).generate([PROMPT], GREEDY)[0]
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_get_their_dtype_as_they_are_loaded(tmp_path, dtype):
    """In parts as on one device; no device has a weight in the stored dtype, which is float32."""
    config = tiny.CONFIG | dict(vocab_size=64, head_dim=8)
    tiny.write(tmp_path, config, tiny.tensors(config))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    _, wanted = models.load(tmp_path, dtype=dtype)
    shapes = {tuple(order(x.shape)) for x in jax.tree.leaves(wanted) for order in (list, reversed)}
    known, seen = set(map(id, jax.live_arrays())), set()  # threads of earlier tests may have others
    fresh = lambda: (x for x in jax.live_arrays() if id(x) not in known and x.shape in shapes)
    look = lambda *_: seen.update(x.dtype.name for x in fresh())
    for ranks in 1, 2:
        served = Engine.from_pretrained(tmp_path, tensor_parallel=ranks, dtype=dtype, progress=look, **OPTIONS)
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(served.params)} == {ranks}
        jax.tree.map(np.testing.assert_array_equal, served.params, wanted)
        assert served.caches[0].spec.dtype == dtype
        del served
    assert seen == {dtype}


# ------------------------------------------------------------------ quantised weights
whole = jax.jit(plain)


def numbers(params) -> list[np.ndarray]:
    """The weights that a tree of params stands for. From the host, by one program for each shape, however it lies."""
    return [np.asarray(whole(jax.device_get(x))) for x in jax.tree.leaves(params, is_leaf=is_quantised)]


@pytest.mark.parametrize(
    ("config", "quantization", "data", "ranks"),
    [(LLAMA, "int4", 1, 4), (EXPERTS, "fp8", 2, 2), (LATENT, "int8", 1, 2)],
    ids=["4 bits, groups cut by ranks", "experts of two data ranks", "a latent cache"],
)
def test_quantised_weights_give_the_tokens_of_one_device(config, quantization, data, ranks, compiles):
    options = dict(deterministic=True, backend="auto" if config is LATENT else "sdpa")
    prompts = [PROMPT[:i] for i in (3, 9, 17, 12, 5)]
    tokens = lambda served: [output.token_ids for output in served.generate(prompts, GREEDY)]
    wanted = tokens(engine(config, quantization, **options))
    served = engine(config, quantization, mesh=mesh(ranks, data), **options)
    served.warmup()
    with compiles() as seen:
        assert tokens(served) == wanted
    assert seen.names == []
    attn, mlp = served.params["layers"][1]["attn"], served.params["layers"][1]["mlp"]
    for kernel, axis in ((attn["o"]["kernel"], 0), (mlp["down"]["kernel"], 0)):
        parts = {shard.data.shape[axis] for shard in kernel.values.addressable_shards}
        assert parts == {kernel.values.shape[axis] // ranks}
    served.update_weights(jax.tree.map(jnp.zeros_like, params_of(config, quantization)))
    assert tokens(served) != wanted
    served.update_weights(params_of(config, quantization))
    served.sleep()
    served.wake()
    assert tokens(served) == wanted
    jax.tree.map(np.testing.assert_array_equal, numbers(served.params), numbers(params_of(config, quantization)))


@pytest.mark.parametrize(
    ("config", "quantization", "of_layers"),
    [(LLAMA, "int4", [4, 4]), (LATENT, "int8", [5, 5])],
    ids=["dense", "latent cache, a shared expert"],
)
def test_each_rank_multiplies_by_its_quantised_weights_as_they_are(config, quantization, of_layers):
    """q, k and v; o; gate and up; down. Of a latent layer q_a with kv_a, q_b, o. And the head."""
    if not library.status().isas:
        pytest.skip("the C++ product is not built here")
    program = program_of(engine(config, quantization, mesh=mesh(2), deterministic=True))
    assert program.count('custom_call_target="jattn_cpu_packed_product"') == sum(of_layers) + 1
    assert program.count('custom_call_target="jattn_cpu_packed_expert_product"') == 3 * sum(
        layer.moe is not None for layer in config.layers
    )


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("int4", "float16"), ("fp4", "auto"), (None, "bfloat16")],
    ids=["AWQ", "NVFP4", "quantised at load"],
)
def test_a_folder_gets_the_same_quantised_weights_in_parts(tmp_path, stored, dtype):
    """In groups of 32, of NVFP4 16. A rank has 48 inputs of `down`."""
    path, config = tmp_path / "model", test_hub_formats.CONFIG | dict(num_hidden_layers=1)
    if stored == "int4":
        test_hub_formats.folder(path, test_hub_formats.AWQ, test_hub_formats.awq_pack, config)
    elif stored == "fp4":
        test_hub_formats.folder(path, test_hub_nvfp4.MODELOPT, test_hub_nvfp4.modelopt_pack, config)
    else:
        path.mkdir()
        tiny.write(path, config, tiny.tensors(config))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    options = OPTIONS | dict(deterministic=True, quantization=None if stored else "fp8", dtype=dtype)
    one, two = (Engine.from_pretrained(path, tensor_parallel=n, **options) for n in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, numbers(one.params), numbers(two.params))
    down = two.params["layers"][0]["mlp"]["down"]["kernel"]
    assert (down.format, down.group_size) == (stored or "fp8", 16)
    assert down.dtype == two.params["embed"].dtype == two.caches[0].spec.dtype == dtype.replace("auto", "float32")
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(two.params)} == {2}
    assert {2 * shard.data.nbytes for shard in down.values.addressable_shards} == {down.values.nbytes}
    if stored:
        for served in one, two:
            places, config_ = served.runner.model.model_mesh, served.config
            planned = Footprint(config_, "float32", None, places, stored_weights(path, dtype=dtype)).weight_bytes()
            leaves = jax.tree.leaves(served.params)
            assert planned == sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert one.generate([PROMPT], GREEDY)[0].token_ids == two.generate([PROMPT], GREEDY)[0].token_ids


def test_one_projection_of_q_k_and_v_is_split_for_the_ranks():
    """Also a quantised one, and in new weights."""
    layers = (dataclasses.replace(x, self_attn=dataclasses.replace(x.self_attn, fused_qkv=True)) for x in LLAMA.layers)
    fused = dataclasses.replace(LLAMA, layers=tuple(layers))
    served = engine(fused, "int8", mesh=mesh(4), deterministic=True, backend="sdpa")
    (wanted,) = engine(fused, "int8", deterministic=True, backend="sdpa").generate([PROMPT], GREEDY)
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids
    q = served.params["layers"][0]["attn"]["q"]["kernel"]
    assert {shard.data.shape for shard in q.values.addressable_shards} == {(32, 16)}
    served.update_weights(jax.tree.map(jnp.zeros_like, params_of(fused, "int8")))
    assert served.generate([PROMPT], GREEDY)[0].token_ids != wanted.token_ids
    served.update_weights(params_of(fused, "int8"))
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids
    with pytest.raises(ValueError, match="do not fit this model"):
        served.update_weights(params_of(fused, "int8") | {"more": np.zeros(3, np.float32)})
    with pytest.raises(UnsupportedError, match="layer 0 has one projection of q, k and v"):
        models.ModelMesh.of(fused, mesh(2))


# ------------------------------------------------------------------ what cannot be
def config_with(**changes):
    return models.config_of(COMMON | dict(model_type="llama", num_key_value_heads=8) | changes)


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (config_with(num_attention_heads=6, num_key_value_heads=2), 4, "layer 0 has 6 query heads, which 4 ranks"),
        (config_with(num_attention_heads=12, num_key_value_heads=3), 4, "layer 0 has 3 kv heads: 4 ranks can neither"),
        (config_with(intermediate_size=66), 4, "MLP of width 66, which 4 ranks"),
        (config_with(model_type="mixtral", num_local_experts=6, num_experts_per_tok=2), 4, "6 experts, which 4 ranks"),
    ],
)
def test_what_ranks_cannot_share_evenly_is_refused_with_its_numbers(config, ranks, words):
    with pytest.raises(ValueError, match=words):
        models.ModelMesh.of(config, mesh(ranks))


def test_a_mesh_that_the_engine_cannot_use_is_refused():
    devices = np.array(jax.devices()[:2])
    with pytest.raises(ValueError, match=r"the mesh has the axes \('x',\)"):
        engine(mesh=Mesh(devices, ("x",)))
    with pytest.raises(TypeError, match="mesh"):
        engine(mesh=devices)
    with pytest.raises(ValueError, match=r"the mesh has no device: its axes are \{'tensor': 0\}"):
        engine(mesh=Mesh(np.empty(0, object), ("tensor",)))
    for other in (list(devices), jax.sharding.AbstractMesh((2,), ("tensor",))):
        with pytest.raises(TypeError, match=r"mesh must be Mesh, got .*; make one with jax.sharding.Mesh"):
            models.ModelMesh.of(models.config_of(COMMON | dict(model_type="llama")), other)


@pytest.mark.parametrize("size", [0, -2, "4", 2.0, True])
def test_a_plans_mesh_has_a_whole_number_of_devices(size):
    """-2 was taken for 1."""
    with pytest.raises(ValueError, match=r"sizes\['tensor'\]=.* must be a positive integer"):
        models.ModelMesh.without_devices(LLAMA, dict(tensor=size))


def test_experts_are_shared_by_data_ranks_or_not():
    """The text "no" was true."""
    makers = (models.ModelMesh.of, mesh(2, 2)), (models.ModelMesh.without_devices, dict(data=2, tensor=2))
    for make, where in makers:
        with pytest.raises(ValueError, match="expert_parallel='no' must be True or False"):
            make(EXPERTS, where, expert_parallel="no")


def test_a_forward_pass_takes_the_model_mesh_of_its_model():
    run = functools.partial(models.forward, LLAMA, None, [1], (), None)
    with pytest.raises(TypeError, match=r"model_mesh must be ModelMesh, got Mesh; make one with ModelMesh.of\(config"):
        run(model_mesh=mesh(2))
    other = models.ModelMesh.of(config_with(num_key_value_heads=4), mesh(4))
    with pytest.raises(ValueError, match="2 kv heads do not lie on .* is of another model; make one with ModelMesh.of"):
        other.weight_shardings(LLAMA)


def test_a_folder_needs_as_many_devices_as_it_asks_for(tmp_path, monkeypatch):
    tiny.write(tmp_path)
    with pytest.raises(ValueError, match="data_parallel=2 and tensor_parallel=64: 128 devices are .*_count=128"):
        Engine.from_pretrained(tmp_path, tensor_parallel=64, data_parallel=2)
    with pytest.raises(ValueError, match="not both"):
        Engine.from_pretrained(tmp_path, tensor_parallel=2, mesh=mesh(2))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match="63 devices are .*_count=16$"):  # of each process
        Engine.from_pretrained(tmp_path, tensor_parallel=63)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (dict(mesh="tensor"), "mesh must be Mesh, got str"),
        (dict(mesh=jax.sharding.AbstractMesh((2,), ("tensor",))), "mesh must be Mesh, got AbstractMesh"),
        (dict(expert_parallel="no", data_parallel=2), "expert_parallel='no' must be"),
        (dict(block_size=0), "block_size=0 must be a positive integer"),
        (dict(dtype="int8"), "dtype=int8 of weights must be None or one of float16"),
        (dict(dtype="f2"), "dtype='f2' is not a dtype"),
        (dict(quantization="int3"), "quantization='int3' is not known"),
        (dict(dtpye="float16", seed=1), "Engine.from_pretrained has no argument dtpye; did you mean dtype[?]$"),
        (dict(tensor_parallel_size=2), "no argument tensor_parallel_size; did you mean tensor_parallel[?]$"),
        (dict(tokenizer=None, config=1), "Engine.from_pretrained has no argument config, tokenizer$"),
    ],
    ids=[
        "no mesh",
        "no device",
        "no boolean",
        "an option of the engine",
        "int8",
        "f2",
        "int3",
        "no name",
        "vLLM's name",
        "a part",
    ],
)
def test_a_wrong_option_is_named_before_a_weight_is_loaded(tmp_path, monkeypatch, option, words):
    tiny.write(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises((TypeError, ValueError), match=words):
        Engine.from_pretrained(tmp_path, **option)


def test_a_mesh_with_a_device_twice_is_refused():
    config, device = models.config_of(COMMON | dict(model_type="llama")), jax.devices()[0]
    with pytest.raises(ValueError, match=r"a device more than once: \[0, 0\]"):
        Engine(config, models.init_params(config, 0, "float32"), mesh=Mesh(np.array([device, device]), ("tensor",)))


def test_inside_a_mesh_of_explicit_axes_an_engine_says_so_and_loses_no_request():
    """It died there in its first step, because JAX could not infer the sharding of a result."""
    explicit, params = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)), params_of(LLAMA)
    refused = functools.partial(pytest.raises, UnsupportedError, match=r"set_mesh.*\('x',\).*an engine places.*outside")
    for options in ({}, dict(mesh=mesh(2))):
        with jax.set_mesh(explicit), refused():
            Engine(LLAMA, params, **OPTIONS | options)
    served = engine(deterministic=True)
    served.add_request(PROMPT, GREEDY)
    for call in (served.step, served.warmup):
        with jax.set_mesh(explicit), refused():
            call()
    served.sleep()
    with jax.set_mesh(explicit), refused():
        served.wake()
    served.wake()
    (output,) = [each for each in served.drain() if each.finished]
    assert output.error is None and len(output.token_ids) == 12


def test_inside_another_mesh_of_automatic_axes_an_engine_is_made_and_wakes():
    """As the mesh of a training step. The engine died on waking there, because shard_map took no other mesh."""
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("x",))):
        served = engine(mesh=mesh(2), deterministic=True)
        served.sleep()
        served.wake()
        served.update_weights(params_of(LLAMA))
        (found,) = served.generate([PROMPT], GREEDY)
    (wanted,) = engine(deterministic=True).generate([PROMPT], GREEDY)
    assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize("partition", [(), ("x",)], ids=["replicated", "divided"])
def test_weights_on_a_mesh_of_explicit_axes_are_served_where_they_are(partition):
    explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec(*partition))
    params = jax.device_put(params_of(LLAMA), place)
    served = Engine(LLAMA, params, deterministic=True, **OPTIONS)
    pointers = lambda tree: [
        part.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for part in x.addressable_shards
    ]
    assert pointers(served.params) == pointers(params), "the weights were copied"
    wanted = engine(deterministic=True).generate([PROMPT], GREEDY)
    assert [output.token_ids for output in served.generate([PROMPT], GREEDY)] == [wanted[0].token_ids]
