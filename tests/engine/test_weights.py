"""Weights are replaced as a whole, between steps, and no key of other weights is read (R-41)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from jattn.engine import BlockTables, Engine, SamplingParams, Sequence
from jattn.engine.weights import adopt, copied_like
from tests.engine import fake

CONFIG = fake.FakeConfig(eos_token_ids=())
GREEDY = dict(temperature=0, ignore_eos=True)
SIZES = dict(num_blocks=60, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_burst=3)


def shifted(tokens, shift):
    """Never the token whose logits are NaN."""
    return 2 + (tokens - 2 + shift) % (CONFIG.vocab_size - 2)


def forward(config, params, token_ids, caches, meta, **options):
    """The fake model, whose keys depend on the weights: token ids are stored shifted by `shift`."""
    shift = params["deep"][0]["shift"].astype(jnp.int32)
    return fake.forward(config, params, shifted(jnp.asarray(token_ids), shift), caches, meta, **options)


def weights(shift=0, bias=None):
    bias = fake.PARAMS["bias"] if bias is None else bias
    return {"bias": jnp.asarray(bias), "deep": [{"shift": jnp.asarray(shift, jnp.float32)}]}


def engine(params, **options):
    return Engine(CONFIG, params, forward=forward, **SIZES | options)


def answer(prompt, count, shift=0):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake.next_logits(CONFIG, shifted(np.asarray(tokens), shift)).argmax()))
    return tuple(tokens[len(prompt) :])


PROMPT = list(range(5, 30))


def test_r41_after_an_exchange_everything_is_what_a_fresh_engine_gives():
    served, params = engine(weights()), SamplingParams(max_tokens=8, **GREEDY)
    assert served.generate([PROMPT], params)[0].token_ids == answer(PROMPT, 8)
    served.update_weights(weights(3))
    assert served.generate([PROMPT], params)[0].token_ids == answer(PROMPT, 8, 3) != answer(PROMPT, 8)
    assert served.stats.cached_tokens == 0
    served.update_weights(weights(0))  # the same weights as at first: no block is cached, and the result is the same
    assert served.generate([PROMPT], params)[0].token_ids == answer(PROMPT, 8)
    assert served.stats.cached_tokens == 0
    served.generate([PROMPT], params)
    assert served.stats.cached_tokens == 24


def test_the_name_of_a_block_carries_the_weights_version():
    names = []
    for version in (0, 1):
        tables = BlockTables((9,), 4, CONFIG.cache_groups, weights_version=version)
        seq = Sequence("0.0", tuple(PROMPT), SamplingParams())
        tables.admit(seq)
        names.append(seq.block_hashes)
    assert len(names[0]) == 6 and not set(names[0]) & set(names[1])


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_request_under_way_goes_on_with_what_the_new_weights_compute(steps):
    """Whichever dispatch is in flight: of prompts, of decodes, or one that was sent ahead."""
    served, params = engine(weights()), SamplingParams(max_tokens=30, **GREEDY)
    prompts = [PROMPT, [9, 8], [7]]
    ids = [served.add_request(prompt, params) for prompt in prompts]
    for _ in range(steps):
        served.step()
    before = {output.id: output.token_ids for output in served._loop.requests.outputs(ids)}
    served.update_weights(weights(3))
    result = {output.id: output.token_ids for output in served._loop.requests.outputs(ids)}
    found = {output.id: output.token_ids for output in served.drain()}
    for id, prompt in zip(ids, prompts, strict=True):
        kept = result[id]
        assert kept[: len(before[id])] == before[id]
        assert kept == answer(prompt, len(kept))
        assert found[id] == kept + answer([*prompt, *kept], 30 - len(kept), 3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda w: {"bias": w["bias"]}, r"\['deep'\]\[0\]\['shift'\] is missing"),
        (lambda w: w | {"more": w["bias"]}, r"\['more'\] is unknown"),
        (lambda w: w | {"bias": w["bias"][:-1]}, r"\['bias'\] is float32\[60\], not float32\[61\]"),
        (lambda w: w | {"bias": w["bias"].astype(jnp.bfloat16)}, r"\['bias'\] is bfloat16\[61\], not float32"),
        (lambda w: w | {"bias": "text"}, r"\['bias'\] is str, not float32"),
        (lambda w: w | {"deep": tuple(w["deep"])}, "containers"),
        (lambda w: None, "missing"),
    ],
)
def test_weights_of_another_form_are_refused_and_change_nothing(wrong, words):
    served, params = engine(weights()), SamplingParams(max_tokens=8, **GREEDY)
    id = served.add_request(PROMPT, params)
    served.step()
    with pytest.raises(ValueError, match=words):
        served.update_weights(wrong(weights(3)))
    (output,) = served.drain()
    assert (output.id, output.token_ids) == (id, answer(PROMPT, 8))


def test_numpy_weights_are_copied_wherever_their_memory_begins():
    """In numpy, as far as possible: JAX would compile a program for each size."""
    for size in range(1, 200):
        mine = [np.zeros(size, np.float32)]
        taken, placed = adopt(mine)[0], copied_like([jax.device_put(np.ones(size, np.float32))], mine)[0]
        mine[0][...] = 3
        assert not np.asarray(taken).any() and not np.asarray(placed).any()


def test_a_caller_cannot_change_the_engines_weights():
    mine = weights()
    mine["deep"][0]["shift"] = np.zeros((), np.float32)  # numpy arrays can be written to
    served, params = engine(mine), SamplingParams(max_tokens=4, **GREEDY)
    with pytest.raises(AttributeError):
        served.params = weights(3)
    mine["deep"][0]["shift"][...] = 3
    mine["bias"] = mine["bias"] + 1e9 * np.arange(61)
    served.params["deep"][0]["shift"] = jnp.float32(3)
    assert served.generate([PROMPT], params)[0].token_ids == answer(PROMPT, 4)
    new = weights(3)
    served.update_weights(new)
    jax.tree.map(lambda x: x.delete(), new)  # as a training step with donated weights does
    assert served.generate([PROMPT], params)[0].token_ids == answer(PROMPT, 4, 3)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_sleep_changes_no_token_and_frees_the_memory(steps):
    served, params = engine(weights()), SamplingParams(max_tokens=20, **GREEDY)
    ids = [served.add_request(prompt, params) for prompt in (PROMPT, [9, 8])]
    for _ in range(steps):
        served.step()
    held = jax.tree.leaves(served.caches)
    served.sleep()
    served.sleep()
    assert all(leaf.is_deleted() for leaf in held) and served.caches is None
    ids.append(served.add_request([7], params))
    for call in (served.step, served.warmup, lambda: served.params, lambda: served.update_weights(weights())):
        with pytest.raises(RuntimeError, match="wake"):
            call()
    assert served.abort(ids[1])
    served.wake()
    served.wake()
    found = {output.id: output for output in served.drain()}
    assert found[ids[0]].token_ids == answer(PROMPT, 20) and found[ids[2]].token_ids == answer([7], 20)
    assert found[ids[1]].finish_reason == "abort"


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound to a device"])
def test_nothing_compiles_after_warmup_update_weights_or_sleep(compiles, bound):
    """JAX compiles again if an array that was committed to a device is not, or the other way round."""
    device = jax.devices()[0]
    served = engine(jax.device_put(weights(), device if bound else None))
    params = SamplingParams(max_tokens=8, **GREEDY)
    served.warmup()
    new = jax.device_put(weights(3), None if bound else device)
    with compiles() as seen:
        served.generate([PROMPT], params)
        served.update_weights(new)
        served.generate([PROMPT], params)
        served.sleep()
        served.wake()
        served.generate([PROMPT], params)
    assert "dispatch" not in seen.names


@pytest.mark.parametrize("bound", [False, True])
def test_weights_stay_bound_to_their_device_or_unbound(bound):
    device = jax.devices()[0] if bound else None
    served = engine(jax.device_put(weights(), device))
    told = lambda: {leaf.committed for leaf in jax.tree.leaves(served.params)}
    assert told() == {bound}
    served.update_weights(jax.device_put(weights(3), None if bound else jax.devices()[0]))
    assert told() == {bound}
    served.sleep()
    served.wake()
    assert told() == {bound}


def test_weights_of_another_form_are_refused_when_the_engine_is_made():
    config = models.config_of(
        dict(
            model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-6,
        )
    )  # fmt: skip
    params = models.init_params(config, 0, "float32")
    short, whole = params | {"embed": params["embed"][:63]}, params | {"embed": np.zeros((64, 16), np.int32)}
    for wrong, seen in (
        (short, r"embed is float32\[63, 16\], not a float \[64, 16\]"),
        (whole, r"embed is int32\[64, 16\], not a float"),
        (params | {"embed": "x"}, "embed is str, not a float"),
        (jax.eval_shape(lambda: params), "embed is ShapeDtypeStruct, not a float"),
        (jax.eval_shape(lambda: models.quantise(params, "int8")), "embed is QuantisedArray, not a float"),
        (params | {"more": params["embed"]}, "more is unknown"),
        ({name: part for name, part in params.items() if name != "layers"}, "layers.0.attn.* is missing; and 6 more"),
        ([1], "embed is missing"),
    ):
        with pytest.raises(ValueError, match=f"the weights do not fit this model: .*{seen}"):
            Engine(config, wrong, **SIZES)
    assert Engine(config, models.quantise(params, "int8"), **SIZES)
    served = Engine(config, params, **SIZES)
    with pytest.raises(ValueError, match=r"\['embed'\] is ShapeDtypeStruct, not float32.*; nothing was changed"):
        served.update_weights(jax.eval_shape(lambda: params))
