"""Backends list what they support: each refuses a feature, dtype or layout that is new, and names it.

A copy of the sources gains one feature, one attention type, one dtype of each kind, one layout, one quantisation and
one platform. A backend that lists everything but some features, or that takes an empty list for 'any', would
accept them.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

import jattn
from tests.rooms.tree import ROOT

NEW = {  # file -> (text, the text with the addition)
    "jattn/types.py": [
        ('"fused output quantization"\n', '"fused output quantization"\n    NEW = "new need"\n'),
        ('"encoder_decoder"', '"encoder_decoder"\n    NEW = "new_type"'),
    ],
    "jattn/device.py": [('PLATFORMS = ("cpu", ', 'PLATFORMS = ("npu", "cpu", ')],
    "jattn/cache/layout.py": [
        ('LAYOUTS = ("auto", ', 'LAYOUTS = ("new_order", "auto", '),
        ('QUANT_MODES = ("none", ', 'QUANT_MODES = ("none", "new_quant", '),
    ],
    "pallas_kernels/algebra/quant.py": [
        (
            '        CacheDtype("float16"),\n',
            '        CacheDtype("float16"),\n        CacheDtype("float64"),\n'
            '        CacheDtype("float8_e4m3b11fnuz", largest=30.0),\n',
        ),
    ],
}
ASKED = {  # option -> the name that a reason must contain
    "feature": "new need",
    "feature by keyword": "new need",
    "attention type": "new_type",
    "attention type of a spec": "new_type",
    "query dtype": "float64",
    "8-bit query dtype": "float8_e4m3b11fnuz",
    "cache dtype": "float64",
    "cache dtype of a spec": "float64",
    "8-bit cache dtype of a spec": "float8_e4m3b11fnuz",
    "layout": "new_order",
    "quantisation": "new_quant",
    "platform": "npu",
}
QUESTIONS = """
import dataclasses, json
import jattn
from jattn.backends import Feature, registry
from jattn.device import Chip

HOPPER = Chip("gpu", "sm_90")
CHIPS = {"pallas_gpu": HOPPER, "pallas_gpu_invariant": HOPPER, "mla_pallas_gpu": HOPPER} | {
    "pallas_tpu": Chip("tpu"), "pallas_tpu_invariant": Chip("tpu"), "mla_pallas_tpu": Chip("tpu")
}
plain = jattn.AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128)
latent = jattn.MLASpec(num_heads=8, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
pages = jattn.KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=128)

def answers(name):
    backend, chip = registry.load(name), CHIPS.get(name, Chip("cpu"))
    mla = backend.is_mla()
    spec, cache = (latent, jattn.mla_cache_spec(latent, 8, block_size=16)) if mla else (plain, pages)
    dim = dict(head_size=128, use_mla=mla)
    over = lambda **changes: backend.reasons(spec, dataclasses.replace(cache, **changes), chip)
    flag = backend.validate_configuration
    yield "plain", backend.reasons(spec, cache, chip)
    yield "feature", backend.reasons(spec, cache, chip, (Feature.NEW,))
    yield "feature by keyword", flag(**dim, use_new=True)
    yield "attention type", flag(**dim, attn_type="new_type")
    if not mla:  # latent attention is a decoder's
        yield "attention type of a spec", backend.reasons(dataclasses.replace(spec, attn_type="new_type"), cache, chip)
    yield "query dtype", flag(**dim, dtype="float64")
    yield "8-bit query dtype", flag(**dim, dtype="float8_e4m3b11fnuz")
    yield "cache dtype", flag(**dim, kv_cache_dtype="float64")
    yield "cache dtype of a spec", over(dtype="float64")
    yield "8-bit cache dtype of a spec", over(dtype="float8_e4m3b11fnuz", quant="per_tensor")
    yield "layout", over(layout="new_order")
    yield "quantisation", over(dtype="int8", quant="new_quant")
    yield "platform", backend.reasons(spec, cache, Chip("npu"))

print(json.dumps({name: dict(answers(name)) for name in jattn.list_backends()}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Backend -> question -> reasons, in the copy."""
    copy = tmp_path_factory.mktemp("later")
    for package in ("jattn", "pallas_kernels"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name, changes in NEW.items():
        text = (copy / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{name}: {old!r} must stand there once"
            text = text.replace(old, new)
        (copy / name).write_text(text)
    env = os.environ | {"JATTN_NATIVE": "0", "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS], cwd=copy, env=env, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", jattn.list_backends())
def test_what_is_new_is_refused_by_name(answers, backend):
    """The plain layer is not refused, so the reasons below are those against the additions."""
    mine = answers[backend]
    mla = jattn.backends.registry.load(backend).is_mla()
    assert set(mine) == {"plain", *ASKED} - ({"attention type of a spec"} if mla else set())
    assert not [why for why in mine["plain"] if "native library" not in why], "a layer that it should take"
    silent = [what for what, word in ASKED.items() if what in mine and not any(word in why for why in mine[what])]
    assert not silent, {what: mine[what] for what in silent}
