"""The TPU kernel that writes keys and values, in the interpreter: values, untouched slots, races and waits."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.backends import tpu_write
from pallas_kernels.tpu import kv_write
from pallas_kernels.tpu.kv_write import KvWriteConfig, supports_write
from tests.kernels.tpu.interpreted import V6E, judged
from tests.oracle import cache as witness

CONFIG = KvWriteConfig(num_kv_heads=2, head_dim=128, v_head_dim=128, page_size=32, kv_dtype="bfloat16")
BLOCKS = 9
TURNS = np.random.default_rng(3).permutation(BLOCKS * 32)
SLOTS = {
    # a pack filled by consecutive tokens, parts of two packs, slots that are nowhere, and two rows for one slot
    "mixed": [*range(64, 80), *range(91, 99), -1, 7, 10**6, -(2**31), 2**31 - 1, 5, 7, 6, BLOCKS * 32 - 1, BLOCKS * 32],
    "decodes": [32 * block + 3 * block for block in (4, 0, 8, 2, 6, 1, 7)],
    "any order": list(TURNS[:12]),
    "backwards": list(range(38, 25, -1)),
    "a whole pack but one, which is written twice": [*range(0, 5), *range(6, 16), 4, *range(16, 32), 31],
    "nothing": [-1, -1, -5],
    "one": [40],
}
MOST = max(map(len, SLOTS.values()))


def bits_of(rng, shape, dtype):
    """Any numbers of a dtype, NaN included, and their bits."""
    bits = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return jnp.asarray(bits.view(f"u{bits.shape[-1]}")[..., 0]).view(dtype)


def as_pages(pool, c, dim):
    """The bits of a pool as [N S K dim]."""
    bits = np.asarray(pool.view(f"uint{8 * pool.dtype.itemsize}"))
    return np.swapaxes(bits.reshape(bits.shape[0], c.num_kv_heads, c.page_size, dim), 1, 2)


def program(config):
    """The write, compiled once for each size and mode; a test that patches the kernel makes its own."""
    return jax.jit(lambda rows, slots, pools: kv_write.write_rows(rows, slots, pools, config))


WRITES = {mode: program(CONFIG) for mode in ("on_wait", "eager")}


def check(config=CONFIG, slots="mixed", mode="on_wait", blocks=BLOCKS, write=None):
    rng, c = np.random.default_rng(1), config
    slots = np.array(SLOTS[slots] if isinstance(slots, str) else slots, np.int64).astype(np.int32)
    pools = [bits_of(rng, (blocks, c.num_kv_heads, c.page_rows, dim), c.kv_dtype) for dim in c.dims]
    dims = c.head_dim, c.v_head_dim
    rows = [bits_of(rng, (len(slots), c.num_kv_heads, dim), c.kv_dtype) for dim in dims]
    assert not supports_write(c, len(slots))
    with judged(mode):
        got = jax.block_until_ready((write or program(c))(rows, jnp.asarray(slots), pools))
    for new, old, row, dim in zip(got, pools, rows, dims, strict=True):
        wanted = witness.write(as_pages(old, c, dim), np.asarray(row.view(f"uint{8 * row.dtype.itemsize}")), slots)
        np.testing.assert_array_equal(as_pages(new, c, dim), wanted)


@pytest.mark.parametrize(("slots", "mode"), [*((slots, "on_wait") for slots in SLOTS), ("mixed", "eager")])
def test_rows_are_where_the_witness_puts_them_and_nothing_else_changes(slots, mode):
    """Of one size, by padding, so that they share a program; but for one token, which no pack can be filled of."""
    wanted = SLOTS[slots] if slots == "one" else [*SLOTS[slots], *[-1] * (MOST - len(SLOTS[slots]))]
    check(slots=wanted, mode=mode, write=WRITES[mode])


CONFIGS = [
    dict(kv_dtype="float32"),
    dict(kv_dtype="float8_e4m3fn", v_head_dim=256),
    dict(kv_dtype="int8", page_size=16, num_kv_heads=1),
    dict(page_size=16, num_kv_heads=12),
    dict(layout="HND128", head_dim=64, v_head_dim=64, page_size=64),
    dict(layout="HND128", head_dim=32, v_head_dim=32, kv_dtype="float32"),
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_each_dtype_and_layout(changes):
    config = dataclasses.replace(CONFIG, **changes)
    group = config.pack_tokens
    slots = [*range(group, 2 * group), *range(2 * group, 2 * group + 3), 5, 3, 1, 3, -1, 6]
    check(config, slots, blocks=1 + 3 * group // config.page_size)


def test_many_rows_are_fetched_from_memory(monkeypatch):
    """As for long prompts, whose rows VMEM does not hold."""
    monkeypatch.setattr(kv_write, "NEW_BYTES", 0)
    check(mode="on_wait")


def test_a_ring_of_two_places_is_used_again_and_again(monkeypatch):
    monkeypatch.setattr(kv_write, "RING", 2)
    check(slots="decodes", mode="eager")


def never_waits(self, side):
    pass


def rows_in_the_order_given(keys, **options):
    return keys


def test_writes_of_a_batch_are_one_after_the_other():
    """Under vmap, in one trip of a loop each."""
    config = dataclasses.replace(CONFIG, num_kv_heads=1, page_size=8, kv_dtype="float32")
    rng, slots = np.random.default_rng(2), np.array([[9, 3], [3, -1]], np.int32)
    rows, pools = (
        [jnp.asarray(rng.standard_normal(shape), jnp.float32)] * 2 for shape in ((2, 2, 1, 128), (2, 2, 1, 8, 128))
    )
    with judged():
        got = jax.vmap(lambda *given: kv_write.write_rows(*given, config))(rows, jnp.asarray(slots), pools)
        jax.block_until_ready(got)
    for new, old, row in zip(got, pools, rows, strict=True):
        for i in range(2):
            wanted = witness.write(np.swapaxes(old[i], 1, 2), np.asarray(row[i]), slots[i])
            np.testing.assert_array_equal(np.swapaxes(new[i], 1, 2), wanted)


FAULTS = {
    "a pack is used again before it is written": (kv_write.Ring, "wait_written", never_waits, "semaphore|race|equal"),
    "two groups share a pack": (kv_write.lax, "sort", rows_in_the_order_given, "race|equal"),
    "a row is read before it is there": (kv_write.Ring, "_row", lambda *given: (), "semaphore|race|equal"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name, monkeypatch):
    owner, attribute, mutant, report = FAULTS[name]
    monkeypatch.setattr(kv_write, "NEW_BYTES", 0)
    monkeypatch.setattr(kv_write, "RING", 16 if attribute == "sort" else 2)
    monkeypatch.setattr(owner, attribute, mutant)
    # of JAX 0.12 a race ends the run
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=f"(?i){report}"):
        check(CONFIG, [1, 40, 2, 41, 3, 100, 130], mode="eager")


REFUSED = [
    (dict(layout="NHD"), "layout NHD: wanted HND or HND128"),
    (dict(kv_dtype="float16"), "stored dtype float16"),
    (dict(head_dim=64), "head_dim 64: wanted rows of 128, 256, 384 or 512"),
    (dict(page_size=24), "pages of 24 tokens and 24 rows: wanted whole packs of 16 rows"),
    (dict(page_size=4, kv_dtype="float32"), "pages of 4 tokens and 4 rows: wanted a multiple of 8 rows"),
    (dict(page_size=48, kv_dtype="int8"), "wanted whole packs of 32 rows"),
    (dict(num_kv_heads=1024), "bytes of VMEM"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_it_cannot_write_is_refused_with_its_reason(changes, sentence):
    assert any(sentence in reason for reason in supports_write(dataclasses.replace(CONFIG, **changes)))


def test_more_tokens_than_smem_holds_are_refused():
    assert "bytes of SMEM" in supports_write(CONFIG, 1 << 17)[0] and not supports_write(CONFIG, 1 << 16)


def test_an_unknown_chip_is_refused():
    assert "chip TPU v4" in supports_write(CONFIG, chip="TPU v4")[0]


@pytest.mark.parametrize(("options", "kernel"), [(dict(), True), (dict(layout="NHD"), False)])
def test_the_backend_writes_by_the_kernel_or_says_why_not(options, kernel):
    """The values are those of the witness, and what is differentiated is write_kv."""
    spec = jattn.KVCacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=128, dtype="float32", **options)
    cache = jattn.empty_cache(spec, float("nan"), storage="native")
    assert bool(tpu_write.reasons_against(cache, 3, V6E)) != kernel
    k, v = (jnp.asarray(np.random.default_rng(seed).standard_normal((4, 2, 128)), jnp.float32) for seed in range(2))
    slots, params = jnp.array([17, -1, 3], jnp.int16), jattn.AttentionParams()
    with judged() if kernel else contextlib.nullcontext():
        write = lambda cache, k, v: tpu_write.write_pages(V6E, cache, k, v, slots, params)
        after, pull = jax.block_until_ready(jax.vjp(write, cache, k, v))
    for new, rows in zip(after.logical(), (k, v), strict=True):
        wanted = witness.write(np.full(new.shape, np.nan), np.asarray(rows)[:3], np.asarray(slots))
        np.testing.assert_array_equal(new, wanted)
    lowered = jax.jit(lambda *given: tpu_write.write_pages(V6E, *given), donate_argnums=0)
    module = jax.export.export(lowered, platforms=["tpu"])(cache, k, v, slots, params).mlir_module()
    assert ("tpu_custom_call" in module) == kernel
    by_xla = jax.vjp(lambda cache, k, v: jattn.write_kv(cache, k, v, slots, params), cache, k, v)[1]
    cotangent = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), cache)
    for got, want in zip(jax.tree.leaves(pull(cotangent)), jax.tree.leaves(by_xla(cotangent)), strict=True):
        np.testing.assert_array_equal(got, want)
