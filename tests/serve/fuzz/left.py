"""What may not be left of requests that are over."""

import asyncio
import gc
import os
import threading

from jattn.text import renderer
from tests.serve.running import wait_until

PATIENCE = 20
"""Seconds that the server has to put everything away."""

MEGABYTES = 200
"""That a process may grow by, of caches and fragments; a leak of a body a request is more."""


def resources(server) -> dict[str, int]:
    """What a process holds."""
    gc.collect()
    renderer.close_idle()  # they wait for the next chat, and hold a pipe each way
    loop = server.servers[0].get_loop()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return dict(
        files=len(os.listdir("/proc/self/fd")),
        tasks=len(asyncio.all_tasks(loop)),
        megabytes=pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    )


def leaks(engine, server, before: dict[str, int]) -> list[str]:
    """What is left of requests that are over."""

    def found() -> list[str]:
        now = resources(server)
        counts = dict(
            requests=server.engine_loop.num_requests,
            sequences=len(engine.scheduler.running) + len(engine.scheduler.waiting),
            responses=len(engine._live) + len(engine._live.unfinished()),
            blocks=engine.stats.cache_usage,
            connections=len(server.server_state.connections),
            requests_in_http=len(server.server_state.tasks),
            files=max(now["files"] - before["files"], 0),
            tasks=max(now["tasks"] - before["tasks"], 0),
            threads=[t.name for t in threading.enumerate() if t.name.startswith(("fuzz", "ThreadPool"))],
            megabytes=max(now["megabytes"] - before["megabytes"] - MEGABYTES, 0),
        )
        return [f"{count} {name} are left" for name, count in counts.items() if count]

    try:
        wait_until(lambda: not found(), PATIENCE)
    except AssertionError:
        return found()
    return []
