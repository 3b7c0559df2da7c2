"""The errors of options that miss another option, that are not used, or that contradict each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttentionParams
from jattn.compat.vllm import get_scheduler_metadata
from tests.backends.ragged_batch import Q, batch
from tests.backends.test_refusals import ONES, attend, build, layer_of, packed

INT8 = layer_of(output_dtype=jnp.int8)
RSWA = layer_of(sliding_window=3, use_rswa=True)


def scaled(q=Q, scale=1.0):
    return attend(q, spec=INT8, params=AttentionParams(output_scale=scale))


REFUSED = {
    "unknown output_dtype": (
        lambda: layer_of(output_dtype="bfloat16"),
        ValueError,
        "output_dtype='bfloat16' must be one of float8_e4m3fn, float8_e5m2, int8, float8_e4m3fnuz, or None",
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
        "out of int8 is quantised: merge states before quantisation",
    ),
    "lookback without chunks": (
        lambda: layer_of(chunk_lookback=1),
        ValueError,
        "chunk_lookback=1 needs chunk_size",
    ),
    "negative lookback": (
        lambda: layer_of(chunk_size=4, chunk_lookback=-1),
        ValueError,
        "chunk_lookback=-1 must be an integer >= 0",
    ),
    "square root of no ALiBi": (lambda: layer_of(use_alibi_sqrt=True), ValueError, "needs has_alibi=True"),
    "R-SWA without a window": (lambda: layer_of(use_rswa=True), ValueError, "needs a sliding_window with a left side"),
    "R-SWA of an encoder": (
        lambda: layer_of(use_rswa=True, sliding_window=3, attn_type="encoder"),
        ValueError,
        "use_rswa=True needs attn_type='decoder'",
    ),
    "spans of an encoder": (
        lambda: layer_of(use_mm_prefix=True, attn_type="encoder_only"),
        ValueError,
        "use_mm_prefix=True needs attn_type='decoder'",
    ),
    "clamped by no window": (
        lambda: layer_of(use_mm_prefix=True, mm_prefix_clamp_sliding_window=True),
        ValueError,
        "needs use_mm_prefix and a sliding_window",
    ),
    "spans asked for, none said": (
        lambda: build(spec=layer_of(use_mm_prefix=True)),
        ValueError,
        r"spec.use_mm_prefix=True needs meta.mm_prefix_ranges, i32\[R, n, 2\]: give from_lengths mm_prefix_ranges=",
    ),
    "prefixes asked for, none said": (
        lambda: packed(spec=RSWA),
        ValueError,
        r"spec.use_rswa=True needs meta.rswa_prefix_lens, i32\[R\]: give from_lengths",
    ),
    "prefixes of another R": (
        lambda: build(batch().replace(rswa_prefix_lens=np.zeros(3, np.int32)), RSWA),
        ValueError,
        r"meta.rswa_prefix_lens.shape=\(3,\) must be \[R\] with R=5",
    ),
    "ranges without pairs": (
        lambda: build(batch().replace(mm_prefix_ranges=np.zeros((5, 2), np.int32)), layer_of(use_mm_prefix=True)),
        ValueError,
        r"meta.mm_prefix_ranges.shape=\(5, 2\) must be \[R, n, 2\] with R=5",
    ),
    "causality of another R": (
        lambda: build(batch().replace(causal=[True, False])),
        ValueError,
        r"meta.causal.shape=\(2,\) must be \(5,\): one for each request",
    ),
    "causality of another R on the host": (
        lambda: jattn.check_host(batch().replace(causal=[True, False])),
        ValueError,
        r"meta.causal.shape=\(2,\) must be \(5,\): one for each request",
    ),
    "final lengths of another R": (
        lambda: build(batch().replace(final_seq_lens=[9])),
        ValueError,
        r"meta.final_seq_lens.shape=\(1,\) must be \(5,\): one for each request",
    ),
    "ranges of fewer requests": (
        lambda: batch(mm_prefix_ranges=[[(0, 2)]]),
        ValueError,
        "must have 4 entries, as query_lens: one list for each request",
    ),
    "a work list of two ranges": (
        lambda: get_scheduler_metadata(batch(), RSWA),
        jattn.UnsupportedError,
        "a work list has one range of keys for each tile",
    ),
    "bias without a flag": (
        lambda: attend(params=AttentionParams(qq_bias=jnp.zeros((2, 2)))),
        ValueError,
        "params.qq_bias must be given exactly when spec.use_qq_bias=False",
    ),
    "bias of another shape": (
        lambda: attend(spec=layer_of(use_qq_bias=True), params=AttentionParams(qq_bias=jnp.zeros((2, 3)))),
        ValueError,
        r"params.qq_bias.shape=\(2, 3\) must be \[Q Q\]",
    ),
    "distance bias without a flag": (
        lambda: attend(params=AttentionParams(distance_bias=jnp.zeros((2, 3)))),
        ValueError,
        "params.distance_bias must be given exactly when spec.use_distance_bias=False",
    ),
    "distance bias of an even number of distances": (
        lambda: attend(spec=layer_of(use_distance_bias=True), params=AttentionParams(distance_bias=jnp.zeros((2, 4)))),
        ValueError,
        r"params.distance_bias.shape=\(2, 4\) must be \[\d+, 2L \+ 1\]",
    ),
    "bias of an encoder": (
        lambda: layer_of(use_qq_bias=True, attn_type="encoder"),
        ValueError,
        "use_qq_bias=True needs attn_type='decoder'",
    ),
    "a quantised result to project": (
        lambda: jattn.nn.AttentionConfig(spec=INT8, hidden_size=32),
        ValueError,
        "the output projection needs unquantised outputs",
    ),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_every_bad_option_gets_its_sentence(bad):
    do, error, sentence = REFUSED[bad]
    with pytest.raises(error, match=sentence):
        do()
