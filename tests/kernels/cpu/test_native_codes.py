"""All 256 codes of fp8 and int8 have the values of ml_dtypes, on every instruction set, as keys and as values.

A request with one key has weight 1, so out is the value. With a query that is 1 in one column and 0 in the others, lse
is the key's number in that column.
"""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cpu.native import ops
from tests.kernels.cpu.native_setup import ISAS, needs_library

pytestmark = needs_library

DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
CODES = np.arange(256, dtype=np.uint8)


def attend(isa, held, queries, k, v, requests):
    """f32 outputs [256, 256] and lse of `requests` requests that share the 256 queries and see the one key."""
    each = np.full(requests, len(queries) // requests)
    batch = ops.NativeBatch(
        query_start_loc=np.concatenate([[0], np.cumsum(each)]).astype(np.int32),
        seq_lens=np.ones(requests, np.int32),
        kv_lens=np.ones(requests, np.int32),
        block_table=np.zeros((requests, 1), np.int32),
    )
    config = ops.NativeConfig(scale=1.0, kv_dtype=held, out_dtype="float32", isa=isa)
    pool = lambda codes: codes.reshape(1, 1, 1, -1)
    out, lse = ops.attend(config, queries[:, None], pool(k), pool(v), batch)
    return np.asarray(out)[:, 0], np.asarray(lse)[:, 0]


@pytest.mark.parametrize("requests", [256, 1], ids=["decode", "prefill"])
@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_code_is_the_number_that_it_stands_for(isa, held, requests):
    numbers = CODES.view(DTYPES[held]).astype(np.float32)
    finite = np.where(np.isfinite(numbers), CODES, 0).astype(np.uint8)
    out, lse = attend(isa, held, np.eye(256, dtype=np.float32), finite, CODES, requests)
    np.testing.assert_array_equal(out, np.broadcast_to(numbers, out.shape))
    np.testing.assert_array_equal(lse, finite.view(DTYPES[held]).astype(np.float32))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_in_a_key_makes_lse_nan(isa, code):
    k = np.where(CODES == 77, code, 0).astype(np.uint8)
    _, lse = attend(isa, "float8_e4m3fn", np.ones((256, 256), np.float32), k, CODES * 0, 256)
    assert np.isnan(lse).all()
