"""The embedded model: training and serving compute the same, and held-out problems are not trained on."""

import itertools

import jax
import numpy as np
import pytest

from jattn import embedded, models
from jattn.embedded import train
from jattn.embedded.dense import dense_logits


def test_dense_training_and_paged_serving_are_the_same_model(tmp_path):
    config = models.config_of(train.CONFIG)
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), models.init_params(config, 0, "float32"))
    tokens, mask = next(train.texts(0, 1))
    dense = jax.jit(dense_logits, static_argnums=0)(config, params, tokens)[0]
    paged = models.prompt_logits(config, params, tokens[0], backend="sdpa")
    np.testing.assert_allclose(dense, paged, atol=1e-4)
    train.save(tmp_path, params)
    found, loaded = models.load(tmp_path)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree.map(lambda x: x.astype("bfloat16"), params))
    assert mask[0].sum() == 3 * 5 and mask[0, :8].sum() == 0


def test_a_few_steps_of_training_lower_the_loss():
    said = []
    train.train(train.Recipe(steps=101, batch=2, warmup=10), report=lambda text, **_: said.append(text))
    losses = [float(text.split("loss ")[1].split(",")[0]) for text in said]
    assert losses[-1] < losses[0] / 2


def test_held_out_problems_are_one_in_sixteen_and_never_trained_on():
    trained = list(itertools.islice(embedded.problems(1, held_out=False), 3000))
    held = list(itertools.islice(embedded.problems(1, held_out=True), 300))
    assert not set(trained) & set(held)
    share = np.mean([embedded.Problem(a, b).held_out for a in range(0, 1000, 7) for b in range(0, 1000, 11)])
    assert share == pytest.approx(1 / 16, abs=0.01)


def test_a_problem_is_written_lowest_digit_first():
    problem = embedded.Problem(47, 385)
    assert problem.line == "740+583=2340\n"
    assert embedded.few_shot([problem], embedded.Problem(1, 2)) == "740+583=2340\n100+200="


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in embedded.directory().iterdir()) < 3e6
