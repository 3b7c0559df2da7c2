"""All-reduces on the devices here, timed, and the decode steps that they allow on 1, 8 and 64 devices, computed.

    python -m benchmarks.gpu.collectives [--ranks 2] [--kind h200] [--write | --out DIR] [--small]

allreduce_SIZE         one all-reduce of SIZE bytes of float32, in a loop of one program
allreduce_fit          hop and link of the formula below, fitted to these times
projected_MODEL_r64    the shortest decode step of 64 requests of 4096 tokens on each data rank

A ring of n devices needs 2 (n - 1) hops, each with an n-th of the bytes:

    all_reduce(n, bytes) = 2 (n - 1) (hop + bytes / n / link)
    step(n)              = read(n) / bandwidth + (2 layers + 1) all_reduce(n, 2 requests hidden)

read: bytes of the weights and the cache that one of n tensor ranks reads, as `jattn plan` counts them; bandwidth: of
the data sheet. Data ranks repeat this step side by side: they exchange sampled tokens once a dispatch, which is not
counted. Tensor ranks are in one host; a tree, or a switch that adds, makes fewer hops than the ring, so the formula is
high there. The step is a lower bound in `read`, as in a plan.
"""

import argparse
import dataclasses
import functools
import json
import math
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import records
from benchmarks.gpu.tensor_parallel import config_of
from jattn.engine.device_kinds import KINDS, DeviceKind
from jattn.engine.footprint import Footprint
from jattn.models import ModelMesh

SIZES = (2**14, 2**17, 2**20, 2**23)  # bytes: 64 rows of 8192 numbers of 16 bits are 2**20
REPEATS = 100  # all-reduces in a program
REQUESTS, CONTEXT = 64, 4096
LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 2), (8, 8), (4, 16))  # (tensor, data)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The two constants of an all-reduce."""

    hop: float  # seconds
    link: float  # bytes/s

    @classmethod
    def fitted(cls, ranks: int, seconds: dict[int, float]) -> "Ring":
        """To the seconds by size, each with a weight of 1 / seconds, so that no size dominates; neither is negative."""
        sizes, times = np.array([*seconds]), np.array([*seconds.values()])
        rows = np.stack([np.ones(len(sizes)), sizes / ranks], axis=1) * 2 * (ranks - 1)
        (hop, per_byte), *_ = np.linalg.lstsq(rows / times[:, None], np.ones(len(times)), rcond=None)
        return cls(max(hop, 0.0), 1 / max(per_byte, 1e-15))

    def seconds(self, ranks: int, size: int) -> float:
        """Of an all-reduce of so many bytes."""
        return 2 * (ranks - 1) * (self.hop + size / ranks / self.link)


def all_reduce_seconds(mesh: Mesh, size: int) -> float:
    """Seconds of one all-reduce, in the fastest of five programs; an error if it does not add."""
    ranks, axes, spec = mesh.size, mesh.axis_names, PartitionSpec(mesh.axis_names)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def program(x):  # the mean of equal numbers is the number
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: jax.lax.psum(x, axes) / ranks, x)

    numbers = np.arange(ranks * size // 4, dtype=np.float32).reshape(ranks, -1)
    x = jax.device_put(numbers, NamedSharding(mesh, spec))
    np.testing.assert_allclose(program(x), np.broadcast_to(numbers.mean(axis=0), numbers.shape), rtol=1e-5)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        program(x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / REPEATS


def projected(model: str, kind: DeviceKind, ring: Ring) -> list[dict]:
    """A row for each layout."""
    config, rows = config_of(model), []
    size = REQUESTS * config.hidden_size * 2
    count = 2 * len(config.layers) + 1
    for tensor, data in LAYOUTS:
        mesh = ModelMesh.without_devices(config, dict(tensor=tensor)) if tensor > 1 else None
        footprint, alone = Footprint(config, "bfloat16", None, mesh), dataclasses.replace(kind, link=math.inf)
        reads = footprint.step_seconds(alone, dict(dtype="bfloat16"), REQUESTS, 1, CONTEXT)
        sums = count * ring.seconds(tensor, size)
        variant = f"tensor {tensor}, data {data}"
        row = dict(case=f"projected_{model}_r{REQUESTS}", variant=variant, devices=tensor * data)
        row |= dict(ms=1e3 * (reads + sums), all_reduce_ms=1e3 * sums, weights_gb=footprint.weight_bytes() / 1e9)
        rows.append(row | dict(tokens_per_s=data * REQUESTS / (reads + sums)))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--ranks", type=int, default=2, help="devices that are timed (default: 2)")
    parser.add_argument("--kind", choices=KINDS, default="h200", help="device of the computed steps (default: h200)")
    records.add_options(parser)
    args = parser.parse_args(argv)
    mesh = jax.make_mesh((args.ranks,), ("tensor",), devices=jax.devices()[: args.ranks])
    seconds = {size: all_reduce_seconds(mesh, size) for size in (SIZES[:2] if args.small else SIZES)}
    ring, variant = Ring.fitted(args.ranks, seconds), f"{args.ranks} devices"
    rows: list[dict] = [dict(case=f"allreduce_{n}", variant=variant, us=1e6 * s) for n, s in seconds.items()]
    rows.append(dict(case="allreduce_fit", variant=variant, hop_us=1e6 * ring.hop, link_gb_per_s=ring.link / 1e9))
    for model in ("8b", "70b"):
        rows += projected(model, KINDS[args.kind], ring)
    for row in rows:
        print(json.dumps(row), flush=True)
    records.write([row | records.provenance() for row in rows], "collectives", records.folder_of(args))


if __name__ == "__main__":
    main()
