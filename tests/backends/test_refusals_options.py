"""A sentence for every option that says less than it needs, more than anybody asked for, or what cannot be."""

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import AttentionParams
from tests.backends.ragged_batch import Q
from tests.backends.test_refusals import ONES, attend, layer_of

INT8 = layer_of(output_dtype=jnp.int8)


def scaled(q=Q, scale=1.0):
    return attend(q, spec=INT8, params=AttentionParams(output_scale=scale))


REFUSED = {
    "unknown output_dtype": (
        lambda: layer_of(output_dtype="bfloat16"),
        ValueError,
        "output_dtype='bfloat16' must be one of float8_e4m3fn, float8_e5m2, int8; None: the queries' own",
    ),
    "output_scale missing": (
        lambda: scaled(scale=None),
        ValueError,
        "params.output_scale=None but spec.output_dtype='int8': a quantised result needs both",
    ),
    "output_scale unused": (
        lambda: attend(params=AttentionParams(output_scale=1.0)),
        ValueError,
        "params.output_scale=1.0 but spec.output_dtype=None",
    ),
    "output_scale per head": (
        lambda: scaled(scale=ONES),
        ValueError,
        r"params.output_scale.shape=\(4,\) must be \(\)",
    ),
    "negative output_scale": (lambda: scaled(scale=-1.0), ValueError, "output_scale=-1.0 must be finite and > 0"),
    "gradient of a quantised result": (
        lambda: jax.grad(lambda q: scaled(q).lse.sum())(Q),
        jattn.UnsupportedError,
        "output_dtype='int8' computes forward only; leave it None to differentiate",
    ),
    "merging quantised results": (
        lambda: jattn.merge(scaled(), scaled()),
        ValueError,
        "a state of int8 is stored numbers, not real ones: merge before the result is quantised",
    ),
    "a quantised result to project": (
        lambda: jattn.nn.AttentionLayer(spec=INT8, hidden_size=32),
        ValueError,
        "the output projection of a layer reads real numbers",
    ),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_every_bad_option_gets_its_sentence(bad):
    do, error, sentence = REFUSED[bad]
    with pytest.raises(error, match=sentence):
        do()
