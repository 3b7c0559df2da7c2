"""Steps of few tokens through jattn.nn.layer_tail, with formulas in place of its launch: which models, and numbers."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn import models
from jattn.backends.gpu_plan import PallasGpuMetadata
from jattn.device import Chip
from jattn.models import decoder, quantising, tail_attention
from jattn.models import layer_tail as taken
from jattn.nn import Norm
from jattn.nn import layer_tail as op
from jattn.nn.weight_spec import is_weight_spec
from tests.models import examples
from tests.models.options import COMMON
from tests.oracle.gates import activated

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=128,
)  # fmt: skip
SERVED = {
    "llama": {},
    "llama with biases": dict(model_type="llama", attention_bias=True, mlp_bias=True),
    "mistral": dict(sliding_window=5),
    "qwen2": {},
    "gemma": {},
    "granite": dict(residual_multiplier=0.22, attention_multiplier=0.1, embedding_multiplier=3.0, logits_scaling=0.5),
    "gemma2": dict(sliding_window=5, query_pre_attn_scalar=64, attn_logit_softcapping=20.0),
    "gemma3_text": dict(sliding_window=5, query_pre_attn_scalar=64),
    "olmo2": {},
    "olmo3": dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    "glm4": dict(partial_rotary_factor=0.5),
    "exaone4": dict(sliding_window=7, sliding_window_pattern=2),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "glm": dict(partial_rotary_factor=0.5),
    "seed_oss": dict(attention_bias=True, attention_out_bias=False),
    "qwen3": dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "phi3": dict(head_dim=None, sliding_window=None, original_max_position_embeddings=128),
    "ministral": dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
}
NAMES = ["llama", "llama, linear", "llama, dynamic", "llama, yarn", "llama, llama3", "mistral", "qwen2", "qwen3",
         "ministral", "ministral3", "ernie4_5", "hunyuan_v1_dense", "glm", "gemma", "granite", "seed_oss", "smollm3",
         "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", "glm4"]  # fmt: skip


def config_of(family: str, **changes) -> models.ModelConfig:
    keys = COMMON | dict(model_type=family) | SIZES | SERVED.get(family, {}) | changes
    return models.config_of({name: value for name, value in keys.items() if value is not None})


def params_of(config, dtype=ml_dtypes.bfloat16):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, dtype)), examples.params_of(config))


def formulas(launches, a, x, weights, scales, counters, config, keys=(), biases=()):
    """What the kernel computes, from its docstring; NaN if the counters that it uses are not zero."""
    launches.append(config)
    f32 = lambda y: y.astype(jnp.float32)
    rounded = lambda y: y.astype(jnp.bfloat16)

    def normed(y, which):
        eps = (*config.eps, *config.after_eps)[which]
        if eps is None:
            return f32(y)
        scale = f32(scales[which]) + (*config.one_plus, *config.after_one_plus)[which]
        return f32(y) / jnp.sqrt((f32(y) ** 2).mean(1, keepdims=True) + eps) * scale[None]

    (o,), (gate, up), (down,), *following = weights
    biases = [[f32(bias)[None] for bias in group] or [0.0] * 3 for group in biases or ((),) * 4]
    x1 = rounded(f32(x) + config.factors[0] * normed(f32(a) @ f32(o) + biases[0][0], 2))
    n1 = normed(x1, 0)
    g = activated(config.activation, n1 @ f32(gate) + biases[1][0], jnp)
    h = rounded(g * (n1 @ f32(up) + biases[1][1]))
    x2 = rounded(f32(x1) + config.factors[1] * normed(f32(h) @ f32(down) + biases[2][0], 3))
    x2 = jnp.where((counters[0] != 0).any(), jnp.nan, x2)
    n2, rows = normed(x2, 1), None
    if following:
        rows = jnp.concatenate([rounded(n2 @ f32(w) + b) for w, b in zip(following[0], biases[3], strict=False)], 1)
    return x2, rows, (jnp.zeros_like(counters[1]), counters[0] + 1)


@pytest.fixture
def hopper(monkeypatch):
    """The list of launches on a pretended H100."""
    launches = []
    on_chip(monkeypatch)
    monkeypatch.setattr(op, "launch", functools.partial(formulas, launches))
    return launches


def on_chip(monkeypatch, generation="sm_90", processors=132):
    decoder._jitted_forward.clear_cache()
    chip = types.SimpleNamespace(
        detect=lambda: Chip("gpu", generation), processors=lambda: processors, keeps_registers=lambda: True
    )  # fmt: skip
    monkeypatch.setattr(op, "device", chip)


STEPS = (64, 64, 64), (1, 1, 65), (5, 3, 68)  # tokens, of which are new, and all of the request; the others are padding


def steps(config, params, logits_at=None, mesh=None, sizes=STEPS):
    """f32 logits of steps of 64, 1 and 5 tokens; in the last, two of them are padding."""
    page, rng, found = 16, np.random.default_rng(3), []
    tables = [rng.permutation(8)[None].astype(np.int32) for _ in config.cache_groups]
    caches = config.make_caches(8, page, params["embed"].dtype)
    step = jax.jit(functools.partial(models.forward, config, backend="sdpa", model_mesh=mesh))
    every = rng.integers(0, config.vocab_size, 70).astype(np.int32)
    for size, new, length in sizes:
        ids = every[length - new :][:size]
        metas = tuple(
            jattn.CommonAttentionMetadata.from_lengths([new], [length], table, page, num_tokens=size)
            for table in tables
        )
        at = None if logits_at is None else np.minimum(np.array(logits_at, np.int32), new - 1)
        caches, logits = step(params, ids, caches, metas, logits_at=at)
        found.append(np.asarray(logits)[: new if at is None else None])
    return np.concatenate(found)


def far(a, b) -> float:
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def with_every_part(config: models.ModelConfig) -> models.ModelConfig:
    """Norms before and after, each another one, factors and biases in each layer."""

    def norms(old, factor):
        of = lambda norm, eps: dataclasses.replace(norm, eps=factor * eps)
        return dataclasses.replace(old, factor=factor, before=of(old.before, 10.0), after=of(old.after, 1.0))

    layers = tuple(
        dataclasses.replace(
            layer, attn_norms=norms(layer.attn_norms, 0.6), mlp_norms=norms(layer.mlp_norms, 0.3),
            mlp=dataclasses.replace(layer.mlp, bias=True),
            self_attn=dataclasses.replace(layer.self_attn, qkv_bias=True, out_bias=True),
        )
        for layer in config.layers
    )  # fmt: skip
    return dataclasses.replace(config, layers=layers)


@pytest.mark.parametrize("family", ["all parts", *SERVED])
def test_the_launches_give_the_logits_of_the_layers_one_by_one(family, hopper, monkeypatch):
    config = with_every_part(config_of("gemma2")) if family == "all parts" else config_of(family)
    params = params_of(config)
    found, count = steps(config, params), len(hopper)
    assert count == 3 * len(config.layers)
    assert [c.rows for c in hopper[:: len(config.layers)]] == [64, 1, 5]
    on_chip(monkeypatch, "sm_80")
    wanted = steps(config, params)
    whole = dict(sizes=[(68, 68, 68)])  # all tokens in one step: one program
    exact = steps(config, jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32)), params), **whole)
    assert len(hopper) == count
    assert np.isfinite(found).all() and not np.array_equal(found, wanted)
    assert far(found, exact) < 1.2 * far(wanted, exact) + 1e-3 < 0.05


def test_logits_at_takes_rows_of_all_logits(hopper):
    config = config_of("qwen3")
    params = params_of(config)
    rows = np.concatenate([[2, 63], [64, 64], [67, 67]])
    np.testing.assert_allclose(steps(config, params, [2, 63]), steps(config, params)[rows], atol=1e-5)
    assert hopper


def test_prompt_logits_in_chunks(hopper, monkeypatch):
    config = config_of("llama")
    params, ids = params_of(config), np.arange(70) * 7 % 61
    found = models.prompt_logits(config, params, ids, chunk=32, backend="sdpa")
    assert {c.rows for c in hopper} == {32}
    on_chip(monkeypatch, "sm_100")
    assert far(found, models.prompt_logits(config, params, ids, chunk=32, backend="sdpa")) < 0.02


def configs(config, rows=5, dtype=jnp.bfloat16, change=lambda params: params):
    """What `configs_of` says to arrays of these shapes."""
    shape = lambda w: jax.ShapeDtypeStruct(w.shape, dtype)
    params = change(jax.tree.map(shape, models.weight_specs(config), is_leaf=is_weight_spec))
    return taken.configs_of(config, params, jax.ShapeDtypeStruct((rows, config.hidden_size), dtype))


FAMILIES = {n: c for n, c in (examples.DECODERS | examples.FURTHER).items() if "hidden_size" in c}
OTHER_SIZES = {"gpt_neox", "gpt_neo", "falcon", "opt", "bloom", "phi3, longrope", "longcat_flash"}


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - OTHER_SIZES))
def test_only_layers_of_the_formula_are_taken(name, hopper):
    """Not: norms of a residual's sum, experts, parallel or latent layers."""
    keys = FAMILIES[name]
    sizes = dict(hidden_size=256, intermediate_size=512) if "kv_lora_rank" in keys else SIZES
    config = models.config_of(keys | {n: v for n, v in sizes.items() if n != "max_position_embeddings"})
    assert bool(configs(config)) == (name in NAMES)


def test_one_bias_of_a_fused_projection_is_added(hopper):
    plain = config_of("qwen2")
    fuse = lambda layer: dataclasses.replace(layer, self_attn=dataclasses.replace(layer.self_attn, fused_qkv=True))
    config = dataclasses.replace(plain, layers=tuple(map(fuse, plain.layers)))
    params, joined = params_of(plain), lambda *parts: jnp.concatenate(parts, axis=-1)
    found = steps(plain, params)
    for own in params["layers"]:
        own["attn"]["qkv"] = jax.tree.map(joined, *(own["attn"].pop(name) for name in "qkv"))
        assert np.abs(np.asarray(own["attn"]["qkv"]["bias"], np.float32)).max() > 0.1
    np.testing.assert_array_equal(steps(config, params), found)
    assert len(hopper) == 6 * len(config.layers)


def test_options_that_are_not_taken(hopper):
    assert configs(config_of("llama")) and not configs(config_of("llama", hidden_act="gelu"))


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_new", "gelu_fast", "swish"])
def test_names_of_activations_that_are_taken(name, hopper):
    (*_, found) = configs(config_of("llama", hidden_act=name)) or [None]
    assert found is not None and found.activation == ("silu" if name == "swish" else "gelu_tanh")


def test_wide_tiles_of_many_rows_need_registers_that_nvjitlink_does_not_move(hopper, monkeypatch):
    """Of Qwen 2.5 7B."""
    sizes = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, head_dim=128)
    config = config_of("qwen2", **sizes)
    assert {c.products[1].strips for c in configs(config, 64)} == {99} and configs(config, 64)[0].moves_registers
    assert not any(c.moves_registers for c in configs(config_of("llama"), 64))
    monkeypatch.setattr(op.device, "keeps_registers", lambda: False)
    assert not configs(config, 64) and configs(config, 48)


@pytest.mark.slow
def test_norms_of_one_plus_a_scale_are_taken(hopper):
    plain = config_of("llama")
    norms = models.residual.ResidualNorms(before=Norm(eps=1e-3, one_plus=True))
    layer = plain.layers[0].__class__(
        self_attn=plain.layers[0].self_attn, mlp=plain.layers[0].mlp, attn_norms=norms, mlp_norms=norms
    )
    config = plain.__class__(**{**vars(plain), "layers": (layer, layer)})
    params = params_of(config)
    assert all(c.one_plus == (True, True) and c.eps == (1e-3, 1e-3) for c in configs(config) or [None])
    found = steps(config, params)
    assert far(found, steps(config, jax.tree.map(lambda x: x.astype(jnp.float32), params))) < 0.03


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_other_weights_are_not_taken(dtype, hopper):
    assert not configs(config_of("llama"), dtype=dtype)


@pytest.mark.parametrize("place", [("attn_norm", "scale"), ("attn", "q", "bias"), ("mlp", "down", "bias")])
def test_a_norm_or_bias_in_float32_is_not_taken(place, hopper):
    def change(params):
        own = params["layers"][1]
        for name in place[:-1]:
            own = own[name]
        own[place[-1]] = jax.ShapeDtypeStruct(own[place[-1]].shape, jnp.float32)
        return params

    config = config_of("llama with biases")
    assert configs(config) and not configs(config, change=change)


def test_quantised_weights_are_not_taken(hopper):
    config = config_of("llama")
    params = params_of(config)
    x = jax.ShapeDtypeStruct((5, 256), jnp.bfloat16)
    assert taken.configs_of(config, params, x)
    assert not taken.configs_of(config, quantising.quantise(params, "int8"), x)


@pytest.mark.parametrize(
    ("generation", "processors", "rows"),
    [("sm_80", 132, 5), ("sm_100", 132, 5), ("", 132, 5), ("sm_90", None, 5), ("sm_90", 1, 1), ("sm_90", 16, 33),
     ("sm_90", 132, 65)],
)  # fmt: skip
def test_other_chips_and_more_tokens_are_not_taken(generation, processors, rows, monkeypatch):
    config = config_of("llama")
    on_chip(monkeypatch)
    assert configs(config, min(rows, 64))
    on_chip(monkeypatch, generation, processors)
    assert not configs(config, rows)


def on_ranks(config, count: int) -> models.ModelMesh:
    return models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:count]), ("tensor",)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_add_up_their_parts_and_give_the_logits_of_one_device(ranks, hopper, monkeypatch):
    """4 ranks, 2 kv heads: two ranks have the same kv head."""
    config = config_of("llama with biases", vocab_size=64, intermediate_size=1024, num_attention_heads=8)
    params = params_of(config)
    alone, count = steps(config, params), len(hopper)

    def summed(a, x, weights, scales, counters, config, keys, biases):
        (o,), into, (down,), *following = weights
        (of_o,), of_into, (of_down,), *of_next = biases
        of_ranks = jax.lax.psum((a @ o).astype(jnp.float32), "tensor").astype(x.dtype)
        x1 = x + of_ranks + of_o[None]  # the kernel's two sums
        rest = scales, counters, config, ()
        partial = formulas([], jnp.zeros_like(a), x1, ((o,), into, (down,)), *rest, ((), of_into, ()))[0] - x1
        x2 = x1 + jax.lax.psum(partial, "tensor") + of_down[None]
        nothing = jnp.zeros_like(a), x2, ((o,), into, (jnp.zeros_like(down),), *following)
        hopper.append(config)
        return x2, formulas([], *nothing, *rest, ((), (), (), *of_next))[1], counters

    mesh = on_ranks(config, ranks)
    if ranks > 1:
        axes = mesh.axes
        psum = jax.lax.psum
        monkeypatch.setattr(jax.lax, "psum", lambda x, name: psum(x, axes if name == "tensor" else name))
        monkeypatch.setattr(op, "launch", summed)
        monkeypatch.setattr(op, "exchange", lambda config: (jnp.zeros(1),) * 3)
    found = steps(config, params, mesh=mesh)
    assert len(hopper) == 2 * count and {c.ranks for c in hopper[count:]} == {ranks}
    assert {c.products[0].inner for c in hopper[count:]} == {512 // ranks}
    assert far(found, alone) < 0.02


@pytest.mark.parametrize("axes", [("data", "tensor"), ("tensor", "context")])
def test_data_and_context_ranks_are_not_taken(axes, hopper):
    config = config_of("llama", vocab_size=64)
    mesh = models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:4]).reshape(2, 2), axes))
    params, x = params_of(config), jax.ShapeDtypeStruct((5, 256), jnp.bfloat16)
    assert taken.configs_of(config, params, x, on_ranks(config, 2))
    assert not taken.configs_of(config, params, x, mesh)


def test_devices_in_another_order_are_not_taken(hopper):
    """The kernel addresses the ranks by JAX's order of devices."""
    config = config_of("llama", vocab_size=64)
    mesh = models.ModelMesh.of(config, Mesh(np.array(jax.devices()[1::-1]), ("tensor",)))
    assert not taken.configs_of(config, params_of(config), jax.ShapeDtypeStruct((5, 256), jnp.bfloat16), mesh)


def test_weights_that_xla_divides_are_not_taken(hopper):
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("x",))):
        assert not configs(config_of("llama"))


@pytest.mark.parametrize(
    ("has_next", "options"), [(True, ()), (False, ()), (True, ("gelu_tanh",)), (True, ("silu", (0.25, 0.5)))]
)
def test_its_gradient_is_that_of_single_products(has_next, options, hopper):
    rng = np.random.default_rng(5)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.bfloat16)
    weights = ((normal(256, 256),), (normal(256, 512), normal(256, 512)), (normal(512, 256),))
    weights += ((normal(256, 256), normal(256, 128)),) if has_next else ()
    a, x, scales = normal(5, 256), normal(5, 256), (normal(256) + 1, normal(256) + 1)
    biases = tuple(tuple(16 * normal(kernel.shape[1]) for kernel in group) for group in weights)
    formula = op.TailFormula(Norm(eps=1e-5), Norm(eps=1e-4, one_plus=True), *options)
    config = op.config_of(5, a.dtype, weights, scales, formula, biases=biases)
    assert config is not None
    loss = lambda results: sum((y.astype(jnp.float32) ** 2).sum() for y in results[:2] if y is not None)
    ours = lambda *inputs: loss(op.layer_tail(formula, config, *inputs[:4], op.new_counters(), *inputs[4:]))
    value, grads = jax.value_and_grad(ours, argnums=(0, 1, 2, 3, 4))(a, x, weights, scales, biases)
    plain = lambda *inputs: loss(op.in_steps(*inputs[:4], formula, *inputs[4:]))
    wanted, wanted_grads = jax.value_and_grad(plain, argnums=(0, 1, 2, 3, 4))(a, x, weights, scales, biases)
    assert hopper and abs(value / wanted - 1) < 0.01
    assert all(np.asarray(y, np.float32).any() for y in jax.tree.leaves(grads[4]))
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        assert far(*(np.asarray(y, np.float32) for y in (got, want))) < 0.02


def attention_formulas(launches, rows, x, weights, scales, counters, config, keys, biases):
    """What the launch with attention computes, in numpy, from its plan: one token after the other."""
    a, sums = config.attention, config.attention.sums
    if sums:
        parts, squares = (np.asarray(y, np.float32) for y in rows)
        assert parts.shape[0] == sums * config.rows8
        factor = 1 / np.sqrt(squares[: config.rows].sum(1) / config.hidden + a.eps)
        rows = parts.reshape(sums, config.rows8, -1).sum(0)[: config.rows] * factor[:, None]
    cos, sin, table, plan, *vectors = (np.asarray(y) for y in keys[:-2])
    of_qkv, norms = vectors[: 3 * a.has_bias], vectors[3 * a.has_bias :]
    bias = np.concatenate(of_qkv).astype(np.float32) if a.has_bias else 0
    pools = [np.array(pool) for pool in keys[-2:]]
    live, count = plan[-1, :2]
    out = np.zeros((config.rows, a.heads * a.head_dim), np.float32)
    for token, unit, _, end, has_new, _, request, slot in plan[:-1]:
        if token < 0 or not has_new:
            continue
        heads = (np.asarray(rows[token], np.float32) + bias).reshape(-1, a.head_dim)
        q, k, v = np.split(heads, [a.heads, a.heads + a.kv_heads])
        if a.norm_eps is not None:
            q, k = (
                y / np.sqrt((y**2).mean(1, keepdims=True) + a.norm_eps) * (scale.astype(np.float32) + a.norm_one_plus)
                for y, scale in zip((q, k), norms, strict=True)
            )
        half = a.head_dim // 2
        q, k = (
            np.concatenate([y[:, :half] * c - y[:, half:] * d, y[:, half:] * c + y[:, :half] * d], axis=1)
            for c, d in [(cos[token], sin[token])]
            for y in (q, k)
        )
        kv = unit // a.chunks
        if slot >= 0:
            for pool, new in zip(pools, (k, v), strict=True):
                pool[slot // a.page, kv, slot % a.page] = new[kv]
        begin = min(r[2] for r in plan[:-1] if tuple(r[:2]) == (token, unit))
        past = [[pool[table[request, j // a.page], kv, j % a.page] for j in range(begin, end)] for pool in pools]
        own = [np.array([*x, new[kv]], np.float32) for x, new in zip(past, (k, v), strict=True)]
        for head in range(unit * a.together, (unit + 1) * a.together):
            scores = own[0] @ q[head] * a.scale
            p = np.exp(scores - scores.max())
            out[token, head * a.head_dim :][: a.head_dim] = p @ own[1] / p.sum()
    assert set(plan[:-1, 0]) - {-1} == set(range(live)) and count >= 1
    plain = dataclasses.replace(config, attention=None)
    after = formulas(launches, jnp.asarray(out, jnp.bfloat16), x, weights, scales, counters, plain, (), biases)
    launches[-1] = config
    if config.gives_sums:  # of which the first CTA's is all
        x2 = np.asarray(after[0], np.float32)
        scale = np.asarray(scales[1], np.float32) + config.one_plus[1]
        y = np.concatenate([x2 * scale @ np.asarray(w, np.float32) for w in weights[3]], axis=1)
        parts = np.zeros((config.products[3].splits * config.rows8, y.shape[1]), np.float32)
        parts[: config.rows] = y
        squares = np.zeros((config.rows8, 4), np.float32)
        squares[: config.rows, 1] = (x2**2).sum(1)
        after = after[0], (jnp.asarray(parts), jnp.asarray(squares)), after[2]
    return *after, tuple(jnp.asarray(pool) for pool in pools)


@pytest.fixture
def attending(monkeypatch):
    """The list of launches, with attention where the model takes it, on a pretended H100."""
    launches = []
    on_chip(monkeypatch)
    monkeypatch.setattr(jattn.device, "chip_of", lambda _: Chip("gpu", "sm_90"))
    either = lambda *args: (attention_formulas if args[6] else formulas)(launches, *args)
    monkeypatch.setattr(op, "launch", either)
    return launches


def decode_step(config, params, backend, new=(1, 0, 1, 1), lens=(70, 0, 1, 33), **changes):
    """f32 (logits, caches) of a step of these requests, the third padded."""
    page, rng, pages = 16, np.random.default_rng(7), changes.pop("pages", 8)
    table = rng.permutation(4 * pages).reshape(4, pages).astype(np.int32)
    caches = config.make_caches(4 * pages, page, jnp.bfloat16)
    normal = lambda pool: jnp.asarray(rng.normal(size=pool.shape), jnp.bfloat16)
    caches = [dataclasses.replace(cache, k=normal(cache.k), v=normal(cache.v)) for cache in caches]
    size = changes.pop("num_tokens", 4)
    meta = jattn.CommonAttentionMetadata.from_lengths(list(new), list(lens), table, page, num_tokens=size, **changes)
    ids = rng.integers(0, config.vocab_size, size).astype(np.int32)
    metas = (meta,) * len(config.cache_groups)
    caches, logits = models.forward(config, params, ids, caches, metas, backend=backend)
    return np.asarray(logits)[: sum(new)], [np.asarray(y, np.float32) for c in caches for y in (c.k, c.v)]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", {}), ("llama", dict(num_attention_heads=6, num_key_value_heads=1, head_dim=128)), ("qwen3", {}),
     ("qwen2", {}), ("granite", {}), ("llama with biases", {}), ("ministral", {})],
)  # fmt: skip
def test_a_decode_step_of_few_requests_is_one_launch_a_layer(family, sizes, attending):
    config = config_of(family, **sizes)
    params = params_of(config)
    found, caches = decode_step(config, params, "pallas_gpu")
    assert [c.attention is not None for c in attending] == [True] * len(config.layers)
    wanted, wanted_caches = decode_step(config, params, "sdpa")
    exact, _ = decode_step(config, jax.tree.map(lambda x: x.astype(jnp.float32), params), "sdpa")
    assert not attending[len(config.layers)].attention
    assert far(found, exact) < 1.2 * far(wanted, exact) + 1e-3 < 0.05
    for own, other in zip(caches, wanted_caches, strict=True):
        np.testing.assert_allclose(own, other, rtol=0.02, atol=0.02)


def of_step(config, attending, monkeypatch, **batch) -> tail_attention.Attending | None:
    """What a step has of the launch with attention, if a launch is reached at all; None: that is not taken."""
    seen = []

    def stop(*args):
        seen.append(tail_attention.attending(*args))
        raise StopIteration

    monkeypatch.setattr(taken, "attending", stop)
    with pytest.raises(StopIteration):  # traced, as by a server, and not computed
        jax.eval_shape(lambda: decode_step(config, params_of(config), "pallas_gpu", **batch))
    return seen[0]


@pytest.mark.parametrize(
    ("family", "changes", "batch", "is_taken"),
    [
        ("llama", {}, {}, True),
        ("ministral3", {}, {}, False),  # queries have a temperature
        ("mistral", {}, {}, True),  # a window
        ("qwen3", {}, {}, True),  # norms of queries and keys
        ("qwen2", {}, {}, True),  # biases
        ("glm", {}, {}, False),  # neighbours are rotated, half of a head
        ("llama", dict(head_dim=32), {}, False),
        ("llama", {}, dict(new=(1, 0, 2, 1), lens=(70, 0, 2, 33)), False),
        ("llama", {}, dict(num_tokens=9), False),
        ("llama", {}, dict(causal=[True] * 4), False),
    ],
)
def test_which_steps_take_the_launch_with_attention(family, changes, batch, is_taken, attending, monkeypatch):
    found = of_step(config_of(family, **changes), attending, monkeypatch, **batch)
    assert (found is not None) == is_taken


def test_a_program_for_requests_of_many_keys_takes_the_launch_where_they_have_few(attending):
    config = config_of("ministral")  # layers with a window, and without
    params = params_of(config)
    with jax.disable_jit():
        found, caches = decode_step(config, params, "pallas_gpu", max_blocks=4096)
    assert [c.attention is not None for c in attending] == [True] * len(config.layers)
    wanted, wanted_caches = decode_step(config, params, "sdpa")
    assert far(found, wanted) < 0.05
    for own, other in zip(caches, wanted_caches, strict=True):
        np.testing.assert_allclose(own, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("lens", "is_together"), [((1025, 0, 1, 33), True), ((1026, 0, 1, 33), False)])
def test_the_longest_request_decides(lens, is_together, attending, monkeypatch):
    """Each of three live tokens has 16 parts. One turn of a part takes 64 of the cached keys."""
    monkeypatch.setattr(tail_attention, "MOST_TURNS", 1)
    seen = []

    def instead(together):
        def step(step, weights, x, arguments, *_):
            seen.append(together)
            assert together or [type(m) for _, m, *_ in arguments] == [PallasGpuMetadata] * len(config.layers)
            raise StopIteration

        return step

    for name, together in (("_together", True), ("_apart", False)):
        monkeypatch.setattr(taken, name, instead(together))
    config = config_of("llama")
    with jax.disable_jit(), pytest.raises(StopIteration):
        decode_step(config, params_of(config), "pallas_gpu", lens=lens, pages=80)
    assert seen == [is_together]


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_program_without_long_requests_has_one_form(kv_heads, attending, monkeypatch):
    """For 4 tokens with 4 heads of 64 over 2 kv heads there are 16 parts of each, and 64 keys a turn: 8192 keys. Over
    one kv head there would be CTAs for 33, but 16 are the most."""
    assert tail_attention.MOST_TURNS * 16 * 64 == 8192
    for blocks, has_both in ((512, False), (513, True)):
        found = of_step(config_of("llama", num_key_value_heads=kv_heads), attending, monkeypatch, max_blocks=blocks)
        assert found is not None and (found.has_few_keys is not None) == has_both


@pytest.mark.parametrize(("window", "has_both"), [(8193, False), (8194, True)])
def test_a_tokens_own_key_takes_no_turn_of_a_window(window, has_both, attending, monkeypatch):
    config = config_of("mistral", sliding_window=window)
    found = of_step(config, attending, monkeypatch, max_blocks=1024)
    assert found is not None and (found.has_few_keys is not None) == has_both
