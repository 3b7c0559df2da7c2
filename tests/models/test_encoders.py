"""BERT and BART give the results of transformers, in ragged batches; BART's decoder token by token."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jattn
from jattn import models
from tests.models.serving import BLOCK_SIZE
from tests.models.test_parity import agree
from tests.models.witness import COMMON, Example, shake

transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
torch = pytest.importorskip("torch", reason="the witness needs the extra 'parity'")

SMALL_BERT = Example("bert", {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, common=False)
SMALL_BART = Example(
    "bart",
    dict(vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=48,
         encoder_attention_heads=2, decoder_attention_heads=4, max_position_embeddings=32, init_std=0.3,
         scale_embedding=True),
    common=False,
)  # fmt: skip
SOURCES, TARGETS = (9, 5), (6, 4)


def saved(example: Example, kind, folder):
    torch.manual_seed(0)
    model = kind(example.config()).eval().float()
    shake(model)
    model.save_pretrained(folder)
    return model, *models.load(folder)


def ids(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 61, n) for n in lengths]


def test_bert_sees_both_ways(tmp_path):
    theirs, config, params = saved(SMALL_BERT, transformers.BertForMaskedLM, tmp_path)
    xs, types = ids(*SOURCES), [np.arange(n) % 2 for n in SOURCES]
    meta = jattn.CommonAttentionMetadata.from_lengths(SOURCES, SOURCES, None, BLOCK_SIZE, num_tokens=16)
    pad = lambda rows: np.pad(np.concatenate(rows), (0, 2))
    run = jax.jit(models.encode, static_argnums=0, static_argnames="backend")
    hidden = run(config, params, pad(xs), meta, token_types=pad(types), backend="sdpa")
    mine = np.split(np.asarray(models.head(config, params, hidden))[: sum(SOURCES)], [SOURCES[0]])
    for x, kind, logits in zip(xs, types, mine, strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor(x)[None], token_type_ids=torch.tensor(kind)[None]).logits[0].numpy()
        agree(logits, wanted)


def test_bart_reads_its_source_once_and_writes_token_by_token(tmp_path):
    theirs, config, params = saved(SMALL_BART, transformers.BartForConditionalGeneration, tmp_path)
    sources, targets = ids(*SOURCES), ids(*TARGETS, seed=1)
    tables = np.random.default_rng(2).permutation(16).reshape(2, 2, 4).astype(np.int32)
    meta = functools.partial(
        jattn.CommonAttentionMetadata.from_lengths, block_table=tables[0][:, :2], block_size=BLOCK_SIZE,
        encoder_seq_lens=SOURCES, cross_block_table=tables[1],
    )  # fmt: skip
    step = jax.jit(models.forward, static_argnums=0, static_argnames="backend")
    caches, rows = config.make_caches(16, BLOCK_SIZE, "float32"), [[], []]
    first = np.concatenate([t[:3] for t in targets])
    caches, logits = step(
        config, params, first, caches, meta([3, 3], [3, 3]), encoder_ids=np.concatenate(sources), backend="sdpa"
    )
    for row, part in zip(rows, np.split(np.asarray(logits), 2), strict=True):
        row.append(part)
    for at in range(3, max(TARGETS)):
        alive = [n > at for n in TARGETS]
        tokens = np.array([t[at] for t, here in zip(targets, alive, strict=True) if here] + [0] * (2 - sum(alive)))
        lens = [int(here) for here in alive], [min(at + 1, n) for n in TARGETS]
        caches, logits = step(config, params, tokens, caches, meta(*lens, num_tokens=2), backend="sdpa")
        for row, part in zip(
            [r for r, here in zip(rows, alive, strict=True) if here], np.asarray(logits), strict=False
        ):
            row.append(part[None])
    for source, target, row in zip(sources, targets, rows, strict=True):
        with torch.no_grad():
            out = theirs(input_ids=torch.tensor(source)[None], decoder_input_ids=torch.tensor(target)[None])
        agree(np.concatenate(row), out.logits[0].numpy())


def test_encoders_and_decoders_are_not_mistaken_for_each_other():
    config = models.config_of(SMALL_BERT.config().to_dict())
    with pytest.raises(ValueError, match="has no cache"):
        config.make_caches(2, 4, "float32")
    with pytest.raises(ValueError, match=r"models\.encode"):
        models.forward(config, {}, None, (), None)
    decoder = dataclasses.replace(models.config_of(Example("llama").config().to_dict()), family="llama")
    with pytest.raises(ValueError, match="is a decoder"):
        models.encode(decoder, {}, None, None)
