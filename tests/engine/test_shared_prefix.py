"""A prefix that all decoding rows share is read once: the same tokens, and no program compiled after warm-up."""

import dataclasses
import functools
import random
from array import array

import jax
import numpy as np
import pytest

from jattn import models
from jattn.backends import register_backend, unregister_backend
from jattn.backends.sdpa import SdpaBackend, SdpaMetadataBuilder
from jattn.engine import Engine, SamplingParams, shared_prefix
from jattn.engine.request import Sequence
from jattn.engine.scheduler import Row
from jattn.metadata.cascade import prefix_levels
from jattn.spec import AttentionSpec
from tests.engine.test_no_compilation import VALUES

CONFIG = models.config_of(VALUES | dict(num_hidden_layers=2))
READ: list[tuple[int, int]] = []
"""(keys of the prefix, requests) of each step with levels, as the backend below computed it."""


@dataclasses.dataclass(frozen=True)
class SharingBuilder(SdpaMetadataBuilder):
    """sdpa's plans, with levels for a traced prefix, as pallas_gpu makes them."""

    shares_prefixes = True

    def seen(self, first, common) -> None:
        """Called with the level of the prefix, and the batch."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        if common.common_prefix_len is None:
            return super().build(0, common, fast_build)
        first, rest = prefix_levels(common, common.common_prefix_len, self.cache_spec.block_size)
        self.seen(first, common)
        return self.build_cascade((first, rest))


class SharingBackend(SdpaBackend):
    name = "sharing"
    builder_cls = SharingBuilder


class CountingBuilder(SharingBuilder):
    """Its programs are compiled in every run: JAX keeps none with a callback on disk."""

    def seen(self, first, common) -> None:
        jax.debug.callback(lambda keys, n: READ.append((int(keys), int(n))), first.seq_lens[0], common.num_reqs)


class CountingBackend(SdpaBackend):
    name = "counting"
    builder_cls = CountingBuilder


@pytest.fixture
def sharing(monkeypatch):
    """A backend that reads prefixes once, where any prefix of two rows pays."""
    monkeypatch.setattr(shared_prefix, "saved_us", lambda prefix, lens, *sizes: 1e6 * (prefix > 0 and len(lens) > 1))
    register_backend("sharing", SharingBackend)
    register_backend("counting", CountingBackend)
    yield
    unregister_backend("sharing")
    unregister_backend("counting")


@functools.cache
def weights(config):
    return models.init_params(config, 0, "float32")


def engine(config=CONFIG, **options) -> Engine:
    sizes = dict(block_size=4, num_blocks=60, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=96)
    return Engine(config, weights(config), **dict(backend="sharing") | sizes | options)


def requests(seed: int, count: int, systems: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that begin with one of `systems` system prompts, in turns of six; and own tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 259) for _ in range(rng.randrange(22, 30))] for _ in range(systems)]
    make = lambda i: prompts[i // 6 % systems] + [rng.randrange(3, 259) for _ in range(rng.randrange(1, 12))]
    params = lambda: SamplingParams(temperature=0, ignore_eos=True, max_tokens=rng.randrange(4, 44))
    return [(make(i), params()) for i in range(count)]


def served(one: Engine, work, aborted: int = 0) -> list[tuple[int, ...]]:
    """The tokens of each request that is not aborted; some join while others run."""
    ids = [one.add_request(*each) for each in work[:-4]]
    done = {}
    for step in range(3):
        done |= {output.id: output for output in one.step() if output.finished}
        if step < aborted:
            one.abort(ids[step])
    ids += [one.add_request(*each) for each in work[-4:]]
    done |= {output.id: output for output in one.drain()}
    assert not any(output.error for output in done.values())
    return [done[id].token_ids for id in ids[aborted:]]


@pytest.mark.slow
def test_tokens_are_those_of_flat_attention_with_two_system_prompts_preemption_and_aborts(sharing, compiles):
    work = requests(0, 20, 2)
    flat, one = engine(num_blocks=40, cascade_attention=False), engine(num_blocks=40)
    programs = one.warmup()
    assert programs == flat.warmup() + len([n for n in one.shapes.buckets.reqs if n > 1])
    with compiles() as seen:
        ours = served(one, work, aborted=2)
    assert seen.names == []
    wanted = served(flat, work, aborted=2)
    assert ours == wanted
    stats = one.stats
    assert stats.preemptions and stats.cached_tokens and stats.aborted == 2
    assert 0 < stats.shared_prefix_dispatches < stats.dispatches and not flat.stats.shared_prefix_dispatches


def test_each_step_of_a_burst_reads_the_prefix_once(sharing):
    """Six rows with 5 whole blocks in common: the shared level has 20 keys in every decode step, of all layers."""
    one, system = (
        engine(backend="counting", max_burst=8),
        list(range(3, 25)),
    )  # 22 tokens: the last two are in blocks of their own
    one.generate([system], SamplingParams(temperature=0, max_tokens=1))
    READ.clear()
    one.generate([[*system, 30 + i] for i in range(6)], SamplingParams(temperature=0, max_tokens=17, ignore_eos=True))
    jax.effects_barrier()
    assert one.stats.shared_prefix_dispatches == 2 and READ == [(20, 6)] * 16


def test_rows_without_a_common_block_take_the_flat_program(sharing):
    one = engine()
    one.generate([[i] * 20 for i in range(3, 9)], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert one.stats.shared_prefix_dispatches == 0


@pytest.mark.slow
def test_windows_stay_flat_beside_layers_that_share(sharing):
    """The table of a group with a window has other blocks in each row, and none for what the window has left."""
    config = models.config_of(
        dict(
            model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], vocab_size=300, hidden_size=64,
            intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=1e4, eos_token_id=0, sliding_window=8,
            rope_local_base_freq=1e4, query_pre_attn_scalar=16, hidden_activation="gelu_pytorch_tanh",
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )  # fmt: skip
    work = requests(1, 8, 1)
    one, flat = engine(config), engine(config, cascade_attention=False)
    assert one.shapes.sharing_group == 1
    assert served(one, work) == served(flat, work)
    assert one.stats.shared_prefix_dispatches


@pytest.mark.parametrize("options", [dict(deterministic=True), dict(prefix_caching=False), dict(backend="auto")])
def test_it_is_off_where_it_could_not_help_or_would_change_bits(sharing, options):
    sizes = dict(block_size=4, num_blocks=60, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=96)
    one = Engine(CONFIG, weights(CONFIG), **dict(backend="sdpa" if "deterministic" in options else "sharing")
                 | options | sizes)  # fmt: skip
    assert not any(shape.shares_prefix for shape in one.shapes.all())


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
@pytest.mark.parametrize("data, tensor", [(2, 1), (1, 2)])
def test_on_a_mesh_tokens_are_those_of_one_device(sharing, data, tensor):
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    mesh, work = jax.sharding.Mesh(devices, ("data", "tensor")), requests(2, 8, 1)
    one = engine(mesh=mesh)
    assert served(one, work) == served(engine(cascade_attention=False), work)
    assert one.stats.shared_prefix_dispatches


def test_data_ranks_share_where_each_does(sharing):
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64)
    rule = shared_prefix.SharedPrefixRule((spec,), 0, 16, 132)
    assert rule.pays([4, 4], [64, 64]) and rule.pays([4, 0], [64, 0]) and not rule.pays([4, 4], [64, 0])
    assert not rule.pays([0], [0])


def test_rows_share_the_first_blocks_that_all_have_and_have_computed():
    rule = shared_prefix.SharedPrefixRule((AttentionSpec(num_heads=2, head_dim=8),), 0, 4, 132)

    def shared(tables, starts) -> int:
        seqs = [Sequence(str(i), (1,), SamplingParams(), 0, tables=[array("i", x)]) for i, x in enumerate(tables)]
        return rule.shared([Row(str(i), start, 1, 1) for i, start in enumerate(starts)], seqs)

    assert shared([[1, 2, 3]], [11]) == 8 and shared([[1, 2, 3], [1, 2]], [11, 7]) == 4
    assert shared([[1, 2, 3], [1, 2, 4], [1, 5, 3]], [11, 11, 11]) == 4
    assert shared([[1, 2, 3, 4], [1, 2, 3, 5]], [12, 13]) == 12
    assert shared([[1, 9], [2, 9]], [7, 7]) == 0 and shared([], []) == 0
