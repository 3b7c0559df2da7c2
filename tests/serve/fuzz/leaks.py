"""What requests must not leave behind in the server's process."""

import asyncio
import gc
import os
import threading

from jattn.text import renderer
from tests.serve.running import wait_until

PATIENCE = 20
"""Seconds that the server has to release everything."""

MEGABYTES = 200
"""Allowed growth of the process by caches and fragmentation; a leak of one body per request is more."""


def resources(server) -> dict[str, int]:
    """Open files, tasks and memory of this process."""
    gc.collect()
    renderer.close_idle()  # idle template processes have two pipes each
    loop = server.servers[0].get_loop()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return dict(
        files=len(os.listdir("/proc/self/fd")),
        tasks=len(asyncio.all_tasks(loop)),
        megabytes=pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    )


def find(engine, server, before: dict[str, int]) -> list[str]:
    """One line for each thing that is left after all requests have ended."""

    def found() -> list[str]:
        now = resources(server)
        counts = dict(
            requests=server.loop.num_requests,
            sequences=len(engine.scheduler.running) + len(engine.scheduler.waiting),
            completions=len(engine._loop.requests) + len(engine._loop.requests.unfinished()),
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
