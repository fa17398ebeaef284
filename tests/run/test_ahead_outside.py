"""vLLM and servers that sample ahead of the trainer, or of which there are several: every token
carries the version of the weights that sampled it, also where new weights reach a running request
and where a process or a server is lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sixfold.backends.samplers import Samplers
from sixfold.backends.sixfold_server import SixfoldServer
from sixfold.commands.train import run as train
from sixfold.errors import UserError
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.rollout.generator import EngineLost
from sixfold.run.start import train_run
from sixfold.types import Task
from sixfold_serving import serve
from tests.server.serving import running

from ..forked_programs import OF_A_RUN, fork_programs
from .processes import metrics, tiny_recipe
from .test_placement import bits, trained

FAKE = Path(__file__).parents[1] / "rollout/fake_vllm"
# Few requests run at a time, so groups end one after another, while others have begun.
AHEAD: dict[str, Any] = dict(
    run__steps=4, rollout__staleness=2, rollout__window=1.0, rollout__max_new_tokens=50,
    checkpoint__every=1, checkpoint__keep=9, sft__steps=2, trainer__learning_rate=0.01,
    # With heads of 8, the last bit of a log-prob depends on the number of rows of a step.
    model__scratch__head_dim=16,
)  # fmt: skip


PROCESSES: dict[str, Any] = dict(placement__kind="processes", placement__samplers=2)
IN_TURN: dict[str, Any] = {**AHEAD, "rollout__staleness": 0, "rollout__max_new_tokens": 12}
del IN_TURN["rollout__window"]


def length(completion: str, task: Task) -> float:
    """A reward that random completions differ in."""
    return len(completion) / 12


def run(folder: Path, name: str = "ahead", base: dict[str, Any] = AHEAD, **more: Any) -> Path:
    flags = tiny_recipe(folder, **{**base, **more})
    assert train_run(parse_recipe(f"run.name = '{name}'", "test", flags), reward=length) == 0
    return folder / name


@torch.no_grad()
def gaps(folder: Path) -> tuple[float, float]:
    """Largest difference of a sampled token's log-prob from a fresh forward pass, in nats.

    Returns:
        With the weights that the token names, and with those of the version before or after.
    """
    models = {}
    for version in range(5):
        (path,) = folder.glob(f"checkpoints/{'step' if version else 'sft'}-{version or 2:06d}")
        source = ModelConfig(path=str(path / "model"))
        models[version] = load_policy(source, seed=0, device="cpu").model
    right = wrong = 0.0
    for file in folder.glob("rollouts/*"):
        for row in read_rollouts(file):
            tokens = torch.tensor(row["tokens"])
            logp = {
                version: model(tokens[None], use_cache=False)
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, tokens[1:, None])[:, 0]
                for version, model in models.items()
            }
            for at, version in enumerate(row["version"]):
                if version >= 0:
                    own = row["logp"][at]
                    right = max(right, abs(own - float(logp[version][at - 1])))
                    wrong = max(wrong, abs(own - float(logp[version ^ 1][at - 1])))
    return right, wrong


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of vLLM, of which a stand-in runs."""
    fork_programs(monkeypatch, targets=OF_A_RUN)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_VLLM", "")
    return dict(rollout__backend__kind="vllm", rollout__backend__python=sys.executable)


def lose(patch: pytest.MonkeyPatch, lost: Callable[[Samplers], None], at: int) -> None:
    """Call `lost` at a call of `Samplers.generate`, while others run."""
    generate, calls = Samplers.generate, 0

    async def losing(self: Samplers, *given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            lost(self)
        return await generate(self, *given, **more)

    patch.setattr(Samplers, "generate", losing)


@pytest.mark.nightly
def test_every_token_of_vllm_has_the_log_prob_of_its_version(
    tmp_path: Path, vllm: dict[str, Any]
) -> None:
    """With stop strings, tokens arrive one by one, without vLLM's own versions."""
    ahead = run(tmp_path, rollout__stop="['1']", engine__max_running=3, **vllm)
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    assert len(trained(ahead)) == len(set(trained(ahead))) == 16
    right, wrong = gaps(ahead)
    assert right < 1e-4 and wrong > 1e-2
    with pytest.raises(UserError, match=r"rollout.backend.kind = 'vllm'.*cannot be replayed"):
        train(["--replay-schedule", str(ahead)])


@pytest.mark.nightly
def test_the_schedule_of_a_server_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    """So its versions are those that sampled: another version gives other tokens."""
    flags = tiny_recipe(tmp_path, **AHEAD)
    model = parse_recipe("run.name = 'x'", "test", flags).model
    policy = load_policy(model, seed=99, device="cpu")
    with running(policy, allow_weight_updates=True, max_running=3) as server:
        backend = dict(rollout__backend__kind="sixfold", rollout__backend__url=server.url)
        ahead = run(tmp_path, **backend)
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    recipe = load_recipe(str(ahead / "recipe.toml"), ["--rollout.backend.kind=engine"])
    recipe = recipe.with_settings({"run.name": "again"})
    schedule = ahead / "schedule.jsonl"
    assert train_run(recipe, reward=length, replayed=schedule) == 0
    assert bits(tmp_path / "again") == bits(ahead)


def killed(pool: Samplers) -> None:
    process: Any = pool.places[1].process
    os.kill(process._child.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_vllm_processes_sample_ahead_though_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: dict[str, Any]
) -> None:
    """Its requests are sampled again, from the weights that its replacement has."""
    lose(monkeypatch, killed, at=60)
    ahead = run(tmp_path, engine__max_running=3, **vllm, **PROCESSES)
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    assert len(trained(ahead)) == len(set(trained(ahead))) == 16
    right, wrong = gaps(ahead)
    assert right < 1e-4 and wrong > 1e-2


@pytest.mark.nightly
@pytest.mark.slow
def test_two_vllm_processes_compute_what_one_does_though_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: dict[str, Any]
) -> None:
    one = run(tmp_path, "one", IN_TURN, **vllm)
    lose(monkeypatch, killed, at=40)
    assert bits(run(tmp_path, "two", IN_TURN, **vllm, **PROCESSES)) == bits(one)


@pytest.mark.nightly
@pytest.mark.slow
def test_vllm_in_an_actor_of_ray_gives_every_token_the_log_prob_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: dict[str, Any]
) -> None:
    """Though it is killed. Another takes its place, with the newest weights. R-190, R-174."""
    monkeypatch.syspath_prepend(str(FAKE))  # for the processes of the cluster

    def kill_its_vllm(pool: Samplers) -> None:
        actor: Any = pool.places[0].process
        family = psutil.Process(actor.pid).children(recursive=True)
        next(p for p in family if "vllm_worker.py" in str(p.cmdline())).kill()

    lose(monkeypatch, kill_its_vllm, at=60)
    ahead = run(tmp_path, engine__max_running=3, placement__kind="ray", **vllm)
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    assert len(trained(ahead)) == len(set(trained(ahead))) == 16
    right, wrong = gaps(ahead)
    assert right < 1e-4 and wrong > 1e-2


@pytest.mark.nightly
def test_two_servers_compute_what_one_process_does_though_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection breaks. The server gets the weights again, and samples the requests again."""
    here = run(tmp_path, "here", IN_TURN)
    broken: list[object] = []
    generate = SixfoldServer.generate

    async def breaking(self: SixfoldServer, *given: Any, **more: Any) -> Any:
        if self in broken:
            raise EngineLost("the connection is broken")
        return await generate(self, *given, **more)

    monkeypatch.setattr(SixfoldServer, "generate", breaking)
    # Servers of one process, but two threads cannot load models at the same time.
    read, one = serve._read_weights, threading.Lock()

    def read_alone(*given: Any) -> Any:
        with one:
            return read(*given)

    monkeypatch.setattr(serve, "_read_weights", read_alone)
    lose(monkeypatch, lambda pool: broken.append(pool.places[0].process), at=40)
    model = load_recipe(str(here / "recipe.toml")).model
    policies = [load_policy(model, seed=seed, device="cpu") for seed in (98, 99)]
    with (
        running(policies[0], allow_weight_updates=True) as first,
        running(policies[1], allow_weight_updates=True) as second,
    ):
        servers = dict(
            rollout__backend__kind="sixfold", rollout__backend__url=first.url,
            rollout__backend__replicas=f"['{second.url}']", rollout__backend__restarts=1,
        )  # fmt: skip
        assert bits(run(tmp_path, "there", IN_TURN, **servers)) == bits(here)
        assert broken
        with pytest.raises(EngineLost, match=r"rollout.backend.restarts = 0. Continue with"):
            broken.clear()
            lose(monkeypatch, lambda pool: broken.append(pool.places[0].process), at=9)
            run(tmp_path, "lost", IN_TURN, **{**servers, "rollout__backend__restarts": 0})
