"""Bundles of the TPU kernel on four generations; of JAX's own kernel and of RPA v3, compiled in the same run.

    python -m benchmarks.tpu.static [--write | --out DIR] [--chips v5e,v6e] [--jobs decode,prefill]

32 query and 8 kv heads of 128, bf16, pages of 128. mla_: absorbed latent attention, 128 heads, rows of 512 + 64. A
bundle is one VLIW instruction that libtpu's compiler scheduled, so their number is a lower bound of cycles. `ns` is the
least time by data sheets, see benchmarks.tpu.model; a table of it ends the run. Needs the libtpu wheel;
benchmarks.tpu.peers installs RPA v3. --write keeps the rows in benchmarks/results/tpu.
"""

import argparse
import json
import sys

from benchmarks.tpu import aot, command, llo, model, own_process, peers

JOBS = (
    "decode", "prefill", "mla_decode", "mla_prefill", "mla_new_tokens", "jax_decode", "jax_prefill", "rpa3_decode",
    "rpa3_prefill",
)  # fmt: skip
JAX_PAGES = 8  # in a block of JAX's kernel
JAX_QUERIES = {"jax_decode": 8, "jax_prefill": 32}  # in its block: few, and its default on v5e


OURS = {
    "decode": aot.DECODE, "prefill": aot.PREFILL, "mla_decode": aot.MLA_DECODE, "mla_prefill": aot.MLA_PREFILL,
    "mla_new_tokens": aot.MLA_PREFILL,
}  # fmt: skip
"""mla_prefill: the keys before a long prompt; mla_new_tokens: the prompt's own, in the materialised form."""


def ours(chip: str, job: str):
    """Compile this package's kernel for `chip`; returns the function that measures its listing."""
    from benchmarks.tpu import bundles
    from jattn.backends import mla_pallas_tpu, pallas_tpu

    shape = OURS[job]
    function, arguments = aot.call(shape, chip)
    aot.compile_for(chip, function, *arguments)
    _, cache, meta, _ = arguments
    if job == "mla_new_tokens":
        return _new_tokens(chip, shape, meta)
    if shape.latent:
        config = mla_pallas_tpu.kernel_config(*aot.latent_layer_of(shape), common=meta)
    else:
        config = pallas_tpu.kernel_config(aot.layer_of(shape), cache.spec, common=meta, chip=chip)
    return lambda program: getattr(bundles, job.removeprefix("mla_"))(program, config)


def _new_tokens(chip: str, shape: aot.Shape, meta):
    """The figures of one launch times the launches for all heads."""
    from benchmarks.tpu import bundles
    from jattn.backends import mla_pallas_tpu
    from jattn.device import Chip

    spec, cache_spec = aot.latent_layer_of(shape)
    absorbed = mla_pallas_tpu.kernel_config(spec, cache_spec, common=meta)
    config = mla_pallas_tpu.new_tokens_config(spec, absorbed, meta, Chip("tpu", chip))
    assert config is not None
    launches = spec.num_heads // config.num_heads
    key_bytes = launches * config.page_bytes(config.block_keys) // (2 * config.block_keys)

    def measured(program):
        found = bundles.prefill(program, config)
        times = {name: round(launches * x, 1) for name, x in found.items() if not name.startswith("spills")}
        return found | times | dict(key_bytes=key_bytes, tile_queries=config.tile_tokens)

    return measured


def theirs(chip: str, job: str):
    """The same for the kernel that comes with JAX."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    from benchmarks.tpu import bundles

    reqs, page, queries = 256, 128, JAX_QUERIES[job]
    shape = lambda dims, dtype="int32": jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))
    arguments = (
        shape((reqs if job == "jax_decode" else 4096, 32, 128), "bfloat16"),
        shape((4096, page, 16, 128), "bfloat16"),
        *(shape(dims) for dims in ((reqs,), (reqs, 64), (reqs + 1,), (1,))),
    )

    def attend(*args):
        return ragged_paged_attention(
            *args, num_kv_pages_per_block=JAX_PAGES, num_queries_per_block=queries, vmem_limit_bytes=60 << 20
        )

    aot.compile_for(chip, attend, *arguments)
    return lambda program: bundles.jax_kernel(program, JAX_PAGES * page, queries) | dict(queries=queries)


def rpa3(chip: str, job: str):
    """The same for RPA v3, whose two kernels are one call."""
    from benchmarks.tpu import bundles

    decode = job == "rpa3_decode"
    requests, tokens = (256, 256) if decode else (2, 4096)
    function, arguments = peers.call(chip, requests, tokens)
    aot.compile_for(chip, function, *arguments)
    sizes = peers.sizes(chip, tokens, requests, decode=decode)
    more = dict(queries=sizes["bq_csz"], tile_queries=sizes["bq_sz"], peer=peers.WHEEL)
    return lambda program: bundles.jax_kernel(program, sizes["bkv_csz"], sizes["bq_csz"]) | more


KERNELS = {"rpa3_decode": "RPAd", "rpa3_prefill": "RPAm"} | dict.fromkeys(
    ("mla_decode", "mla_prefill"), "ragged_latent_attention"
)
"""Names of the kernels in the dump; of all other jobs: ragged_paged_attention."""


def one(chip: str, job: str, folder: str) -> dict:
    """The row of one job, in a process that was started with the flags of the dump."""
    compiled = rpa3 if job.startswith("rpa3_") else theirs if job.startswith("jax_") else ours
    measured = compiled(chip, job)
    row = dict(chip=chip, case=job) | measured(llo.read(folder, KERNELS.get(job, "ragged_paged_attention")))
    return row | model.least(row)


def main(argv: list[str] | None = None) -> int:
    """Every job on every chip; 1 if one of them failed."""
    parser = command.parser("benchmarks.tpu.static", str(__doc__))
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--one", nargs=3, metavar=("CHIP", "JOB", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(one(*args.one)))
        return 0
    found = command.print_and_keep("static", args, (
        dict(chip=chip, case=job) | own_process.row_of_dump("benchmarks.tpu.static", chip, job)
        for chip, job in command.each(args.chips, args.jobs)
    ))  # fmt: skip
    print(model.table(found))
    # RPA v3's default sizes do not fit every chip
    return command.exit_code(row for row in found if not row["case"].startswith("rpa3_"))


if __name__ == "__main__":
    sys.exit(main())
