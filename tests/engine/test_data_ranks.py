"""Data ranks: requests are placed, and each rank computes its own in the same dispatch, as a single device would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from jattn.engine import Engine, SamplingParams, flights, warming
from jattn.engine.dispatch import dispatch
from tests.engine import test_mesh as on_mesh
from tests.engine.test_mesh import COMMON, GREEDY, LATENT, LLAMA, PROMPT, engine, mesh, of_one_device
from tests.engine.test_scheduler import FULL, WINDOW, World


# ------------------------------------------------------------------ placement, without a device
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
def test_thousands_of_random_operations_on_three_ranks_lose_no_block_and_no_token(groups):
    world, alone = World(groups, data_ranks=3, num_blocks=14, max_num_seqs=3), 0
    for _ in range(2500):
        ahead = [world.step_ahead] * 3
        world.rng.choice([world.add, world.add, *ahead, world.step, world.abort, world.fork])()
        running = {seq.data_rank for seq in world.scheduler.running if seq.num_left > 0}
        alone += bool(running - {i for i, part in enumerate(world.plans[-1].parts) if part.rows}) if world.plans else 0
    world.drain()
    for seq in world.finished.values():
        for i in range(len(seq.output)):
            assert seq.output[i] == sum(seq.tokens[: len(seq.prompt) + i]) * 7 % 20
    assert {seq.data_rank for seq in world.finished.values()} == {0, 1, 2} and len(world.finished) > 100
    assert alone > 50, "no rank waited while others went on"
    assert sum(len(plan.preempted) for plan in world.plans) > 5 and any(plan.burst > 1 for plan in world.plans)
    assert sum(hit for plan in world.plans for _, hit in plan.admitted) > 100


def ranks_of(world: World) -> list[int]:
    return [seq.data_rank for seq in world.seqs.values()]


def test_strangers_are_spread_and_a_request_follows_its_cached_beginning():
    world = World((FULL,), data_ranks=2, num_blocks=40, max_num_seqs=4, budget=60)
    for first in (10, 30, 50, 70):
        world.add(list(range(first, first + 9)), 20)
    world.step()
    assert ranks_of(world) == [0, 1, 0, 1]
    world.add([*range(30, 38), 1], 20)  # begins as the second
    world.step()
    assert ranks_of(world)[-1] == 1
    world.add([*range(30, 38), 2], 20)
    world.step()
    assert ranks_of(world)[-1] == 0, "rank 1 has as many rows more as it may have"


def test_a_rank_without_blocks_is_passed_over():
    world = World((FULL,), data_ranks=2, num_blocks=6, max_num_seqs=4, budget=40)
    world.add(list(range(9)), 11)  # its five blocks are all of rank 0
    world.step()
    world.add([*range(8), 50, 51, 52, 53, 54, 55, 56, 57, 58], 1)  # begins as the first
    world.step()
    world.add(list(range(60, 64)), 1)
    assert ranks_of(world)[:1] == [0] and world.finished["1"].data_rank == 1
    world.drain()


def test_a_prompt_on_one_rank_ends_the_bursts_of_all_and_a_short_row_does_not():
    world = World((FULL,), data_ranks=2, num_blocks=40, max_num_seqs=2, budget=12, burst=8)
    world.add([1, 2], 30), world.add([3, 4], 30)
    world.step()
    assert world.step().burst == 8
    world.add(list(range(20)), 3)
    assert [world.step().burst for _ in range(2)] == [1, 1]
    plan = world.step()
    assert plan.burst == 8 and sorted(row.max_samples for row in plan.rows) == [2, 8, 8]


# ------------------------------------------------------------------ on devices
SHARED_HEAD = models.config_of(
    COMMON | dict(model_type="gemma2", num_key_value_heads=1, sliding_window=9, query_pre_attn_scalar=8)
)
QWEN_EXPERTS = models.config_of(
    COMMON | dict(
        model_type="qwen3_moe", num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True, decoder_sparse_step=2,
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "data", "ranks", "is_deterministic"),
    [(LLAMA, 2, 1, False), (SHARED_HEAD, 2, 2, True), (QWEN_EXPERTS, 2, 2, True), (LATENT, 2, 2, True)],
    ids=["data", "two ranks for the kv head, windows", "experts", "a latent cache"],
)
def test_the_tokens_are_those_of_one_device_and_nothing_compiles(config, data, ranks, is_deterministic, compiles):
    """A deterministic engine has one program, which is soon compiled."""
    few = dict(max_num_seqs=2, num_blocks=16)  # few programs, and too few blocks
    served = engine(config, mesh=mesh(ranks, data), deterministic=is_deterministic, **few)
    served.warmup()
    with compiles() as seen:
        tokens = on_mesh.tokens_of_a_trace(served)
    assert seen.names == []
    assert tokens == of_one_device(config)
    assert served.stats.cache_usage == 0 and not served.has_work


@functools.cache
def deterministic() -> Engine:
    return engine(deterministic=True, backend="sdpa", mesh=mesh(2, 2))


@pytest.mark.parametrize("kind", on_mesh.KINDS)
def test_sampling_on_two_ranks_of_two(kind):
    params = SamplingParams(max_tokens=10, **on_mesh.KINDS[kind])
    prompts = [PROMPT[:i] for i in (3, 9, 17)]
    alone = on_mesh.deterministic().generate(prompts, params)
    for a, b in zip(alone, deterministic().generate(prompts, params), strict=True):
        assert [x.token_ids for x in a.outputs] == [x.token_ids for x in b.outputs]
        for told, wanted in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert told.top.keys() == wanted.top.keys() and told.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_only_one_of_the_ranks_has_penalties_or_log_probabilities():
    """The histories of the others are unused, and the rows keep their places."""
    prompts = [PROMPT[:i] for i in (3, 9, 17)]
    for options in on_mesh.KINDS["log-probabilities"], on_mesh.KINDS["penalties"]:
        params = [GREEDY, SamplingParams(max_tokens=12, **options), GREEDY]
        wanted = on_mesh.deterministic().generate(prompts, params)
        seen = deterministic().generate(prompts, params)
        assert [x.token_ids for x in seen] == [x.token_ids for x in wanted]
        assert [len(x.logprobs or ()) for x in seen] == [len(x.logprobs or ()) for x in wanted]


def test_alone_or_in_a_crowd_on_any_rank_every_bit_is_the_same():
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2)
    prompts = [PROMPT[:i] for i in (3, 9, 17, 12)]
    for prompt, wanted in zip(prompts, deterministic().generate(prompts, params), strict=True):
        (alone,) = deterministic().generate([prompt], params)
        assert alone.token_ids == wanted.token_ids and alone.logprobs == wanted.logprobs


def test_sleep_new_weights_and_a_failed_step(monkeypatch):
    served = deterministic()
    (wanted,) = served.generate([PROMPT], GREEDY)
    served.sleep()
    served.wake()
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids
    served.update_weights(models.init_params(LLAMA, 4, "float32"))
    assert served.generate([PROMPT], GREEDY)[0].token_ids != wanted.token_ids
    served.update_weights(on_mesh.params_of(LLAMA))
    calls, real = iter(range(99)), flights.batch_of
    monkeypatch.setattr(flights, "batch_of", lambda *args: 1 / 0 if next(calls) == 3 else real(*args))
    outputs = served.generate([PROMPT] * 9, GREEDY)
    failed = sum(output.finish_reason == "error" for output in outputs)
    assert 0 < failed < 9 and all(x.error or x.token_ids == wanted.token_ids for x in outputs)


def test_each_rank_has_whole_weights_and_blocks_that_no_other_reads():
    served = deterministic()
    part = lambda x: {shard.data.shape for shard in x.addressable_shards}
    cache, blocks = served.caches[0], on_mesh.OPTIONS["num_blocks"]
    assert part(served.params["layers"][0]["attn"]["q"]["kernel"]) == {(32, 32)}
    assert part(cache.k) == {(blocks, 1, 4, 8)} and cache.spec.num_blocks == 2 * blocks
    (wanted,) = served.generate([PROMPT], GREEDY)
    poison = lambda x: jax.device_put(jnp.asarray(x).at[blocks:].set(jnp.nan), x.sharding)
    served.runner._caches = jax.tree.map(poison, served.caches)
    assert served.generate([PROMPT], GREEDY)[0].token_ids == wanted.token_ids, "a request alone is on rank 0"
    first, second = served.generate([PROMPT[:9], PROMPT[9:]], GREEDY)
    assert first.finish_reason == second.finish_reason == "length", "rank 1 overwrites what it reads"
    served.runner.renew_caches()


def test_ranks_send_each_other_only_what_they_sampled():
    """The all-gathers after the last step: tokens, log-probabilities, and the most likely tokens with theirs."""
    found = on_mesh.collectives(engine(mesh=mesh(1, 2)))
    assert {name for name, _ in found} == {"all-gather"} and len(found) <= 4


def test_nothing_without_elements_enters_a_data_rank():
    """XLA crashes there with JAX 0.11.2, see ModelMesh.each_data_rank."""
    served = engine(mesh=mesh(1, 2))
    runner, shape = served.runner, served.shapes.all()[0]
    batch = warming._padding(runner.model, served.shapes, shape)
    args = runner.model, runner.params, runner.caches, runner._row_state, batch
    program = jax.make_jaxpr(dispatch.function, static_argnums=0)(*args)
    (mapped,) = [each for each in program.jaxpr.eqns if each.primitive.name == "shard_map"]
    assert all(np.prod(x.aval.shape) for x in mapped.invars)


def test_a_folder_is_served_on_two_ranks(tmp_path):
    config = on_mesh.tiny.CONFIG | dict(vocab_size=64, head_dim=8)
    on_mesh.tiny.write(tmp_path, config, on_mesh.tiny.tensors(config))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    options = on_mesh.OPTIONS | dict(deterministic=True)
    served = Engine.from_pretrained(tmp_path, data_parallel=2, **options)
    assert served.runner.model.data_ranks == 2
    wanted = Engine.from_pretrained(tmp_path, **options).generate([PROMPT, PROMPT[3:]], GREEDY)
    seen = served.generate([PROMPT, PROMPT[3:]], GREEDY)
    assert [x.token_ids for x in seen] == [x.token_ids for x in wanted]


def test_a_forward_pass_outside_a_data_rank_is_refused():
    model_mesh = models.ModelMesh.of(LLAMA, mesh(1, 2))
    with pytest.raises(ValueError, match="2 data ranks: call forward inside each_data_rank"):
        models.forward(LLAMA, on_mesh.params_of(LLAMA), np.zeros(4, np.int32), (), (), model_mesh=model_mesh)


# ------------------------------------------------------------------ experts over all devices
@pytest.mark.parametrize(
    ("config", "data", "ranks", "is_deterministic"),
    [(QWEN_EXPERTS, 2, 2, False), (LATENT, 2, 1, True)],
    ids=["bursts end together", "a latent cache"],
)
def test_shared_experts_give_the_tokens_of_one_device(config, data, ranks, is_deterministic, compiles):
    few = dict(max_num_seqs=2, num_blocks=16)
    served = engine(config, mesh=mesh(ranks, data), deterministic=is_deterministic, expert_parallel=True, **few)
    served.warmup()
    with compiles() as seen:
        tokens = on_mesh.tokens_of_a_trace(served)
    assert seen.names == []
    assert tokens == of_one_device(config)
    weights = served.params["layers"][1]["mlp"]["up"]["kernel"]
    assert {shard.data.shape[0] for shard in weights.addressable_shards} == {8 // (data * ranks)}
    assert len({str(shard.index) for shard in weights.addressable_shards}) == data * ranks, "no expert is there twice"


def test_experts_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="expert_parallel=True, but llama has no experts"):
        engine(LLAMA, mesh=mesh(1, 2), expert_parallel=True)
    with pytest.raises(ValueError, match="over data ranks, and the mesh has one"):
        engine(QWEN_EXPERTS, mesh=mesh(2), expert_parallel=True)
    with pytest.raises(ValueError, match="give data_parallel, or a mesh"):
        engine(QWEN_EXPERTS, expert_parallel=True)
    few = models.config_of(
        COMMON | dict(model_type="mixtral", num_key_value_heads=4, num_local_experts=2, num_experts_per_tok=2)
    )
    with pytest.raises(ValueError, match="2 x 2 devices cannot share 2 experts evenly; use a divisor of 2"):
        engine(few, mesh=mesh(2, 2), expert_parallel=True)
