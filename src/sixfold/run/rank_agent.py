"""A Ray actor that starts one rank as a process, as torchrun's agent does (`run/ray_ranks.py`).

The module is also the program of that process: the command line of a rank. It ends with the actor,
and so with the program that has started the ranks.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import ray

from ..backends.ray_head import machine_name
from ..processes.child import Child, ChildError
from ..processes.program import Requests
from ..version import __version__

PROGRAM = "sixfold.run.rank_agent"

_READ_BYTES = 1 << 16
_OUT, _ERRORS, _MESSAGES = 1, 2, 3
ENDED = 0
"""Kind of the last message of a rank: its exit code. Other messages are output of this stream."""


def versions() -> dict[str, str]:
    """Versions that must be equal wherever the numbers of a run are computed."""
    return {"sixfold": __version__, "torch": version("torch").partition("+")[0]}


@dataclass(frozen=True)
class Place:
    """Where an actor is.

    Attributes:
        machine: name of the machine.
        address: its address in the cluster.
        gpus: numbers of the GPUs that Ray has given to the actor.
        versions: as of `versions`.
    """

    machine: str
    address: str
    gpus: tuple[str, ...]
    versions: Mapping[str, str]


class RankAgent:
    """Starts one rank, passes on what it prints, and passes signals to it."""

    def __init__(self) -> None:
        self._rank: Child | None = None
        self._store: Any = None

    def place(self) -> Place:
        """Where this actor is."""
        gpus = tuple(str(number) for number in ray.get_gpu_ids())
        return Place(machine_name(), ray.util.get_node_ip_address(), gpus, versions())

    def host_store(self, address: str) -> int:
        """Host the store where the ranks meet, and return its port.

        No rank hosts it: if one dies, the others read there who it was.
        """
        from torch.distributed import TCPStore

        with socket.create_server((address, 0)) as server:
            port: int = server.getsockname()[1]
            self._store = TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=server.detach(),  # alone it would listen on every address
            )
        return port

    def run(
        self, arguments: Sequence[str], folder: str, environment: Mapping[str, str]
    ) -> Iterator[tuple[int, str | int]]:
        """Run a command line of Sixfold, and return the output as it comes.

        Args:
            arguments: the command line.
            folder: working folder.
            environment: environment variables to set.

        Yields:
            Number of the output stream and text; at the end `ENDED` and the exit code, which is
            negative after a signal.
        """
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        ends = {"output": out_end, "descriptors": (errors_end,)}
        self._rank = child = Child(PROGRAM, environment=environment, **ends)  # type: ignore[arg-type]
        os.close(out_end)
        os.close(errors_end)
        given = {"arguments": [*arguments], "folder": folder, "errors": errors_end}
        child.send(json.dumps(given).encode())
        decoders = {kind: getincrementaldecoder("utf-8")("replace") for kind in (_OUT, _ERRORS)}
        with selectors.DefaultSelector() as waiting:
            waiting.register(out, selectors.EVENT_READ, _OUT)
            waiting.register(errors, selectors.EVENT_READ, _ERRORS)
            waiting.register(child.replies, selectors.EVENT_READ, _MESSAGES)
            while {_OUT, _ERRORS} & {key.data for key in waiting.get_map().values()}:
                for key, _ in waiting.select():
                    if key.data == _MESSAGES:
                        try:
                            list(child.arrived())  # the first tells its process id
                        except ChildError:
                            waiting.unregister(key.fd)
                    elif found := os.read(key.fd, _READ_BYTES):
                        yield key.data, decoders[key.data].decode(found)
                    else:
                        waiting.unregister(key.fd)
                        os.close(key.fd)
        code = child.process.wait()
        child.close()
        yield ENDED, code

    def signal(self, number: int) -> None:
        """Send a signal to the rank. One that has not begun ends."""
        if self._rank and self._rank.pid:
            os.kill(self._rank.pid, number)
        elif self._rank:
            self._rank.close(grace_s=0.0)


def serve(requests: Requests) -> None:
    """Become a rank."""
    given = json.loads(next(requests))
    requests.note()
    os.dup2(given["errors"], sys.stderr.fileno())
    os.close(given["errors"])
    os.chdir(given["folder"])
    for name in [n for n in os.environ if n.startswith("RAY_")]:  # the token of the cluster
        del os.environ[name]
    from ..cli import main

    sys.argv = ["sixfold", *given["arguments"]]
    sys.exit(main())
