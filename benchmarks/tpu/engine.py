"""The engine's program compiled ahead of time for a slice of four TPU chips, and the least time of its step.

    python -m benchmarks.tpu.engine [--write | --out DIR] [--chips v5e,v6e] [--cases decode_1b_r64] [--layers N]

decode_1b_r64       a burst of 16 decode steps of 64 requests, each with 2048 keys
prefill_1b_2048     a step with a prompt of 2048 tokens

Nothing runs: the random Llama of benchmarks.gpu.engine_step (1.1e9 parameters, bf16) is given by its shapes, with
tensor parallelism over all devices of the slice and the engine's default pages. A row says whether it compiled, which
pools stayed donated, what memory a device needs, how often XLA copies a pool, and the least time of a step by data
sheets: bytes of weights and keys over the memory's rate, or products over their rate if that is more; then the
exchanges between the chips. `copies_ms` is what copies of pools around the loop add to each dispatch. Needs the libtpu
wheel. Each program is compiled in a process of its own.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from typing import Any
from unittest import mock

from benchmarks.tpu import aot, command, hlo, own_process
from benchmarks.tpu.limits import CHIPS

BLOCK = 64  # the engine's default on an accelerator
BURST = 16
LONGEST = 4096
LANES = 128  # the width of a tile: narrower rows of keys are padded to it


@dataclasses.dataclass(frozen=True)
class Case:
    """One program and the batch for which its time is computed."""

    name: str
    tokens: int  # T, and R where every row has a single token
    rows: int  # R
    context: int  # keys of each request at the end of the step
    requests: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        new = self.tokens // self.requests
        return self.requests * sum(range(self.context - new + 1, self.context + 1))


CASES = {
    case.name: case for case in (Case("decode_1b_r64", 64, 64, 2048, 64), Case("prefill_1b_2048", 2048, 64, 2048, 1))
}


@dataclasses.dataclass(frozen=True)
class Program:
    """The arguments of jattn.engine.dispatch.dispatch as shapes, each placed on the slice's devices."""

    model: Any
    params: Any
    caches: Any
    row_state: Any
    batch: Any

    def compile(self, folder: str):
        """The compiled dispatch; its listing is written to a folder."""
        from jattn.engine.dispatch import dispatch

        lowered = dispatch.lower(self.model, self.params, self.caches, self.row_state, self.batch)
        return lowered.compile(compiler_options=hlo.options(folder))


def program(case: Case, layers: int, devices: list) -> Program:
    """The dispatch that an Engine with mesh= would send; call it where jattn.device.detect says what `devices` are."""
    import jax
    import numpy as np

    from benchmarks.gpu.engine_step import LLAMA
    from jattn import models
    from jattn.engine import construction
    from jattn.engine.batch import empty_batch, packed_batch
    from jattn.engine.dispatch import empty_row_state
    from jattn.engine.scheduler import Limits
    from jattn.engine.shapes import StepShape, StepShapes
    from jattn.engine.sizing import lane_specs

    config = models.config_of(LLAMA | dict(num_hidden_layers=layers))
    mesh = models.ModelMesh.of(config, jax.sharding.Mesh(np.array(devices), ("tensor",)))
    placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    everywhere = lambda tree: jax.tree.map(lambda x: placed(x, mesh.everywhere), tree)
    num_blocks = case.rows * LONGEST // BLOCK + 1
    specs = lane_specs(config.cache_specs(num_blocks, BLOCK, "bfloat16"), mesh)
    caches = []
    for cache in jax.eval_shape(lambda: mesh.empty_caches(specs)):
        pools = jax.sharding.NamedSharding(mesh.mesh, mesh.cache_partition(cache.spec))
        caches.append(jax.tree.map(lambda x, where=pools: placed(x, where), cache))
    params = jax.eval_shape(lambda: models.init_params(config, 0, "bfloat16"))
    shapes = StepShapes(Limits(case.rows, 2048, LONGEST, BURST, BURST), BLOCK, is_coarse=True)
    rows = empty_batch(StepShape(case.tokens, case.rows, case.is_decode), len(config.cache_groups), shapes)
    batch = packed_batch([rows], shapes)
    return Program(
        model=construction.model_of(config, caches, None, "auto", False, mesh),
        params=jax.tree.map(placed, params, mesh.weight_shardings(config)),
        caches=tuple(caches),
        row_state=everywhere(jax.eval_shape(lambda: empty_row_state(shapes.max_rows))),
        batch=everywhere(batch),
    )


def part_shape(x) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    return x.sharding.shard_shape(x.shape)


def work(case: Case, given: Program) -> dict:
    """Bytes and FLOP of one step on one device."""
    import jax

    config = given.model.config
    size = lambda x: math.prod(part_shape(x)) * x.dtype.itemsize
    weights = dict(given.params)
    if not config.tied_embeddings:
        weights.pop("embed")  # a step reads few of its rows
    head = weights.pop("head")["kernel"]
    matrices = [x for x in jax.tree.leaves(weights) if len(x.shape) == 2]
    multiplied = sum(math.prod(part_shape(x)) for x in matrices) * case.tokens
    multiplied += math.prod(part_shape(head)) * case.rows  # one row of each request
    kv_bytes = attended = 0
    for layer, cache in zip(config.layers, given.caches, strict=True):
        spec = layer.attention
        _, kv_heads, rows, lanes = part_shape(cache.k)
        row_bytes = rows * -(-lanes // LANES) * LANES * cache.k.dtype.itemsize // cache.spec.block_size
        kv_bytes += 2 * case.requests * case.context * kv_heads * row_bytes
        attended += case.pairs * spec.num_heads // given.model.model_mesh.size * spec.head_dim
    return dict(
        weight_bytes=sum(map(size, jax.tree.leaves(weights))) + size(head), kv_bytes=kv_bytes,
        flop=2 * multiplied + 4 * attended,
    )  # fmt: skip


def prediction(chip: str, done: dict, listing: hlo.Listing, devices: int, pool: tuple[int, ...]) -> dict:
    """Least milliseconds of a step, by part; and of what is around the loop."""
    limits = CHIPS[chip]
    exchanged = hlo.collectives(listing.step)
    inside, outside = (hlo.copies(part, pool) for part in (listing.step, listing.around))
    memory = (done["weight_bytes"] + done["kv_bytes"]) / limits.hbm * 1e3
    products = done["flop"] / limits.products * 1e3
    links = sum(limits.collective_seconds(op.kind, op.bytes, devices) for op in exchanged) * 1e3
    copied = lambda ops: 2 * sum(op.bytes for op in ops) / limits.hbm * 1e3
    return dict(
        collectives=len(exchanged), collective_bytes=sum(op.bytes for op in exchanged),
        pool_copies_in_step=len(inside), pool_copies_in_dispatch=len(outside), copies_ms=round(copied(outside), 3),
        memory_ms=round(memory, 4), products_ms=round(products, 4), links_ms=round(links, 4),
        step_ms=round(max(memory, products) + links + copied(inside), 4),
    )  # fmt: skip


def one(chip: str, name: str, layers: int) -> dict:
    """The row of one program. In a process with `aot.environment()`, which has no TPU."""
    import jax
    from jax.experimental import topologies

    from jattn import device

    case = CASES[name]
    devices = topologies.get_topology_desc(aot.TOPOLOGIES[chip], "tpu").devices
    begin = time.perf_counter()
    with mock.patch.object(device, "detect", lambda: device.Chip("tpu", devices[0].device_kind)):
        given = program(case, layers, devices)
        with tempfile.TemporaryDirectory() as folder:
            compiled = given.compile(folder)
            listing = hlo.read(folder, "dispatch")
    memory, pools = compiled.memory_analysis(), jax.tree.leaves(given.caches)
    first = len(jax.tree.leaves(given.params))  # the pools follow the weights
    donated = set(listing.donated) & set(range(first, first + len(pools)))
    done = work(case, given)
    return dict(
        topology=aot.TOPOLOGIES[chip], devices=len(devices), layers=layers, tokens=case.tokens, rows=case.rows,
        context=case.context, seconds=round(time.perf_counter() - begin, 1), kernels=hlo.kernels(listing.step),
        pools=len(pools), pools_donated=len(donated), argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes, program_bytes=memory.generated_code_size_in_bytes,
        **done, **prediction(chip, done, listing, len(devices), part_shape(pools[0])),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Compile and print; 1 if a program does not compile."""
    parser = command.parser("benchmarks.tpu.engine", str(__doc__))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", type=int, default=16, help="of the model (default: 16, all)")
    parser.add_argument("--one", nargs=3, metavar=("CHIP", "CASE", "LAYERS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        chip, case, layers = args.one
        print(json.dumps(one(chip, case, int(layers))))
        return 0
    found = (
        dict(chip=chip, case=case) | own_process.row("benchmarks.tpu.engine", chip, case, str(args.layers))
        for chip, case in command.each(args.chips, args.cases)
    )
    return command.exit_code(command.print_and_keep("engine", args, found))


if __name__ == "__main__":
    sys.exit(main())
