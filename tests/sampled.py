"""Which files have so many similar tests that a commit must pass only some of them.

`make test` runs all of them; `.ci/run` the first of each test function, and about one in n of the others. A checksum of
their names chooses these: the same ones each time, and none that alternating parameters would leave out for ever. What
is left out gets the marker `slow`. `.ci/run --whole` leaves nothing out.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

ONE_IN = {
    "tests/backends/test_conformance.py": 8,
    "tests/backends/test_conformance_packed.py": 6,
    "tests/backends/test_cudnn_gradient.py": 7,
    "tests/backends/test_mla_conformance.py": 8,
    "tests/backends/test_mla_pallas_tpu.py": 10,
    "tests/backends/test_pallas_gpu.py": 3,
    "tests/backends/test_tpu_invariance.py": 3,
    "tests/bite/test_engine_mutants.py": 3,
    "tests/bite/test_mutants.py": 5,
    "tests/bite/test_tpu_copies.py": 3,
    "tests/cache/test_pool.py": 3,
    "tests/cache/test_transfer.py": 3,
    "tests/cache/test_write.py": 10,
    "tests/cli/test_cli.py": 3,
    "tests/cli/test_signals.py": 3,
    "tests/engine/test_context_ranks.py": 5,
    "tests/engine/test_data_ranks.py": 4,
    "tests/engine/test_latent.py": 2,
    "tests/engine/test_mesh.py": 8,
    "tests/engine/test_plan.py": 5,
    "tests/engine/test_sampling_odd.py": 3,
    "tests/engine/test_stream_text.py": 3,
    "tests/kernels/cpu/test_native_packed.py": 3,
    "tests/kernels/cpu/test_native_product.py": 4,
    "tests/kernels/gpu/test_flat_list.py": 6,
    "tests/kernels/gpu/test_lowering.py": 3,
    "tests/kernels/gpu/test_many_rows.py": 3,
    "tests/kernels/gpu/test_mla.py": 3,
    "tests/kernels/gpu/test_work_list.py": 6,
    "tests/kernels/tpu/test_kv_write.py": 5,
    "tests/kernels/tpu/test_lowering.py": 3,
    "tests/kernels/tpu/test_paged_attention.py": 16,
    "tests/laws/test_batch.py": 3,
    "tests/laws/test_cascade.py": 3,
    "tests/laws/test_doors_named.py": 2,
    "tests/laws/test_doors_walk_attention.py": 3,
    "tests/laws/test_doors_walk_metadata.py": 4,
    "tests/laws/test_field_bugs_2026.py": 5,
    "tests/laws/test_field_bugs_hangs.py": 3,
    "tests/laws/test_field_bugs_masks.py": 5,
    "tests/laws/test_field_bugs_numbers.py": 3,
    "tests/laws/test_field_bugs_operands.py": 2,
    "tests/laws/test_gradients.py": 5,
    "tests/laws/test_options.py": 8,
    "tests/laws/test_own_dtypes.py": 3,
    "tests/laws/test_serving.py": 6,
    "tests/models/test_encoders.py": 3,
    "tests/models/test_families.py": 4,
    "tests/models/test_halves.py": 3,
    "tests/models/test_hub_formats.py": 2,
    "tests/models/test_last_layer.py": 3,
    "tests/models/test_layer_tail.py": 5,
    "tests/models/test_model_mesh.py": 12,
    "tests/models/test_moe.py": 3,
    "tests/models/test_neighbours.py": 10,
    "tests/models/test_parity.py": 3,
    "tests/models/test_quantising.py": 3,
    "tests/models/test_wrappers.py": 2,
    "tests/nn/test_rope.py": 3,
    "tests/nn/test_scan.py": 3,
    "tests/ops/test_cpu_loop.py": 10,
    "tests/ops/test_mla.py": 3,
    "tests/ops/test_parallel.py": 3,
    "tests/ops/test_paths.py": 8,
}
"""File -> n."""


def mark(items: Sequence[pytest.Item], root: Path) -> None:
    """Give the tests that are left out the marker `slow`."""
    places = {root / file: n for file, n in ONE_IN.items()}
    begun = set[tuple[Path, str]]()
    for item in items:
        n = places.get(item.path)
        if n is None or item.get_closest_marker("slow"):
            continue
        function = item.path, getattr(item, "originalname", "")
        if function in begun and zlib.crc32(item.name.encode()) % n:
            item.add_marker(pytest.mark.slow)
        begun.add(function)
