"""The replay buffer: what a step draws, what leaves, and what a checkpoint restores."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from sixfold.batch import Batch, collate
from sixfold.controller.replay_buffer import Buffered, ReplayBuffer, mean_ratios
from sixfold.errors import UserError
from sixfold.types import Group, Reward, Task, Trajectory

TASKS = {f"t{n}": Task(f"t{n}", f"prompt {n // 2}") for n in range(12)}
"""Two tasks share each prompt."""


def group(number: int, ratio: float = 1.0) -> Group:
    """A group of two trajectories whose trainer's log-probs are log(ratio) above the sampled."""
    task = TASKS[f"t{number}"]
    made = [
        Trajectory.one_turn(
            task.id, sample, [1, 2], [3] * (sample + 1), [-0.1 / 3] * (sample + 1),
            [7] * (sample + 1), "stop", reward=Reward(ratio),
        )
        for sample in range(2)
    ]  # fmt: skip
    return Group(task, made)


def scored(groups: list[Group]) -> Batch:
    """Batch whose log-ratios are those that the rewards name, and anything at other tokens."""
    batch = collate(groups)
    ratios = torch.tensor([t.reward.value for g in groups for t in g.trajectories])  # type: ignore[union-attr]
    prox = (batch.old_logp + ratios.log()[:, None]).where(batch.mask, torch.nan)
    return batch.with_(prox_logp=prox)


def buffer(**more: Any) -> ReplayBuffer:
    given = {"share": 0.5, "max_age": 2, "gamma": 0.5, "capacity": 0, "max_ratio": 2.0}
    return ReplayBuffer(**{**given, "tasks": TASKS, **more})


def step(own: ReplayBuffer, new: list[Group], seed: int = 0) -> tuple[list[str], dict[str, float]]:
    """Train one step. Returns the ids of the replayed tasks, and the metrics."""
    drawn = own.draw(new, seed)
    groups = [*new, *drawn]
    return [g.task.id for g in drawn], own.trained(groups, scored(groups))


def held(own: ReplayBuffer) -> list[str]:
    return [b.group.task.id for b in own.groups]


def test_groups_are_drawn_with_weights_gamma_to_the_age() -> None:
    """Two groups, of ages 1 and 2: the younger is first with probability 1 / (1 + gamma)."""
    counts: Counter[str] = Counter()
    own = buffer()
    step(own, [group(0)])
    own.groups.append(Buffered(group(2), step=0))
    for seed in range(4000):
        counts[own.draw([group(4)], seed)[0].task.id] += 1
        assert own.draw([group(4)], seed) == own.draw([group(4)], seed)
    deviation = math.sqrt(4000 * (2 / 3) * (1 / 3))
    assert abs(counts["t0"] - 4000 * 2 / 3) < 4 * deviation


def test_no_two_groups_of_a_step_share_a_prompt() -> None:
    own = buffer(max_age=4)
    step(own, [group(0), group(2)])
    step(own, [group(1), group(4)])
    for seed in range(50):
        new = [group(5), group(6), group(8)]  # the prompt of t5 is that of t4
        drawn = [g.task.id for g in own.draw(new, seed)]
        assert len(drawn) == 2 and "t2" in drawn and {*drawn} & {"t0", "t1"}


@pytest.mark.parametrize(("share", "count"), [(0.5, 4), (0.25, 1), (0.2, 1), (0.1, 0)])
def test_the_share_is_that_of_the_whole_step(share: float, count: int) -> None:
    own = buffer(share=share)
    step(own, [group(n) for n in (0, 2, 4, 6)])
    replayed, found = step(own, [group(n) for n in (8, 10)] * 2)
    assert len(replayed) == count
    assert found["replay/frac"] == count / (4 + count)
    assert found.get("replay/age_mean") == (1 if count else None)


def test_the_oldest_and_the_farthest_leave() -> None:
    own = buffer(max_age=2, capacity=3)
    step(own, [group(0)])
    _, found = step(own, [group(2), group(4, ratio=2.1)])
    assert held(own) == ["t0", "t2"] and found["replay/ratio_dropped"] == 1
    step(own, [group(6)])
    assert held(own) == ["t2", "t6"]  # t0 would be 3 steps old
    step(own, [group(8), group(10)])
    assert held(own) == ["t6", "t8", "t10"]
    step(own, [group(0), group(2), group(4), group(1)])
    assert held(own) == ["t2", "t4", "t1"]


def test_a_replayed_group_leaves_when_the_policy_has_moved_away() -> None:
    own = buffer(max_age=4)
    step(own, [group(0)])
    moved = group(2)
    drawn = own.draw([moved], 0)
    batch = scored([moved, replace(drawn[0], trajectories=group(0, ratio=3.0).trajectories)])
    assert own.trained([moved, *drawn], batch)["replay/ratio_dropped"] == 1
    assert held(own) == ["t2"]


def test_the_mean_ratio_counts_sampled_tokens() -> None:
    """One token of ratio 1.5 and two of 3: (1.5 + 3 + 3) / 3 = 2.5."""
    mixed = group(0)
    mixed.trajectories[0].reward, mixed.trajectories[1].reward = Reward(1.5), Reward(3.0)
    found = mean_ratios(scored([group(2, 0.5), mixed]), 2)
    assert found == pytest.approx([0.5, 2.5], abs=1e-6)


def test_a_restored_buffer_goes_on_with_the_same_groups() -> None:

    def greedy(number: int) -> Group:
        return replace(group(number), greedy=group(number).trajectories[0])

    own = buffer()
    step(own, [greedy(0), greedy(2)])
    step(own, [greedy(4), greedy(6)])
    saved = json.loads(json.dumps(own.state(), allow_nan=False))
    other = buffer()
    other.load(saved)
    assert other.groups == own.groups and other.state() == own.state()
    for n in range(3):
        assert step(other, [greedy(8), greedy(10)], n) == step(own, [greedy(8), greedy(10)], n)
    less = buffer(tasks={"t0": TASKS["t0"]})
    with pytest.raises(UserError, match=r"task 't2' of the replay buffer .*dataset has changed"):
        less.load(saved)
