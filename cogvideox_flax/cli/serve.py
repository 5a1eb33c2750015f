"""`cogvideox serve`: the HTTP API and the page, over a durable queue in a folder. Nothing here imports JAX, so that the
server answers before its models are opened."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import resource
import secrets
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError, install_extra
from cogvideox_flax.generate.jobs import JobFolder
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.io.atomic import write_text
from cogvideox_flax.io.paths import read_text
from cogvideox_flax.runtime.terminal import say
from cogvideox_flax.serve.group import worker_size
from cogvideox_flax.serve.worker import Home, ThisProcess, Worker

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Connections above which requests are answered 503."""


def serve(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C; what is under way then goes on with the next start."""
    try:
        import uvicorn

        from cogvideox_flax.serve.api import Api
    except ImportError as e:
        raise InputError(f"the server needs {e.name}: {install_extra('serve')}") from e
    from cogvideox_flax.serve.events import EventLog
    from cogvideox_flax.serve.files import Uploads
    from cogvideox_flax.serve.guard import Guard

    if not 0 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}; expected 0 to 65535, 0 for a free one")
    models = _models(args)
    folder = args.dir.absolute()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # connections that say nothing take no file from the job under way
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    with JobFolder(folder / "jobs") as jobs:
        password = _password(args)
        events = EventLog(folder / "next-event")
        worker = Worker(jobs, models, events, _home(args), progress=not args.quiet)
        uploads = Uploads(folder / "files")
        api = Api(jobs, worker, events, uploads, adapters=folder / "adapters", max_queue=args.max_queue)
        hosts = [name for name in (args.host, *args.name) if name]
        app = Guard(api.app(), hosts=hosts, password=password, max_bytes=args.max_upload * 2**20)
        with _listen(args.host, args.port) as listener:
            port = listener.getsockname()[1]
            shown = f"[{args.host}]" if ":" in args.host else args.host
            say(f"open http://{shown}:{port} (Ctrl-C stops; the videos are in {args.dir})", True)
            config = uvicorn.Config(
                app,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
                limit_concurrency=MAX_CONNECTIONS,
                lifespan="on",
            )

            class Server(uvicorn.Server):
                def handle_exit(self, *signal: Any) -> None:
                    events.end()  # the streams of open pages, which would be waited for
                    super().handle_exit(*signal)

            _run(Server(config), listener, worker)


def _run(server: Any, listener: socket.socket, worker: Worker) -> None:
    """Run the server; end it where the models cannot be opened."""

    def watch() -> None:
        worker.ready.wait()
        if worker.failure is not None:
            server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server's own handlers hold while it runs, then send it again
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if worker.failure is not None:
        raise worker.failure


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        raise InputError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another --port or --host") from e


def _models(args: argparse.Namespace) -> dict[str, ModelChoice]:
    """The models to serve, each under a name of its own."""
    models = dict[str, ModelChoice]()
    for where in args.model or [None]:
        name = "embedded" if where is None else Path(where).resolve().name if Path(where).exists() else where
        if name in models:
            raise InputError(f"two models are called {name}; rename one of the directories")
        which: Any = {"revision": args.revision, "variant": args.variant, "dtype": args.dtype, "mesh": args.mesh}
        models[name] = ModelChoice(where, where or "embedded", **which)
    return models


def _home(args: argparse.Namespace) -> Home:
    """Where videos are made."""
    size = worker_size(args.ray, args.ray_worker, args.hosts_per_worker)
    if args.ray is None:
        return ThisProcess()
    from cogvideox_flax.serve.actors import Cluster

    return Cluster(args.ray, size)


def _password(args: argparse.Namespace) -> str | None:
    """The password: of --password-file; where others can reach the server, one that is made once for this folder."""
    if args.password_file is not None:
        try:
            text = read_text(args.password_file).strip()
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"cannot read the password from {args.password_file}: {e}") from e
        if not text or "\n" in text:
            raise InputError(f"{args.password_file} holds no password; expected one line")
        return text
    if _is_loopback(args.host):
        return None
    path = args.dir / "password"
    if not path.exists():
        write_text(path, secrets.token_urlsafe(24) + "\n", mode=0o600)
    password = read_text(path).strip()
    say(f"the password is in {path}: {password}", True)
    return password


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
