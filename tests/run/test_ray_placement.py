"""Samplers that are actors of a Ray cluster: the same run, whatever becomes of an actor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import GetTimeoutError

from sixfold.backends.ray_cluster import reserved
from sixfold.backends.samplers import Samplers
from sixfold.cli import main
from sixfold.errors import RunFailed, UserError
from sixfold.run import ray_ranks, start
from sixfold.run.rank_agent import Place, versions
from sixfold.run.ray_ranks import (
    Ends,
    by_machine,
    check_versions,
    rank_environments,
    wait_for_ranks,
)
from sixfold.run.restart import AGAIN

from .processes import tiny_recipe
from .test_placement import PROCESSES, bits, run
from .test_several_ranks import METHODS, trained, weights

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


ON_RANKS: dict[str, Any] = {"placement__kind": "ray", "placement__ranks": 2}


@pytest.mark.nightly
@pytest.mark.parametrize("samplers", [0, 1])
def test_ranks_on_ray_train_as_those_of_torchrun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], samplers: int
) -> None:
    """R-189, with samplers beside them too. A rank that is killed costs a restart: R-308."""
    settings = {**METHODS["grpo"], "model__scratch__head_dim": 16, "checkpoint__every": 1}
    apart = {"placement__kind": "processes"} if samplers else {}
    there = trained(tmp_path, "torchrun", 2, **settings, **apart)
    more = {"run__steps": 3, "run__restarts": 1, "placement__samplers": samplers}
    flags = tiny_recipe(tmp_path, **settings, **ON_RANKS, **more, run__name="ray")
    me, killed = psutil.Process(), threading.Event()
    earlier = set(me.children(recursive=True))

    def kill_a_rank() -> None:
        while not list(tmp_path.glob("ray/checkpoints/step-000001")):
            time.sleep(0.05)
        family = set(me.children(recursive=True)) - earlier
        next(p for p in family if is_rank(p) and p.environ()["RANK"] == "1").kill()
        killed.set()

    threading.Thread(target=kill_a_rank, daemon=True).start()
    assert main(["train", "demo", *flags]) == 0
    assert killed.is_set() and "All ranks start again: restart 1 of 1" in capfd.readouterr().err
    left, right = weights(tmp_path / "ray", 3), weights(there, 3)
    assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
    left_over = [p for p in me.children(recursive=True) if p not in earlier]
    assert not psutil.wait_procs(left_over, timeout=60)[1]


def is_rank(process: psutil.Process) -> bool:
    """True for the process of a rank, False for its supervisor and all others."""
    try:
        parent = process.parent()
        return bool(parent) and all("rank_agent" in str(p.cmdline()) for p in (process, parent))
    except psutil.Error:
        return False


@pytest.mark.nightly
def test_ranks_end_with_the_program_that_has_started_them(tmp_path: Path) -> None:
    """Whatever kills it. Their first error is its error."""
    flags = tiny_recipe(tmp_path, **ON_RANKS, placement__samplers=0, run__steps=9999)
    command = [sys.executable, "-m", "sixfold", "train", "demo", *flags, "--run.name", "run"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as driver:
        while not list(tmp_path.glob("run/checkpoints/step-*")):
            assert driver.poll() is None
            time.sleep(0.1)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert sum(map(is_rank, family)) == 2
        driver.kill()
    assert not psutil.wait_procs(family, timeout=60)[1]
    wrong = subprocess.run(
        [*command, "--model.path", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and wrong.stderr.count("sixfold: error:") == 1, wrong.stderr


def places(*machines: str, gpus: int = 0) -> list[Place]:
    return [
        Place(name, f"10.0.0.{name}", tuple(str(5 + i) for _ in range(gpus)), versions())
        for i, name in enumerate(machines)
    ]


def test_ranks_get_the_variables_of_torchrun() -> None:
    """Neighbouring ranks are on one machine, and each uses the GPU that Ray has given to it."""
    found = places("1", "2", "1", gpus=1)
    order = by_machine(found)
    assert order == [0, 2, 1]
    first, second, third = rank_environments([found[i] for i in order], 29500, 3)
    assert first == {
        "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_RANK": "0",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": "5,7",
    }  # fmt: skip
    assert [second[key] for key in ("LOCAL_RANK", "GROUP_RANK", "RANK")] == ["1", "0", "1"]
    assert second["CUDA_VISIBLE_DEVICES"] == "5,7" and third["CUDA_VISIBLE_DEVICES"] == "6"
    assert [third[key] for key in ("LOCAL_RANK", "GROUP_RANK")] == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in rank_environments(places("1"), 1, 1)[0]
    with pytest.raises(UserError, match=r"the node of rank 1 has .*'torch': '1'"):
        check_versions([found[0], replace(found[1], versions={"sixfold": "1", "torch": "1"})])


def test_the_first_failure_decides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output of all ranks is passed on. The others have some seconds to end."""
    monkeypatch.setattr(ray_ranks, "GRACE_S", 0.0)

    def ends(*reports: tuple[int, int, str | int], size: int = 2) -> tuple[str, int]:
        events, found = SimpleQueue[tuple[int, int, str | int]](), Ends()
        for report in reports:
            events.put(report)
        wait_for_ranks(size, events, found)
        return found.lost, found.said

    assert ends((0, 1, "a"), (1, 2, "b"), (1, 0, 0), (0, 0, 0)) == ("", 0)
    assert capsys.readouterr() == ("a", "b")
    assert ends((1, 0, 1), (0, 0, 3)) == ("", 3), "rank 0 has printed what failed"
    assert ends((1, 0, -9)) == ("rank 1 was killed by SIGKILL", 0), "rank 0 does not answer"
    assert ends((1, 0, "the node died")) == ("rank 1 was lost: the node died", 0)
    assert ends((0, 0, AGAIN), (1, 0, 1))[0] == "rank 0 got no answer from a part of the run"
    assert ends((1, 0, 130), (0, 0, 130)) == ("", 130), "Ctrl-C: a rank may still save"
    assert ends((1, 0, -15), (0, 0, 143)) == ("", 143), "before it has begun"


def test_a_signal_that_kills_a_rank_that_begins_costs_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def once(cluster: Any, settings: Any, arguments: Any, environment: Any, ends: Ends) -> None:
        runs.append(environment)
        with ray_ranks._signals_to([], ends):
            if len(runs) == 2:
                signal.raise_signal(signal.SIGTERM)
        ends.add(0, -signal.SIGKILL)

    @contextmanager
    def connected(*given: object) -> Iterator[None]:
        clusters.append("up")
        yield
        clusters.append("down")

    clusters: list[str] = []
    monkeypatch.setattr(ray_ranks, "_run_once", once)
    monkeypatch.setattr(ray_ranks, "connected", connected)
    monkeypatch.setattr(ray_ranks, "reserved", lambda *given: nullcontext())
    monkeypatch.setattr(ray_ranks.ray, "cluster_resources", dict)
    settings = ray_ranks.RankSettings("", 2, 1, 1, "cpu", 1.0, restarts=5)
    again = ["train", "--resume", str(tmp_path)]
    assert ray_ranks.train_on_ray(settings, again, tmp_path, again) == 128 + signal.SIGTERM
    assert [one["SIXFOLD_RESTARTS"] for one in runs] == ["0", "1"]
    assert clusters == ["up", "down"] * 2, "a lost cluster is not used again"


def test_a_restart_waits_for_a_machine_and_a_start_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def once(cluster: Any, settings: Any, arguments: Any, environment: Any, ends: Ends) -> None:
        runs.append(arguments)
        ends.add(0, 0 if len(runs) == 2 else "the node died")

    @contextmanager
    def reserved(*given: object) -> Iterator[None]:
        if sizes.pop(0) < 2:
            raise UserError("the Ray cluster has 1")
        yield

    monkeypatch.setattr(ray_ranks, "_run_once", once)
    monkeypatch.setattr(ray_ranks, "POLL_S", 0.0)
    monkeypatch.setattr(ray_ranks, "connected", lambda *given: nullcontext())
    monkeypatch.setattr(ray_ranks, "reserved", reserved)
    monkeypatch.setattr(ray_ranks.ray, "cluster_resources", dict)
    settings = ray_ranks.RankSettings("", 2, 1, 1, "cpu", 60.0, restarts=1)
    again = ["train", "--resume", str(tmp_path)]
    sizes = [2, 1, 1, 2]
    assert ray_ranks.train_on_ray(settings, again, tmp_path, again) == 0
    assert len(runs) == 2 and not sizes
    sizes = [1]
    with pytest.raises(UserError, match="has 1"):
        ray_ranks.train_on_ray(settings, again, tmp_path, again)


def test_what_is_lost_before_a_run_begins_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "_ran", lambda *given: given[-1].add(0, "no answer") or True)
    settings = ray_ranks.RankSettings("", 2, 1, 1, "cpu", 60.0, restarts=5)
    with pytest.raises(RunFailed, match=r"rank 0 was lost: no answer$"):
        ray_ranks.train_on_ray(settings, ["train"], tmp_path, ["train", "--resume", "r"])


def test_ranks_that_do_not_start_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the node of a cluster has died: a restart may help, so it is no error yet."""

    def never(*_: object, **__: object) -> None:
        raise GetTimeoutError("no answer")

    class Agent:
        place = SimpleNamespace(remote=lambda: None)

    killed: list[Agent] = []
    monkeypatch.setattr(ray_ranks.ray, "get", never)
    monkeypatch.setattr(ray_ranks.ray, "kill", killed.append)
    settings = ray_ranks.RankSettings("", 2, 1, 1, "cpu", 1.0, restarts=5)
    cluster: Any = SimpleNamespace(start=lambda *_, **__: Agent())
    ray_ranks._run_once(cluster, settings, ["train"], {}, ends := Ends())
    assert ends.lost.startswith("a rank has not started") and len(killed) == 2


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


@pytest.mark.parametrize(("size", "starts"), [("1", True), (None, True), ("2", False)])
def test_one_process_starts_the_ranks_and_a_rank_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str | None, starts: bool
) -> None:
    """Some clusters set WORLD_SIZE to 1 in every job."""
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setattr(ray_ranks, "train_on_ray", lambda *given: 7)
    monkeypatch.setattr(start, "train_run", lambda *given, **more: 8)
    settings = ["--placement.kind", "ray", "--placement.ranks", "2", "--run.dir", str(tmp_path)]
    assert main(["train", "demo", *settings]) == (7 if starts else 8)
