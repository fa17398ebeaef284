"""What an attack looks for outside its sandbox: files and sockets made for one case."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sixfold.errors import UserError


@contextmanager
def host_setup(setup: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the files and sockets of a case exist. They are removed afterwards.

    Args:
        setup: "files" (path to content, in the temporary folder only), "tcp_listen" and
            "tcp6_listen" (ports on loopback), "abstract_unix" (name of a socket), and "env"
            (environment variables).

    Raises:
        UserError: for a file elsewhere or one that exists, or a port that is taken.
    """
    with ExitStack() as made:
        for name, content in (setup.get("files") or {}).items():
            made.enter_context(_file(Path(name), str(content)))
        try:
            for family, host, key in (
                (socket.AF_INET, "127.0.0.1", "tcp_listen"),
                (socket.AF_INET6, "::1", "tcp6_listen"),
            ):
                if key in setup:
                    made.enter_context(_listening(family, (host, int(setup[key]))))
            if name := setup.get("abstract_unix"):
                made.enter_context(_listening(socket.AF_UNIX, f"\0{name}"))
        except OSError as error:
            raise UserError(f"setup of a case: {error}") from error
        made.enter_context(_variables(setup.get("env") or {}))
        yield


@contextmanager
def _file(path: Path, content: str) -> Iterator[None]:
    temporary = Path(tempfile.gettempdir()).resolve()
    if not path.resolve().is_relative_to(temporary) or path.exists():
        raise UserError(f"setup of a case: {path} must be a new file in {temporary}")
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()


@contextmanager
def _listening(family: int, address: Any) -> Iterator[None]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        yield


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
