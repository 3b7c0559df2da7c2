"""Compiles the TPU kernel ahead of time for four generations, on a machine without TPUs; needs the libtpu wheel.

    python -m benchmarks.tpu.aot [--only NAMES] [--chips v5e,v6e]     exits with 1 if a shape does not compile

Prints one line of JSON for each shape and chip. `environment()` must be set before libtpu is loaded, so run it in a
process of its own.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time

from benchmarks import name_lists

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
CAP = dict(logits_soft_cap=30.0)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer and one batch: the arguments of AttentionSpec and KVCacheSpec that are not the defaults below."""

    name: str
    spec: dict = dataclasses.field(default_factory=dict)
    cache: dict = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"
    query_lens: tuple[int, ...] = (1, 1, 600, 70)
    columns: int = 64
    causal: bool | str = True
    q_scale: bool = False  # a scale of queries for each head
    ranks: int = 1  # that hold the keys; interleave: consecutive keys on one of them
    interleave: int = 1
    latent: bool = False  # spec: the arguments of MLASpec; cache: of mla_cache_spec; wide: whole rows
    wide: bool = False


def two_thirds(head, q_pos, kv_pos):
    """A mask_fn that hides a third of the keys from each of the first three heads."""
    return (q_pos - kv_pos) % 3 != head


def faded(score, head, q_pos, kv_pos):
    """A score_fn of the head and of the distance."""
    return score + 0.1 * head - 0.01 * (q_pos - kv_pos)


LAYER = dict(num_heads=32, num_kv_heads=8, head_dim=128)
DEEPSEEK = dict(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
POOL = dict(num_blocks=4096, block_size=128)
MIXED = (
    *(Shape(f"head_dim_{d}", dict(head_dim=d)) for d in (16, 32, 64, 80, 96, 112, 128, 192, 256)),
    Shape("v_head_dim", dict(head_dim=192, v_head_dim=128)),
    *(Shape(f"page_{s}", cache=dict(block_size=s)) for s in (16, 32, 48, 64, 256)),
    Shape("float32", cache=dict(dtype="float32"), dtype="float32"),
    Shape("float32_over_bf16", dtype="float32"),
    *(
        Shape(f"{d}_page_{s}", cache=dict(dtype=d, quant=mode, block_size=s))
        for d, mode, s in (
            ("float8_e4m3fn", "per_head", 128),
            ("float8_e5m2", "per_tensor", 32),
            ("int8", "per_tensor", 16),
        )
    ),
    Shape("mha", dict(num_heads=16, num_kv_heads=16)),
    Shape("ratio_7", dict(num_heads=28, num_kv_heads=4)),
    Shape("mqa_71", dict(num_heads=71, num_kv_heads=1, head_dim=64)),
    Shape("window_cap_sinks", dict(sliding_window=1000, has_sinks=True, **CAP)),
    Shape("two_sided", dict(sliding_window=(100, 30)), causal="each"),
    Shape("chunk_alibi", dict(chunk_size=1000, has_alibi=True)),
    Shape("lookback_output", dict(chunk_size=1000, chunk_lookback=1, output_dtype="float8_e4m3fn")),
    Shape("alibi_sqrt", dict(has_alibi=True, use_alibi_sqrt=True)),
    Shape("functions", dict(mask_fn=two_thirds, score_fn=faded)),
    Shape("encoder", dict(attn_type="encoder_only", sliding_window=(9, 3))),
    Shape("mm_prefix", dict(use_mm_prefix=True, sliding_window=300)),
    Shape("rswa_mm_prefix", dict(use_mm_prefix=True, use_rswa=True, sliding_window=300, has_sinks=True)),
    Shape("qq_bias", dict(use_qq_bias=True, has_alibi=True), query_lens=(24,) * 16),
    Shape("qq_bias_page_48", dict(use_qq_bias=True), cache=dict(block_size=48), query_lens=(24,) * 16),
    Shape("nhd", cache=dict(layout="NHD")),
    Shape("nhd_int8_mqa", dict(num_kv_heads=1), cache=dict(layout="NHD", dtype="int8", quant="per_head")),
    Shape("float16_over_bf16_nhd", dict(num_kv_heads=2), cache=dict(layout="NHD"), dtype="float16"),
    Shape("token_scales", cache=dict(dtype="int8", quant="per_token_head")),
    Shape("token_scales_page_48", cache=dict(dtype="float8_e4m3fn", quant="per_token_head", block_size=48)),
    Shape("lanes_64", dict(head_dim=64, sliding_window=300), cache=dict(layout="HND128", block_size=64)),
    Shape("lanes_64_int8", dict(head_dim=64), dict(layout="HND128", dtype="int8", quant="per_head", block_size=16)),
    Shape("lanes_32", dict(head_dim=32, has_alibi=True), cache=dict(layout="HND128", block_size=32)),
    Shape("lanes_16", dict(head_dim=16, use_mm_prefix=True), cache=dict(layout="HND128", block_size=64)),
    Shape("kv_heads_160", dict(num_heads=160, num_kv_heads=160, head_dim=64), cache=dict(num_blocks=64)),
    Shape("keys_on_2_ranks", ranks=2, interleave=4),
    Shape(
        "keys_on_4_ranks", dict(has_alibi=True, sliding_window=300, mask_fn=two_thirds), ranks=4, query_lens=(1,) * 32
    ),
)
DECODE = Shape("decode", query_lens=(1,) * 256)
PREFILL = Shape("prefill", query_lens=(2048,) * 2)
MLA_DECODE = Shape("mla_decode", query_lens=(1,) * 256, latent=True)
MLA_PREFILL = Shape("mla_prefill", query_lens=(2048,) * 2, latent=True)
LATENT = (
    MLA_DECODE,
    MLA_PREFILL,
    Shape("mla_wide", latent=True, wide=True),
    Shape("mla_fp8_page_32", cache=dict(dtype="float8_e4m3fn", quant="per_tensor", block_size=32), latent=True),
    Shape("mla_float32", cache=dict(dtype="float32"), dtype="float32", latent=True),
    Shape("mla_16_heads", dict(num_heads=16), query_lens=(4,) * 32, latent=True),
    Shape("mla_latent_256", dict(num_heads=40, kv_lora_rank=256, qk_rope_head_dim=32), latent=True),
    Shape("mla_functions", dict(mask_fn=two_thirds, score_fn=faded), latent=True),
    Shape("mla_options", dict(has_sinks=True, has_alibi=True, sliding_window=1000, **CAP), latent=True),
)
SHAPES = (*MIXED, DECODE, PREFILL, Shape("speculative", query_lens=(4,) * 32), *LATENT)


def environment() -> dict[str, str]:
    """The environment that libtpu needs on a machine without TPUs."""
    return dict(
        JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost",
        XLA_FLAGS="",  # those of a CPU's tests are not for a TPU
    )  # fmt: skip


def available() -> bool:
    """Is the libtpu wheel installed?"""
    spec = importlib.util.find_spec("libtpu")
    return spec is not None and spec.origin is not None


def mesh_of(chip: str, ranks: int = 1):
    """A mesh of so many devices of a chip, whose axis is called x."""
    import jax
    from jax.experimental import topologies

    return jax.sharding.Mesh(topologies.get_topology_desc(TOPOLOGIES[chip], "tpu").devices[:ranks], ("x",))


def compile_for(
    chip: str, function, *shapes, ranks: int = 1, donated: tuple[int, ...] = (), options: dict | None = None
):
    """`function` compiled for a chip's mesh of so many ranks, each with whole arguments, which are given as
    ShapeDtypeStructs; options: the compiler's."""
    import jax

    mesh = mesh_of(chip, ranks)
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes)
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, out_shardings=here, donate_argnums=donated).lower(*placed)
        return lowered.compile(compiler_options=options)


def layer_of(shape: Shape):
    """Its AttentionSpec."""
    import jattn

    return jattn.AttentionSpec(**LAYER | shape.spec)


def latent_layer_of(shape: Shape):
    """(MLASpec, KVCacheSpec)."""
    import jattn

    spec = jattn.MLASpec(**DEEPSEEK | shape.spec)
    cache_spec = jattn.mla_cache_spec(spec, **POOL | shape.cache)
    if shape.wide:
        cache_spec = dataclasses.replace(cache_spec, head_dim=spec.head_dim, v_head_dim=spec.kv_lora_rank)
    return spec, cache_spec


def call(shape: Shape, chip: str = "v6e"):
    """(function, its arguments as shapes) of one attention call on the backend, work list included."""
    import jax

    import jattn

    attn, params, q_dim = _latent_call(shape, chip) if shape.latent else _attention_call(shape, chip)
    reqs, width, size = len(shape.query_lens), shape.columns, attn.cache_spec.block_size * shape.ranks
    meta = jattn.CommonAttentionMetadata.from_lengths(
        shape.query_lens, [max(n, 700) for n in shape.query_lens], [[0] * width] * reqs, size,
        causal=[r % 2 == 0 for r in range(reqs)] if shape.causal == "each" else shape.causal,
        **_reach(attn.spec, reqs),
    )  # fmt: skip
    q = jax.ShapeDtypeStruct((sum(shape.query_lens), attn.spec.num_heads, q_dim), shape.dtype)
    cache = jax.eval_shape(lambda: jattn.empty_cache(attn.cache_spec, storage="native"))

    def attend(q, cache, meta, params):
        return attn.attend(q, cache, attn.build(meta), params)

    if shape.ranks > 1:  # over the axis of the mesh of compile_for
        once = jax.sharding.PartitionSpec()
        attend = jax.shard_map(attend, in_specs=once, out_specs=once, check_vma=False)
    return attend, (q, cache, meta, params)


def _reach(spec, reqs: int) -> dict:
    """The arguments of from_lengths for use_rswa and use_mm_prefix."""
    given = dict(use_rswa=("rswa_prefix_lens", [64] * reqs), use_mm_prefix=("mm_prefix_ranges", [[(3, 90)]] * reqs))
    return dict(given[name] for name in given if vars(spec).get(name))


def _latent_call(shape: Shape, chip: str):
    """(MLAAttention, its parameters as shapes, elements of a query)."""
    import jax
    import jax.numpy as jnp

    import jattn
    from jattn.device import Chip

    spec, cache_spec = latent_layer_of(shape)
    attn = jattn.MLAAttention(spec, cache_spec, backend="mla_pallas_tpu", platform=Chip("tpu", chip))
    f32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    heads, latent = spec.num_heads, spec.kv_lora_rank
    params = jattn.MLAParams(
        w_uk=jax.ShapeDtypeStruct((heads, spec.qk_nope_head_dim, latent), jnp.bfloat16),
        w_uv=jax.ShapeDtypeStruct((heads, latent, spec.v_head_dim), jnp.bfloat16),
        alibi_slopes=f32(heads) if spec.has_alibi else None,
        sinks=f32(heads) if spec.has_sinks else None,
        kv_c_scale=f32() if cache_spec.quant == "per_tensor" else None,
    )
    return attn, params, spec.qk_head_dim


def _attention_call(shape: Shape, chip: str):
    """(PagedAttention, its parameters as shapes, elements of a query)."""
    import jax
    import jax.numpy as jnp

    import jattn
    from jattn.device import Chip

    spec = layer_of(shape)
    dims = dict(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, v_head_dim=spec.v_head_dim)
    cache_spec = jattn.KVCacheSpec(**POOL | dims | shape.cache)
    attn = jattn.PagedAttention(spec, cache_spec, "pallas_tpu", Chip("tpu", chip), parallel=_parallel(shape))
    f32 = lambda n: jax.ShapeDtypeStruct((n,), jnp.float32)
    params = jattn.AttentionParams(
        alibi_slopes=f32(spec.num_heads) if spec.has_alibi else None,
        sinks=f32(spec.num_heads) if spec.has_sinks else None,
        q_scale=f32(spec.num_heads) if shape.q_scale else None,
        k_scale=f32(spec.num_kv_heads) if cache_spec.quant == "per_head" else None,
        v_scale=f32(spec.num_kv_heads) if cache_spec.quant == "per_head" else None,
        output_scale=jax.ShapeDtypeStruct((), jnp.float32) if spec.output_dtype is not None else None,
        qq_bias=jax.ShapeDtypeStruct((24, 24), jnp.float32) if spec.use_qq_bias else None,
    )
    return attn, params, spec.head_dim


def _parallel(shape: Shape):
    """Its ContextParallel, whose axis is called x."""
    from jattn.backends import ContextParallel

    if shape.ranks == 1:
        return ContextParallel()
    return ContextParallel(dcp_axis="x", dcp_world_size=shape.ranks, interleave=shape.interleave)


def compile_one(shape: Shape, chip: str) -> dict:
    """The row of one shape: ok and seconds, or the compiler's message."""
    start = time.perf_counter()
    try:
        function, arguments = call(shape, chip)
        compile_for(chip, function, *arguments, ranks=shape.ranks)
    except Exception as error:  # the compiler raises many kinds; the message is the answer
        return dict(shape=shape.name, chip=chip, ok=False, error=str(error)[:2000])
    return dict(shape=shape.name, chip=chip, ok=True, seconds=round(time.perf_counter() - start, 1))


def main(argv: list[str] | None = None) -> int:
    """Compile and print; 1 if a shape does not compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of shapes, separated by commas")
    parser.add_argument("--chips", default=",".join(TOPOLOGIES))
    args = parser.parse_args(argv)
    wanted = name_lists.known(parser, "--only", args.only, [shape.name for shape in SHAPES], "shape")
    chips = name_lists.known(parser, "--chips", args.chips, TOPOLOGIES, "chip")
    os.environ.update(environment())
    failed = 0
    for shape in SHAPES:
        if wanted and shape.name not in wanted:
            continue
        for chip in chips or TOPOLOGIES:
            row = compile_one(shape, chip)
            failed += not row["ok"]
            print(json.dumps(row), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
