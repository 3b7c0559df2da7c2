"""A model that does not fit one card: a folder of 141 GB, loaded by Engine.from_pretrained onto several, and served.

    python -m benchmarks.gpu.large_model FOLDER [--ranks 2] [--write | --out DIR] [--small]
    python -m benchmarks.gpu.large_model FOLDER --only-folder    # write the folder, if it is not there

FOLDER should be in memory (tmpfs of 150 GB). It gets a Llama of 80 layers with the shapes of the 70B model in bf16:
random weights of which each tensor has another part of one table, one *.safetensors file for each layer.

large_cut      the first CUT layers in float32 on all cards: greedy tokens beside those of one card's products in
               float32, which no kernel of this project computes; `equal` is the share of equal tokens
large_load     seconds until the engine has the weights, GB/s, and the largest number of bytes on a card
large_decode   milliseconds of a decode step of 64 requests, and the tokens of a text prompt
"""

import argparse
import gc
import json
import pathlib
import struct
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import records

CUT, READY = 2, "complete"
THREADS = 16
TABLE = 2**28  # bytes of random numbers that all tensors share
CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=8192,
    intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    hidden_act="silu", max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=False, eos_token_id=1, bos_token_id=0, torch_dtype="bfloat16",
)  # fmt: skip
SMALL = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8) | dict(
    num_key_value_heads=2, head_dim=16
)


# ---------------------------------------------------------------------- the folder
def tensors_of_layer(config: dict, layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as the folder has them."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = (config[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
    shapes = {
        f"self_attn.{name}_proj": (size, hidden) for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    shapes |= {"self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
    shapes |= {"mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def files_of(config: dict) -> dict[str, dict[str, tuple[int, ...]]]:
    """File -> its tensors."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    files = {f"layer-{i:02d}.safetensors": tensors_of_layer(config, i) for i in range(config["num_hidden_layers"])}
    ends = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    return files | {"ends.safetensors": ends}


def write_folder(folder: pathlib.Path, config: dict) -> None:
    """Write the folder unless it is complete. Weights have a standard deviation of inputs ** -0.5, norms are 1."""
    import ml_dtypes

    if (folder / READY).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    count = min(TABLE, 2**20) if config["hidden_size"] < 1024 else TABLE
    inputs = sorted(
        {config["hidden_size"], config["intermediate_size"]} | {config["num_attention_heads"] * config["head_dim"]}
    )
    normal = rng.standard_normal(count // 8, np.float32)
    normal = np.concatenate([normal, normal[::-1], -normal, np.roll(normal, 12345)])  # four parts of one draw
    of_inputs = {n: (normal * n**-0.5).astype(ml_dtypes.bfloat16).view(np.uint8) for n in inputs}
    ones = np.ones(max(inputs), ml_dtypes.bfloat16).view(np.uint8)
    pieces = []

    def layout(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """The header of a file, and the tasks that write its tensors."""
        header, offset = {}, 0
        for tensor, shape in shapes.items():
            size = 2 * int(np.prod(shape))
            header[tensor] = dict(dtype="BF16", shape=list(shape), data_offsets=[offset, offset + size])
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)
        for tensor, shape in shapes.items():
            first, last = header[tensor]["data_offsets"]
            table = ones if len(shape) == 1 else of_inputs[shape[1]]
            pieces.append((name, 8 + len(text) + first, last - first, table, len(pieces)))

    def write(piece) -> None:
        name, place, size, table, number = piece
        view, start = memoryview(table), 0 if table is ones else number * 7919 * 64 % len(table)
        with open(folder / name, "r+b", buffering=0) as file:
            file.seek(place)
            while size:
                part = view[start : start + min(size, len(table) - start, 2**24)]
                file.write(part)
                size, start = size - len(part), (start + len(part)) % len(table)

    for name, shapes in files_of(config).items():
        layout(name, shapes)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, pieces))
    settings(folder, config, files_of(config))
    (folder / READY).touch()


def settings(folder: pathlib.Path, config: dict, files: dict) -> None:
    """config.json, the index and a tokenizer of bytes."""
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {tensor: name for name, shapes in files.items() for tensor in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="ByT5Tokenizer")))


def cut_folder(folder: pathlib.Path, config: dict) -> pathlib.Path:
    """A folder with the first CUT layers, whose files are links to those of the whole."""
    cut, config = folder / "cut", config | dict(num_hidden_layers=CUT)
    cut.mkdir(exist_ok=True)
    for name in files_of(config):
        (cut / name).unlink(missing_ok=True)
        (cut / name).hardlink_to(folder / name)
    settings(cut, config, files_of(config))
    return cut


# ---------------------------------------------------------------------- measurements
def measure_cut(folder: pathlib.Path, ranks: int, rows: int = 4, prompt: int = 24, new: int = 24) -> dict:
    """Greedy tokens of the cut model in float32 on all cards, judged by one card's float32 products."""
    import jax

    import jattn
    from jattn import models

    mesh = jax.make_mesh((ranks,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    with jax.default_matmul_precision("highest"):
        config = models.load_config(folder)
        place = models.ModelMesh.of(config, mesh).weight_sharding(config)
        config, params = models.load(folder, dtype="float32", sharding=place)
        ids = np.random.default_rng(1).integers(2, config.vocab_size, (rows, prompt)).tolist()
        engine = jattn.Engine(
            config, params, mesh=mesh, max_num_seqs=rows, max_num_batched_tokens=rows * prompt, num_blocks=64,
            max_model_len=prompt + new + 1, max_burst=8, prefix_caching=False,
        )  # fmt: skip
        greedy = jattn.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        found = [list(output.token_ids) for output in engine.generate(ids, greedy)]
        del engine, params
        config, params = models.load(
            folder, dtype="float32", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        equal = []
        for own, tokens in zip(ids, found, strict=True):
            logits = models.prompt_logits(config, params, own + tokens[:-1], backend="sdpa")
            wanted = np.asarray(logits)[len(own) - 1 :].argmax(1).tolist()
            equal.append([a == b for a, b in zip(tokens, wanted, strict=True)])
    return dict(case="large_cut", layers=CUT, equal=float(np.mean(equal)), tokens=int(np.size(equal)))


def measure_whole(folder: pathlib.Path, ranks: int, small: bool) -> list[dict]:
    """Load the folder and serve it."""
    import jax

    import jattn
    from benchmarks.gpu import engine_step

    rows, dispatches = (4, 2) if small else (64, 6)
    longest = 64 + engine_step.BURST * (engine_step.UNTIMED + dispatches + 3) + 1
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    begin, loaded = time.perf_counter(), []
    engine = jattn.Engine.from_pretrained(
        folder, tensor_parallel=ranks, max_num_seqs=rows, max_num_batched_tokens=rows,
        num_blocks=None if small else 512,
        max_model_len=longest, max_burst=engine_step.BURST, prefix_caching=False,
        progress=lambda done, total, name: loaded.append(time.perf_counter()) if done + 1 == total else None,
    )  # fmt: skip
    ready = time.perf_counter()
    of_card = [sum(s.data.nbytes for x in jax.tree.leaves(engine.params) for s in x.addressable_shards if s.device == d)
               for d in jax.devices()[:ranks]]  # fmt: skip
    row = dict(case="large_load", seconds=ready - begin, read_seconds=loaded[0] - begin, gb=size / 1e9,
               gb_per_s=size / (loaded[0] - begin) / 1e9, gb_of_weights_on_a_card=max(of_card) / 1e9)  # fmt: skip
    print(json.dumps(row), flush=True)
    begin = time.perf_counter()
    engine.warmup()
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    ids = np.random.default_rng(0).integers(2, engine.config.vocab_size, (rows, 1))
    greedy = jattn.SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    texts = engine.generate(["A model that does not fit one card says: "] * 2 + [p.tolist() for p in ids[2:]], greedy)
    first = time.perf_counter() - begin
    seconds, _ = engine_step.serve(engine, ids, dispatches)
    decode = dict(case="large_decode", ms=float(np.median(seconds)) / engine_step.BURST * 1e3, requests=rows,
                  compile_and_first_seconds=first, repeats=texts[0].token_ids == texts[1].token_ids,
                  text_tokens=list(texts[0].token_ids))  # fmt: skip
    print(json.dumps(decode), flush=True)
    return [row, decode]


def run(folder: pathlib.Path, args: argparse.Namespace) -> list[dict]:
    """All rows; each is printed when it is known."""
    from benchmarks.gpu.two_cards import two_programs

    config = CONFIG | (SMALL if args.small else {})
    begin = time.perf_counter()
    while not (folder / READY).exists() and args.wait and time.perf_counter() - begin < args.wait:
        time.sleep(0.2)
    write_folder(folder, config)
    print(f"the folder is there after {time.perf_counter() - begin:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    served = (4, 4) if args.small else (64, 64)

    def whole():
        with two_programs(*served):
            return measure_whole(folder, args.ranks, args.small)

    for work in (whole, lambda: [measure_cut(cut_folder(folder, config), args.ranks)]):
        try:
            found = work()
        except Exception as error:
            traceback.print_exc(limit=-4)
            found = [dict(case="large", error=f"{type(error).__name__}: {error}"[:300])]
        gc.collect()
        print(json.dumps(found[-1]), flush=True)
        rows += [row | dict(variant=f"{args.ranks} devices") | records.provenance() for row in found]
        records.write(rows, "large_model", records.folder_of(args))
    return rows


def main(argv: list[str] | None = None) -> None:
    """Print and keep the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.large_model", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only-folder", action="store_true", help="write the folder, and end")
    parser.add_argument("--ranks", type=int, default=2, help="cards (default: 2)")
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for another process that writes it")
    records.add_options(parser)
    args = parser.parse_args(argv)
    if args.only_folder:
        begin = time.perf_counter()
        write_folder(args.folder, CONFIG | (SMALL if args.small else {}))
        print(f"folder: {time.perf_counter() - begin:.1f} s", flush=True)
        return
    run(args.folder, args)


if __name__ == "__main__":
    main()
