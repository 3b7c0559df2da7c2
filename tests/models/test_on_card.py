"""The tool that checks families on a GPU: its models can be made, and it has a program for each batch of an engine."""

from concurrent.futures import Future

import pytest

from tests.models import on_card


@pytest.mark.parametrize("label", on_card.names())
def test_every_model_has_few_layers_and_a_program_for_each_batch(label):
    model = on_card.Served(label)
    assert 3 <= len(model.config.layers) <= 10 and model.config.vocab_size <= on_card.VOCABULARY
    assert sorted(model.trees.values()) == ["16 tokens", "256 tokens", "4 tokens"]


def test_no_model_begins_when_the_time_is_over(monkeypatch):
    begun = []
    monkeypatch.setattr(on_card, "report", lambda label, programs: begun.append(label) or label != "b")
    assert on_card.run_here(["a", "b", "c"], 60) == (1, 0) and begun == ["a", "b", "c"]
    assert on_card.run_here(["a", "b"], 0) == (0, 2) == on_card.run_here(["a", "b"], float("nan"))
    assert begun == ["a", "b", "c"]


def test_an_interrupted_run_waits_for_no_program(monkeypatch):
    closed = []

    class Compiler:
        def __init__(self, *sizes):
            pass

        def lower(self, make, label, card):
            return label

        def compile(self, made, how):
            job = Future()
            job.set_result({})
            return job

        def close(self):
            closed.append(True)

    def interrupted(label, programs):
        raise KeyboardInterrupt

    monkeypatch.setattr(on_card.lowering, "Compiler", Compiler)
    monkeypatch.setattr(on_card, "report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_card.run_lowered(["llama"], 1, 60)
    assert closed == [True]
