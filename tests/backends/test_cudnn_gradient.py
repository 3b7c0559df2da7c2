"""The gradient of packed attention on the GPU: what is given to cuDNN, and when. cuDNN itself is replaced here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import jattn
from jattn.backends import cudnn, cudnn_gradient
from jattn.backends.pallas_gpu import PallasGpuImpl
from jattn.backends.sdpa import SdpaImpl
from jattn.device import Chip
from jattn.ops.gradient import forward_only
from jattn.spec import AttentionParams
from tests.backends import cudnn_by_its_documentation

HOPPER = Chip("gpu", "sm_90")
LAYER = dict(num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.fixture
def impl(monkeypatch):
    """The impl of a Hopper card, whose kernels are replaced by jnp and whose cuDNN by its documentation."""
    attend = cudnn_by_its_documentation.dot_product_attention
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", attend)
    zero = lambda *arrays, used: tuple(jnp.where(used[:, None, None], x, 0) for x in arrays)  # noqa: E731
    monkeypatch.setattr(cudnn, "zero_rows", zero)
    plain = lambda self, *args: SdpaImpl(self.spec, None, HOPPER).forward_packed(*args)  # noqa: E731
    monkeypatch.setattr(PallasGpuImpl, "forward_copied", plain)
    return lambda spec: PallasGpuImpl(spec, None, HOPPER)


@pytest.fixture
def calls(impl, monkeypatch):
    """Grows by what each call of cuDNN's forward knows of the lengths."""
    seen, forward = [], cudnn.forward
    monkeypatch.setattr(cudnn, "forward", lambda *args: (seen.append(args[-1]), forward(*args))[1])
    return seen


def batch(query_lens, seq_lens=None, *, pad=0, traced=True, causal=True):
    seq_lens = query_lens if seq_lens is None else seq_lens
    meta = jattn.CommonAttentionMetadata.from_lengths(query_lens, seq_lens, None, 16, causal=causal)
    meta = meta.padded(sum(query_lens) + pad, len(query_lens) + (2 if pad else 0))
    return jax.tree.map(jnp.asarray, meta) if traced else meta


def inputs(queries, keys, live=None, dtype=jnp.bfloat16):
    """q, k, v and dout; rows from `live` on are NaN."""
    seeds = jax.random.split(jax.random.key(0), 4)
    shapes = ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
    arrays = [jax.random.normal(seed, (*shape, 16), dtype) for seed, shape in zip(seeds, shapes, strict=True)]
    return [x if live is None else x.at[live:].set(jnp.nan) for x in arrays]


def both_ways(impl, q, k, v, dout, meta):
    """(out, lse, dq, dk, dv)"""

    def attend(q, k, v):
        state = impl.for_batch(meta).forward_packed(q, k, v, meta, AttentionParams())
        return state.out, state.lse

    out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
    return out, lse, *pull(dout)


def run(impl, *arrays, meta):
    """both_ways in one program, which knows the lengths if they are numpy arrays."""
    if isinstance(meta.seq_lens, np.ndarray):
        return jax.jit(lambda *args: both_ways(impl, *args, meta))(*arrays)
    return jax.jit(lambda *args: both_ways(impl, *args))(*arrays, meta)


def witness(q, k, v, dout, query_lens, seq_lens, causal=True, window=10**6):
    """(out, lse, dq, dk, dv) in numpy float64, one request and head at a time."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.full(q.shape[:2], -np.inf)
    starts = [np.append(0, np.cumsum(x)) for x in (query_lens, seq_lens)]
    for r, (m, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        rows, keys = (slice(start[r], start[r] + x) for start, x in zip(starts, (m, n), strict=True))
        distance = np.arange(n - m, n)[:, None] - np.arange(n)[None]
        see = ((distance >= 0) | (not causal)) & (distance < window)
        for h in range(q.shape[1] if m and n else 0):
            g, scale = h // 2, q.shape[2] ** -0.5
            logits = np.where(see, q[rows, h] @ k[keys, g].T * scale, -np.inf)
            top = logits.max(1, keepdims=True)
            lse[rows, h] = (np.log(np.exp(logits - top).sum(1, keepdims=True)) + top)[:, 0]
            weights = np.exp(logits - lse[rows, h][:, None])
            out[rows, h] = weights @ v[keys, g]
            inner = (dout[rows, h] * out[rows, h]).sum(1, keepdims=True)
            dlogits = weights * (dout[rows, h] @ v[keys, g].T - inner) * scale
            dq[rows, h] = dlogits @ k[keys, g]
            dk[keys, g] += dlogits.T @ q[rows, h]
            dv[keys, g] += weights.T @ dout[rows, h]
    return out, lse, dq, dk, dv


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.06, rtol=0.02)


BATCHES = {
    "one prompt": ([40], 0),
    "equal": ([12, 12, 12], 0),
    "equal, odd": ([7, 7], 0),
    "ragged": ([7, 1, 33, 16], 0),
    "ragged, padded": ([7, 1, 33, 16], 6),
    "an empty request": ([9, 0, 12], 3),
    "nothing": ([0, 0], 8),
}


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "known"])
@pytest.mark.parametrize("lens, pad", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("options", [{}, dict(sliding_window=6), dict(causal=False)], ids=str)
def test_value_and_gradient_are_those_of_sdpa(impl, calls, lens, pad, options, traced):
    """Rows of padding may hold anything; in the results they are 0."""
    options = dict(options)
    causal = options.pop("causal", True)
    spec = jattn.AttentionSpec(**LAYER, **options)
    meta, tokens = batch(lens, pad=pad, causal=causal, traced=traced), sum(lens) + pad
    arrays = inputs(tokens, tokens, sum(lens))
    got = run(impl(spec), *arrays, meta=meta)
    assert calls
    assert_close(got, witness(*arrays, lens, lens, causal, options.get("sliding_window", 10**6)))


@pytest.mark.parametrize(
    "query_lens, seq_lens",
    [([8, 8], [12, 12]), ([8, 6, 0, 3], [5, 0, 4, 9]), ([1, 1], [20, 11])],
    ids=["equal", "none of either", "decode"],
)
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "known"])
def test_other_lengths_of_keys_without_causality(impl, calls, query_lens, seq_lens, traced):
    """A request without keys has the result 0, and one without queries leaves its keys' gradient 0."""
    spec, meta = jattn.AttentionSpec(**LAYER), batch(query_lens, seq_lens, traced=traced, causal=False)
    arrays = inputs(sum(query_lens), sum(seq_lens))
    assert_close(run(impl(spec), *arrays, meta=meta), witness(*arrays, query_lens, seq_lens, causal=False))
    assert calls


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "known"])
def test_a_request_with_computed_tokens_gets_the_gradient_of_sdpa(impl, traced):
    """cuDNN would align its first query with its first key."""
    spec = jattn.AttentionSpec(**LAYER)
    meta, arrays = batch([8, 12], [12, 16], pad=8, traced=traced), inputs(28, 28)
    assert_close(run(impl(spec), *arrays, meta=meta), witness(*arrays, [8, 12], [12, 16]))


def test_what_is_known_of_the_lengths():
    spec = jattn.AttentionSpec(**LAYER)
    known = lambda *args, spec=spec, **options: cudnn.lengths_known(spec, batch(*args, **options))  # noqa: E731
    assert known([8, 8], traced=False) is cudnn.Lengths.EQUAL
    assert known([8, 8], pad=2, traced=False) is cudnn.Lengths.ALL_NEW
    assert known([7, 7], traced=False) is cudnn.Lengths.ALL_NEW
    assert known([8, 6], traced=False) is cudnn.Lengths.ALL_NEW
    assert known([8, 6]) is cudnn.Lengths.ALL_NEW
    assert known([8, 8], [10, 10], traced=False) is cudnn.Lengths.UNKNOWN
    assert known([8, 8], [10, 10]) is cudnn.Lengths.UNKNOWN


def test_a_batch_with_other_lengths_is_no_longer_known_to_be_all_new():
    meta = batch([8, 8], pad=2)
    assert meta.is_all_new and meta.padded(40, 6).is_all_new and meta.unpadded(16, 2).is_all_new
    assert not meta.replace(seq_lens=meta.seq_lens + 1).is_all_new
    assert not jattn.CommonAttentionMetadata.from_lengths([2], [2], [[0]], 16).is_all_new


@pytest.mark.slow
def test_a_gradient_of_lse_is_that_of_sdpa(impl):
    spec, meta = jattn.AttentionSpec(**LAYER), batch([8, 12])
    q, k, v, dout = inputs(20, 20)

    def loss(who, q):
        state = who.forward_packed(q, k, v, meta, AttentionParams())
        return (state.out * dout).sum().astype(jnp.float32) + state.lse.sum()

    got, want = (jax.grad(lambda q: loss(who, q))(q) for who in (impl(spec), SdpaImpl(spec, None, HOPPER)))  # noqa: B023
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.03)


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "known"])
@pytest.mark.parametrize("lens, pad", [([8, 8], 0), ([5, 9], 2)], ids=["equal", "padded"])
def test_a_second_derivative_is_that_of_sdpa(impl, monkeypatch, lens, pad, traced):
    """What cuDNN computes has no derivative."""
    for name in ("forward", "backward"):
        once = getattr(cudnn, name)
        opaque = lambda spec, q, *args, once=once: once(spec, forward_only(q, "cuDNN"), *args)
        monkeypatch.setattr(cudnn, name, opaque)
    spec, meta = jattn.AttentionSpec(**LAYER), batch(lens, pad=pad, traced=traced)
    q, k, v, dout = inputs(sum(lens) + pad, sum(lens) + pad, dtype=jnp.float16)

    def squares(who, q, k, v):
        attend = lambda *x: who.for_batch(meta).forward_packed(*x, meta, AttentionParams()).out  # noqa: E731
        grads = jax.vjp(attend, q, k, v)[1](dout)
        return sum((x.astype(jnp.float32) ** 2).sum() for x in grads)

    got, want = (
        jax.jit(jax.grad(functools.partial(squares, who), (0, 1, 2)))(q, k, v)
        for who in (impl(spec), SdpaImpl(spec, None, HOPPER))
    )
    for a, b in zip(got, want, strict=True):
        assert jnp.linalg.norm((a - b).astype(jnp.float32)) < 1e-2 * jnp.linalg.norm(b.astype(jnp.float32))


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "known"])
@pytest.mark.parametrize("around", ["remat", "vmap"])
def test_under_transformations(impl, calls, around, traced):
    spec, meta = jattn.AttentionSpec(**LAYER), batch([8, 12], pad=4, traced=traced)
    arrays = inputs(24, 24)
    who = impl(spec).for_batch(meta)

    def grads(q, k, v, dout):
        attend = lambda *x: who.forward_packed(*x, meta, AttentionParams()).out  # noqa: E731
        return jax.vjp(jax.checkpoint(attend) if around == "remat" else attend, q, k, v)[1](dout)

    want = witness(*arrays, [8, 12], [8, 12])[2:]
    if around == "vmap":
        got = jax.jit(jax.vmap(grads))(*(jnp.stack([x, x]) for x in arrays))
        want = [np.stack([x, x]) for x in want]
    else:
        got = jax.jit(grads)(*arrays)
    assert_close(got, want)
    assert calls


def test_attention_gives_the_backend_what_is_known_of_the_lengths(impl, calls, monkeypatch):
    """Through the public function, where the lengths are still numpy arrays."""
    monkeypatch.setattr(jattn.device, "detect", lambda: HOPPER)
    spec, meta, (q, k, v, _) = jattn.AttentionSpec(**LAYER), batch([8, 8], traced=False), inputs(16, 16)
    spec = dataclasses.replace(spec, scale=0.3)  # of no other test: a trace is kept
    jax.grad(lambda q: jattn.attention(q, k, v, meta, spec).out.astype(jnp.float32).sum())(q)
    assert calls == [cudnn.Lengths.EQUAL]


@pytest.mark.parametrize(
    "lens, pad, traced, zeroing",
    [([64, 64], 0, False, 0), ([64, 64], 0, True, 3), ([60, 3], 1, True, 3), ([60, 3], 0, False, 3)],
    ids=["equal", "traced", "padded", "odd"],
)
def test_cudnn_computes_the_forward_pass_once_and_nothing_else_does(monkeypatch, lens, pad, traced, zeroing):
    """Lowered for CUDA with cuDNN's real operations. zeroing: launches that write the rows of padding."""
    for name, value in dict(check_cudnn_version=91000, check_compute_capability=True).items():
        monkeypatch.setattr(fused_attention_stablehlo, name, lambda *args, value=value: value)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda capability: False)
    spec, meta = jattn.AttentionSpec(**LAYER), batch(lens, pad=pad, traced=traced)
    who, arrays = PallasGpuImpl(spec, None, HOPPER), inputs(sum(lens) + pad, sum(lens) + pad)

    def step(*args):
        *arrays, batch_of_step = args if traced else (*args, meta)
        out, _, *grads = both_ways(who, *arrays, batch_of_step)
        return out, grads

    targets = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "mosaic_gpu_v2")
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    export = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=unchecked)
    text = export(*arrays, *([meta] if traced else [])).mlir_module()
    assert [text.count(f"custom_call @{name}(") for name in targets] == [1, 1, zeroing]
    assert "stablehlo.case" not in text


OTHER_CHIPS = ("sm_80", "sm_86", "sm_89", "sm_120")


@pytest.mark.parametrize("lens, traced, by_cudnn", [([64, 64], False, 1), ([64, 64], True, 0), ([60, 3], False, 0)])
@pytest.mark.parametrize("chip", ["sm_86", "sm_120"])
def test_other_chips_than_hopper_get_a_gradient_of_every_batch(monkeypatch, chip, lens, traced, by_cudnn):
    """Lowered for CUDA with JAX's own checks: it refused segments on Ampere and Ada."""
    capability = lambda wanted: int(chip[3:]) >= 10 * float(wanted)  # noqa: E731
    checks = dict(
        check_cudnn_version=lambda: 91000, check_compute_capability=capability,
        is_cuda_compute_capability_equal=lambda capability: False,
    )  # fmt: skip
    for name, value in checks.items():
        monkeypatch.setattr(fused_attention_stablehlo, name, value)
    meta, arrays = batch(lens, traced=traced), inputs(sum(lens), sum(lens))
    who = PallasGpuImpl(jattn.AttentionSpec(**LAYER), None, Chip("gpu", chip))
    step = lambda *args: both_ways(who, *args[:4], args[4] if traced else meta)  # noqa: E731
    targets = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "mosaic_gpu_v2")
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    export = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=unchecked)
    text = export(*arrays, *([meta] if traced else [])).mlir_module()
    assert [text.count(f"custom_call @{name}(") for name in targets[:2]] == [by_cudnn] * 2


@pytest.mark.parametrize("chip", OTHER_CHIPS)
def test_what_cudnn_has_on_other_chips_is_told(chip):
    spec, wide = (jattn.AttentionSpec(**LAYER | dict(head_dim=d)) for d in (128, 256))
    told = lambda layer: cudnn_gradient.chosen(layer, None, (), Chip("gpu", chip))  # noqa: E731
    assert (
        told(spec)
        == f"sdpa; cuDNN where all requests are known to have one even length, as it takes no others on {chip}"
    )
    assert told(wide) == "sdpa, as cuDNN takes no head_dim=256 (only multiples of 8 up to 128)"
    assert (
        cudnn_gradient.chosen(wide, None, (), HOPPER) == cudnn_gradient.chosen(wide, None, (), Chip("gpu")) == "cuDNN"
    )


def test_explain_says_what_computes_the_gradient():
    told = lambda cache=None, **layer: next(  # noqa: E731
        r for r in jattn.explain(jattn.AttentionSpec(**LAYER | dict(head_dim=64) | layer), cache, HOPPER)
        if r.name == "pallas_gpu"
    )  # fmt: skip
    assert told().gradient == "cuDNN" and told().notes[-1] == "gradient: cuDNN"
    assert told(logits_soft_cap=20.0).gradient == "sdpa, as cuDNN takes no logits_soft_cap=20.0"
    pages = jattn.KVCacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64)
    assert told(pages).gradient == "sdpa, as cuDNN takes packed keys only"


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(logits_soft_cap=20.0), "logits_soft_cap"),
        (dict(has_sinks=True), "has_sinks"),
        (dict(has_alibi=True), "has_alibi"),
        (dict(head_dim=512, v_head_dim=512), "head_dim=512"),
        (dict(head_dim=20, v_head_dim=20), "head_dim=20"),
        (dict(v_head_dim=8), "head_dim=16, v_head_dim=8"),
        (dict(sliding_window=(3, 3)), "sliding_window=(3, 3)"),
        (dict(sliding_window=4, attn_type="encoder_only"), "sliding_window="),
        (dict(chunk_size=8), "chunk_size"),
        (dict(mask_fn=lambda *args: True), "mask_fn"),
        (dict(score_fn=lambda score, *args: score), "score_fn"),
        (dict(output_dtype="float8_e4m3fn"), "output_dtype"),
        (dict(use_distance_bias=True), "use_distance_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # every worker of a run must give a test the same name
)
def test_what_cudnn_does_not_have_is_named(change, reason):
    spec = dataclasses.replace(jattn.AttentionSpec(**LAYER), **change)
    assert any(why.startswith(reason) for why in cudnn.layer_reasons(spec, "bfloat16", HOPPER))
    assert not cudnn.layer_reasons(jattn.AttentionSpec(**LAYER), "bfloat16", HOPPER)


def test_what_cudnn_does_not_have_in_a_batch_is_named(impl, calls):
    spec, windowed = (jattn.AttentionSpec(**LAYER, **more) for more in ({}, dict(sliding_window=4)))
    meta = batch([4, 4])
    assert not cudnn.batch_reasons(windowed, meta, 8, 8)
    assert "causality by request" in cudnn.batch_reasons(spec, batch([4, 4], causal=[True, False]), 8, 8)
    assert "without causality" in cudnn.batch_reasons(windowed, batch([4, 4], causal=False), 8, 8)[0]
    assert "8 queries and 9 keys" in cudnn.batch_reasons(spec, meta, 8, 9)[0]
    assert "bytes of statistics" in cudnn.batch_reasons(spec, meta, 2**26, 2**26)[0]


def test_without_a_gradient_the_kernel_computes(impl, calls):
    meta, (q, k, v, _) = batch([20]), inputs(20, 20)
    impl(jattn.AttentionSpec(**LAYER)).forward_packed(q, k, v, meta, AttentionParams())
    assert not calls
