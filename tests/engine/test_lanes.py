"""The pools of an engine on a TPU: narrow heads fill the lanes, and `sdpa` reads them, too."""

import jax
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.device import Chip
from jattn.engine import sizing
from tests.cases import CASES, FEATURES
from tests.problem import Problem
from tests.running import conform

CONFIG = models.config_of(dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=256, intermediate_size=64,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, hidden_act="silu",
))  # fmt: skip


def pools(backend: str = "auto", block_size: int = 64, mesh=None):
    """The cache that an engine would make."""
    make = sizing.cache_maker(CONFIG, 8, block_size, dict(dtype="bfloat16"), mesh, backend)
    (cache,) = jax.eval_shape(make)
    return cache


def test_narrow_heads_fill_lanes_on_a_tpu_only(monkeypatch):
    assert pools().k.shape == (8, 2, 64, 64)
    monkeypatch.setattr(jattn.device, "detect", lambda: Chip("tpu", "v6e"))
    assert pools().k.shape == (8, 2, 32, 128) and pools().spec.layout == "HND128"
    assert pools("split").k.shape == (8, 2, 64, 64), "it reads HND and NHD"
    assert pools(block_size=8).k.shape == (8, 2, 8, 64), "a page would be half a register"


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["tensor", "context"])
def test_each_rank_has_its_part_of_whole_rows(ranks, monkeypatch):
    devices = np.array(jax.devices()[:2]).reshape(ranks)
    mesh = models.ModelMesh.of(CONFIG, jax.sharding.Mesh(devices, ("tensor", "context")))
    monkeypatch.setattr(jattn.device, "detect", lambda: Chip("tpu", "v6e"))
    assert pools(mesh=mesh).k.shape == (8, 2, 32, 128)


@pytest.mark.parametrize("feature", ["everything", "rswa_mm_prefix_sqrt"])
def test_sdpa_reads_keys_side_by_side(feature):
    wide = dict(layout="HND128", head_dim=32, block_size=4)
    conform(Problem(case=CASES["mixed_unsorted"], feature=FEATURES[feature], dtype="bfloat16", **wide), "sdpa")
