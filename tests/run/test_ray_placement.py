"""Samplers that are actors of a Ray cluster: the same run, whatever becomes of an actor."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sixfold.backends.ray_sampler import reserved
from sixfold.backends.samplers import Samplers
from sixfold.errors import UserError

from .test_placement import PROCESSES, bits, run

RAY: dict[str, Any] = {**PROCESSES, "placement__kind": "ray"}


def listening(family: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses and ports on which processes listen."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_ray_computes_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Also while an actor is killed. R-189: the same tokens, the same training, the same weights.

    The cluster listens on loopback alone, and none of its processes outlives the run.
    """
    generate, asked, places = Samplers.generate, 0, set[tuple[str, int]]()
    me = psutil.Process()
    earlier = [me, *me.children(recursive=True)]  # of other tests
    taken = listening(earlier)
    started: list[psutil.Process] = []

    async def killing(self: Samplers, *given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 40:
            started.extend(p for p in me.children(recursive=True) if p not in earlier)
            places.update(listening([me, *started]) - taken)
            actor: Any = self.places[0].process
            os.kill(actor.pid, signal.SIGKILL)
        return await generate(self, *given, **more)

    here = run(tmp_path, "here", algorithm__name=algorithm)
    monkeypatch.setattr(Samplers, "generate", killing)
    there = run(tmp_path, "there", algorithm__name=algorithm, **RAY)
    assert asked > 40
    assert bits(there) == bits(here)
    assert {address.removeprefix("::ffff:") for address, _ in places} == {"127.0.0.1"}
    assert started
    assert not psutil.wait_procs(started, timeout=60)[1]


def refused(*arguments: Any) -> str:
    """The error of a reservation, in one line."""
    with pytest.raises(UserError) as caught, reserved(*arguments):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.nightly
def test_a_cluster_that_is_too_small_is_refused() -> None:
    with reserved("", 2, 1, 0, 60.0):
        assert "need 4 CPUs, and the Ray cluster has 2" in refused("", 2, 2, 0, 60.0)
        assert "need 2 GPUs, and the Ray cluster has 0" in refused("", 2, 1, 1, 60.0)
        assert "others use them" in refused("", 2, 1, 0, 0.1)


def test_an_address_without_a_cluster_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    line = refused(address, 1, 1, 0, 60.0)
    assert f"placement.address = '{address}'" in line and "ray start --head" in line
