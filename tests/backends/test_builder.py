"""AttentionMetadataBuilder: its plans; and builders and backends that are derived from others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import backends
from jattn.backends import AttentionCGSupport
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from tests.backends.toy import CACHE, CPU, SPEC, ToyBackend, ToyBuilder, ToyImpl, ToyMetadata, derived

BUILDER = ToyBuilder(SPEC, CACHE, CPU)


def batch(query_lens=(3, 1), seq_lens=(3, 5), **options):
    table = np.arange(2 * len(query_lens)).reshape(-1, 2)
    return CommonAttentionMetadata.from_lengths(list(query_lens), list(seq_lens), table, 4, **options)


def test_a_plan_takes_another_groups_pages():
    m = BUILDER.build(0, batch())
    other = BUILDER.update_block_table(m, m.block_table + 4, m.slot_mapping + 16)
    assert (other.block_table == m.block_table + 4).all() and (other.position == m.position).all()


def test_update_block_table_is_refused_where_it_was_not_declared():
    class Fixed(ToyBuilder):
        supports_update_block_table = False

    m = BUILDER.build(0, batch())
    with pytest.raises(UnsupportedError, match="Fixed cannot exchange the block table"):
        Fixed(SPEC, CACHE, CPU).update_block_table(m, m.block_table, m.slot_mapping)


def test_the_capture_plan_is_shapes_only_and_fits_the_real_one():
    meta = batch()
    abstract = BUILDER.build_for_cudagraph_capture(meta)
    assert isinstance(abstract, ToyMetadata)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert backends.fits(abstract, jax.jit(BUILDER.build, static_argnums=0)(0, meta))
    from_shapes = BUILDER.build_for_cudagraph_capture(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, meta)))
    assert backends.fits(abstract, from_shapes)


def test_fits_is_the_trace_key():
    meta = batch(num_tokens=8, num_reqs=4)
    assert backends.fits(meta, batch((2, 1), (4, 6), num_tokens=8, num_reqs=4))
    assert not backends.fits(meta, batch(num_tokens=16, num_reqs=4))
    assert not backends.fits(meta, batch((1, 1), (1, 1), num_tokens=8, num_reqs=4))  # max_query_len is static
    assert not backends.fits(meta, batch(num_tokens=8, num_reqs=4, causal=[True, False]))


def test_drafting_builds_quickly_inside_a_scan():
    class Recording(ToyBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            assert (common_prefix_len, fast_build) == (0, True)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    builder, meta = Recording(SPEC, CACHE, CPU), jax.tree.map(jnp.asarray, batch((1, 1), (3, 5)))

    def step(meta, draft_index):
        m = builder.build_for_drafting(meta, draft_index)
        return meta.advanced(4), m.position

    _, positions = jax.lax.scan(step, meta, jnp.arange(2))
    np.testing.assert_array_equal(positions, [[2, 4], [3, 5]])


@pytest.mark.parametrize(
    ("support", "single", "uniform", "mixed"),
    [
        (AttentionCGSupport.NEVER, False, False, False),
        (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, True, False, False),
        (AttentionCGSupport.UNIFORM_BATCH, True, True, False),
        (AttentionCGSupport.ALWAYS, True, True, True),
    ],
)
def test_can_run_in_cudagraph(support, single, uniform, mixed):
    class Builder(ToyBuilder):
        cudagraph_support = support

    builder = Builder(SPEC, CACHE, CPU)
    answers = [builder.can_run_in_cudagraph(batch(lens, (7, 7))) for lens in ((1, 1), (3, 3), (1, 3))]
    assert answers == [single, uniform, mixed]
    assert Builder.get_cudagraph_support(SPEC, CACHE) is support


def test_the_order_of_requests_is_left_alone_unless_a_threshold_asks():
    perm, changed = BUILDER.reorder_batch(batch((3, 1), (3, 5)))
    assert list(perm) == [0, 1] and changed is False

    class DecodesFirst(ToyBuilder):
        reorder_batch_threshold = 1

    perm, changed = DecodesFirst(SPEC, CACHE, CPU).reorder_batch(batch((3, 1), (3, 5)))
    assert list(perm) == [1, 0] and changed


def test_decode_threshold_is_raised_by_drafts_and_clamped_last():
    class Spec(ToyBuilder):
        reorder_batch_threshold = 1
        supports_spec_as_decode = True

    class Ragged(Spec):
        supports_dcp_with_varlen = True

    spec, ragged = Spec(SPEC, CACHE, CPU), Ragged(SPEC, CACHE, CPU)
    assert BUILDER.decode_threshold(3) is None
    assert [spec.decode_threshold(), spec.decode_threshold(3), spec.decode_threshold(3, dcp_world_size=2)] == [1, 4, 1]
    assert ragged.decode_threshold(3, dcp_world_size=2) == 4


def test_cascade_is_off_unless_declared_and_then_the_heuristic_decides():
    asked = (4096, np.ones(64, np.int32), 32, 8, False, False, False, 132)
    assert BUILDER.use_cascade_attention(*asked) is False

    class Cascading(ToyBuilder):
        supports_cascade = True

    builder = Cascading(SPEC, CACHE, CPU)
    assert builder.use_cascade_attention(*asked) is True
    assert builder.use_cascade_attention(128, *asked[1:]) is False
    with pytest.raises(UnsupportedError, match="ToyBuilder has no cascade"):
        BUILDER.build_cascade((batch(),))


def test_subclass_attention_backend_changes_the_builder_only():
    class Quick(ToyBuilder):
        pass

    backend = backends.subclass_attention_backend("Quick", ToyBackend, Quick)
    assert backend.__name__ == "QuickToyBackend" and issubclass(backend, ToyBackend)
    assert backend.get_builder_cls() is Quick and ToyBackend.get_builder_cls() is ToyBuilder
    assert backend.get_impl_cls() is ToyImpl


def test_overrides_must_name_something():
    with pytest.raises(ValueError, match="ToyBackend has no supported_dtype to override"):
        derived(supported_dtype=())


def test_subclass_attention_metadata_builder_transforms_the_batch_first():
    builder_cls = backends.subclass_attention_metadata_builder(
        "Blind", ToyBuilder, lambda meta: meta.replace(slot_mapping=jnp.full_like(meta.slot_mapping, -1))
    )
    builder = builder_cls(SPEC, CACHE, CPU)
    assert builder_cls.__name__ == "BlindToyBuilder" and isinstance(builder, ToyBuilder)
    assert (builder.build(0, batch()).slot_mapping == -1).all()
    assert hash(builder) == hash(builder_cls(SPEC, CACHE, CPU)) and builder != BUILDER
