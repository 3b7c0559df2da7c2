"""The registry and the choice of a backend: names, order, and all reasons of each backend."""

import dataclasses
import sys

import pytest

from jattn import backends
from jattn.backends import Feature, registry
from jattn.cache import KVCacheSpec
from jattn.errors import UnsupportedError
from jattn.spec import AttentionSpec
from tests.backends.toy import ToyBackend

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE = KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
PREFERENCE = (
    "pallas_gpu", "pallas_gpu_invariant", "pallas_tpu", "pallas_tpu_invariant", "cpu_native", "sdpa", "split",
    "pallas_cpu",
    "mla_cpu_native", "mla_pallas_gpu", "mla_pallas_tpu", "mla_sdpa",
)  # fmt: skip


@pytest.fixture
def registered():
    """Register backends for one test."""
    names = []

    def register(name, backend=ToyBackend, **options):
        backends.register_backend(name, backend, **options)
        names.append(name)

    yield register
    for name in names:
        backends.unregister_backend(name)


# Registry


def test_names_come_in_order_of_preference():
    assert backends.list_backends() == tuple(name for name in PREFERENCE if name in backends.list_backends())
    assert "sdpa" in backends.list_backends()


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(
        ValueError, match=r"backend 'spda' is not known \(did you mean 'sdpa'\?\); use 'auto' or one of"
    ):
        backends.resolve(SPEC, CACHE, "spda", "cpu")


def test_a_backend_of_ones_own_comes_last_or_before_another(registered):
    known = backends.list_backends()
    registered("mine")
    assert backends.list_backends() == (*known, "mine")
    registered("first", before=known[0])
    assert backends.list_backends() == ("first", *known, "mine")


def test_a_registered_backend_can_be_named_and_preferred(registered):
    before = backends.resolve(SPEC, CACHE, platform="cpu")
    registered("mine")
    assert backends.resolve(SPEC, CACHE, "mine", "cpu") is ToyBackend
    assert backends.resolve(SPEC, CACHE, platform="cpu") is before
    registered("ours", before=backends.list_backends()[0])
    assert backends.resolve(SPEC, CACHE, platform="cpu") is ToyBackend  # the cached choice is not used


def test_register_backend_decorates():
    @backends.register_backend("decorated")
    class Decorated(ToyBackend):
        pass

    try:
        assert backends.resolve(SPEC, CACHE, "decorated", "cpu") is Decorated
    finally:
        backends.unregister_backend("decorated")


def test_a_backend_by_path_is_imported_when_first_asked_for(registered, tmp_path, monkeypatch):
    (tmp_path / "late_backend.py").write_text("from tests.backends.toy import ToyBackend as Late\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered("late", "late_backend:Late")
    assert "late_backend" not in sys.modules
    assert backends.resolve(SPEC, CACHE, "late", "cpu") is ToyBackend
    del sys.modules["late_backend"]


@pytest.mark.parametrize(
    ("name", "backend", "options", "error", "sentence"),
    [
        ("sdpa", ToyBackend, {}, ValueError, "'sdpa' is already registered; call unregister_backend first"),
        ("auto", ToyBackend, {}, ValueError, "'auto' must be a non-empty string other than 'auto'"),
        ("", ToyBackend, {}, ValueError, "must be a non-empty string"),
        ("x", ToyBackend, dict(before="nobody"), ValueError, "before='nobody' is not known; use one of"),
        ("x", "no_colon", {}, ValueError, "'no_colon' must read 'package.module:Class'"),
        ("x", int, {}, TypeError, "must be a subclass of jattn.backends.AttentionBackend"),
        (
            "x",
            backends.AttentionBackend,
            {},
            TypeError,
            "lacks name, impl_cls, builder_cls, metadata_cls",
        ),
    ],
)
def test_what_cannot_be_registered(name, backend, options, error, sentence):
    known = backends.list_backends()
    with pytest.raises(error, match=sentence):
        backends.register_backend(name, backend, **options)
    assert backends.list_backends() == known


def test_an_impl_without_forward_cannot_be_registered():
    class Half(ToyBackend):
        @classmethod
        def get_impl_cls(cls):
            return backends.AttentionImpl

    with pytest.raises(TypeError, match="AttentionImpl must be an AttentionImpl with forward"):
        backends.register_backend("half", Half)


def test_a_path_that_leads_nowhere_is_an_error_not_a_missing_backend(registered):
    registered("gone", "jattn.backends.gone:Gone")
    with pytest.raises(ImportError, match=r"backend .gone. was registered as .jattn\.backends\.gone:Gone."):
        backends.explain(SPEC, CACHE, "cpu")


# Choosing


def test_auto_takes_the_first_that_can():
    reports = backends.explain(SPEC, CACHE, "cpu")
    first = next(report.name for report in reports if report.supported)
    assert backends.resolve(SPEC, CACHE, platform="cpu").get_name() == first
    assert [report.name for report in reports] == list(backends.list_backends())
    assert all(report.supported == (not report.reasons) for report in reports)


def test_a_named_backend_that_cannot_lists_everybodys_reasons_and_who_could(registered):
    registered("toy")
    spec = dataclasses.replace(SPEC, has_sinks=True, logits_soft_cap=2.0)
    with pytest.raises(
        UnsupportedError, match=r"backend 'toy' does not support this layer \(supported by .*sdpa.*\)"
    ) as refused:
        backends.resolve(spec, CACHE, "toy", "cpu")
    assert isinstance(refused.value, NotImplementedError)
    assert refused.value.reasons["toy"] == (
        "attention sinks not supported: has_sinks=True",
        "logits soft cap not supported: logits_soft_cap=2.0",
    )
    assert all(reason in str(refused.value) for reason in refused.value.reasons["toy"])
    first = str(refused.value).split("\n")[0]
    assert "has_sinks=True" in first and "has_alibi" not in first, "what differs from the defaults, and no more"


def test_what_nobody_can_lists_every_backend():
    with pytest.raises(UnsupportedError, match="no backend supports this layer") as refused:
        backends.resolve(SPEC, CACHE, platform="cpu", needs=(Feature.KV_CONNECTOR,))
    assert tuple(refused.value.reasons) == backends.list_backends()
    with pytest.raises(UnsupportedError, match=r"this layer: AttentionSpec\(.*\) without a cache"):
        backends.resolve(SPEC, None, platform="cpu", needs=(Feature.KV_CONNECTOR,))
    for reasons in refused.value.reasons.values():  # split has the reasons of each half
        assert any("KV connector not supported: the caller asks for it" in reason for reason in reasons)


def test_needs_change_the_choice(registered):
    registered("toy", before=backends.list_backends()[0])
    assert backends.resolve(SPEC, CACHE, platform="cpu") is ToyBackend
    assert backends.resolve(SPEC, CACHE, platform="cpu", needs=(Feature.NON_CAUSAL,)) is not ToyBackend


def test_the_platform_is_part_of_the_question(registered):
    class OnGpu(ToyBackend):
        platforms = ("gpu",)

    registered("on_gpu", OnGpu, before=backends.list_backends()[0])
    assert backends.resolve(SPEC, CACHE, platform="gpu") is OnGpu
    assert backends.resolve(SPEC, CACHE, platform="cpu") is not OnGpu
    with pytest.raises(ValueError, match="platform='npu' is not known; use one of cpu, gpu, tpu"):
        backends.explain(SPEC, CACHE, "npu")


def test_the_answer_is_cached_by_value():
    again = dataclasses.replace(SPEC), dataclasses.replace(CACHE)
    assert backends.explain(SPEC, CACHE, "cpu") is backends.explain(*again, "cpu")


# Explaining


def test_explain_prints_a_table(registered):
    registered("toy")
    spec = dataclasses.replace(SPEC, has_sinks=True, has_alibi=True)
    rows = str(backends.explain(spec, CACHE, "cpu")).splitlines()
    assert rows[0].split() == ["backend", "runs", "how,", "or", "why", "not"]
    assert any(row.split() == ["sdpa", "yes"] for row in rows)
    assert rows[-2].split(maxsplit=2) == ["toy", "no", "attention sinks not supported: has_sinks=True"]
    assert rows[-1].strip() == "ALiBi not supported: has_alibi=True"
    assert rows[-1].index("ALiBi") == rows[0].index("how")
    assert all(len(row) <= 120 for row in rows)
    assert repr(backends.explain(spec, CACHE, "cpu")) == "\n".join(rows)


def test_explain_is_a_table_in_a_notebook_too(registered):
    class Markup(ToyBackend):
        layer_reasons = classmethod(lambda cls, spec, cache_spec, chip: ("needs <16> & more",))

    registered("markup", Markup)
    table = backends.explain(SPEC, CACHE, "cpu")._repr_html_()
    assert table.startswith("<table>") and table.count("<tr>") == len(backends.list_backends()) + 1
    assert "needs &lt;16&gt; &amp; more" in table


def test_registry_entries_are_a_value():
    assert registry.entries() == registry.entries() and hash(registry.entries())
