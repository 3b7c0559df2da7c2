"""`jattn serve`: an OpenAI-compatible HTTP server."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from jattn.cli import options

EXAMPLE = """example:
  jattn serve --model ~/models/llama --port 8000
  curl localhost:8000/v1/completions -d '{"prompt": "740+583=", "max_tokens": 4, "temperature": 0}'

An API key is read from the environment variable that --api-key-env names, so that no process list shows it.
After SIGTERM the server finishes running requests and exits with code 0, also while it loads and compiles; if the
engine breaks, with code 1."""

SECONDS = (
    ("header-timeout", 10.0, "for a client to send a request's headers"),
    ("body-timeout", 60.0, "for a client to send a request's body"),
    ("keep-alive-timeout", 5.0, "that a connection may be idle between requests"),
    ("write-timeout", 60.0, "that a client may read nothing of its answer"),
    ("grace", 20.0, "after SIGTERM for running requests to finish"),
)


def add(commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("the server")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free port")
    group.add_argument("--model-name", help="what clients call the model (default: the folder's name)")
    group.add_argument("--api-key-env", metavar="NAME", help="ask for the API key in this environment variable")
    group.add_argument(
        "--max-body-bytes", type=int, default=1 << 20, help="bytes of a request's body, at most (default: 1048576)"
    )
    group.add_argument(
        "--max-queue", type=int, default=256, help="sequences served or waiting, n a prompt (default: 256)"
    )
    group.add_argument("--max-connections", type=int, default=512, help="open connections, at most (default: 512)")
    for name, seconds, what in SECONDS:
        group.add_argument(
            f"--{name}", type=float, default=seconds, metavar="SECONDS", help=f"{what} (default: {seconds:g})"
        )
    group.add_argument("--no-warmup", action="store_true", help="compile when first needed, not before serving")
    options.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise ValueError(f"--api-key-env {args.api_key_env}: that variable is not set, or empty")
    try:
        from jattn.serve import ServerOptions, serve
        from jattn.serve.run import bind
    except ImportError as error:
        raise ImportError(f"the server needs pip install 'jattn[serve]' ({error})") from error
    name = args.model_name or (Path(args.model).resolve().name if args.model else "adder")
    seconds = {option: getattr(args, option) for option in (name.replace("-", "_") for name, _, _ in SECONDS)}
    server = ServerOptions(
        model_name=name,
        api_key=key,
        max_body_bytes=args.max_body_bytes,
        max_queue=args.max_queue,
        max_connections=args.max_connections,
        **seconds,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with _ending_quietly():
        sockets = bind(args.host, args.port)  # before the model loads: a port that is taken is told at once
        engine = options.make_engine(args)
        if not args.no_warmup:
            options.warm(engine)
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"serving {name} on http://{host}:{sockets[0].getsockname()[1]}/v1", file=sys.stderr, flush=True)
        serve(engine, server, args.host, args.port, sockets)
    return 0


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """SIGTERM ends the process with a sentence and code 0; while it serves, the server has its own handler."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    print("jattn: ended by SIGTERM", file=sys.stderr, flush=True)
    raise SystemExit(0)
