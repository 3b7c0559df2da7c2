"""Conditions in a kernel: the function runs or not, and no bool is converted on the way to Mosaic."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu import branch
from pallas_kernels.gpu.branch import as_number, when, when_in_warp


@pytest.mark.parametrize("branch", [when, when_in_warp])
@pytest.mark.parametrize("holds", [True, False])
def test_the_function_runs_if_the_condition_holds(holds, branch):
    def kernel(condition, out):
        out[0] = as_number(condition[0] > 0)

        @branch(condition[0] > 0)
        def _():
            out[0] += 10

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((1,), jnp.int32), interpret=True)
    assert call(jnp.asarray([int(holds)])) == (11 if holds else 0)


def test_mosaic_converts_no_bool(monkeypatch):
    """Each conversion starts ptxas."""
    from jax.experimental.mosaic.gpu import fragmented_array

    converted, real = [], fragmented_array.FragmentedArray.astype

    def astype(self, *args, **options):
        converted.append(str(self.mlir_dtype))
        return real(self, *args, **options)

    monkeypatch.setattr(fragmented_array.FragmentedArray, "astype", astype)

    def lowered(branch):
        def kernel(x, out):
            value = x[0]

            @branch(value > 3)
            def _():
                out[0] = value

        params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
        out = jax.ShapeDtypeStruct((1,), jnp.int32)
        call = plgpu.kernel(kernel, out_type=out, num_threads=1, thread_name="wg", compiler_params=params)
        converted.clear()
        jax.jit(call).trace(jnp.zeros(1, jnp.int32)).lower(lowering_platforms=("cuda",))
        return list(converted)

    own = lowered(lambda _: lambda function: function()).count("i1")  # those of JAX itself
    assert lowered(branch.when).count("i1") == own == lowered(branch.when_in_warp).count("i1")
    assert lowered(pl.when).count("i1") == own + 1
