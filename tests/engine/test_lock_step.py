"""LockStepEngine and Processes without other processes: a store in memory, two engines in this one."""

import json
import socket
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jattn import UnsupportedError, models
from jattn.engine import Engine, LockStepEngine, SamplingParams, construction, pretrained, program_key
from jattn.engine import processes as rules
from jattn.engine.processes import Processes
from jattn.errors import EngineDeadError
from jattn.text import ByteTokenizer
from tests.engine.test_mesh import LLAMA, OPTIONS, PROMPT, VOCAB, mesh, of_one_device, params_of, tokens_of_a_trace
from tests.models import tiny


class Store:
    """The methods of the runtime's client that Processes calls, on one dict for all processes."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.most = 0  # keys at once
        self._changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, prefix):
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_delete(self, prefix):
        with self._changed:
            assert prefix.endswith("/"), "a key that ends so is a folder"
            self.values = {key: value for key, value in self.values.items() if not key.startswith(prefix)}


@pytest.fixture
def processes(monkeypatch):
    """Makes Processes on one store; a list of what their on_end was told."""
    monkeypatch.setattr(rules, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(rules, "END_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    store, told, made = Store(), [], []

    def make(id, seconds=60.0, store=store):
        made.append(Processes(store, 2, id, seconds, lambda group, why: told.append((group.id, why))))
        return made[-1]

    yield make, store, told
    for each in made:
        each.fail("the test is over")
        each._watcher.join()


def engine(group, **options):
    return LockStepEngine(LLAMA, params_of(LLAMA), **dict(processes=group, mesh=mesh(2)) | OPTIONS | options)


def test_a_follower_repeats_every_plan_and_token_of_the_leader(processes):
    make, _, told = processes
    both = leader, follower = engine(make(0), deterministic=True), engine(make(1), deterministic=True)
    plans = [[], []]
    for seen, each in zip(plans, both, strict=True):
        send = each._flights.send
        each._flights.send = lambda plan, *more, send=send, seen=seen: seen.append(plan) or send(plan, *more)
    assert leader.warmup() == 1
    assert tokens_of_a_trace(leader) == of_one_device(LLAMA)
    leader.processes.leave()
    follower.follow()
    follower.processes.leave()
    assert plans[0] == plans[1] and len(plans[0]) > 50
    assert leader._flights.digest == follower._flights.digest != 0
    assert not told and not follower.has_work


def test_read_commands_are_deleted(processes, monkeypatch):
    monkeypatch.setattr(rules, "GROUP", 4)
    make, store, _ = processes
    leader, follower = make(0), make(1)
    for number in range(100):
        leader.publish([["step", number]])
        if number % 3 == 2:  # the follower may be a few lists behind
            assert [follower.receive() for _ in range(3)] == [[["step", number - 2 + i]] for i in range(3)]
    assert store.most < 20


def test_a_warm_up_that_fails_because_another_process_has_ended_is_one_sentence(processes, monkeypatch):
    make, _, _ = processes
    leader, follower = engine(make(0), deterministic=True), engine(make(1), deterministic=True)

    def lost(progress=None):
        raise JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer\nmore")

    for id, each in enumerate((leader, follower)):
        monkeypatch.setattr(each.runner, "warm", lost)
        with pytest.raises(EngineDeadError, match=rf"warm-up failed in process {id}, perhaps .*closed by peer\)$"):
            leader.warmup() if each is leader else each.follow()


def test_another_seed_in_a_follower_stops_it_with_a_sentence(processes):
    make, _, _ = processes
    leader, follower = engine(make(0), deterministic=True), engine(make(1), deterministic=True)
    follower._seeds = np.random.default_rng(7)
    leader.add_request(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    list(leader.drain())
    with pytest.raises(EngineDeadError, match="process 1 has planned or sampled other tokens than process 0"):
        follower.follow()


def test_processes_that_were_started_differently_do_not_start(processes):
    make, _, _ = processes
    engine(make(0), deterministic=True)
    with pytest.raises(ValueError, match="here max_num_seqs=2 and there 3"):
        engine(make(1), deterministic=True, max_num_seqs=2)


def test_objects_of_one_type_are_one_start(processes):
    """Their text has an address, which is another one in each process."""
    make, _, _ = processes
    forward = [lambda *args, **options: models.forward(*args, **options) for _ in range(2)]
    for id in range(2):
        engine(make(id), tokenizer=ByteTokenizer(0), forward=forward[id], seed=np.int64(3))
    with pytest.raises(ValueError, match="started differently: here forward=None and there function$"):
        engine(make(1), tokenizer=ByteTokenizer(0), seed=3)


def test_an_option_that_only_process_0_has_is_named(processes):
    make, _, _ = processes
    engine(make(0), cascade_attention=False)
    with pytest.raises(ValueError, match="started differently: here cascade_attention=True and there False$"):
        engine(make(1))


def test_folders_with_other_weights_do_not_start(processes):
    make, _, _ = processes
    engine(make(0), deterministic=True, fingerprint=7)
    with pytest.raises(ValueError, match="started differently: the weights are not those of process 0's folder$"):
        engine(make(1), deterministic=True, fingerprint=8)


def folder_of(path, unk_token="", **changes):
    path.mkdir()
    tiny.write(path, tiny.CONFIG | changes)
    (path / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="ByT5Tokenizer", unk_token=unk_token)))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(unk_token="?"), "the files of the tokenizer are not"),
        (dict(eos_token_id=3), "config.json or generation_config.json are not"),
    ],
    ids=["tokenizer", "config"],
)
def test_another_file_of_the_folder_is_named_before_a_weight_is_loaded(
    processes, tmp_path, monkeypatch, changes, words
):
    """With another tokenizer a stop string would end a request at another token."""
    make, _, _ = processes
    options = dict(mesh=mesh(2), num_blocks=9, block_size=4)
    LockStepEngine.from_pretrained(folder_of(tmp_path / "0"), processes=make(0), **options)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    other = folder_of(tmp_path / "1", **changes)
    with pytest.raises(ValueError, match=f"started differently: {words} those of process 0's folder$"):
        LockStepEngine.from_pretrained(other, processes=make(1), **options)


def test_settings_of_jax_that_change_the_programs_are_compared(processes):
    """JAX aborts processes whose arrays have other sizes."""
    make, _, _ = processes
    engine(make(0), deterministic=True)
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(ValueError, match="here jax_default_matmul_precision=highest and there None"),
    ):
        engine(make(1), deterministic=True)


def test_other_source_code_is_named(processes, monkeypatch):
    """Processes whose schedulers plan other steps hung for ever, alive: each waited for the other's collective."""
    make, _, _ = processes
    engine(make(0), deterministic=True)
    own = program_key.sources()
    monkeypatch.setattr(program_key, "sources", lambda: "0" * 64)
    with pytest.raises(ValueError, match=f"started differently: here jattn_source=000000000000 and there {own[:12]}$"):
        engine(make(1), deterministic=True)

    def changed():
        raise program_key.NoKey("a.py changed after this process started")

    monkeypatch.setattr(program_key, "sources", changed)
    with pytest.raises(ValueError, match="here jattn_source=a.py changed after this process started and there "):
        engine(make(1), deterministic=True)


def test_another_number_of_processes_is_named(processes):
    """Else a process would wait for the others that it expects, and end all after its time-out."""
    make, _, _ = processes
    engine(make(0), deterministic=True)
    other = make(1)
    other.count = 3
    with pytest.raises(ValueError, match="started differently: here num_processes=3 and there 2$"):
        engine(other, deterministic=True)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (dict(quantization="int8"), "here quantization='int8' and there None"),
        (dict(max_num_seqs=3), "here max_num_seqs=3 and there 32"),
        (dict(tensor_parallel=2), "here tensor_parallel=2 and there 1"),
        (dict(dtype="float16"), "here dtype='float16' and there None"),
    ],
)
def test_other_options_are_named_before_a_weight_is_loaded(processes, tmp_path, monkeypatch, option, told):
    """Weights that are quantised in one process only would end in a collective that the other never joins."""
    tiny.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    make, _, _ = processes
    LockStepEngine.from_pretrained(tmp_path, processes=make(0), mesh=mesh(2), num_blocks=9, block_size=4)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=f"process 1 and process 0 were started differently: {told}$"):
        LockStepEngine.from_pretrained(
            tmp_path, processes=make(1), mesh=mesh(2), num_blocks=9, block_size=4, seed=3, **option
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(dtype="auto"), {}),
        (dict(dtype=None), dict(dtype="auto")),
        (dict(dtype="bfloat16"), dict(dtype=jnp.bfloat16)),
        (dict(cache_dtype=jnp.float32, backend="auto"), dict(cache_dtype="float32", max_num_seqs=32)),
    ],
    ids=["not given", "None", "an object", "of the cache"],
)
def test_options_that_mean_the_same_are_one_start(processes, tmp_path, one, other):
    make, _, _ = processes
    folder, options = folder_of(tmp_path / "0"), dict(mesh=mesh(2), num_blocks=9, block_size=4)
    for id, own in enumerate((one, other)):
        LockStepEngine.from_pretrained(folder, processes=make(id), **options, **own)


@pytest.mark.parametrize("name", ["args", "options", "dtpye"])
def test_an_option_that_an_engine_does_not_have_is_named_before_a_weight_is_loaded(
    processes, tmp_path, monkeypatch, name
):
    """Also one that is called as the parameters of a signature that take whatever is left."""
    make, _, _ = processes
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(
        TypeError, match=f"LockStepEngine.from_pretrained has no argument {name}(; did you mean dtype[?])?$"
    ):
        LockStepEngine.from_pretrained(folder_of(tmp_path / "0"), processes=make(0), mesh=mesh(2), **{name: 1})


def test_a_subclass_that_hands_its_options_on_has_those_of_its_bases(processes, tmp_path):
    class Own(LockStepEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)

    make, _, _ = processes
    options = dict(mesh=mesh(2), num_blocks=9, block_size=4)
    assert Own.from_pretrained(folder_of(tmp_path / "0"), processes=make(0), **options).processes.leads


def test_a_subclass_that_hands_no_options_on_has_its_own_alone():
    class Own(Engine):
        def __init__(self, config, params, tokenizer, *, num_blocks=None, **of_folder: None):
            super().__init__(config, params, tokenizer, num_blocks=num_blocks, **of_folder)

    class Fixed(Own):
        def __init__(self, config, params, tokenizer, *, num_blocks=9, chat_template, mesh, expert_parallel):
            super().__init__(config, params, tokenizer, num_blocks=num_blocks, mesh=mesh)

    assert pretrained.unknown_names(Own, ["seed", "num_blocks", "of_folder"]) == ["of_folder"]
    assert pretrained.unknown_names(Fixed, ["seed", "num_blocks"]) == ["seed"]


def test_no_mesh_is_the_same_start_whether_given_or_not(processes, tmp_path):
    make, _, _ = processes
    folder = folder_of(tmp_path / "0")
    for id, own in enumerate((dict(mesh=None), {})):
        with pytest.raises(ValueError, match="^2 processes need a mesh"):
            LockStepEngine.from_pretrained(folder, processes=make(id), num_blocks=9, block_size=4, **own)


def test_a_folder_that_is_not_there_is_what_one_process_says_of_it(processes, tmp_path):
    make, _, _ = processes
    with pytest.raises(FileNotFoundError, match="absent is not a folder; pass one with config.json"):
        LockStepEngine.from_pretrained(tmp_path / "absent", processes=make(0))


def test_the_same_devices_in_another_layout_are_a_different_start(processes):
    make, _, _ = processes
    engine(make(0), deterministic=True, mesh=mesh(1, data=2))
    with pytest.raises(ValueError, match="started differently: here mesh={'data': 1, 'tensor': 2, "):
        engine(make(1), deterministic=True, mesh=mesh(2))


def test_a_failed_step_ends_the_engine_and_fails_no_request_by_itself(processes, monkeypatch):
    make, _, _ = processes
    leader = engine(make(0), deterministic=True)
    leader.add_request(PROMPT)
    monkeypatch.setattr(leader.runner, "send", lambda *_: 1 / 0)
    with pytest.raises(EngineDeadError, match="a step failed in process 0.*ZeroDivisionError"):
        leader.step()


def test_what_several_processes_cannot_do_is_refused(processes):
    make, _, _ = processes
    leader, follower = engine(make(0), deterministic=True), engine(make(1), deterministic=True)
    for call in (leader.sleep, leader.wake, lambda: leader.update_weights(leader.params)):
        with pytest.raises(UnsupportedError, match="several processes"):
            call()
    for call in (follower.step, follower.warmup, lambda: follower.add_request(PROMPT), lambda: follower.abort("0")):
        with pytest.raises(RuntimeError, match="process 0 leads"):
            call()
    with pytest.raises(RuntimeError, match="which leads"):
        leader.follow()
    with pytest.raises(ValueError, match="need a mesh"):
        engine(make(0), mesh=None)


def test_requests_are_checked_before_they_are_published(processes):
    make, store, _ = processes
    leader = engine(make(0), deterministic=True)
    leader.add_request(PROMPT, request_id="a")
    with pytest.raises(ValueError, match="'a' is still running"):
        leader.add_request(PROMPT, request_id="a")
    assert leader.abort("a") and not leader.abort("a") and not leader.abort("b") and leader.has_work
    leader.add_request([VOCAB], request_id="wrong")
    outputs = {output.id: output for output in leader.step()}
    assert outputs["wrong"].error and outputs["a"].outputs[0].finish_reason == "abort"
    published = [value for key, value in store.values.items() if key.startswith("jattn/commands/")]
    assert len(published) == 1 and '"a"' in published[0] and "wrong" not in published[0]


def test_what_is_refused_in_the_leader_is_not_published(processes):
    """The others would do it, and wait in their collectives for ever."""
    make, store, _ = processes

    class Stepping(ByteTokenizer):
        raised: list[Exception] = []

        def decode(self, token_ids):
            for call in (leader.step, leader.warmup) if leader._loop.requests else ():  # not while it is added
                try:
                    call()
                except RuntimeError as error:
                    self.raised.append(error)
            return super().decode(token_ids)

    leader = engine(make(0), deterministic=True, tokenizer=Stepping(0))
    leader.add_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0), request_id="a")
    with pytest.raises(RuntimeError, match="warm up before the first request"):
        leader.warmup()
    assert not leader.abort(["a"])  # type: ignore[arg-type]
    steps = 0
    while leader.has_work:
        leader.step()
        steps += 1
    published = [value for key, value in store.values.items() if key.startswith("jattn/commands/")]
    assert len(published) == steps and "warmup" not in "".join(published)
    assert {type(error) for error in Stepping.raised} == {RuntimeError}


# ------------------------------------------------------------------ the end
def wait_for(true):
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_silent_process_ends_the_others(processes):
    make, store, told = processes
    make(0, seconds=0.5)
    wait_for(lambda: told)
    assert told == [(0, "process 1 has given no sign of life for 0.5 s")]
    assert store.values["jattn/end"] == told[0][1]


def test_a_process_that_fails_tells_the_others_why(processes):
    make, _, told = processes
    make(0), make(1).fail("process 1 has ended (no space)")
    wait_for(lambda: told)
    assert told == [(0, "process 1 has ended (no space)")]


def test_process_0_is_asked_once_to_stop_by_all_others(processes):
    make, store, told = processes
    leader, asked = make(0), []
    leader.on_stop = lambda: asked.append(True)
    make(1).ask_leader_to_stop()
    wait_for(lambda: store.values.get("jattn/alive/1", "").endswith("stop") and asked)
    time.sleep(0.2)
    assert asked == [True] and not told


def test_the_store_is_gone_with_process_0(processes):
    make, _, told = processes
    gone = Store()
    gone.key_value_dir_get = lambda prefix: (_ for _ in ()).throw(JaxRuntimeError("UNAVAILABLE: Socket closed"))
    make(1, store=gone)
    wait_for(lambda: told)
    assert told == [(1, "process 0 cannot be reached (UNAVAILABLE: Socket closed)")]


def test_a_store_that_does_not_answer_is_process_0_that_hangs(processes, monkeypatch):
    """kill -STOP of process 0: a call of its store returns neither a value nor an error."""
    monkeypatch.setattr(rules, "TELL_SECONDS", 0.05)
    make, store, told = processes
    over, write = threading.Event(), store.key_value_set
    make(1, seconds=0.5)
    wait_for(lambda: "jattn/alive/1" in store.values)
    store.key_value_set = lambda *args, **options: over.wait(60) and write(*args, **options)
    try:
        wait_for(lambda: told)
        assert told == [(1, "process 0 has given no sign of life for 0.5 s")]
        make(0).fail("this returns too")
    finally:
        over.set()


def test_a_process_whose_others_do_not_come_says_so(monkeypatch, caplog):
    """JAX would abort it, with a stack of C++."""
    over = threading.Event()
    monkeypatch.setattr(rules, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(rules, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: over.wait(60))
    with pytest.raises(OSError, match="process 1 of 2 has waited 0.1 s for the others at 127.0.0.1:1: start each"):
        Processes.join("127.0.0.1:1", 2, 1, on_end=lambda group, why: None)
    over.set()
    assert "process 1 of 2 waits for the others, which connect through 127.0.0.1:1" in caplog.text


@pytest.mark.parametrize(
    ("error", "seen"),
    [(RuntimeError("UNAVAILABLE: no\nmore"), (OSError, "through 127.0.0.1:1: UNAVAILABLE: no$")),
     (ValueError("devices are made"), (ValueError, "^devices are made$"))],
)  # fmt: skip
def test_an_error_of_the_connection_reaches_the_caller(monkeypatch, error, seen):
    def initialize(*_, **__):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(seen[0], match=seen[1]):
        Processes.join("127.0.0.1:1", 2, 1, on_end=lambda group, why: None)


@pytest.mark.parametrize(
    ("coordinator", "count", "id", "seconds", "words"),
    [
        ("host", 2, 0, 1, "HOST:PORT"),
        ("host:port", 2, 0, 1, "HOST:PORT"),
        ("http://host:1", 2, 1, 1, "HOST:PORT"),
        ("::1:8476", 2, 0, 1, "IPv6 address is in brackets, as"),
        ("[127.0.0.1]:8476", 2, 0, 1, "HOST:PORT"),
        ("[[::1]]:8476", 2, 0, 1, "HOST:PORT"),
        ("[a:b]:8476", 2, 0, 1, "HOST:PORT"),
        ("a..b:8476", 2, 0, 1, "HOST:PORT"),
        ("a b:8476", 2, 0, 1, "HOST:PORT"),
        ("host:1", 1, 0, 1, "1 processes: there must be at least 2"),
        ("host:1", 2**31 - 1, 0, 1, "2147483647 processes: there must be at least 2 and at most 65536"),
        ("host:1", 2**40, 0, 1, "count=1099511627776 is outside int32"),
        ("host:1", 2.0, 0, 1, "count=2.0 must be an integer, got float"),
        ("host:1", 2, "0", 1, "id='0' must be an integer, got str"),
        ("host:1", 2, 0, "1", "seconds='1' must be a number, got str"),
        ("host:1", 2, 2, 1, "process 2 of 2: the ids are 0 to 1"),
        ("host:1", 2, 0, 0, "0 seconds, must be above 0"),
        ("host:1", 2, 0, float("inf"), "at most 86400"),
        ("host:1", 2, 0, float("nan"), "at most 86400"),
        ("host:0", 2, 0, 1, "a port from 1 to 65535"),
        ("host:99999", 2, 0, 1, "a port from 1 to 65535"),
        ("host:٣", 2, 0, 1, "a port from 1 to 65535"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_connected(coordinator, count, id, seconds, words):
    with pytest.raises(ValueError, match=words):
        Processes.join(coordinator, count, id, seconds=seconds, on_end=lambda group, why: None)


def test_an_address_where_process_0_cannot_listen_is_an_error_before_jax_is_asked():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        for address in (used, "192.0.2.1:9000", "no-such-host.invalid:9000"):
            with pytest.raises(OSError, match=f"process 0 cannot listen on {address}"):
                Processes.join(address, 2, 0, seconds=1, on_end=lambda group, why: None)


def test_a_mesh_over_several_processes_needs_the_lock_step():
    devices = np.array([types.SimpleNamespace(process_index=i) for i in range(2)])
    with pytest.raises(UnsupportedError, match="the processes \\[0, 1\\], and an Engine runs in process 0 only"):
        construction.model_mesh_of(LLAMA, types.SimpleNamespace(devices=devices))
    with pytest.raises(ValueError, match="must have some of each of the 1"):
        construction.model_mesh_of(LLAMA, types.SimpleNamespace(devices=devices), spans_processes=True)
