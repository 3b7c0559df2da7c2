"""Where few logits are wanted, the last layer ends with its attention for other tokens; the logits do not change."""

import functools

import jax
import numpy as np
import pytest

import jattn
from jattn import models
from tests.models import examples

FAMILIES = (
    *("llama", "gemma2", "gpt_oss", "cohere", "deepseek_v3", "longcat_flash"),  # cohere: a parallel MLP
    *("gemma3n_text", "gemma4_text"),  # AltUp and layer inputs; experts beside the MLP
)
LENGTHS, AT = (9, 5), np.array([8, 13], np.int32)


def step_of(config):
    """(the step, its arguments after the params): two prompts at once."""
    ids = np.random.default_rng(4).integers(0, config.vocab_size, sum(LENGTHS)).astype(np.int32)
    meta = jattn.CommonAttentionMetadata.from_lengths(LENGTHS, LENGTHS, [[2, 0, 3], [4, 1, 5]], 4)
    return functools.partial(models.forward, config), (ids, config.make_caches(6, 4, "float32"), meta)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_some_tokens_are_those_of_all_tokens(family):
    config = models.config_of((examples.DECODERS | examples.FURTHER)[family])
    params = examples.params_of(config)
    step, args = step_of(config)
    caches, every = jax.jit(step)(params, *args)
    same_caches, some = jax.jit(functools.partial(step, logits_at=AT))(params, *args)
    np.testing.assert_allclose(some, every[AT], atol=2e-5 * float(np.std(every)), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same_caches, caches)


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_no_logits_are_wanted(family):
    """E.g. of a chunk that does not end a prompt. Experts get no token then, of which reshape cannot infer a size."""
    config = models.config_of((examples.DECODERS | examples.FURTHER)[family])
    step, args = step_of(config)
    none = functools.partial(step, logits_at=np.zeros(0, np.int32))
    caches, logits = jax.eval_shape(none, examples.params_of(config), *args)
    assert logits.shape == (0, config.vocab_size) and len(caches) == len(args[1])


@pytest.mark.parametrize("at", [3, [[8, 13]], [8.0], slice(0, 2), "8", [True, False]], ids=repr)
def test_what_names_no_tokens_is_refused_by_name(at):
    config = models.config_of(examples.DECODERS["llama"])
    step, args = step_of(config)
    with pytest.raises(ValueError, match="logits_at"):
        jax.eval_shape(lambda params: step(params, *args, logits_at=at), examples.params_of(config))


def test_the_last_mlp_computes_only_the_wanted_tokens():
    config = models.config_of(examples.DECODERS["llama"])
    params = examples.params_of(config)
    step, args = step_of(config)

    def rows(**options) -> list[int]:
        """Of each product with a matrix of an MLP: its rows."""
        closed = jax.make_jaxpr(functools.partial(step, **options))(params, *args)
        return [rows for rows, matrix in products(closed.jaxpr) if matrix in sizes]

    sizes = {params["layers"][0]["mlp"][name]["kernel"].shape for name in ("gate", "down")}
    every = sum(LENGTHS)
    layers, of_layer = len(config.layers), len(rows()) // len(config.layers)
    assert of_layer >= 2 and rows() == [every] * of_layer * layers
    assert rows(logits_at=AT) == [every] * of_layer * (layers - 1) + [len(AT)] * of_layer


def products(jaxpr):
    """(rows of the left operand, shape of the first matrix) of every product, in order, inside of calls too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ffi_call"):
            left, right = (operand.aval.shape for operand in equation.invars[:2])
            yield left[0], right
        for parameter in equation.params.values():
            if inner := getattr(parameter, "jaxpr", None):
                yield from products(inner)
