"""Which completions are kept, against properties and a slow version."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.errors import UserError
from sixfold.recipe.schema import SampleConfig
from sixfold.stages.keepers import REASONS, check_enough, completion_of, select
from sixfold.types import Group, Reward, Task, Trajectory, Turn

READ = partial(completion_of, decode=lambda tokens: "", stops=())


def sample(index: int, text: str, reward: Reward | None, task: str = "t", **fields: Any) -> Any:
    made = Trajectory.one_turn(
        task, index, [1], [2], [0.0], [0], fields.pop("finish", "stop"), text=text, reward=reward
    )
    return replace(made, **fields)


def group(*trajectories: Trajectory) -> Group:
    return Group(Task("t", "?"), list(trajectories))


def right(value: float = 1.0) -> Reward:
    return Reward(value, solved=True)


def wrong(value: float = 0.0) -> Reward:
    return Reward(value, solved=False)


def outcome(chosen: Group, **config: Any) -> tuple[list[int], dict[int, str]]:
    """Kept sample indices, and reasons of the others."""
    found = select([chosen], SampleConfig(**config), READ)
    return [k.sample for k in found.kept], {k: why for (_, k), why in found.dropped.items()}


def test_every_reason() -> None:
    chosen = group(
        sample(0, "a b", right(1.0)),
        sample(1, "a \n b", right(1.0)),
        sample(2, "c", right(2.0)),
        sample(3, "d", right(0.5)),
        sample(4, "e", wrong(3.0)),
        sample(5, "f", Reward.failed("no")),
        sample(6, "g", None),
        sample(7, "h", right(), finish="length"),
        sample(8, " ", right()),
        sample(9, "\ud800", right()),
        sample(10, "i", Reward(math.nan, solved=True)),
        sample(11, "j", right(), outcome="timeout"),
        sample(12, "k", Reward(1.0)),
    )
    faults = {5: "error", 6: "error", 7: "unfinished", 8: "unusable", 9: "unusable", 10: "error"}
    faults |= {11: "error"}
    assert outcome(chosen, per_task=2) == (
        [0, 2],
        {1: "duplicate", 3: "over_per_task", 4: "unsolved", 12: "error", **faults},
    )
    assert outcome(chosen, keep="reward", threshold=1.0, deduplicate=False) == (
        [0, 1, 2, 4, 12],
        {3: "below_threshold", **faults},
    )
    assert outcome(chosen, keep="all") == ([0, 2, 3, 4, 12], {1: "duplicate", **faults})
    rest = dict.fromkeys((0, 1, 2, 3, 12), "not_best")
    assert outcome(chosen, keep="best") == ([4], {**rest, **faults})


def test_a_reply_with_a_special_token_is_no_row() -> None:
    samples = [sample(0, "1+1=2", right()), sample(1, "1+1=<|end|>2", right())]
    found = select([group(*samples)], SampleConfig(), READ, lambda text: "<|end|>" in text)
    assert [keeper.sample for keeper in found.kept] == [0]
    assert found.dropped == {("t", 1): "unusable"}


def test_rewards_of_turns_count() -> None:
    two = sample(0, "a", Reward(0.0, steps=((1, 1.5),)))
    assert outcome(group(two, sample(1, "b", Reward(1.0))), keep="best")[0] == [0]


def test_the_smaller_index_wins_a_tie() -> None:
    """In whatever order the samples are."""
    made = [sample(k, text, right()) for k, text in enumerate("abca")]
    for chosen in (group(*made), group(*reversed(made))):
        assert outcome(chosen, keep="best")[0] == [0]
        assert outcome(chosen, per_task=2) == ([0, 1], {2: "over_per_task", 3: "duplicate"})


def test_counts_name_every_reason() -> None:
    found = select([group(sample(0, "a", right()), sample(1, "b", wrong()))], SampleConfig(), READ)
    assert found.counts() == {"kept": 1, **dict.fromkeys(REASONS, 0), "unsolved": 1}
    check_enough(found.counts(), SampleConfig())
    with pytest.raises(UserError, match=r"sample\.min_rows = 2.* 1 completions.*1 unsolved"):
        check_enough(found.counts(), SampleConfig(min_rows=2))


REWARDS = st.one_of(
    st.none(),
    st.builds(lambda v, s: Reward(v, solved=s), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
    st.just(Reward.failed("x")),
)
SAMPLES = st.tuples(
    st.sampled_from(["a", "a ", "b\nc", "b c", "d", ""]),
    REWARDS,
    st.sampled_from(["stop", "length", "error"]),
)
GROUPS = st.lists(st.lists(SAMPLES, min_size=1, max_size=6), max_size=4).map(
    lambda groups: [
        Group(
            Task(str(number), "?"),
            [
                sample(k, text, reward, str(number), finish=finish)
                for k, (text, reward, finish) in enumerate(samples)
            ],
        )
        for number, samples in enumerate(groups)
    ]
)
CONFIGS = st.builds(
    lambda keep, per_task, deduplicate, threshold: SampleConfig(
        keep=keep,
        per_task=0 if keep in ("best", "all") else per_task,
        deduplicate=deduplicate,
        threshold=threshold if keep == "reward" else 1.0,
    ),
    st.sampled_from(["solved", "reward", "best", "all"]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
)


def slow(chosen: Group, config: SampleConfig) -> list[int]:
    """The kept samples of a group, chosen one by one: the best of those that may still be added."""
    kept: list[Trajectory] = []
    while True:
        most = {"best": 1}.get(config.keep, config.per_task)
        open_ = [
            t
            for t in chosen.trajectories
            if t not in kept
            and t.finish_reason == "stop"
            and t.text
            and t.reward is not None
            and t.reward.value is not None
            and (config.keep != "solved" or t.reward.solved)
            and (config.keep != "reward" or t.reward.value >= config.threshold)
            and not (config.deduplicate and any(k.text.split() == t.text.split() for k in kept))
        ]
        if not open_ or (most and len(kept) == most):
            return sorted(t.sample for t in kept)
        kept.append(max(open_, key=lambda t: (t.total_reward, -t.sample)))


@given(GROUPS, CONFIGS)
@settings(max_examples=150, deadline=None)
def test_selection_is_that_of_the_slow_version(groups: list[Group], config: SampleConfig) -> None:
    found = select(groups, config, READ)
    expected = [(g.task.id, k) for g in groups for k in slow(g, config)]
    assert [(k.task.id, k.sample) for k in found.kept] == expected
    every = {(g.task.id, t.sample) for g in groups for t in g.trajectories}
    assert set(expected) | set(found.dropped) == every
    assert len(expected) + len(found.dropped) == len(every)
    texts = {(t.task_id, t.sample): t.text for g in groups for t in g.trajectories}
    assert all(k.completion == texts[k.task.id, k.sample] for k in found.kept)


@given(GROUPS, CONFIGS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_groups_and_samples_does_not_matter(
    groups: list[Group], config: SampleConfig, rng: random.Random
) -> None:
    found = select(groups, config, READ)
    shuffled = [
        replace(g, trajectories=rng.sample(g.trajectories, len(g.trajectories))) for g in groups
    ]
    rng.shuffle(shuffled)
    again = select(shuffled, config, READ)
    assert again.dropped == found.dropped
    order = [g.task.id for g in shuffled]
    assert again.kept == sorted(found.kept, key=lambda k: (order.index(k.task.id), k.sample))


def test_replies_of_an_episode_end_with_the_stop_string() -> None:
    """The last token of a reply may go on after it. The environment has not read the rest."""
    pieces = {1: "?", 2: "c(2", 3: ") and", 4: "=4#", 5: "4", 6: "<end>"}
    trajectory = Trajectory(
        "t",
        0,
        [1, 2, 3, 4, 5, 6],
        "pssoss",
        [0.0] * 6,
        [0] * 6,
        (Turn(1, 3), Turn(4, 6)),
        text="c(2) and=4#4",
        environment="calculator",
    )

    def decode(tokens: list[int]) -> str:
        return "".join(pieces[token] for token in tokens if token != 6)

    assert completion_of(trajectory, decode, [")", ") a"]) == ("c(2)", "4")
    assert completion_of(trajectory, decode, []) == ("c(2) and", "4")
    assert completion_of(replace(trajectory, environment=""), decode, []) == "c(2) and=4#4"


def test_the_conversation_of_an_agent_is_refused() -> None:
    with pytest.raises(UserError, match=r"environment\.agent.*environment\.episode"):
        select([group(sample(0, "a", right(), environment="agent"))], SampleConfig(), READ)


def test_an_episode_with_an_empty_or_cut_reply_is_dropped() -> None:
    for finish, replies, why in (
        ("stop", ("a", ""), "unusable"),
        ("length", ("a", "b"), "unfinished"),
    ):
        turns = (Turn(1, 2, finish_reason=finish), Turn(3, 4))
        episode = Trajectory(
            "t", 0, [1, 2, 3, 4], "psos", [0.0] * 4, [0] * 4, turns, reward=right()
        )
        found = select([group(episode)], SampleConfig(), lambda t, replies=replies: replies)
        assert found.dropped == {("t", 0): why}
