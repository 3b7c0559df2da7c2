"""The quick subset: which tests `make test ARGS=quick` runs, in about three minutes on two cores without any cache.

Chosen by protection per second: every backend on every feature once, every door's refusals, the definitions (algebra
and the oracle itself), the bookkeeping of batches, pages and the scheduler, and the engine's and server's rules on
small models. Left to the whole suite: other dtypes, sizes and layouts of a feature, random walks, mutants, whole
families of models, compiling for chips, and whatever starts processes or waits for clocks.

`python -m tests.quick` prints the files and folders of the subset, so that pytest collects nothing else.
"""

import re
from collections.abc import Sequence

import pytest

SUBSET = {
    # Definitions, and the rules about files and names that a rename breaks.
    "tests/algebra/": "",
    "tests/oracle/": "",
    "tests/rooms/test_checks_can_fail.py": "",
    "tests/rooms/test_files.py": "outgrows|machine|numpy_only|environment",
    "tests/rooms/test_public_names.py": "",
    # Backends: each on each feature, quantised once; who refuses what, and who is chosen.
    "tests/backends/test_conformance.py": r"witness_or_refuses\[\w+-(feature-|quant-\w+-per_tensor-plain)",
    "tests/backends/test_base.py": "",
    "tests/backends/test_builder.py": "",
    "tests/backends/test_first_choice.py": "",
    "tests/backends/test_mla_conformance.py": "features|auto",
    "tests/backends/test_positive_lists.py": "",
    "tests/backends/test_reasons.py": "",
    "tests/backends/test_refusals.py": "",
    "tests/backends/test_select.py": "",
    # Doors, and laws on small batches.
    "tests/laws/test_batch.py": r"\[(sdpa|cpu_native|split)-plain\]",
    "tests/laws/test_doors_named.py": "",
    "tests/laws/test_field_bugs_cache.py": "",
    "tests/laws/test_field_bugs_masks.py": "",
    "tests/laws/test_merge.py": "",
    "tests/laws/test_serving.py": "any_chunking",
    "tests/laws/test_trees.py": "",
    # Batches, pages and the reference.
    "tests/cache/test_layout.py": "",
    "tests/cache/test_pool.py": "",
    "tests/compat/": "",
    "tests/metadata/": "",
    "tests/ops/test_mla_door.py": "",
    "tests/ops/test_state.py": "",
    # Kernels: the readable one, the native one, and the work lists of the TPU kernel.
    "tests/kernels/cpu/test_native.py": "",
    "tests/kernels/cpu/test_paged_attention.py": "",
    "tests/kernels/tpu/test_work_list.py": "",
    # Models, engine and server.
    "tests/nn/test_layer.py": "",
    "tests/models/test_absent_keys.py": "",
    "tests/models/test_rope_keys.py": "",
    "tests/engine/test_quick_laws.py": "",
    "tests/engine/test_sampling.py": "",
    "tests/engine/test_scheduler.py": "",
    "tests/engine/test_shapes.py": "",
    "tests/text/test_text.py": "",
    "tests/serve/test_keys.py": "",
    "tests/serve/test_body.py": "",
    "tests/serve/test_refusals.py": "",
    "tests/serve/test_server.py": "",
    "tests/cli/test_cli.py": "explain|demo_fails",
    "tests/cli/test_serve_options.py": "",
}
"""Folder or file -> a regular expression that a test's id must match somewhere ("": every test there)."""


def mark(items: Sequence[pytest.Item]) -> None:
    """Give the tests of the subset the marker `quick`."""
    for item in items:
        if any(_holds(row, item) for row in SUBSET.items()):
            item.add_marker(pytest.mark.quick)


def check(items: Sequence[pytest.Item]) -> None:
    """pytest.UsageError where a row finds none of the tests of its place."""
    gone = []
    for place, words in SUBSET.items():
        there = [item for item in items if item.nodeid.startswith(place)]
        if there and not any(_holds((place, words), item) for item in there):
            gone.append(f"{place} with {words!r}")
    if gone:
        raise pytest.UsageError(f"tests/quick.py names tests that are not there: {', '.join(gone)}")


def _holds(row: tuple[str, str], item: pytest.Item) -> bool:
    place, words = row
    return item.nodeid.startswith(place) and re.search(words, item.nodeid) is not None


if __name__ == "__main__":
    print(*SUBSET)
