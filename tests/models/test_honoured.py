"""`jattn models` lists every option that the comparison with transformers varies, and none that has one value."""

import pytest

from jattn import cli
from jattn.models.families import FAMILIES
from jattn.models.honoured import honoured_options
from tests.models import options

SIZES = {
    "moe_topk", "intermediate_size", "type_vocab_size", "pad_token_id", "rms_norm_eps", "layer_norm_eps", "norm_eps",
    "n_shared_experts",
}  # fmt: skip


@pytest.mark.parametrize("name", options.BY_NAME)
def test_every_option_that_is_compared_is_listed(name):
    row, listed = options.BY_NAME[name], set(honoured_options(name))
    varied = {key for key, values in row.options.items() if key != "together" and len(values) > 1}
    assert varied - listed <= SIZES, "sizes are not options"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "partial_rotary_factor"), ("glm", "layer_types"), ("falcon", "alibi"),
        ("bert", "position_embedding_type"), ("gemma2", "use_bidirectional_attention"),
    ],
)  # fmt: skip
def test_a_key_with_one_possible_value_is_no_option(name, key):
    assert key not in honoured_options(name)


def test_the_command_prints_every_family(capsys):
    assert cli.main(["models"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FAMILIES) and "norm_topk_prob" in said
