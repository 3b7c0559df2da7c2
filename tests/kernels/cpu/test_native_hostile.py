"""A native call never reads or writes outside its arrays: wrong shapes and dtypes are refused, wrong numbers clamped.

The tests make the custom calls directly, without the checks in Python. The fuzz driver passes random numbers to the
kernels, under AddressSanitizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.native import library, ops
from tests.kernels.cpu.native_setup import needs_library
from tests.running import same_bits

pytestmark = needs_library

T, R, H, K, D, V, N, S, B = 6, 3, 4, 2, 16, 24, 5, 8, 7


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


def i32(*shape):
    return jnp.zeros(shape, jnp.int32)


ATTEND = dict(
    q=f32(T, H, D), k=f32(N, K, S, D), v=f32(N, K, S, V), k_token_scale=f32(0), v_token_scale=f32(0),
    query_start_loc=jnp.arange(R + 1, dtype=jnp.int32), seq_lens=i32(R), kv_lens=i32(R),
    block_table=i32(R, B), kv_start=i32(0), causal=i32(0), alibi_slopes=f32(0), sinks=f32(0), q_scale=f32(0),
    k_scale=f32(0), v_scale=f32(0),
)  # fmt: skip
ATTEND_NUMBERS = dict(
    scale=np.float32(1), soft_cap=np.float32(0), window_left=-1, window_right=-1, chunk_size=0, latent_dim=0, kv_dtype=0
)
WRITE = dict(
    k=f32(T, K, D), v=f32(T, K, V), slot_mapping=i32(T), k_scale=f32(0), v_scale=f32(0),
    k_pool=f32(N, K, S, D), v_pool=f32(N, K, S, V), k_token_scale=f32(0), v_token_scale=f32(0),
)  # fmt: skip


def call(target, arrays, numbers, outputs):
    """One custom call with these arrays."""
    attributes = {name: np.int32(x) if isinstance(x, int) else x for name, x in numbers.items()}
    attributes |= dict(heads_first=True, isa="auto", threads=np.int32(1))
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs)
    return jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*arrays.values(), **attributes))


def attend(out=((T, H, V), "float32"), lse=((T, H), "float32"), kv_dtype=0, **changed):
    return call(library.ATTEND, ATTEND | changed, ATTEND_NUMBERS | dict(kv_dtype=kv_dtype), [out, lse])


def write(kv_dtype=0, out=None, **changed):
    arrays = WRITE | changed
    outputs = [(x.shape, x.dtype) for name, x in arrays.items() if "pool" in name or "token" in name]
    return call(library.WRITE, arrays, dict(kv_dtype=kv_dtype), out or outputs)


PACKED = dict(k=f32(9, K, D), v=f32(9, K, V), kv_start=i32(R), block_table=i32(0, 0))
BAD_ATTEND = {
    "q has rank 2": (dict(q=f32(T, D)), r"q is \[6 16\] and must be of rank 3"),
    "another head dim": (dict(q=f32(T, H, D + 1)), r"k is \[5 2 8 16\] and must be \[5 2 8 17\]"),
    "fewer values": (dict(v=f32(N - 1, K, S, V)), r"v is \[4 2 8 24\] and must be \[5 2 8 24\]"),
    "packed values": (dict(v=f32(9, K, V)), "v is .* and must be of rank 4"),
    "keys of rank 5": (dict(k=f32(1, N, K, S, D)), "rank 4"),
    "heads that kv heads do not divide": (
        dict(q=f32(T, 3, D), out=((T, 3, V), "float32")),
        "heads is 3 and must be a multiple of the number of kv heads, 2",
    ),
    "no kv heads": (dict(k=f32(N, 0, S, D), v=f32(N, 0, S, V)), "number of kv heads is 0 and must be 1"),
    "head dim 0": (dict(q=f32(T, H, 0), k=f32(N, K, S, 0)), "head_dim is 0 and must be 1 to 512"),
    "head dim 513": (dict(q=f32(T, H, 513), k=f32(N, K, S, 513)), "head_dim is 513"),
    "wide values": (dict(v=f32(N, K, S, 640), out=((T, H, 640), "float32")), "v_head_dim is 640"),
    "too few starts": (dict(query_start_loc=i32(R)), r"query_start_loc is \[3\] and must be \[4\]"),
    "too few kv lengths": (dict(kv_lens=i32(R - 1)), r"kv_lens is \[2\] and must be \[3\]"),
    "a short table": (dict(block_table=i32(R - 1, B)), r"block_table is \[2 7\] and must be \[3 7\]"),
    "a flat table": (dict(block_table=i32(R * B)), "block_table is .* and must be of rank 2"),
    "causal of one": (dict(causal=i32(1)), r"causal is \[1\] and must be \[3\]"),
    "slopes of kv heads": (dict(alibi_slopes=f32(K)), r"alibi_slopes is \[2\] and must be \[4\]"),
    "too few sinks": (dict(sinks=f32(1)), r"sinks is \[1\]"),
    "too few query scales": (dict(q_scale=f32(1)), r"q_scale is \[1\]"),
    "too few key scales": (dict(k_scale=f32(1)), r"k_scale is \[1\] and must be \[2\]"),
    "too few value scales": (dict(v_scale=f32(1)), r"v_scale is \[1\]"),
    "flat token scales": (dict(k_token_scale=f32(N * K * S)), r"k_token_scale is \[80\]"),
    "token scales of half the pool": (dict(v_token_scale=f32(N, K, S // 2)), r"v_token_scale is \[5 2 4\]"),
    "packed without starts": (PACKED | dict(kv_start=i32(0)), r"kv_start is \[0\] and must be \[3\]"),
    "packed, values shorter": (PACKED | dict(v=f32(8, K, V)), r"v is \[8 2 24\] and must be \[9 2 24\]"),
    "packed, values of another dtype": (
        PACKED | dict(v=f32(9, K, V).astype(jnp.bfloat16)),
        "v has dtype BF16 and must have float32, the kv_dtype",
    ),
    "a pool of halves read as floats": (
        dict(k=f32(N, K, S, D).astype(jnp.float16)),
        "k has dtype F16 and must have float32, the kv_dtype",
    ),
    "bits of bf16 read as floats": (
        dict(k=jnp.zeros((N, K, S, D), jnp.uint16)),
        "k has dtype U16 and must have float32",
    ),
    "an unknown dtype": (dict(kv_dtype=6), "kv_dtype is 6 and must be 0 to 5"),
    "a negative dtype": (dict(kv_dtype=-1), "kv_dtype is -1 and must be 0 to 5"),
    "integer queries": (dict(q=i32(T, H, D)), "q has dtype S32 and must have float32"),
    "integer slopes": (dict(alibi_slopes=i32(H)), "expected F32|dtype"),
    "float lengths": (dict(seq_lens=f32(R)), "expected S32|dtype"),
    "a result of bytes": (dict(out=((T, H, V), "int8")), "out has dtype S8 and must have float32, float16 or bfloat16"),
    "a short result": (dict(out=((T - 1, H, V), "float32")), r"out is \[5 4 24\] and must be \[6 4 24\]"),
    "a short lse": (dict(lse=((T, H - 1), "float32")), r"lse is \[6 3\]"),
}
BAD_WRITE = {
    "values of fewer tokens": (dict(v=f32(T - 1, K, V)), r"v is \[5 2 24\] and must be \[6 2 24\]"),
    "too few slots": (dict(slot_mapping=i32(T - 1)), r"slot_mapping is \[5\] and must be \[6\]"),
    "more heads than the pool": (dict(k=f32(T, 3, D), v=f32(T, 3, V)), r"k_pool is .* must be \[5 3 8 16\]"),
    "longer rows than the pool's": (dict(k=f32(T, K, D + 8)), r"k_pool is \[5 2 8 16\]"),
    "a smaller pool of values": (dict(v_pool=f32(N, K, S - 1, V)), r"v_pool is \[5 2 7 24\]"),
    "a flat pool": (dict(k_pool=f32(N * S, K, D)), "k_pool is .* rank 4"),
    "half the token scales": (dict(k_token_scale=f32(N, K, S // 2)), "k_token_scale is"),
    "token scales of bytes": (
        dict(k_token_scale=jnp.zeros((N, K, S), jnp.int8)),
        "k_token_scale has dtype S8 and must have float32",
    ),
    "too few scales": (dict(k_scale=f32(1)), r"k_scale is \[1\]"),
    "bytes as floats": (dict(k_pool=jnp.zeros((N, K, S, D), jnp.uint8)), "k_pool has dtype U8 and must have float32"),
    "two types": (dict(v=f32(T, K, V).astype(jnp.bfloat16)), "v has dtype BF16 and must have the dtype of k"),
    "a result that is smaller": (dict(out=[((1,), "float32")] * 4), "another size as output than as input"),
}


@pytest.mark.parametrize("why", BAD_ATTEND)
def test_attend_refuses(why):
    changed, sentence = BAD_ATTEND[why]
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        attend(**changed)


@pytest.mark.parametrize("why", BAD_WRITE)
def test_write_refuses(why):
    changed, sentence = BAD_WRITE[why]
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        write(**changed)


def test_what_is_well_formed_is_taken():
    """The arrays of which the refused calls above change one."""
    out, lse = attend()
    assert not np.asarray(out).any() and np.isneginf(lse).all()
    attend(**PACKED)
    attend(
        k_token_scale=f32(N, K, S),
        v_token_scale=f32(N, K, S),
        causal=i32(R),
        alibi_slopes=f32(H),
        sinks=f32(H),
        k_scale=f32(K),
    )
    write()
    codes = dict(k_pool=jnp.zeros((N, K, S, D), jnp.uint8), v_pool=jnp.zeros((N, K, S, V), jnp.uint8))
    write(
        kv_dtype=3,
        **codes,
        k_token_scale=f32(N, K, S),
        v_token_scale=f32(N, K, S),
        k_scale=f32(K) + 1,
        v_scale=f32(K) + 1,
    )


BAD_DRAW = {
    "flat logits": (dict(logits=f32(9)), r"logits is \[9\] and must be of rank 2"),
    "too few temperatures": (dict(temperature=f32(R - 1)), r"temperature is \[2\] and must be \[3\]"),
    "too few top_k": (dict(top_k=i32(R - 1)), r"top_k is \[2\] and must be \[3\]"),
    "too many top_p": (dict(top_p=f32(R + 1)), r"top_p is \[4\] and must be \[3\]"),
    "a scalar least": (dict(least=f32()), r"least is \[\] and must be \[3\]"),
    "keys of one word": (dict(keys=jnp.zeros((R, 1), jnp.uint32)), r"keys is \[3 1\] and must be \[3 2\]"),
    "few tokens": (dict(tokens=((R - 1,), "int32")), r"tokens is \[2\] and must be \[3\]"),
    "few floors": (dict(floors=((R - 1,), "float32")), r"floors is \[2\] and must be \[3\]"),
    "a float top_k": (dict(top_k=f32(R)), "expected S32|dtype"),
    "signed keys": (dict(keys=i32(R, 2)), "expected U32|dtype"),
    "bf16 logits": (dict(logits=f32(R, 9).astype(jnp.bfloat16)), "expected F32|dtype"),
    "floors of integers": (dict(floors=((R,), "uint32")), "expected F32|dtype"),
}


@pytest.mark.parametrize("why", BAD_DRAW)
def test_a_draw_refuses(why):
    changed, sentence = BAD_DRAW[why]
    arrays = dict(
        logits=f32(R, 9), temperature=f32(R), top_k=i32(R), top_p=f32(R), least=f32(R),
        keys=jnp.zeros((R, 2), jnp.uint32), tokens=((R,), "int32"), floors=((R,), "float32"),
    ) | changed  # fmt: skip
    results = [jax.ShapeDtypeStruct(*arrays.pop(name)) for name in ("tokens", "floors")]
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        jax.ffi.ffi_call(library.DRAW, results)(*arrays.values(), isa="auto", threads=np.int32(1))


def test_fill_refuses_two_values_and_another_type():
    for value, dtype in ((f32(2), "float32"), (i32(), "float32")):
        with pytest.raises(jax.errors.JaxRuntimeError, match="one element of the dtype of the array"):
            jax.ffi.ffi_call(library.FILL, jax.ShapeDtypeStruct((4,), dtype))(value)


EMPTY = ("tokens",), ("requests",), ("blocks",), ("page",), ("width",), ("tokens", "requests")


@pytest.mark.parametrize("empty", EMPTY, ids="+".join)
def test_an_empty_dimension_gives_an_empty_answer(empty):
    sizes = dict(tokens=T, requests=R, blocks=N, page=S, width=B) | dict.fromkeys(empty, 0)
    out, lse = attend(
        q=f32(sizes["tokens"], H, D) + 1,
        k=f32(sizes["blocks"], K, sizes["page"], D),
        v=f32(sizes["blocks"], K, sizes["page"], V) + 1,
        query_start_loc=jnp.arange(sizes["requests"] + 1, dtype=jnp.int32),
        seq_lens=i32(sizes["requests"]) + 3,
        kv_lens=i32(sizes["requests"]) + 3,
        block_table=i32(sizes["requests"], sizes["width"]),
        out=((sizes["tokens"], H, V), "float32"),
        lse=((sizes["tokens"], H), "float32"),
    )
    assert not np.asarray(out).any() and np.isneginf(lse).all()
    pools = write(
        k=f32(sizes["tokens"], K, D) + 1,
        v=f32(sizes["tokens"], K, V) + 1,
        slot_mapping=i32(sizes["tokens"]) - 1,
        k_pool=f32(sizes["blocks"], K, sizes["page"], D),
        v_pool=f32(sizes["blocks"], K, sizes["page"], V),
    )
    assert not any(np.asarray(pool).any() for pool in pools)


@pytest.mark.parametrize(("start", "length"), [(4, 9), (8, 2**31 - 1), (9, 3), (2**31 - 1, 5), (-(2**31), 4), (-3, 4)])
def test_packed_keys_past_the_last_are_no_keys(start, length):
    """A jitted caller may pass lengths whose sum exceeds the number of packed keys."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((9, K, D)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((2, H, D)).astype(np.float32)
    config = ops.NativeConfig(scale=0.3, kv_dtype="float32", out_dtype="float32")

    def attention(first, count):
        lens = np.array([count], np.int32)
        batch = ops.NativeBatch(
            query_start_loc=np.array([0, 2]), seq_lens=lens, kv_lens=lens, kv_start=np.array([first])
        )
        return ops.attend(config, q, k, v, batch)

    first = min(max(start, 0), 9)
    assert same_bits(attention(start, length), attention(first, min(length, 9 - first)))


def test_hostile_numbers_leave_neighbours_alone():
    """Slots outside the pool are not written, page numbers outside are clamped, and so are lengths."""
    slots = jnp.array([-1, -(2**31), N * S, 2**31 - 1, N * S + 1, -N * S], jnp.int32)
    assert not any(np.asarray(pool).any() for pool in write(k=f32(T, K, D) + 1, v=f32(T, K, V) + 1, slot_mapping=slots))
    k, v = f32(N, K, S, D) + 1, f32(N, K, S, V) + 2
    for entry in (-(2**31), -1, N, 2**31 - 1):
        many = jnp.full(R, 2**31 - 1, jnp.int32)
        out, _ = attend(k=k, v=v, q=f32(T, H, D) + 1, block_table=i32(R, B) + entry, seq_lens=many, kv_lens=many)
        np.testing.assert_array_equal(np.asarray(out)[:R], 2.0)
        assert not np.asarray(out)[R:].any()
