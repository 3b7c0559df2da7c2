"""The engine's thread: requests fail alone, queued sequences are counted, unread outputs do not accumulate."""

import asyncio
import contextlib
import threading
import time

import httpx
import pytest

from jattn.engine import SamplingParams
from jattn.serve.engine_loop import EngineLoop, Inbox
from jattn.serve.errors import FailedError, QueueFullError, StoppedError
from tests.serve.running import PATIENCE, connection, held, is_idle, make_engine, post, serving, slow_engine, wait_until

ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
LONG = {"prompt": "long", "max_tokens": 240, "temperature": 0}


def put(inbox, index, update):
    """Put an update into an inbox, and wake its reader."""
    Inbox.wake([inbox] if inbox.put(index, update) else [])


@contextlib.contextmanager
def running(engine=None, max_queue=8):
    loop = EngineLoop(make_engine() if engine is None else engine, max_queue)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
        loop.join()


def params(**more):
    return SamplingParams(**dict(temperature=0, max_tokens=3) | more)


def finished(loop, id, *prompts, **more):
    async def main():
        return await loop.submit(id, prompts, params(**more)).finished()

    return asyncio.run(main())


def test_a_request_that_the_engine_cannot_take_fails_alone(monkeypatch):
    """A salt that cannot be encoded once ended the engine's thread, and with it every stream."""
    with running() as loop:
        (want,) = finished(loop, "a", "hello")

        async def salted(salt):
            return await loop.submit("b", ["hello"], params(), salt=salt).finished()

        (refused,) = asyncio.run(salted("\ud800"))
        assert "surrogate" in refused.error
        monkeypatch.setattr("jattn.engine.engine.seed_of", lambda *args: 1 / 0)
        with pytest.raises(FailedError, match="ZeroDivisionError|division"):
            asyncio.run(salted(""))
        monkeypatch.undo()
        assert loop.healthy and loop.num_requests == 0 and not loop.engine.has_work
        assert finished(loop, "c", "hello")[0].outputs == want.outputs


def test_an_engine_that_cannot_abort_serves_on():
    with running() as loop:
        engine, abort = loop.engine, loop.engine.abort

        async def leave():
            with held(engine):
                loop.submit("a", ["hello"], params()).close()
                engine.abort = lambda id: 1 / 0
                stream = loop.submit("b", ["hello"], params(max_tokens=200))
            async for _ in stream:
                break
            stream.close()
            while loop.num_requests:
                await asyncio.sleep(0.01)

        asyncio.run(leave())
        engine.abort = abort
        assert loop.healthy and len(finished(loop, "c", "hello")[0].token_ids) == 3


def test_places_count_sequences_and_a_body_is_taken_whole_or_not_at_all():
    with running(max_queue=5) as loop:

        async def main():
            with held(loop.engine):
                first = loop.submit("a", ["x"], params(n=3, temperature=1, seed=1))
                for prompts, n in ((["x", "y", "z"], 1), (["x"], 3), (["x", "y"], 2)):
                    with pytest.raises(QueueFullError, match="3 sequences"):
                        loop.submit("b", prompts, params(n=n, temperature=1))
                    assert loop.num_requests == 1, "a part of a refused body was taken"
                second = loop.submit("c", ["x", "y"], params())
                with pytest.raises(QueueFullError):
                    loop.submit("d", ["x"], params())
            return await asyncio.gather(first.finished(), second.finished())

        first, second = asyncio.run(main())
        assert len(first[0].outputs) == 3 and [len(output.outputs) for output in second] == [1, 1]
        assert loop.num_requests == 0 and loop.engine.stats.requests == 3


def test_whoever_leaves_the_queue_frees_its_place_and_the_engine_never_sees_it():
    with running(max_queue=2) as loop:

        async def main():
            with held(loop.engine):
                running = loop.submit("a", ["x"], params())
                await asyncio.sleep(0.05)  # the engine's thread is inside its step
                loop.submit("b", ["x"], params()).close()
            await running.finished()
            while loop.num_requests:
                await asyncio.sleep(0.01)

        asyncio.run(main())
        assert loop.engine.stats.requests == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_its_first_token_frees_its_place(stream):
    with serving(max_queue=1) as (engine, server, url):
        httpx.post(f"{url}/v1/completions", json=ASK)
        before = engine.stats.aborted
        with held(engine):
            with connection(url, post("/v1/completions", LONG | {"stream": stream})):
                wait_until(lambda: server.loop.num_requests == 1)
                assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 429
        wait_until(lambda: is_idle(engine, server))
        assert engine.stats.aborted <= before + 1
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_a_body_that_is_refused_leaves_nothing_running():
    with serving(max_queue=3) as (engine, server, url):
        with held(engine):
            with connection(url, post("/v1/completions", LONG | {"stream": True})):
                wait_until(lambda: server.loop.num_requests == 1)
                many = ASK | {"prompt": ["a", "b", "c"]}
                answer = httpx.post(f"{url}/v1/completions", json=many)
                assert answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert answer.headers["retry-after"] and server.loop.num_requests == 1
        wait_until(lambda: is_idle(engine, server))
        assert engine.stats.requests <= 1


def test_one_failed_prompt_of_a_body_ends_its_siblings():
    with serving() as (engine, server, url):
        body = {"prompt": [[40, 1], [50, 60]], "max_tokens": 200, "temperature": 0}  # 1 is poison
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/completions", json=body | {"stream": stream})
            assert "NaN" in answer.text and answer.status_code == (200 if stream else 500)
            wait_until(lambda: is_idle(engine, server))


def test_a_request_that_somebody_aborts_in_the_engine_is_an_error_not_an_answer():
    with running(slow_engine(0.1)) as loop:

        async def main():
            stream = loop.submit("a", ["x"], params(max_tokens=200))
            async for _ in stream:
                loop._commands.put(lambda: loop.engine.abort("a"))

        with pytest.raises(FailedError, match="aborted"):
            asyncio.run(main())


def test_a_broken_engine_ends_every_stream_and_accepts_nothing_more():
    with running() as loop:

        async def main():
            with held(loop.engine):
                streams = [loop.submit(f"r{i}", ["x"], params(max_tokens=200)) for i in range(4)]
                await asyncio.sleep(0.05)
                loop._commands.put(lambda: 1 / 0)
            found = await asyncio.gather(*(stream.finished() for stream in streams), return_exceptions=True)
            assert any(isinstance(each, StoppedError) and "division" in str(each) for each in found)
            assert all(isinstance(each, (StoppedError, list)) for each in found)
            with pytest.raises(StoppedError, match="division"):
                loop.submit("z", ["x"], params())

        asyncio.run(main())
        assert not loop.healthy and isinstance(loop.failure, ZeroDivisionError)


def test_a_step_with_an_invalid_output_ends_every_stream():
    """The outputs before it are delivered, and their readers must learn of them, or of the failure."""
    with running() as loop:
        step = loop.engine.step
        loop.engine.step = lambda: (outputs := step()) and [*outputs, None]

        async def main():
            with held(loop.engine):
                streams = [loop.submit(name, ["x"], params(max_tokens=count)) for name, count in (("a", 1), ("b", 200))]
            ends = (asyncio.wait_for(stream.finished(), PATIENCE) for stream in streams)
            return await asyncio.gather(*ends, return_exceptions=True)

        ended, failed = asyncio.run(main())
        assert isinstance(ended, list) and isinstance(failed, StoppedError) and "NoneType" in str(failed)


def test_streams_end_at_once_where_a_step_takes_longer_than_clients_wait():
    """A step may compile for minutes (--no-warmup), and the server cuts its connections after some seconds."""
    with running() as loop:

        async def main():
            with held(loop.engine):
                stream = loop.submit("a", ["x"], params(max_tokens=200))
                await asyncio.sleep(0.05)
                loop.stop()
                with pytest.raises(StoppedError, match="shutting down"):
                    await asyncio.wait_for(stream.finished(), 1)

        asyncio.run(main())


def test_an_output_that_comes_after_an_error_does_not_replace_it():
    """The engine's thread may deliver an output while another thread ends all streams."""

    async def main():
        inbox = Inbox()
        put(inbox, 0, StoppedError("the end"))
        put(inbox, 0, 5)
        assert str((await inbox.get())[0]) == "the end"

    asyncio.run(main())


def test_an_inbox_keeps_the_newest_and_wakes_its_reader_once():
    async def main():
        inbox, calls = Inbox(), []
        loop = asyncio.get_running_loop()
        call, inbox._loop = loop.call_soon_threadsafe, type("Loop", (), {})()
        inbox._loop.call_soon_threadsafe = lambda *f: calls.append(1) or call(*f)
        for i in range(1000):
            put(inbox, 0, i)
            put(inbox, 1, -i)
        assert len(inbox._updates) == 2 and len(calls) == 1
        assert await inbox.get() == {0: 999, 1: -999}
        put(inbox, 1, 5)
        assert await inbox.get() == {1: 5}

    asyncio.run(main())


def test_the_outputs_of_a_step_wake_the_event_loop_once(monkeypatch):
    """Each call writes to a socket, and the engine's thread then waits for the interpreter."""
    calls, base = [], asyncio.BaseEventLoop
    real = base.call_soon_threadsafe

    def counting(self, callback, *args, **more):
        if threading.current_thread().name == "jattn-engine":
            calls.append(1)
        return real(self, callback, *args, **more)

    monkeypatch.setattr(base, "call_soon_threadsafe", counting)
    with running() as loop:

        async def main():
            with held(loop.engine):
                streams = [loop.submit(str(i), ["hello"], params()) for i in range(4)]
            return await asyncio.gather(*(stream.finished() for stream in streams))

        outputs = asyncio.run(main())
        assert [len(output.token_ids) for (output,) in outputs] == [3] * 4
        assert len(calls) <= loop.engine.stats.dispatches


def test_no_news_is_lost_between_threads():
    """R-37: the last output of a stream was once lost to a wake-up that came too early."""

    async def main():
        inbox, total = Inbox(), 20_000
        thread = threading.Thread(target=lambda: [put(inbox, 0, i) for i in range(total)])
        thread.start()
        last = -1
        while last != total - 1:
            news = (await asyncio.wait_for(inbox.get(), PATIENCE))[0]
            assert news > last
            last = news
        thread.join()

    asyncio.run(main())


def test_a_neighbour_is_served_while_many_sequences_wait():
    """max_queue limits n: the next client waits for at most that many sequences, not for 300,000."""
    with serving(slow_engine(), max_queue=128) as (engine, server, url):
        httpx.post(f"{url}/v1/completions", json=ASK)
        huge = ASK | {"n": 127, "temperature": 1, "max_tokens": 200, "stream": True}
        with connection(url, post("/v1/completions", huge)):
            wait_until(lambda: server.loop.num_requests == 1)
            begin = time.monotonic()
            assert httpx.get(f"{url}/health").status_code == 200 and time.monotonic() - begin < 20
            assert httpx.post(f"{url}/v1/completions", json=ASK | {"n": 2, "temperature": 1}).status_code == 429
        wait_until(lambda: is_idle(engine, server))
