"""`jattn serve`: an OpenAI-compatible HTTP server."""

import argparse
import logging
import os
import sys
from pathlib import Path

from jattn.cli import options

EXAMPLE = """example:
  jattn serve --model ~/models/llama --port 8000
  curl localhost:8000/v1/completions -d '{"prompt": "740+583=", "max_tokens": 4, "temperature": 0}'

The API key, where one is wanted, is read from the environment variable that --api-key-env names, so that it stands in
no process list."""


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
    group.add_argument("--port", type=int, default=8000, help="default: 8000")
    group.add_argument("--model-name", help="what clients call the model (default: the folder's name)")
    group.add_argument("--api-key-env", metavar="NAME", help="ask for the API key in this environment variable")
    group.add_argument("--max-body-bytes", type=int, default=1 << 20, help="default: 1048576")
    group.add_argument("--max-queue", type=int, default=256, help="requests served or waiting (default: 256)")
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
    except ImportError as error:
        raise ImportError(f"the server needs pip install 'jattn[serve]' ({error})") from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    engine = options.make_engine(args)
    if not args.no_warmup:
        options.warm(engine)
    name = args.model_name or (Path(args.model).resolve().name if args.model else "adder")
    server = ServerOptions(model_name=name, api_key=key, max_body_bytes=args.max_body_bytes, max_queue=args.max_queue)
    print(f"serving {name} on http://{args.host}:{args.port}/v1", file=sys.stderr, flush=True)
    serve(engine, server, args.host, args.port)
    return 0
