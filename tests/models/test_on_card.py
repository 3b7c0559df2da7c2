"""The tool that checks families on a GPU: its models can be made, and it has a program for each batch of an engine."""

import pytest

from tests.models import on_card


@pytest.mark.parametrize("label", on_card.names())
def test_every_model_has_few_layers_and_a_program_for_each_batch(label):
    model = on_card.Served(label)
    assert 3 <= len(model.config.layers) <= 10 and model.config.vocab_size <= on_card.VOCABULARY
    assert sorted(model.trees.values()) == ["16 tokens", "256 tokens", "4 tokens"]
