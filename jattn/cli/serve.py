"""`jattn serve`: an OpenAI-compatible HTTP server."""

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from jattn.cli import options, processes, signals
from jattn.cli.command import add_command
from jattn.embedder import Embedder
from jattn.engine import Engine, Processes
from jattn.models import POOLINGS

EXAMPLES = (
    "jattn serve --model ~/models/llama --port 8000",
    """curl localhost:8000/v1/completions -d '{"prompt": "740+583=", "max_tokens": 4, "temperature": 0}'""",
)
NOTES = """\
The API key is read from the environment variable that --api-key-env names: a process list would show an argument.
After SIGTERM the server finishes running requests and exits with code 0. While it loads or compiles, SIGTERM ends it
at once, also with code 0. If the engine breaks, the server exits with code 1."""

YOUNG_OBJECTS = 20_000
"""Python's collector runs when this many more objects were made than freed, not after its usual 700 or 2000."""

TIMEOUTS = (
    ("header-timeout", 10.0, "time for a client to send the headers of a request"),
    ("body-timeout", 60.0, "time for a client to send the body of a request"),
    ("keep-alive-timeout", 5.0, "time that a connection may be idle between two requests"),
    ("write-timeout", 60.0, "time that a client may read nothing of its response"),
    ("grace", 20.0, "time for running requests to finish after SIGTERM"),
)


def add(commands) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "serve", "an OpenAI-compatible server", EXAMPLES, notes=NOTES)
    group = parser.add_argument_group("the server")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free port")
    group.add_argument("--model-name", help="what clients call the model (default: the folder's name)")
    group.add_argument("--api-key-env", metavar="NAME", help="require the API key in this environment variable")
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin, such as https://chat.example, call the server (CORS); repeatable; *: all",
    )
    group.add_argument(
        "--max-body-bytes",
        type=int,
        help="maximum size of a request's body in bytes (default: 1048576, of embeddings 8388608)",
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=256,
        help="maximum number of sequences that run or wait, n for each prompt; of embeddings: requests (default: 256)",
    )
    group.add_argument(
        "--max-connections", type=int, default=512, help="maximum number of open connections (default: 512)"
    )
    for name, seconds, what in TIMEOUTS:
        group.add_argument(
            f"--{name}", type=float, default=seconds, metavar="SECONDS", help=f"{what} (default: {seconds:g})"
        )
    group.add_argument(
        "--no-warmup",
        action="store_true",
        help="compile each program when it is first needed, not before serving; always so for embeddings",
    )
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="serve /v1/embeddings, made by this pooling (default: as the folder's modules.json says, if it has one)",
    )
    options.add_engine(parser)
    processes.add(parser)
    parser.set_defaults(run=lambda args: processes.run(args, run))


def run(args: argparse.Namespace, group: Processes | None = None) -> int:
    """Serve until a signal. group: of the processes that share the engine, if there are several."""
    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise ValueError(f"--api-key-env {args.api_key_env}: this variable is not set, or is empty")
    try:
        from jattn.serve import ServerOptions, serve
        from jattn.serve.server import backlog_of, bind, listen
    except ImportError as error:
        raise ImportError(f"the server needs pip install 'jattn[serve]' ({error})") from error
    if args.model_name == "":
        raise ValueError("--model-name is empty: give a name, or omit it for the folder's name")
    name = args.model_name or (Path(args.model).resolve().name if args.model else "adder")
    seconds = {option: getattr(args, option) for option in (name.replace("-", "_") for name, _, _ in TIMEOUTS)}
    server = ServerOptions(
        model_name=name,
        api_key=key,
        allow_origins=tuple(args.allow_origin),
        max_body_bytes=args.max_body_bytes,
        max_queue=args.max_queue,
        max_connections=args.max_connections,
        **seconds,
    )
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("jattn").setLevel(logging.INFO)  # JAX tells each platform that it does not find
    with _exit_0_on_sigterm():
        backlog_of(server.max_connections)
        sockets = bind(args.host, args.port)  # before the model loads, so that a port in use is reported at once
        if options.serves_embeddings(args):
            served: Embedder | Engine = options.make_embedder(args)
        else:
            served = options.make_engine(args, processes=group)
            if not args.no_warmup:
                options.warm(served)
        collect_rarely()
        listen(sockets)
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"serving {name} on http://{host}:{sockets[0].getsockname()[1]}/v1", file=sys.stderr, flush=True)
        with signals.left_to_others():
            serve(served, server, args.host, args.port, sockets)
    return 0


def collect_rarely() -> None:
    """Let Python's garbage collector leave out what exists now, and look for garbage less often.

    A million objects of JAX, the model and its programs live as long as the process: walking them every few thousand
    tokens takes a tenth of the host's time. A step of 256 rows makes 1500 objects, which reference counts free; two
    collections a step take another twentieth.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


@contextlib.contextmanager
def _exit_0_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process with one line and code 0; the server has its own handler while it runs."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers can be set only there
        yield
        return
    before = signal.signal(signal.SIGTERM, signals.exit_0)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
