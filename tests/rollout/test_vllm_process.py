"""The client of vLLM's process and the worker script, on a stand-in for vLLM: the messages over the
pipe, and every way in which the process can end.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.controller.scripted import collect
from tests.rollouts import GeneratorRollout
from vllm_processes import load, log_probs, score, start, use_fake, weights

from sixfold.backends import vllm_process, weight_files
from sixfold.backends.vllm_process import VllmProcess
from sixfold.checks.environment import Environment
from sixfold.controller.rounds import StaleGroup
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import EngineLost, SampleKey, wait_for
from sixfold.seeds import sample_seed
from sixfold.types import SamplingParams, Task

TASKS = [Task(f"t{i}", f"{i}+{'7' * i}=") for i in (3, 0, 1, 12)]
Change = Callable[[str], None]


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_fake(patch)
        yield


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VllmProcess]:
    """One process for all tests that do not damage it, with its own interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        use_fake(patch, forking=False)
        process = start(policy)
    load(process, weights(policy), 4)
    yield process
    process.close()


def make_rollout(policy: Policy, engine: VllmProcess, samples: int = 3) -> GeneratorRollout:
    params = SamplingParams(max_tokens=10, temperature=0.8, stop_token_ids=policy.stop_token_ids)
    return GeneratorRollout(engine, Renderer(policy.tokenizer), params, samples)


@pytest.mark.nightly
@pytest.mark.slow
def test_streams_are_those_of_the_policy_at_the_sampling_temperature(
    policy: Policy, engine: VllmProcess
) -> None:
    renderer = Renderer(policy.tokenizer)
    groups = make_rollout(policy, engine).generate(TASKS, seed=1)
    assert [g.task for g in groups] == TASKS
    for group in groups:
        assert [t.sample for t in group.trajectories] == [0, 1, 2]
        prompt = renderer.encode(group.task)
        for t in group.trajectories:
            n, p = len(t.tokens), len(prompt)
            assert (
                t.task_id == group.task.id
                and t.tokens[:p] == prompt
                and [u.start for u in t.turns] == [p]
            )
            assert t.mask == [False] * p + [True] * (n - p) and t.version == [-1] * p + [4] * (
                n - p
            )
            assert t.finish_reason == (
                "stop" if t.tokens[-1] in policy.stop_token_ids else "length"
            )
            assert t.finish_reason == "stop" or n - p == 10
            assert t.logp[p:] == pytest.approx(
                log_probs(policy, t.tokens, 0.8)[p - 1 :].tolist(), abs=1e-5
            )
            assert t.text == renderer.decode(t.tokens[p:]) and t.seconds > 0
    assert {t.finish_reason for g in groups for t in g.trajectories} == {"stop", "length"}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sample_is_a_function_of_seed_task_and_index_alone(
    policy: Policy, engine: VllmProcess
) -> None:
    def drawn(tasks: list[Task], seed: int, samples: int = 3) -> dict[tuple[str, int], list[int]]:
        groups = make_rollout(policy, engine, samples).generate(tasks, seed)
        return {(t.task_id, t.sample): t.tokens for g in groups for t in g.trajectories}

    first = drawn(TASKS, 1)
    assert drawn(TASKS[::-1], 1) == first
    assert drawn(TASKS[1:2], 1, 2) == {(TASKS[1].id, k): first[TASKS[1].id, k] for k in range(2)}
    assert all(drawn(TASKS, 2)[key] != tokens for key, tokens in first.items())


def test_seeds_are_frozen_and_differ_in_every_argument() -> None:
    """A change of the formula would change every run. The three values were computed once with
    hashlib alone.
    """
    assert [sample_seed(*a) for a in ((0, "t", 0), (0, "t", 1), (7, "prompt", 15))] == SEEDS
    many = {sample_seed(s, f"{t}", k) for s in range(10) for t in range(10) for k in range(10)}
    assert len(many) == 1000 and max(many) < 1 << 48


SEEDS = [256115168291305, 15660987455161, 19405941780198]


@pytest.mark.slow
def test_metrics_count_one_call(policy: Policy, engine: VllmProcess) -> None:
    rollout = make_rollout(policy, engine)
    trajectories = [t for g in rollout.generate(TASKS, 1) for t in g.trajectories]
    stats = rollout.stats()
    assert stats["rollout/tokens"] == sum(t.sampled_length for t in trajectories)
    assert stats["rollout/prompt_tokens"] == sum(t.prompt_length for t in trajectories)
    assert stats["rollout/reused_frac"] == pytest.approx(
        12 / stats["rollout/prompt_tokens"]
    )  # the stand-in reports 1 token per request


def test_scores_are_at_temperature_one(policy: Policy, engine: VllmProcess) -> None:
    tokens = [7, 9, 11, 6, 30, 8]
    assert score(engine, tokens) == pytest.approx(log_probs(policy, tokens).tolist(), abs=1e-5)


def test_one_task_twice_in_a_call_is_refused(policy: Policy, engine: VllmProcess) -> None:
    with pytest.raises(ValueError, match="a task id is repeated"):
        make_rollout(policy, engine).generate([TASKS[0], TASKS[0]], 1)


@pytest.mark.slow
def test_tokens_of_another_weight_version_are_refused(policy: Policy, engine: VllmProcess) -> None:
    engine.version = 5  # only in the client
    try:
        with (
            Environment([lambda completion, task: 1.0]) as environment,
            pytest.raises(StaleGroup, match=r"version \[4\], but the sampler has version 5"),
        ):
            collect(make_rollout(policy, engine).driver(), environment, TASKS, 1)
    finally:
        engine.version = 4


@pytest.mark.slow
def test_load_changes_scores_and_version_and_leaves_no_file(
    policy: Policy, engine: VllmProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_memory", lambda size: str(tmp_path))
    other = replace(policy, model=copy.deepcopy(policy.model))
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.3)
    tokens = [7, 9, 11, 6, 30, 8]
    try:
        load(engine, weights(other), 9)
        assert engine.version == 9
        assert score(engine, tokens) == pytest.approx(log_probs(other, tokens).tolist(), abs=1e-5)
        assert {
            v
            for g in make_rollout(other, engine).generate(TASKS, 1)
            for t in g.trajectories
            for v in t.version[t.prompt_length :]
        } == {9}
    finally:
        load(engine, weights(policy), 4)
    assert list(tmp_path.iterdir()) == []
    assert score(engine, tokens) == pytest.approx(log_probs(policy, tokens).tolist(), abs=1e-5)


# How it can end


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Change:
    return lambda kind: use_fake(monkeypatch, kind)


@pytest.mark.slow
def test_several_gpus_that_share_each_matrix_read_every_load(policy: Policy, fake: None) -> None:
    """From a folder, with the tied head."""
    process = start(policy, tensor_parallel_size=2)
    tokens = [7, 9, 11, 6, 30, 8]
    other = replace(policy, model=copy.deepcopy(policy.model))
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.5)
    for version, current in enumerate((policy, other)):
        load(process, weights(current), version)
        gap = torch.tensor(score(process, tokens)) - log_probs(current, tokens)
        assert gap.abs().max() < 1e-4
    process.close()


def test_an_interpreter_that_is_not_there_is_refused(policy: Policy) -> None:
    with pytest.raises(
        UserError, match=r"rollout.backend.python = '/no/such/python': interpreter not found"
    ):
        start(policy, "/no/such/python")


def test_an_interpreter_without_vllm_says_how_to_get_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(
        UserError,
        match=re.escape(
            f"{sys.executable} does not have vllm. Run pip install 'sixfold[vllm]', or set"
        ),
    ):
        start(policy)


def test_a_vllm_that_cannot_be_imported_says_why(policy: Policy, fault: Change) -> None:
    fault("broken")
    with pytest.raises(UserError, match=r"vLLM failed:\n(.*\n)*.*ImportError: libnothing.so"):
        start(policy)


def test_end_of_the_process_is_reported_with_its_last_output_and_is_final(
    policy: Policy, fault: Change
) -> None:
    fault("die")
    engine = start(policy)
    with pytest.raises(
        UserError,
        match=(
            r"exit code 3. Continue with --resume. Its last output:\n(.*\n)*  MemoryError: no room"
            r" for the cache"
        ),
    ):
        make_rollout(policy, engine).generate(TASKS, 1)
    with pytest.raises(EngineLost, match="exit code 3"):
        score(engine, [1, 2])
    engine.close()


def test_a_kill_is_named(policy: Policy, fake: None) -> None:
    engine = start(policy)
    engine._child.process.kill()
    engine._child.process.wait()
    with pytest.raises(UserError, match="killed by SIGKILL; the machine may be out of memory"):
        score(engine, [1, 2])


@pytest.mark.slow
def test_silence_times_out_and_heartbeats_extend_the_limit(
    policy: Policy, fault: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "SILENCE_S", 1.5)
    fault("hang")
    hung = start(policy)
    with pytest.raises(UserError, match=r"no sign of life for 1.5 s"):
        score(hung, [1, 2])
    assert hung._child.process.poll() == -signal.SIGKILL
    fault("slow")  # six steps of 0.4 s, with one sign of life per second
    slow = start(policy)
    monkeypatch.setattr(vllm_process, "SILENCE_S", 30.0)
    load(slow, weights(policy), 0)  # imports torch, which takes an unknown time
    monkeypatch.setattr(vllm_process, "SILENCE_S", 1.5)
    began = time.monotonic()
    wait_for(slow.generate([7, 8], SamplingParams(max_tokens=6), SampleKey("t")))
    assert time.monotonic() - began > 2
    slow.close()


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named(policy: Policy, fake: None) -> None:
    engine = start(policy)
    with pytest.raises(UserError, match=r"KeyError: 'no.such.weight'"):
        load(engine, {"no.such.weight": torch.zeros(2)}, 1)
    assert engine.version == -1


@pytest.mark.slow
def test_altered_weights_end_the_process(
    policy: Policy, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never samples from them."""
    write = weight_files.save_file

    def altered(own: dict[str, torch.Tensor], *given: Any) -> None:
        write({name: tensor * 1.5 for name, tensor in own.items()}, *given)

    monkeypatch.setattr(weight_files, "save_file", altered)
    with pytest.raises(EngineLost, match=r"torn or altered: '.*' differs from its checksum"):
        load(start(policy), weights(policy), 9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "hang"])
def test_the_process_does_not_outlive_a_killed_parent(
    kind: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both while it waits for a request and during a request, when it does not read the pipe."""
    use_fake(monkeypatch, kind, forking=False)
    told, tell = os.pipe()
    parent = os.fork()
    if not parent:
        engine = start(policy)
        if kind:
            engine._child.post(b'{"id": 0, "do": "score", "tokens": [1, 2]}', answers=0)
        os.write(tell, str(engine._child.process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(tell)
    pid = int(os.read(told, 100))
    os.close(told)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    until = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
