"""`cutaway serve`: the live page, and the routes that OpenAI clients use."""

import argparse
import os
import socket
import sys

from cutaway.cli.arguments import DEFAULT_MODEL, add_engine
from cutaway.errors import CutawayError

KEY_VARIABLE = "CUTAWAY_API_KEY"

PROGRAMS = """
In another terminal, for a program (the openai package's client takes base_url="http://127.0.0.1:8710/v1"):
  curl http://127.0.0.1:8710/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 40}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{parser.epilog or ''}\n{PROGRAMS}".strip()
    parser.add_argument(
        "--model",
        metavar="MODEL",
        action="append",
        help="a model to offer beside those that cutaway models lists, by name or path; may be given several times, "
        f"and the first is the one that opens ({DEFAULT_MODEL} if not given)",
    )
    add_engine(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8710, metavar="PORT", help="the port (8710; 0 picks a free one)")
    parser.add_argument(
        "--longest", type=int, default=2048, metavar="N", help="the most tokens that a prompt may have (2048)"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the page, only print its address")
    programs = parser.add_argument_group("for programs, under /v1 (docs/SERVER.md)")
    programs.add_argument(
        "--at-once", type=int, default=8, metavar="N", help="responses of a model that share passes (8)"
    )
    programs.add_argument(
        "--waiting", type=int, default=32, metavar="N", help="how many more may queue before requests get 429 (32)"
    )
    programs.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"ask for this key, of programs and of browsers (better in the environment as {KEY_VARIABLE}, where other "
        "users of the machine do not see it)",
    )
    programs.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another name by which this server may be called, as behind a proxy; may be given several times",
    )
    programs.add_argument(
        "--drain",
        type=int,
        default=30,
        metavar="SECONDS",
        help="how long responses under way may take to end after Ctrl-C or SIGTERM (30)",
    )


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.port <= 65535:
        raise CutawayError(f"--port is {options.port}; it must be 0 to 65535.")
    if options.longest < 1:
        raise CutawayError(f"--longest is {options.longest}; it must be at least 1.")
    for name, least in (("at_once", 1), ("waiting", 1), ("drain", 0)):
        if getattr(options, name) < least:
            raise CutawayError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least {least}.")
    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise CutawayError("The API key is empty; leave it out where none is wanted.")
    from pathlib import Path

    from cutaway.checkpoints.sources import locate
    from cutaway.serve.models import Models

    sources = options.model or []
    for source in sources:
        locate(source)  # a wrong name is refused now, not in the page
    listener = _listener(options.host, options.port)

    import uvicorn

    from cutaway.serve import make_app
    from cutaway.serve.guard import LOOPBACK

    first = sources[0] if sources else DEFAULT_MODEL
    default = first if first.startswith("hf:") else Path(first).name
    app = make_app(
        Models(sources or [DEFAULT_MODEL], options.engine, options.dtype),
        default=default,
        longest=options.longest,
        hosts=(*LOOPBACK, options.host, *options.allow_host),
        at_once=options.at_once,
        queued=options.waiting,
        api_key=key,
    )
    port = listener.getsockname()[1]
    shown = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{shown}:{port}/"
    print(f"Cutaway is at {address} (Ctrl-C ends it); OpenAI clients take {address}v1", flush=True)
    if options.host not in LOOPBACK and key is None:
        print(
            f"cutaway: {options.host} can be reached by others; nothing here asks them who they are (--api-key does).",
            file=sys.stderr,
        )
    if not options.no_browser:
        _open(address)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=options.drain)
    )
    server.run(sockets=[listener])
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises CutawayError where the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's algorithm on, which holds the end of an answer back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise CutawayError(
            f"Cutaway cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}; --port picks another."
        ) from None
    return listener


def _open(address: str) -> None:
    import threading
    import webbrowser

    threading.Timer(0.5, webbrowser.open, [address]).start()
