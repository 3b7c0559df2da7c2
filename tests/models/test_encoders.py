"""Encoders and BART give the results of transformers, in ragged batches; BART's decoder token by token."""

import copy
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jattn
from jattn import models
from jattn.engine import Engine
from jattn.models.families.distance_bias import buckets_of
from tests.models import examples, options
from tests.models.serving import BLOCK_SIZE
from tests.models.test_parity import agree
from tests.models.witness import Example, shake

transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
torch = pytest.importorskip("torch", reason="the witness needs the extra 'parity'")

DRAWS = [(row, draw) for row in options.ENCODERS for draw in range(row.draws)]
ROWS = functools.partial(pytest.mark.parametrize, ids=lambda row: row.family if hasattr(row, "family") else str(row))
SMALL_BART = Example(
    "bart",
    dict(vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=48,
         encoder_attention_heads=2, decoder_attention_heads=4, max_position_embeddings=32, init_std=0.3,
         scale_embedding=True),
    common=False,
)  # fmt: skip
SMALL_T5 = {
    "t5": dict(vocab_size=61, d_model=32, d_kv=10, d_ff=24, num_layers=2, num_heads=4, feed_forward_proj="relu"),
    "t5, version 1.1": dict(
        vocab_size=61, d_model=32, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=5, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, layer_norm_epsilon=1e-3,
    ),
}  # fmt: skip
SEQ2SEQ = {"bart": SMALL_BART} | {name: Example("t5", values, common=False) for name, values in SMALL_T5.items()}
KINDS = {"bart": transformers.BartForConditionalGeneration, "t5": transformers.T5ForConditionalGeneration}
START = dict(bart=2, t5=0)
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


def written(row: options.Varied, draw: int, kind, folder):
    """transformers' random model of a row of options.ENCODERS, written to a folder with exactly this config."""
    values = row.config(draw)
    given = {key: value for key, value in copy.deepcopy(values).items() if key != "model_type"}
    given.setdefault("pad_token_id", 0)
    torch.manual_seed(draw)
    config = transformers.CONFIG_MAPPING[row.family](**given, initializer_range=0.3, attn_implementation="eager")
    model = kind.from_config(config).eval().float()
    shake(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return model


def packed(rows, config, params, types=None, backend="sdpa"):
    """The hidden states of each row, encoded in one ragged batch with padding tokens and a padding request."""
    lengths = [len(row) for row in rows]
    meta = jattn.CommonAttentionMetadata.from_lengths(
        lengths, lengths, None, BLOCK_SIZE, num_tokens=40, num_reqs=len(rows) + 1
    )
    pad = lambda some, fill: np.pad(np.concatenate(some), (0, 40 - sum(lengths)), constant_values=fill)
    run = jax.jit(models.encode, static_argnums=0, static_argnames="backend")
    kinds = None if types is None else pad(types, 0)
    hidden = run(config, params, pad(rows, 10**6), meta, token_types=kinds, backend=backend)
    return np.split(np.asarray(hidden)[: sum(lengths)], np.cumsum(lengths)[:-1])


def of_theirs(model, rows, types=None):
    """transformers' output of a padded batch of rows."""
    longest = max(map(len, rows))
    padded = lambda some, fill: [np.pad(x, (0, longest - len(x)), constant_values=fill) for x in some]
    pad = lambda some, fill: torch.tensor(np.stack(padded(some, fill)))
    mask = pad([np.ones(len(row), int) for row in rows], 0)
    more = {} if types is None else dict(token_type_ids=pad(types, 0))
    with torch.no_grad():
        return model(pad(rows, model.config.pad_token_id), attention_mask=mask, **more)


@ROWS(("row", "draw"), DRAWS)
def test_every_option_of_a_masked_language_model_is_theirs(row, draw, tmp_path):
    theirs = written(row, draw, transformers.AutoModelForMaskedLM, tmp_path)
    config, params = models.load(tmp_path)
    rows = ids(17, 9, 5)
    types = [np.arange(len(x)) % config.token_types for x in rows] if config.token_types else None
    wanted = of_theirs(theirs, rows, types).logits.numpy()
    for x, hidden, logits in zip(rows, packed(rows, config, params, types), wanted, strict=True):
        agree(np.asarray(models.head(config, params, hidden)), logits[: len(x)])


@ROWS("row", options.ENCODERS)
def test_a_folder_without_a_head_gives_their_last_hidden_states(row, tmp_path):
    theirs = written(row, 0, transformers.AutoModel, tmp_path)
    config, params = models.load(tmp_path, head=False)
    assert "head" not in params
    rows = ids(17, 9, 5)
    wanted = of_theirs(theirs, rows).last_hidden_state.numpy()
    for x, hidden, exact in zip(rows, packed(rows, config, params, backend="auto"), wanted, strict=True):
        agree(hidden, exact[: len(x)])
    with pytest.raises(ValueError, match="loaded without its head"):
        models.head(config, params, hidden)
    with pytest.raises(ValueError, match="pass head=False"):
        models.load(tmp_path)


def test_layers_that_share_their_tensors_share_their_arrays(tmp_path):
    """12 layers of ALBERT need the memory of one."""
    row = options.BY_NAME["albert"]
    written(dataclasses.replace(row, base=row.base | dict(num_hidden_layers=12)), 0, transformers.AutoModel, tmp_path)
    told = []
    _, params = models.load(tmp_path, head=False, progress=lambda done, total, path: told.append((done, total)))
    leaves = jax.tree.leaves(params["layers"])
    assert len(leaves) == 12 * 16 and len(set(map(id, leaves))) == 16
    assert told[-1] == (len(told) - 1, len(told))


def test_a_shared_layer_is_on_every_device_that_the_caller_names(tmp_path):
    row = options.BY_NAME["albert"]
    written(dataclasses.replace(row, base=row.base | dict(num_hidden_layers=4)), 0, transformers.AutoModel, tmp_path)
    first, second = (jax.sharding.SingleDeviceSharding(device) for device in jax.devices()[:2])
    place = lambda path, spec: second if path.startswith("layers.2.") else first
    _, params = models.load(tmp_path, head=False, sharding=place)
    seen = [{leaf.sharding for leaf in jax.tree.leaves(layer)} for layer in params["layers"]]
    assert seen == [{first}, {first}, {second}, {first}]
    assert params["layers"][0]["mlp"]["up"]["kernel"] is params["layers"][3]["mlp"]["up"]["kernel"]


def test_the_names_of_the_first_berts_layer_norms_are_known(tmp_path):
    """Those converted from TensorFlow have gamma and beta."""
    written(options.ENCODERS[0], 0, transformers.AutoModelForMaskedLM, tmp_path)
    _, wanted = models.load(tmp_path)
    path = tmp_path / "model.safetensors"
    old = lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    tensors = load_file(path)
    save_file({old(name): x for name, x in tensors.items()}, path)
    _, params = models.load(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, wanted))
    name = "bert.embeddings.LayerNorm.weight"
    save_file({old(name): x for name, x in tensors.items()} | {name: tensors[name]}, path)
    with pytest.raises(ValueError, match="is there twice"):
        models.load(tmp_path)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_decoder_reads_its_source_once_and_writes_token_by_token(name, tmp_path):
    theirs, config, params = saved(SEQ2SEQ[name], KINDS[SEQ2SEQ[name].family], tmp_path)
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
    config = models.config_of(examples.ENCODERS["bert"])
    with pytest.raises(ValueError, match="has no cache"):
        config.make_caches(2, 4, "float32")
    with pytest.raises(ValueError, match=r"models\.encode"):
        models.forward(config, {}, None, (), None)
    decoder = dataclasses.replace(models.config_of(Example("llama").config().to_dict()), family="llama")
    with pytest.raises(ValueError, match="is a decoder"):
        models.encode(decoder, {}, None, None)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_greedy_tokens_are_those_of_generate(name, tmp_path):
    theirs, config, params = saved(SEQ2SEQ[name], KINDS[SEQ2SEQ[name].family], tmp_path)
    (source,), start, most = ids(9), START[config.family], 7
    options = dict(
        max_new_tokens=most,
        min_new_tokens=most,
        do_sample=False,
        num_beams=1,
        use_cache=False,
        decoder_start_token_id=start,
    )
    wanted = theirs.generate(torch.tensor(source)[None], forced_eos_token_id=None, **options)[0].tolist()
    step = jax.jit(models.forward, static_argnums=0, static_argnames="backend")
    tables = np.random.default_rng(2).permutation(8).reshape(2, 1, 4).astype(np.int32)
    caches, tokens = config.make_caches(8, BLOCK_SIZE, "float32"), [start]
    for at in range(most):
        meta = jattn.CommonAttentionMetadata.from_lengths(
            [1], [at + 1], tables[0], BLOCK_SIZE, encoder_seq_lens=[len(source)], cross_block_table=tables[1]
        )
        once = dict(encoder_ids=source) if at == 0 else {}
        caches, logits = step(config, params, np.array(tokens[-1:]), caches, meta, backend="sdpa", **once)
        told = np.array(logits[-1])
        told[list(config.eos_token_ids)] = -np.inf  # min_new_tokens
        tokens.append(int(told.argmax()))
    assert tokens == wanted


def test_a_t5_with_a_head_of_its_own_does_not_scale_its_logits(tmp_path):
    theirs, config, params = saved(SEQ2SEQ["t5"], KINDS["t5"], tmp_path)
    assert config.tied_embeddings and config.logits_scale == 32**-0.5
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": 2 * tensors["shared.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight' is not used"):
        models.load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("scale_decoder_outputs")
    (tmp_path / "config.json").write_text(json.dumps(values | dict(tie_word_embeddings=False)))
    config, params = models.load(tmp_path)
    assert not config.tied_embeddings and config.logits_scale == 1.0
    np.testing.assert_array_equal(params["head"]["kernel"], 2 * tensors["shared.weight"].T)


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 5), (32, 200), (64, 1000)])
def test_every_distance_has_the_bucket_that_transformers_gives_it(count, most, both_sides):
    distances = np.arange(-3 * most, 3 * most + 1)
    rule = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    wanted = rule(torch.tensor(distances), bidirectional=both_sides, num_buckets=count, max_distance=most).numpy()
    clipped = np.clip(distances, -most, most)
    np.testing.assert_array_equal(buckets_of(clipped, count, most, both_sides), wanted)


def test_a_number_of_buckets_that_the_stored_bias_does_not_have_is_an_error(tmp_path):
    saved(SEQ2SEQ["t5"], KINDS["t5"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | dict(relative_attention_num_buckets=16)))
    with pytest.raises(ValueError, match="the bias has 32 buckets, and relative_attention_num_buckets=16"):
        models.load(tmp_path)


@pytest.mark.parametrize(("name", "way"), [("bart", "encoder_ids"), ("t5", "encoder_ids"), ("bert", "Embedder")])
def test_the_engine_refuses_what_it_does_not_serve_and_says_what_runs_it(name, way):
    with pytest.raises(ValueError, match=f"the engine does not serve.*{way}"):
        Engine(models.config_of(examples.ENCODERS[name]), {}, num_blocks=8)
