"""The models of benchmarks.gpu.whole_models in their small form, and the floor beside which a trace stands."""

import subprocess

import jax
import numpy as np
import pytest

from benchmarks import records
from benchmarks.gpu import served, trace, whole_models
from jattn import models


def test_a_small_model_is_served_and_its_row_kept(tmp_path):
    assert whole_models.main(["--small", "--only", "gemma3_12b", "--out", str(tmp_path)]) == 0
    (row,) = records.read(tmp_path / "whole_models.jsonl")
    assert row["output_tokens"] == sum(new for _, new in trace.SMALL_TRACE.work(512)) and row["compiled_later"] == 0
    assert 0 < row["share_of_floor"] == row["floor_seconds"] / row["seconds"] and row["ready_seconds"] > 0


def test_a_token_is_multiplied_by_the_experts_that_it_chooses():
    fields = whole_models.CONFIGS["qwen3_30b"] | whole_models.SMALL
    config = models.config_of(fields)
    params = jax.eval_shape(lambda: served.weights_of(served.Case("qwen3_30b", 2), config))
    attention = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128  # q, k, v and the output
    of_experts = 3 * 128 * fields["moe_intermediate_size"] * fields["num_experts_per_tok"]
    router = 128 * fields["num_experts"]
    assert whole_models.used_numbers(config, params) == 2 * (attention + of_experts + router)


def test_the_floor_of_decodes_is_reading_or_multiplying():
    config = models.config_of(whole_models.CONFIGS["llama_8b"] | whole_models.SMALL)
    params = served.weights_of(served.Case("llama_8b", 2), config)
    found = whole_models.floor_of(config, params, [([1] * 10, 5), ([1] * 20, 3)], 2)
    numbers = whole_models.used_numbers(config, params)
    keys = 11 + 12 + 13 + 14 + 21 + 22  # of the steps after each prompt's own
    assert found["floor_steps"] == 4
    np.testing.assert_allclose(found["floor_kv_seconds"], keys * 2 * 2 * 2 * 32 * 2 / whole_models.READ_RATE)
    np.testing.assert_allclose(found["floor_prompts_seconds"], 30 * 2 * numbers / whole_models.MULTIPLY_RATE)
    longest = max(found["floor_weights_seconds"], found["floor_products_seconds"])
    rest = found["floor_kv_seconds"] + found["floor_prompts_seconds"]
    np.testing.assert_allclose(found["floor_seconds"], longest + rest)


def test_the_floor_reads_no_key_outside_a_window():
    """One layer of gpt-oss has a window of 128 keys, the other none."""
    config = models.config_of(whole_models.CONFIGS["gpt_oss_20b"] | whole_models.SMALL)
    params = served.weights_of(served.Case("gpt_oss_20b", 2), config)
    found = whole_models.floor_of(config, params, [([1] * 200, 3), ([1] * 100, 2)], 2)
    of_token = 2 * 2 * 32 * 2  # of a layer: keys and values of 2 heads
    keys = (128 + 128 + 101) + (201 + 202 + 101)
    np.testing.assert_allclose(found["floor_kv_seconds"], keys * of_token / whole_models.READ_RATE)


def test_the_floor_reads_the_experts_of_the_rows_that_are_left():
    """2 steps: one of two rows, then one of the longer output alone."""
    config = models.config_of(whole_models.CONFIGS["qwen3_30b"] | whole_models.SMALL)
    params = served.weights_of(served.Case("qwen3_30b", 2), config)
    found = whole_models.floor_of(config, params, [([1] * 10, 3), ([1] * 20, 2)], 2)
    read = served.read_bytes(params, config, 2) + served.read_bytes(params, config, 1)
    np.testing.assert_allclose(found["floor_weights_seconds"], read / whole_models.READ_RATE)


@pytest.mark.parametrize(("ends", "code"), [([0, 0], 0), ([0, 1], 1), ([-9, 0], 1)])
def test_a_model_whose_process_is_killed_has_failed(monkeypatch, ends, code):
    """A process that a signal ends has a return code below 0, as one whose memory is too large."""
    left = list(ends)
    ended = lambda command, check: subprocess.CompletedProcess(command, left.pop(0))
    monkeypatch.setattr(whole_models.subprocess, "run", ended)
    assert whole_models.main(["--only", "llama_8b,qwen25_7b"]) == code and not left
