"""Problems drawn at random from every option of a layer, its cache and its batch: `fields_of(seed)`."""

import random
from typing import Any

from tests.cases import Case, Feature, fade, no_thirds

WORK = 4_000_000
"""Queries times keys times heads of a problem, about: the witness takes a second for so many."""
KV_HEADS, GROUPS = (1, 1, 2, 2, 3, 4, 4, 5, 8), (1, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8, 9, 12, 16, 17, 24, 32, 71, 128)
MOST_HEADS = 128
DIMS = (16, 32, 48, 64, 64, 64, 80, 96, 112, 128, 128, 128, 128, 144, 160, 176, 192, 208, 240, 256, 256, 8, 24, 40, 72)
PAGES = (1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 16, 16, 24, 32, 32, 48, 64, 64, 80, 96, 128, 128, 256, 512)
WINDOWS = (1, 2, 5, 16, 63, 64, 65, 127, 128, 300, 1024)


def fields_of(seed: int, work: int = WORK) -> dict[str, Any]:
    """The fields of a Problem; work: see WORK."""
    rng = random.Random(seed)
    group = rng.choice(GROUPS)
    kv_heads = min(rng.choice(KV_HEADS), MOST_HEADS // group)
    dim = rng.choice(DIMS)
    dtype = rng.choice(("bfloat16",) * 7 + ("float16", "float16", "float32"))
    storage = _storage(rng)
    return dict(
        case=_case(rng, seed, work // (kv_heads * group)), feature=_feature(rng, seed, dtype, "quant" in storage),
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=dim,
        v_head_dim=rng.choice((16, 32, 64, 96, 128)) if rng.random() < 0.15 else None,
        block_size=rng.choice(PAGES), dtype=dtype, layout=rng.choice(("auto", "auto", "HND", "NHD")),
        pad_tokens=rng.choice((0, 1, 3, 17, 200)), pad_reqs=rng.choice((0, 1, 2, 20)),
        pad_columns=rng.choice((0, 2, 7)), seed=seed, page_seed=seed, **storage,
    )  # fmt: skip


def _storage(rng: random.Random) -> dict[str, str]:
    if rng.random() < 0.6:
        return {}
    dtype = rng.choice(("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "int8"))
    return dict(cache_dtype=dtype, quant=rng.choice(("per_tensor", "per_head", "per_token_head")))


def _feature(rng: random.Random, seed: int, dtype: str, is_quantised: bool) -> Feature:
    """Options of a layer: each by itself seldom, so that a layer has about two."""
    spec, params, often = {}, [], lambda share: rng.random() < share
    if often(0.3):
        two_sided = (rng.randint(0, 50), rng.randint(0, 20))
        spec["sliding_window"] = rng.choice((*WINDOWS, (rng.randint(0, 300), -1), two_sided, (-1, rng.randint(0, 20))))
    elif often(0.15):
        spec |= dict(chunk_size=rng.choice((3, 8, 16, 64, 100, 128, 500)), chunk_lookback=rng.choice((0, 0, 1, 2)))
    if often(0.2):
        spec["logits_soft_cap"] = rng.choice((0.7, 1.5, 30.0, 50.0, 100.0))
    if often(0.2):
        spec |= dict(has_alibi=True, use_alibi_sqrt=often(0.2))
        params.append("alibi_slopes")
    for share, options, names in (
        (0.25, dict(has_sinks=True), ("sinks",)),
        (0.15, dict(scale=rng.choice((0.03, 0.37, 1.0))), ()),
        (0.07, dict(mask_fn=no_thirds), ()),
        (0.07, dict(score_fn=fade), ()),
        (0.07, dict(use_mm_prefix=True), ()),
        (0.07, dict(use_qq_bias=True), ("qq_bias",)),
        (0.07, dict(output_dtype=rng.choice(("float8_e4m3fn", "int8"))), ("output_scale",)),
    ):
        if often(share):
            spec |= options
            params += names
    if isinstance(spec.get("sliding_window"), int) and often(0.2):
        spec["use_rswa"] = True
    if often(0.2):
        each = rng.choice(("", "[]"))
        own = ("q_scale",) if is_quantised or dtype == "float32" else ("q_scale", "k_scale", "v_scale")
        params += [name + each for name in own]
    causal = rng.choice((False, "alternate")) if often(0.1) else True
    return Feature(f"drawn {seed}", spec, tuple(params), causal)


def _case(rng: random.Random, seed: int, work: int) -> Case:
    """A batch of decodes, drafts, chunks, prompts and requests without new tokens. work: queries times keys."""
    count = rng.choice((1, 1, 2, 3, 4, 6, 9, 17, 33, 70, 150))
    kinds = ("decode",) * 4 + ("draft", "chunk", "prompt", "idle")
    if rng.random() < 0.4:
        kinds = rng.choice((("decode", "decode", "draft"), ("decode",), ("chunk",), ("prompt",)))
    usual, query_lens, seq_lens, left = rng.choice((20, 60, 200, 600, 2000, 6000)), [], [], work
    for _ in range(count):
        kind, keys = rng.choice(kinds), max(1, min(int(rng.lognormvariate(0, 1) * usual), 20_000))
        new = dict(decode=1, draft=rng.randint(2, 9), chunk=rng.randint(2, 400), prompt=min(keys, 900), idle=0)[kind]
        keys = new if kind == "prompt" else max(keys, new) if kind != "idle" else rng.choice((0, keys))
        if new * keys > left:
            new, keys = 1, min(keys, 100)
        if not left:
            break
        query_lens, seq_lens, left = [*query_lens, new], [*seq_lens, keys], max(left - new * keys, 0)
    if not any(query_lens):
        query_lens[0], seq_lens[0] = 1, max(seq_lens[0], 1)
    return Case(f"drawn {seed}", tuple(query_lens), tuple(seq_lens))
