"""Whole programs on disk: what their key depends on, what has none, and what becomes of one that fails."""

import contextlib
import dataclasses
import os
import pickle
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import pallas_kernels
from jattn import compile_cache, device, models
from jattn.backends import registry
from jattn.device import Chip
from jattn.engine import Engine, SamplingParams, kept_programs, program_key, programs, warming
from jattn.engine.program_key import NoKey, key_of
from tests.engine.test_warming import CONFIG, engine


@pytest.fixture
def unread():
    """The process is described anew in this test, and again after it."""
    caches = program_key._machine, program_key.sources, program_key._setting_names
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Programs are kept on disk, in this folder."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    show = warnings.showwarning
    monkeypatch.setenv("JATTN_CACHE_DIR", str(folder))
    monkeypatch.delenv("JATTN_COMPILE_CACHE", raising=False)
    monkeypatch.setattr(kept_programs, "_broken", {})
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    assert compile_cache.enable() is not None
    yield folder
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
    warnings.showwarning = show
    compilation_cache.reset_cache()


def question(config=CONFIG, shape=0, **options):
    """The model and the arguments of a dispatch."""
    runner = engine(config).runner
    model = dataclasses.replace(runner.model, **options)
    batch = warming._padding(runner.model, runner.shapes, runner.shapes.all()[shape])
    return model, (runner.params, runner._caches, runner._row_state, batch)


def test_equal_engines_have_one_key_and_every_difference_another(monkeypatch, unread):
    model, args = question()
    params, caches, before, batch = args
    keys = [key_of(model, args, {})]
    assert key_of(*question(), {}) == keys[0]
    keys.append(key_of(model, args, {"xla_some_option": 1}))
    keys.append(key_of(*question(dataclasses.replace(CONFIG, eos_token_ids=(1,))), {}))
    keys.append(key_of(*question(shape=1), {}))
    keys.append(key_of(*question(backend="sdpa"), {}))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    keys.append(key_of(model, (half, caches, before, batch), {}))
    placed = jax.device_put(params, jax.devices()[0])  # committed
    keys.append(key_of(model, (placed, caches, before, batch), {}))
    if len(jax.devices()) > 1:
        keys.append(key_of(model, (jax.device_put(params, jax.devices()[1]), caches, before, batch), {}))
    precision = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    keys.append(key_of(model, args, {}))
    jax.config.update("jax_default_matmul_precision", precision)
    with monkeypatch.context() as patch:
        patch.setattr(program_key, "FORMAT", 0)
        keys.append(key_of(model, args, {}))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false")
        program_key._machine.cache_clear()
        keys.append(key_of(model, args, {}))
    for keeps in (True, False):  # they decide which kernel a GPU's program has
        with monkeypatch.context() as patch:
            patch.setattr(device, "detect", lambda: Chip("gpu", "sm_90"))
            patch.setattr(device, "keeps_registers", lambda keeps=keeps: keeps)
            program_key._machine.cache_clear()
            keys.append(key_of(model, args, {}))
    program_key._machine.cache_clear()
    assert len(set(keys)) == len(keys) and key_of(model, args, {}) == keys[0]


def test_the_source_code_is_in_the_key_but_not_the_rooms_above_the_engine(tmp_path, monkeypatch, unread):
    copy = tmp_path / "pallas_kernels"
    shutil.copytree(
        os.path.dirname(pallas_kernels.__file__), copy, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    monkeypatch.setattr(pallas_kernels, "__file__", str(copy / "__init__.py"))
    hashes = []
    old = program_key._IMPORTED_AT - 9
    for name, text in ((None, ""), ("folders.py", "# more\n"), ("serve/new.py", "x = 1\n"), ("gpu/new.py", "x = 1\n")):
        if name:
            (copy / name).parent.mkdir(exist_ok=True)
            with open(copy / name, "a") as file:
                file.write(text)
            os.utime(copy / name, (old, old))
        program_key.sources.cache_clear()
        hashes.append(program_key.sources())
    assert hashes[1] == hashes[2] and len(set(hashes)) == 3
    os.utime(copy / "gpu/new.py", (old + 99, old + 99))
    program_key.sources.cache_clear()
    with pytest.raises(NoKey, match="changed after this process started"):
        program_key.sources()


def test_what_cannot_be_described_has_no_key(unread):
    model, args = question()
    with pytest.raises(NoKey, match="is not code of"):
        key_of(dataclasses.replace(model, forward=lambda *args, **options: None), args, {})
    with pytest.raises(NoKey, match="object is not described"):
        key_of(dataclasses.replace(model, config=object()), args, {})
    with pytest.raises(NoKey, match="Python objects"):
        program_key.plain(np.array([{}]))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(args[0], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with pytest.raises(NoKey, match="several devices"):
        key_of(model, (spread, *args[1:]), {})
    registry.register_backend("ours", "somewhere.else:Backend")
    try:
        with pytest.raises(NoKey, match="a backend that is not jattn's"):
            key_of(model, args, {})
    finally:
        registry.unregister_backend("ours")


def test_equal_values_have_equal_descriptions_and_others_differ():
    values = [
        1, 1.0, True, "1", None, (1,), (1, 2), {"a": 1}, {"a": 2}, {1}, b"1", np.int32(1), np.float32(1), np.array([1]),
        np.array([1], np.int8), np.dtype("int8"), jnp.bfloat16, int, jax.tree.structure((1, 2)),
        jax.tree.structure([1, 2]), jax.tree.structure({"a": 1}), jax.tree.structure({"b": 1}), models.forward,
        CONFIG, dataclasses.replace(CONFIG, vocab_size=65),
    ]  # fmt: skip
    described = [repr(program_key.plain(value)) for value in values]
    assert len(set(described)) == len(values) and " at 0x" not in "".join(described)
    big = np.zeros(5000)
    other = big.copy()
    other[2500] = 1  # numpy's repr of both is the same
    assert program_key.plain(big) != program_key.plain(other)


def test_a_program_of_jaxs_cache_is_not_kept_and_a_broken_one_is_compiled_again(kept, caplog):
    f, x = jax.jit(lambda x: jnp.sin(x) + 1), jnp.arange(4.0)
    trees = jax.tree.structure(((x,), {})), jax.tree.structure(0)
    expected = f(x)
    file = compile_cache.own_folder() / kept_programs.BELOW / f"key{kept_programs.SUFFIX}"

    def load():
        return kept_programs.load("key", *trees, jax.devices()[0])

    def compile():
        return kept_programs.compiled(jax.jit(lambda x: jnp.sin(x) + 1).lower(x), "key", trees[1])

    assert load() is None
    np.testing.assert_array_equal(compile()(x), expected)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    np.testing.assert_array_equal(load()(x), expected)
    file.unlink()
    np.testing.assert_array_equal(compile()(x), expected)
    assert not file.exists(), "JAX's cache had it"
    file.write_bytes(b"no program")
    assert load() is None and not file.exists()
    compile()
    assert file.exists(), "it was compiled, although JAX's cache has it under its first key"
    content = file.read_bytes()
    for damage in ("cut off", "changed", "another pickle", "writable by others", "linked"):
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        file.chmod(0o600)
        match damage:
            case "cut off":
                file.write_bytes(content[:-9])
            case "changed":
                file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            case "another pickle":
                other = pickle.dumps("no program")
                file.write_bytes(kept_programs._digest("key", other) + other)
            case "writable by others":
                file.chmod(0o666)
            case "linked":
                file.rename(kept / "elsewhere")
                file.symlink_to(kept / "elsewhere")
        caplog.clear()
        assert load() is None and not file.is_symlink() and not file.exists(), damage
        assert caplog.text.count("cannot be loaded") == (damage == "another pickle"), damage
    compile()
    shutil.copy(file, file.with_name(f"other{kept_programs.SUFFIX}"))
    assert kept_programs.load("other", *trees, jax.devices()[0]) is None, "it has another one's name"
    wrong = jax.tree.structure((0, 0))
    kept_programs.remove("key")
    kept_programs.compiled(f.lower(x), "key", wrong)
    assert not file.exists(), "its results are not those that a later process would expect"
    compile_cache.trim(kept, 1)
    assert not list(kept.rglob(f"*{kept_programs.SUFFIX}")), "the limit holds for them too"


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_program_from_disk_that_fails_is_removed_and_compiled(monkeypatch, warm, max_tokens):
    """After a warm-up nothing is lost; without, the requests of that one step are. New caches are tried by the smallest
    program, which may be broken too."""
    removed, compiled = [], []

    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: Function wrapped_convert not found")

    def compile(lowered, key, tree):
        compiled.append(key)
        return lowered.compile()

    monkeypatch.setattr(kept_programs, "are_kept", lambda: True)
    monkeypatch.setattr(kept_programs, "load", lambda key, *args: None if key in removed else broken)
    monkeypatch.setattr(kept_programs, "remove", removed.append)
    monkeypatch.setattr(kept_programs, "compiled", compile)
    served, greedy = engine(), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if warm:
        assert served.warmup() == len(served.shapes.all()) == len(compiled) == len(removed)
    else:
        (output,) = served.generate([[5, 6, 7]], greedy)
        assert output.error and removed
    (output,) = served.generate([[5, 6, 7]], greedy)
    assert not output.error and sorted(set(compiled)) == sorted(compiled)
    monkeypatch.undo()
    (expected,) = engine().generate([[5, 6, 7]], greedy)
    assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("error", [programs.BrokenProgramError("from disk"), RuntimeError("no memory")], ids=repr)
def test_no_prefix_is_found_in_caches_that_a_later_warm_up_made(monkeypatch, error):
    served, greedy, real = engine(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), warming._run
    prompt = list(range(5, 25))
    (expected,) = served.generate([prompt], greedy)
    failures = [error]

    def failing(*args):
        results = real(*args)
        if failures:
            raise failures.pop()
        return results

    monkeypatch.setattr(warming, "_run", failing)
    with contextlib.suppress(RuntimeError):
        served.warmup()
    served.warmup()
    (output,) = served.generate([prompt], greedy)
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 0


def test_an_engine_with_a_models_forward_of_the_users_keeps_nothing(kept):
    params = models.init_params(CONFIG, 0, "float32")
    mine = lambda *args, **options: models.forward(*args, **options)
    sizes = dict(num_blocks=20, block_size=4, max_num_seqs=1, max_num_batched_tokens=16)
    served = Engine(CONFIG, params, forward=mine, **sizes)
    served.warmup()
    assert not list(kept.rglob(f"*{kept_programs.SUFFIX}"))
    assert served.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].error is None
