"""What docs/support_matrix.md says that a backend supports: tests compare refusals with it.

A refusal passes only if the document has it, and a backend that the document lists must run. Otherwise a backend that
began to refuse everything would pass every test. The document is read, not generated, because its generator asks the
backends.
"""

import functools
import os
import re

import jax

import jattn
from pallas_kernels.cpu.native import library, toolchain
from tests.problem import Problem
from tests.rooms.tree import ROOT

ASKED = {  # field of a spec -> how the document names what it asks for
    "chunk_size": "chunked-local attention",
    "chunk_lookback": "lookback of chunked-local attention",
    "logits_soft_cap": "logits soft cap",
    "has_alibi": "ALiBi",
    "use_alibi_sqrt": "ALiBi with square-root distances",
    "has_sinks": "attention sinks",
    "use_rswa": "R-SWA",
    "use_mm_prefix": "partial multimodal token full attention",
    "use_qq_bias": "bias among the new tokens",
    "use_distance_bias": "learned bias of the distance",
    "mask_fn": "user mask_fn",
    "score_fn": "user score_fn",
    "output_dtype": "fused output quantization",
    "compute_dtype": "products in 8 bits",
}
TPU = (
    "kv dtype",
    "dtype of packed keys",
    "v_head_dim",
    "VMEM",
    "SMEM",
    "kv heads",
    "across encoder and decoder",
    "in the layout",
)
COMBINATIONS = {  # what kernels of chips refuse together only: the document leaves that to `jattn.explain`
    "pallas_gpu": ("kv dtype", "v_head_dim", "shared memory", "an 8-bit cache", "across encoder and decoder"),
    "pallas_gpu_invariant": ("kv dtype", "v_head_dim", "shared memory", "across encoder and decoder"),
    "pallas_tpu": TPU,
    "pallas_tpu_invariant": TPU,
}


@functools.cache
def rows() -> dict[str, dict[str, str]]:
    """Row -> backend -> cell. A row's name ends where its spelling begins; latent attention's rows are left out."""
    found, names = {}, []
    text = (ROOT / "docs" / "support_matrix.md").read_text().split("## Multi-head latent")[0]
    for line in text.splitlines():
        if line.startswith("|---"):
            continue
        if line.startswith("|"):
            title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            names = [cell.strip("`") for cell in cells] if not title else names
            found[title.split(": ")[0]] = dict(zip(names, cells, strict=True))
        elif line.startswith("Nobody yet: "):
            refused = line.removeprefix("Nobody yet: ").removesuffix(".").split("; ")
            found |= {row.split(": ")[0]: dict.fromkeys(names, "-") for row in refused}
    return found


def asked(problem: Problem, attn_type: str = "decoder", packed: bool = False) -> list[str]:
    """The rows that this layer, batch and cache need."""
    spec = problem.feature.spec
    wanted = [attn_type, "log-sum-exp output", f"{problem.dtype} queries"]
    wanted += [row for field, row in ASKED.items() if spec.get(field)]
    window, decoder = spec.get("sliding_window"), attn_type == "decoder"
    wanted += [] if window is None else ["sliding window"]
    wanted += ["window to the right of the query"] if window and (isinstance(window, tuple) or not decoder) else []
    wanted += ["value head dim other than the key's"] if problem.v_dim != problem.head_dim else []
    if decoder and problem.feature.causal is not True:
        wanted += ["non-causal attention" if problem.feature.causal is False else "causal per request"]
    per_head = any(name.endswith("[]") for name in problem.feature.params)
    wanted += ["per-head quant scales"] if per_head or problem.quant == "per_head" else []
    if packed:
        return [*wanted, "attention without a cache"]
    floats = [f"{problem.storage} cache"] if problem.quant == "none" else []
    return [*wanted, *floats, "HND" if problem.layout == "auto" else problem.layout]


def says(backend: str, problem: Problem, attn_type: str = "decoder", packed: bool = False) -> bool:
    """Does the document say that this backend takes this problem on this platform?"""
    table, platform = rows(), jax.default_backend()
    if backend not in table["platforms"] or platform not in table["platforms"][backend]:
        return False  # no column: it takes latent caches only
    listed = [("head dim", problem.head_dim), ("head dim", problem.v_dim)]
    if not packed:
        listed += [("page", problem.block_size)]
        listed += [] if problem.quant == "none" else [(f"{problem.storage} cache, `quant=`", problem.quant)]
    cells = [table[row][backend] for row in asked(problem, attn_type, packed)]
    return all(cell == "yes" or platform in cell.split(", ") for cell in cells) and all(
        _takes_value(row, value, backend) for row, value in listed
    )


def _takes_value(row: str, value: int | str, backend: str) -> bool:
    """A size that the document does not list is supported if the next smaller and the next larger listed ones are."""
    title = next(title for title in rows() if re.match(re.escape(row) + " of ", title))
    tried, cell = title.split(" of ")[1].split(", "), rows()[title][backend]
    good = tried if cell == "any" else cell.split(", ")
    if isinstance(value, str) or str(value) in tried:
        return str(value) in good
    below, above = ([n for n in map(int, tried) if keep(n)] for keep in (lambda n: n < value, lambda n: n > value))
    return all(str(n) in good for n in (*below[-1:], *above[:1]))


def excuse() -> str:
    """Why the native library is allowed to be absent here; empty: it must be available."""
    if os.environ.get("JATTN_NATIVE") == "0":
        return "the native library is switched off by JATTN_NATIVE=0"
    try:
        toolchain.compiler()
    except toolchain.BuildError as error:
        return str(error)
    status = library.status()
    return status.reason if status.path and not status.isas else ""  # built, but not for this processor


def is_native_absent() -> bool:
    """True where it is absent and may be."""
    return not library.status().available and bool(excuse())


def must_take(backend: str, problem: Problem, attn_type: str = "decoder", packed: bool = False) -> bool:
    """`says`, except that cpu_native may refuse where its library cannot be built."""
    if backend == "cpu_native" and is_native_absent():
        return False
    return says(backend, problem, attn_type, packed)


def check_refusal(
    backend: str, problem: Problem, refusal: jattn.UnsupportedError, attn_type: str = "decoder", packed: bool = False
) -> None:
    """A refusal has reasons, and is what the document says, or a combination that only `jattn.explain` knows."""
    reasons = refusal.reasons[backend]
    assert reasons and all(reasons), refusal
    known = COMBINATIONS.get(backend, ())
    combined = [reason for reason in reasons if any(words in reason for words in known)]
    if len(combined) < len(reasons):
        assert not must_take(backend, problem, attn_type, packed), f"docs/support_matrix.md: {backend} takes this"


def check_taken(backend: str, problem: Problem, attn_type: str = "decoder", packed: bool = False) -> None:
    """What is taken is what the document says."""
    assert says(backend, problem, attn_type, packed), f"docs/support_matrix.md: {backend} refuses this"
