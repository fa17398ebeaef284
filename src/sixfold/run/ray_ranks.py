"""Start the ranks of a run as actors of a Ray cluster, as torchrun starts processes.

The ranks themselves do not know: each is the same command line, with the environment variables of
torchrun. Ray places them, and ends them if this program ends, in whatever way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ..backends.ray_cluster import Reserved, connected, reserved
from ..errors import RunFailed, UserError, one_line
from ..files.folder import RunFolder
from .rank_agent import ENDED, Place, RankAgent, versions
from .restart import AGAIN, COUNT, identity

GRACE_S = 30.0
"""Seconds that the other ranks have to save, to say what has failed and to end."""

POLL_S = 5.0
"""Seconds between two looks at a cluster that has lost a machine."""

_CALLS = 4  # of an actor at once: its rank, and signals


@dataclass(frozen=True)
class RankSettings:
    """How ranks are started.

    Attributes:
        address: the cluster, as for `connected`.
        ranks: their number.
        threads: CPU threads of the trainer in each.
        cpus: CPUs of each, with its samplers and its checks.
        device: `run.device`.
        silence_s: longest wait for resources and for the start of an actor, in seconds.
        restarts: times that all ranks start again from the newest checkpoint.
    """

    address: str
    ranks: int
    threads: int
    cpus: int
    device: str
    silence_s: float
    restarts: int


def train_on_ray(
    settings: RankSettings, arguments: Sequence[str], folder: Path, again: Sequence[str]
) -> int:
    """Run a command line on ranks that Ray starts.

    Args:
        settings: how they are started.
        arguments: the command line.
        folder: folder of the run.
        again: the command line that resumes the run.

    Returns:
        The exit code of the first rank that says what has failed, else 0. After a signal, what is
        usual for it.

    Raises:
        RunFailed: if a rank was lost, and none of the others has said so.
        UserError: if the Ray cluster is not there or has too few resources.
    """
    recipe = RunFolder(folder).recipe
    earlier = identity(recipe)
    for done in range(settings.restarts + 1):
        # A restart connects again, or starts a new cluster: the old one may be what was lost.
        until = time.monotonic() + settings.silence_s
        while not _ran(settings, arguments, {COUNT: str(done)}, ends := Ends()):
            if not done:
                raise UserError(ends.lost)
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)  # a machine may be starting again
        begun = identity(recipe) not in (None, earlier) or arguments == again
        if done == settings.restarts or ends.stopped or not (ends.lost and begun):
            break
        print(
            f"WARNING: {ends.lost}\nAll ranks start again: restart {done + 1} of"
            f" {settings.restarts}",
            file=sys.stderr,
            flush=True,
        )
        arguments = again
    if ends.lost and not ends.said:
        if ends.stopped:
            return 128 + ends.stopped
        hint = f". Go on with: sixfold train --resume {folder}" if begun else ""
        raise RunFailed(f"{ends.lost}{hint}")
    return ends.said or max(ends.codes.values())


def _ran(
    settings: RankSettings, arguments: Sequence[str], environment: Mapping[str, str], ends: Ends
) -> bool:
    """Run the ranks on a cluster. False if there is none, or it is too small: `lost` says why."""
    size, cpus, wait = settings.ranks, settings.cpus, settings.silence_s
    try:
        with connected(settings.address, size * cpus, wait):
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = int(settings.device != "cpu" and (has_gpus or settings.device != "auto"))
            with reserved(settings.address, size, cpus, gpus, wait, "trainer ranks") as cluster:
                _run_once(cluster, settings, arguments, environment, ends)
    except UserError as error:
        ends.lost = str(error)
        return False
    return True


@dataclass
class Ends:
    """How ranks have ended.

    Attributes:
        codes: exit codes by rank, in the order of their ends.
        lost: what has become of the first rank that was lost or asked for a restart.
        said: exit code of the first rank that has printed what failed. 0: none has.
        stopped: number of the signal that has asked for the end. 0: none has.
    """

    codes: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    said: int = 0
    stopped: int = 0

    def add(self, rank: int, end: int | str) -> None:
        """Record the end of a rank: its exit code, or why its actor is lost."""
        code = end if isinstance(end, int) else 1
        if code in (-signal.SIGINT, -signal.SIGTERM):  # a rank that still loads handles none
            code = 128 - code
        self.codes[rank] = code
        if isinstance(end, str):
            self.lost = self.lost or f"rank {rank} was lost: {end}"
        elif code < 0:
            self.lost = self.lost or f"rank {rank} was killed by {signal.Signals(-code).name}"
        elif code == AGAIN:
            self.lost = self.lost or f"rank {rank} got no answer from a part of the run"
        elif code > 1:  # 1: a bug, with its traceback, or another rank has printed
            self.said = self.said or code


def _run_once(
    cluster: Reserved,
    settings: RankSettings,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    ends: Ends,
) -> None:
    """Start all ranks, and wait until they have ended. None is left."""
    agents = [cluster.start(RankAgent, n, calls=_CALLS) for n in range(settings.ranks)]
    try:
        try:
            found = [agent.place.remote() for agent in agents]
            places: list[Place] = ray.get(found, timeout=settings.silence_s)
            order = by_machine(places)
            agents, places = [agents[i] for i in order], [places[i] for i in order]
            check_versions(places)
            host = agents[0].host_store.remote(places[0].address)
            port = ray.get(host, timeout=settings.silence_s)
        except RayTaskError as error:  # a restart would not help
            raise RunFailed(f"a rank has not started: {one_line(error)}") from error
        except RayError as error:
            ends.lost = f"a rank has not started: {one_line(error)}"
            return
        events: SimpleQueue[tuple[int, int, str | int]] = SimpleQueue()
        for rank, given in enumerate(rank_environments(places, port, settings.threads)):
            call = agents[rank].run.options(num_returns="streaming")
            stream = call.remote([*arguments], os.getcwd(), {**given, **environment})
            threading.Thread(target=_follow, args=(rank, stream, events), daemon=True).start()
        with _signals_to(agents, ends):
            wait_for_ranks(len(agents), events, ends)
    finally:
        for agent in agents:
            ray.kill(agent)


def wait_for_ranks(size: int, events: SimpleQueue[tuple[int, int, str | int]], ends: Ends) -> None:
    """Print what the ranks print until all have ended, or `GRACE_S` after one has failed."""
    until = None
    while len(ends.codes) < size:
        try:
            left = None if until is None else max(0.0, until - time.monotonic())
            rank, kind, what = events.get(timeout=left)
        except Empty:
            return
        if kind != ENDED:
            stream = sys.stdout if kind == 1 else sys.stderr
            print(what, end="", file=stream, flush=True)
            continue
        ends.add(rank, what)
        if until is None and ends.codes[rank] not in (0, 130, 143):
            until = time.monotonic() + GRACE_S


def _follow(rank: int, stream: Any, events: SimpleQueue[tuple[int, int, str | int]]) -> None:
    """Put what an actor reports into a queue."""
    try:
        for reference in stream:
            events.put((rank, *ray.get(reference)))
    except RayError as error:
        events.put((rank, ENDED, one_line(error)))


@contextmanager
def _signals_to(agents: Sequence[Any], ends: Ends) -> Iterator[None]:
    """Pass Ctrl-C and SIGTERM on to the ranks, which end their step first."""

    def handle(number: int, frame: object) -> None:
        ends.stopped = number
        for agent in agents:
            agent.signal.remote(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def by_machine(places: Sequence[Place]) -> list[int]:
    """Order of the actors in which those of a machine are neighbours, as with torchrun."""
    machines = list(dict.fromkeys(place.machine for place in places))
    return sorted(range(len(places)), key=lambda i: machines.index(places[i].machine))


def check_versions(places: Sequence[Place]) -> None:
    """Check that all machines have the packages of this one.

    Raises:
        UserError: if one has others.
    """
    for rank, place in enumerate(places):
        if place.versions != versions():
            raise UserError(
                f"the node of rank {rank} has {dict(place.versions)}, but this one {versions()}:"
                " numbers would differ. Install the same versions on all nodes"
            )


def rank_environments(places: Sequence[Place], port: int, threads: int) -> list[dict[str, str]]:
    """Environment variables of each rank, with the names and meanings of torchrun.

    Args:
        places: where the ranks are, in their order.
        port: port of their store, beside rank 0.
        threads: CPU threads of the trainer in each.
    """
    machines = list(dict.fromkeys(place.machine for place in places))
    found = []
    for rank, place in enumerate(places):
        here = [other for other in places if other.machine == place.machine]
        earlier = sum(other.machine == place.machine for other in places[:rank])
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(earlier),
            "GROUP_RANK": str(machines.index(place.machine)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(threads),
        }
        if place.gpus:  # rank i of a machine uses the GPU i of those that it sees
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for p in here for gpu in p.gpus)
        if place.address == "127.0.0.1":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        found.append(environment)
    return found
