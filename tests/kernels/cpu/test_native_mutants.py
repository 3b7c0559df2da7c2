"""The tests detect deliberate faults of the native kernels: with any one of them switched on, conformance fails.

src/mutants.h lists the faults. The library that contains them is built once for all workers, for one instruction set
and without optimisation; it is loaded into the same process as the real one and shares no state with it.
"""

import ctypes
import functools
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.native import library, ops, toolchain
from tests.cases import CASES, COMBINED, FEATURES, Case
from tests.kernels.cpu import test_native_draw as draw
from tests.kernels.cpu import test_native_latent as latent
from tests.kernels.cpu.native_setup import needs_library
from tests.problem import Problem
from tests.running import conform

pytestmark = needs_library

ONLY_HERE = dict(spare_blocks=41)
"""A shape that no other test compiles: a compiled step keeps calling the library for which it was compiled."""

PROBLEMS = {
    "window": Problem(feature=COMBINED["cap_sinks_window"], case=CASES["mixed_unsorted"], **ONLY_HERE),
    "chunk": Problem(feature=COMBINED["chunk_alibi_sinks"], heads=6, **ONLY_HERE),
    "scales": Problem(feature=FEATURES["head_scales"], cache_dtype="int8", quant="per_head", **ONLY_HERE),
    "token_scales": Problem(cache_dtype="float8_e4m3fn", quant="per_token_head", **ONLY_HERE),
    "tiles": Problem(case=CASES["two_tiles"], **ONLY_HERE),
    "splits": Problem(case=Case("splits", (1, 2), (2600, 700)), kv_heads=1, block_size=64, **ONLY_HERE),
}
CAUGHT_BY = {
    "causal_off_by_one": "chunk",
    "window_off_by_one": "window",
    "chunk_off_by_one": "chunk",
    "scale_ignored": "window",
    "scales_swapped": "scales",
    "query_scale_ignored": "scales",
    "token_scale_of_another_key": "token_scales",
    "soft_cap_ignored": "window",
    "slope_of_another_head": "chunk",
    "heads_interleaved": "window",
    "sink_twice": "window",
    "lse_in_base_two": "window",
    "last_page_dropped": "window",
    "splits_not_rescaled": "splits",
    "decode_tiles_not_rescaled": "splits",
    "prefill_tiles_not_rescaled": "tiles",
    "padding_not_cleared": "window",
    "negative_slot_written": "window",
    "scale_not_divided": "scales",
    "product_inputs_dropped": "product",
    "product_groups_not_summed": "product",
    "product_columns_unordered": "product",
    "product_tail_dropped": "product",
    "latent_not_in_keys": "latent",
    "packed_factor_ignored": "packed product",
    "packed_scales_of_first_group": "packed product",
    "packed_zero_points_ignored": "packed product",
    "empty_experts_not_counted": "experts",
    "expert_rows_not_skipped": "experts",
    "top_k_off_by_one": "sampling floor",
    "top_p_of_all_ties": "sampling floor",
    "groups_have_the_same_noise": "draw",
    "large_noise_ignored": "draw",
    "likeliest_of_equal_sums": "equal sums",
}


def declared() -> list[str]:
    """The names of the enum in their order; the first is 'none'."""
    source = (toolchain.SOURCES / "mutants.h").read_text()
    body = re.search(r"enum class Mutant : int \{(.*?)\}", source, re.DOTALL)
    assert body
    return re.findall(r"\w+", body[1])


@pytest.fixture
def switch_on(faulty, faulty_library):
    """Switches one fault on in the faulty library, which serves during the test."""
    names = declared()
    yield lambda name: faulty_library.jattn_switch_on(ctypes.c_int(names.index(name)))
    faulty_library.jattn_switch_on(ctypes.c_int(0))


def check(name: str) -> None:
    """AssertionError unless the problem's results are right."""
    if name == "packed product":
        return check_packed_product()
    if name == "experts":
        return check_expert_product()
    if name == "sampling floor":
        return draw.test_a_cut_far_from_every_sum_is_exact()
    if name == "draw":
        return draw.test_many_unlikely_tokens_are_drawn_as_often_as_they_should_be("auto")
    if name == "equal sums":
        return draw.test_of_equal_sums_the_first_token_is_drawn("auto")
    if name in PROBLEMS:
        return conform(PROBLEMS[name], "cpu_native")
    if name == "latent":
        rows = latent.Rows([9, 30], 41, 7, 4, "float32", "split")
        q = np.random.default_rng(0).standard_normal((3, 7, 48)).astype(np.float32)
        return latent.check(latent.attend(rows, q, [1, 2], [9, 30]), latent.witness(rows, q, [1, 2]), 1e-5)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((14, 321), (321, 45)))
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for transposed in (False, True):
        (y,) = ops.product(x, [w.T if transposed else w], out_dtype="float32", transposed=transposed)
        np.testing.assert_allclose(y, wanted, atol=1e-4)
    return None


def check_packed_product() -> None:
    """AssertionError unless a product with int8 weights, their scales and zero points is right."""
    rng = np.random.default_rng(0)
    x, values = rng.standard_normal((14, 192)), rng.integers(-128, 128, (192, 45)).astype(np.int8)
    scales, zeros = rng.uniform(0.5, 1.0, (3, 45)) / 128, rng.integers(-128, 128, (3, 45)).astype(np.int8)
    wanted = x @ ((values - np.repeat(zeros.astype(float), 64, 0)) * np.repeat(scales, 64, 0))
    factor, floats = rng.uniform(0.5, 1.0, (1, 45)), lambda x: jnp.asarray(x, jnp.float32)
    given = (jnp.asarray(values), floats(scales), jnp.asarray(zeros), floats(factor))
    (y,) = ops.packed_product(jnp.asarray(x, jnp.float32), [given], "int8", out_dtype="float32")
    np.testing.assert_allclose(y, wanted * factor, atol=1e-3)


def check_expert_product() -> None:
    """AssertionError unless each row is multiplied by the matrix of its expert."""
    rng, sizes = np.random.default_rng(0), (0, 5, 3)
    x, w = rng.standard_normal((8, 41)), rng.standard_normal((3, 41, 33))
    wanted = np.einsum("ni,nio->no", x, w[np.repeat(np.arange(3), sizes)])
    given = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.array(sizes)
    np.testing.assert_allclose(ops.expert_product(*given, out_dtype="float32"), wanted, atol=1e-4)


@functools.cache
def healthy(name: str) -> bool:
    """The problem passes with no fault switched on."""
    check(name)
    return True


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_a_native_mutant_is_caught(mutant, switch_on):
    assert healthy(CAUGHT_BY[mutant])
    switch_on(mutant)
    with pytest.raises(AssertionError):
        check(CAUGHT_BY[mutant])


def test_every_fault_that_is_declared_is_compiled_and_tested():
    assert declared() == ["none", *CAUGHT_BY]
    sources = "".join(p.read_text() for p in toolchain.SOURCES.iterdir())
    assert set(re.findall(r"JATTN_MUTANT\((\w+), ", sources)) - {"name"} == set(CAUGHT_BY)


def test_what_users_run_has_no_switch():
    assert b"jattn_switch_on" not in pathlib.Path(library.status().path).read_bytes()


def test_two_libraries_in_one_process_share_nothing(switch_on, monkeypatch):
    """A fault in one library does not change the results of the other."""
    switch_on("scale_ignored")
    monkeypatch.undo()  # the real one serves again
    conform(PROBLEMS["window"].replace(spare_blocks=43), "cpu_native")
