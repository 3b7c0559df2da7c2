"""Embeddings are transformers' hidden states, pooled by hand; a request's does not depend on its neighbours."""

import numpy as np
import pytest

from jattn import Embedder, models
from jattn.engine import Engine
from jattn.models.dense import DenseLayer
from tests.models import examples, witness

LENGTHS = (9, 1, 17, 4)
HAND = {
    "mean": lambda hidden: hidden.mean(axis=0),
    "cls": lambda hidden: hidden[0],
    "last": lambda hidden: hidden[-1],
    "max": lambda hidden: hidden.max(axis=0),
    "weighted_mean": lambda hidden: np.average(hidden, axis=0, weights=np.arange(1, len(hidden) + 1)),
    "mean_sqrt_len": lambda hidden: hidden.sum(axis=0) / np.sqrt(len(hidden)),
}


def rows_of(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 61, n) for n in lengths]


def close(mine, wanted) -> None:
    assert np.abs(np.asarray(mine) - wanted).max() <= 1e-4 * wanted.std()


@pytest.mark.parametrize("family", ["roberta", "modernbert", "qwen3"])
def test_embeddings_are_the_pooled_hidden_states_of_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
    torch = pytest.importorskip("torch", reason="the witness needs the extra 'parity'")
    values = {key: value for key, value in examples.ALL[family].items() if key != "model_type"}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{"pad_token_id": 0} | values, initializer_range=0.3)
    theirs = transformers.AutoModel.from_config(config).eval().float()
    theirs.save_pretrained(tmp_path)
    config, params = models.load(tmp_path, head=False)
    rows = rows_of(*LENGTHS)
    with torch.no_grad():
        hidden = [theirs(torch.tensor(row)[None]).last_hidden_state[0].numpy() for row in rows]
    for pooling in models.POOLINGS:
        wanted = np.stack(list(map(HAND[pooling], hidden)))
        close(models.embed(config, params, np.concatenate(rows), LENGTHS, pooling), wanted)


GEMMA = examples.DECODERS["gemma3_text"] | dict(use_bidirectional_attention=True)
BOTH_SIDES = {
    "llama": examples.DECODERS["llama"] | dict(is_causal=False),
    "gte-Qwen2": examples.DECODERS["qwen2"] | dict(is_causal=False, use_sliding_window=False),
    "qwen2 with windows": examples.DECODERS["qwen2"] | dict(is_causal=False),
    "mistral": examples.DECODERS["mistral"] | dict(is_causal=False),
    "gemma2": examples.DECODERS["gemma2"] | dict(is_causal=False),
    "gemma3_text": examples.DECODERS["gemma3_text"] | dict(is_causal=False),
    "gpt2": examples.FURTHER["gpt2"] | dict(is_causal=False),
    "EmbeddingGemma": GEMMA,
    "EmbeddingGemma, an even window": GEMMA | dict(sliding_window=8),
    "EmbeddingGemma, a window of all": GEMMA | dict(sliding_window=512),
}


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_a_decoder_that_sees_both_sides_is_theirs(name, tmp_path):
    pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
    torch = pytest.importorskip("torch", reason="the witness needs the extra 'parity'")
    theirs = witness.saved(BOTH_SIDES[name], tmp_path).base_model
    config, params = models.load(tmp_path, head=False)
    assert config.is_encoder
    rows = rows_of(*LENGTHS)
    with torch.no_grad():
        hidden = [theirs(torch.tensor(row)[None], use_cache=False).last_hidden_state[0].numpy() for row in rows]
    close(models.embed(config, params, np.concatenate(rows), LENGTHS), np.stack([row.mean(axis=0) for row in hidden]))
    with pytest.raises(ValueError, match=r"is an encoder.*jattn\.Embedder"):
        Engine(config, params, num_blocks=8)


@pytest.mark.parametrize("as_stored", ["T5EncoderModel", "T5ForConditionalGeneration"])
def test_t5_embeds_with_its_encoder(as_stored, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
    torch = pytest.importorskip("torch", reason="the witness needs the extra 'parity'")
    values = {key: value for key, value in examples.ENCODERS["t5"].items() if key != "model_type"}
    theirs = getattr(transformers, as_stored)(transformers.T5Config(**values)).eval()
    witness.shake(theirs)
    theirs.save_pretrained(tmp_path)
    config, params = models.load(tmp_path, head=False)
    rows = rows_of(*LENGTHS)
    with torch.no_grad():
        hidden = [theirs.encoder(torch.tensor(row)[None]).last_hidden_state[0].numpy() for row in rows]
    close(models.embed(config, params, np.concatenate(rows), LENGTHS), np.stack([row.mean(axis=0) for row in hidden]))


@pytest.fixture(scope="module")
def bert():
    config = models.config_of(examples.ENCODERS["bert"]).without_head()
    return config, examples.params_of(config)


def test_an_embedding_does_not_depend_on_the_batch_around_it(bert):
    rows = rows_of(*LENGTHS)
    together = np.asarray(models.embed(*bert, np.concatenate(rows), LENGTHS))
    for row, mine in zip(rows, together, strict=True):
        np.testing.assert_allclose(models.embed(*bert, row, [len(row)])[0], mine, atol=2e-6)


def test_rows_may_be_padded_with_anything(bert):
    rows = rows_of(*LENGTHS)
    padded = np.stack([np.pad(row, (0, 20 - len(row)), constant_values=10**6) for row in rows])
    np.testing.assert_array_equal(
        models.embed(*bert, padded, LENGTHS), models.embed(*bert, np.concatenate(rows), LENGTHS)
    )


DENSE = DenseLayer(kernel=np.random.default_rng(3).normal(size=(32, 8)).astype(np.float32), activation="Tanh")


def test_dense_layers_come_between_pooling_and_dimensions(bert):
    rows, bias = rows_of(*LENGTHS), np.linspace(-1, 1, 5, dtype=np.float32)
    last = DenseLayer(kernel=np.arange(40, dtype=np.float32).reshape(8, 5) / 40, bias=bias)
    whole = np.asarray(models.embed(*bert, np.concatenate(rows), LENGTHS))
    wanted = (np.tanh(whole @ DENSE.kernel) @ last.kernel + bias)[:, :4]
    made = models.embed(*bert, np.concatenate(rows), LENGTHS, dense=[DENSE, last], dim=4)
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    unit = models.embed(*bert, np.concatenate(rows), LENGTHS, dense=[DENSE, last], dim=4, normalize=True)
    np.testing.assert_allclose(unit, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (dict(kernel=np.ones(32)), r"dense\[0\]\.kernel.* must have 2 axes"),
        (dict(kernel=np.ones((32, 4, 5))), r"dense\[0\]\.kernel.* must have 2 axes"),
        (dict(kernel=np.ones((32, 4), complex)), r"dense\[0\]\.kernel\.dtype=complex128"),
        (dict(kernel=None), r"dense\[0\]\.kernel=None"),
        (dict(bias=np.ones(5)), r"dense\[0\]\.bias has 5 numbers, but its kernel gives 4"),
        (dict(bias=np.ones(1)), r"dense\[0\]\.bias has 1 numbers"),
        (dict(bias=np.ones((1, 4))), r"dense\[0\]\.bias.* must have 1 axes"),
        (dict(activation="Swish"), r"dense\[0\]\.activation='Swish' is not known; use one of Identity"),
        (dict(kernel=np.ones((31, 4))), r"dense\[0\] reads 31 dimensions, but it gets 32"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_a_dense_layer_that_does_not_fit_is_refused(bert, layer, words):
    layer = DenseLayer(**dict(kernel=np.ones((32, 4), np.float32)) | layer)
    with pytest.raises(ValueError, match=words):
        models.embed(*bert, [1, 2], [2], dense=[layer])
    with pytest.raises(ValueError, match=words):
        Embedder(config=bert[0], params=bert[1], pooling="mean", dense=(layer,))


@pytest.mark.parametrize(
    "wrong", [dict(dense=DENSE), dict(dense=["x"]), dict(dense=None), dict(normalize="no")], ids=list
)
def test_a_wrong_option_of_embed_is_refused_by_its_name(bert, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        models.embed(*bert, [1, 2], [2], **wrong)


@pytest.mark.parametrize("dim", [None, 8])
def test_an_embedding_is_cut_before_it_is_normalised(bert, dim):
    rows = rows_of(*LENGTHS)
    whole = np.asarray(models.embed(*bert, np.concatenate(rows), LENGTHS))[:, :dim]
    wanted = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    made = models.embed(*bert, np.concatenate(rows), LENGTHS, normalize=True, dim=dim)
    np.testing.assert_allclose(made, wanted, atol=1e-6)


def test_token_types_are_added(bert):
    ids, types = np.concatenate(rows_of(7)), np.array([0, 0, 0, 1, 1, 1, 1])
    plain = models.embed(*bert, ids, [7])
    np.testing.assert_array_equal(models.embed(*bert, ids, [7], token_types=np.zeros(7, int)), plain)
    assert np.abs(np.asarray(models.embed(*bert, ids, [7], token_types=types)) - plain).max() > 1e-2


def test_batches_of_many_sizes_share_a_few_programs(compiles):
    config = models.config_of(examples.ENCODERS["bert"] | dict(num_hidden_layers=1)).without_head()
    params = examples.params_of(config)
    with compiles() as seen:
        for count in range(1, 17):
            lengths = [count] * count
            models.embed(config, params, np.full(sum(lengths), 5), lengths, backend="sdpa")
    sizes = {models.embedding.batch_of(config, [n] * n).num_tokens for n in range(1, 17)}
    assert len(sizes) == 5 and seen.names.count("_embeddings") <= 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(pooling="middle"), "pooling='middle' must be one of mean, cls, last, max, weighted_mean, mean_sqrt_len"),
        (dict(dim=33), "dim=33 must be an integer from 1 to 32"),
        (dict(dim=0), "dim=0 must be"),
        (dict(dim=9, dense=[DENSE]), "dim=9 must be an integer from 1 to 8"),
        (dict(dense=[DENSE, DENSE]), r"dense\[1\] reads 32 dimensions, but it gets 8"),
        (dict(lengths=[3, 0]), "each at least 1"),
        (dict(lengths=[]), "at least one request"),
        (dict(lengths=[4]), r"ids is int64\[3\]; it must be integers \[4\]"),
        (dict(ids=np.zeros(65, int), lengths=[65]), "longer than the model's config.max_positions=64"),
        (dict(ids=np.zeros(3), lengths=[3]), "ids is float64"),
        (dict(ids=np.array([3, 2**40, 5])), "ids from 3 to 1099511627776 must be from 0 to"),
        (dict(ids=np.array([3, -1, 5])), "ids from -1 to 5 must be from 0 to"),
        (dict(token_types=np.array([0, 2, 0])), "token_types from 0 to 2 must be from 0 to 1"),
    ],
)
def test_what_cannot_be_embedded_is_refused(bert, changes, words):
    arguments = dict(ids=np.array([3, 4, 5]), lengths=[3]) | changes
    with pytest.raises(ValueError, match=words):
        models.embed(*bert, arguments.pop("ids"), arguments.pop("lengths"), **arguments)


def test_an_encoder_decoder_is_refused():
    config = models.config_of(examples.ENCODERS["bart"])
    with pytest.raises(ValueError, match="bart is an encoder-decoder"):
        models.embed(config, {}, [1], [1])
