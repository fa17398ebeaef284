"""collate and Batch: every stream at its token's index, padding on the right, and nothing lost."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.algorithm.advantages import group_statistics, group_zscore
from sixfold.batch import Batch, check_mask, collate, final_rewards
from sixfold.types import Group, Kept, Reward, Task, Trajectory, Turn
from tests.made_trajectories import from_mask, turns_of

torch.set_num_threads(1)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt = draw(st.integers(1, 5))
    provenance = "p" * prompt + "".join(draw(st.lists(st.sampled_from("sto"), max_size=7)))
    n = len(provenance)
    logp = draw(st.lists(st.floats(-30, 0, width=32), min_size=n, max_size=n))
    version = draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))
    value = draw(st.none() | st.floats(-10, 10, width=32))
    turns = tuple(
        replace(turn, reward=draw(st.integers(-8, 8)) / 4) for turn in turns_of(provenance)
    )
    return Trajectory(
        task_id="t",
        sample=0,
        tokens=draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n)),
        provenance=provenance,
        logp=[x if c == "s" else 0.0 for x, c in zip(logp, provenance, strict=True)],
        version=[v if c == "s" else -1 for v, c in zip(version, provenance, strict=True)],
        turns=turns,
        outcome=draw(st.sampled_from(["ended", "length", "turns", "context"])),
        reward=Reward(value),
    )


many_groups = st.lists(
    st.lists(trajectories(), min_size=1, max_size=4), min_size=1, max_size=4
).map(lambda rows: [Group(Task(f"t{i}", "?"), row) for i, row in enumerate(rows)])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(many_groups)
def test_every_stream_of_every_trajectory_comes_back(groups: list[Group]) -> None:
    batch = collate(groups)
    flat = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    assert batch.tokens.shape == (len(flat), max(len(t.tokens) for _, t in flat))
    for b, (g, t) in enumerate(flat):
        n = int(batch.lengths[b])
        assert n == len(t.tokens)
        assert (int(batch.prompt_lengths[b]), int(batch.group[b])) == (t.prompt_length, g)
        assert batch.tokens[b, :n].tolist() == t.tokens
        assert batch.mask[b, :n].tolist() == t.mask
        assert batch.old_logp[b, :n].tolist() == t.logp
        assert batch.version[b, :n].tolist() == t.version
        assert (
            not batch.mask[b, n:].any()
            and not batch.tokens[b, n:].any()
            and not batch.old_logp[b, n:].any()
        )
        assert (batch.version[b, n:] == -1).all()
        value = math.nan if t.total_reward is None else t.total_reward
        torch.testing.assert_close(
            batch.scores[b], torch.tensor(value), equal_nan=True, rtol=1e-6, atol=1e-5
        )
        assert batch.truncated is not None and bool(batch.truncated[b]) == (t.outcome != "ended")


def _trajectory(mask: list[bool], value: float | None) -> Trajectory:
    return from_mask("t", 0, range(len(mask)), 2, mask, reward=Reward(value))


def test_a_hand_made_batch() -> None:
    long = Trajectory.one_turn(
        "a", 0, [9, 8], [7, 6], [-1.0, -2.0], [5, 6], "stop", reward=Reward(1.0)
    )
    short = Trajectory.one_turn("b", 0, [4], [3], [-3.0], [7], "length", reward=Reward(0.5))
    batch = collate([Group(Task("a", "?"), [long]), Group(Task("b", "?"), [short])])
    assert batch.tokens.tolist() == [[9, 8, 7, 6], [4, 3, 0, 0]]
    assert batch.mask.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch.old_logp.tolist() == [[0.0, 0.0, -1.0, -2.0], [0.0, -3.0, 0.0, 0.0]]
    assert batch.version.tolist() == [[-1, -1, 5, 6], [-1, 7, -1, -1]]
    assert batch.rewards.tolist() == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.5, 0.0, 0.0]]
    assert (batch.lengths.tolist(), batch.prompt_lengths.tolist(), batch.group.tolist()) == (
        [4, 2],
        [2, 1],
        [0, 1],
    )
    assert not batch.mask[:, 0].any()
    assert batch.truncated is not None and batch.truncated.tolist() == [False, True]


def test_the_reward_sits_on_the_last_sampled_token_not_on_tool_output_after_it() -> None:
    batch = collate(
        [
            Group(
                Task("t", "?"),
                [
                    _trajectory([False, False, True, True, False], 1.0),
                    _trajectory([False, False], 2.0),
                ],
            )
        ]
    )
    assert batch.rewards[0].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert batch.rewards[1].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert final_rewards([3.0], torch.tensor([[False, True, True, False]])).tolist() == [
        [0.0, 0.0, 3.0, 0.0]
    ]


def test_a_failed_check_stays_out_of_its_groups_statistics() -> None:
    completion = [False, False, True]
    batch = collate(
        [Group(Task("t", "?"), [_trajectory(completion, v) for v in (1.0, None, 0.0, 0.5)])]
    )
    assert batch.scores.isnan().tolist() == [False, True, False, False]
    mean, std, count = group_statistics(batch.scores, batch.group)
    assert (float(mean[0]), float(count[0])) == (0.5, 3.0)
    assert float(std[0]) == pytest.approx(math.sqrt(1 / 6))
    assert group_zscore(batch.scores, batch.group, 1e-6)[1] == 0.0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no trajectories"):
        collate([])
    with pytest.raises(ValueError, match="no trajectories"):
        collate([Group(Task("t", "?"), [])])
    unscored = _trajectory([False, False, True], 0.0)
    unscored.reward = None
    with pytest.raises(ValueError, match="trajectory 0 of task t has no reward"):
        collate([Group(Task("t", "?"), [unscored])])


def test_parts_are_sorted_by_name_and_nan_where_one_does_not_apply() -> None:
    parts: list[dict[str, float]] = [{"form": 0.5, "answer": 1.0}, {"answer": 0.0}, {}]
    rows = [_trajectory([False, False, True], 1.0) for _ in parts]
    for row, of_row in zip(rows, parts, strict=True):
        row.reward = Reward(None if not of_row else 1.0, of_row)
    batch = collate([Group(Task("t", "?"), rows)])
    assert batch.part_names == ("answer", "form") and batch.parts is not None
    nan = float("nan")
    torch.testing.assert_close(
        batch.parts, torch.tensor([[1.0, 0.5], [0.0, nan], [nan, nan]]), equal_nan=True
    )
    bare = collate([Group(Task("t", "?"), [_trajectory([False, False, True], 0.25)])])
    assert bare.part_names == ("reward",) and bare.parts is not None
    assert bare.parts.tolist() == [[0.25]]


def test_the_greedy_reward_is_its_own_with_process_rewards_and_nan_if_its_check_failed() -> None:
    groups = []
    for value, steps in ((1.0, ((2, 0.5),)), (None, ())):
        greedy = _trajectory([False, False, True], 0.0)
        greedy.reward = Reward(value, steps=steps)
        rows = [_trajectory([False, False, True], 0.0) for _ in range(2)]
        groups.append(Group(Task("t", "?"), rows, greedy))
    batch = collate(groups)
    assert batch.greedy is not None and batch.greedy[:2].tolist() == [1.5, 1.5]
    assert batch.greedy[2:].isnan().all() and len(batch.tokens) == 4


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(many_groups)
def test_rows_picks_the_same_rows_of_every_table(groups: list[Group]) -> None:
    whole = collate(groups)
    whole = whole.with_(
        advantages=torch.randn(whole.tokens.shape), weights=torch.rand(whole.tokens.shape)
    )
    index = torch.randperm(len(whole.tokens))[: max(1, len(whole.tokens) // 2)]
    part = whole.rows(index)
    for name, table in vars(whole).items():
        mine = getattr(part, name)
        if name == "names":
            assert mine == ()
        elif not isinstance(table, torch.Tensor):
            assert mine == table
        else:
            torch.testing.assert_close(mine, table[index], rtol=0, atol=0, equal_nan=True)


def _kept(sets: list[list[int]]) -> Kept:
    made = Kept()
    for ids in sets:
        made.add(array("i", ids), 0.5)
    return made


def test_kept_sets_of_unlike_rows_by_hand() -> None:
    """Tool output between sampled tokens, a row that drew from everything, a token that did among
    ones that did not; whole, in rows and in parts.
    """
    a = from_mask("a", 0, [9, 8, 7, 6], 1, [False, True, False, True], reward=Reward(1.0))
    b = from_mask("b", 0, [4, 3], 1, [False, True], reward=Reward(1.0))
    c = from_mask("c", 0, [5, 2, 1], 1, [False, True, True], reward=Reward(1.0))
    a.kept, c.kept = _kept([[0, 8], [1, 5, 6]]), _kept([[], [1]])
    batch = collate([Group(Task(t.task_id, "?"), [t]) for t in (a, b, c)])
    sets = batch.kept
    assert sets is not None
    assert sets.ids.tolist() == [0, 8, 1, 5, 6, 1] and sets.ids.dtype == torch.int32
    assert sets.count.tolist() == [[0, 2, 0, 3], [0, 0, 0, 0], [0, 0, 1, 0]]
    part = batch.rows(torch.tensor([2, 0])).kept
    assert part is not None and part.ids is sets.ids
    tokens = part[batch.mask[[2, 0]]]
    assert tokens.count.tolist() == [0, 1, 2, 3]
    assert [m.tolist() for m in tokens.members()] == [[1, 2, 2, 3, 3, 3], [1, 0, 8, 1, 5, 6]]
    halves = [half.excluded(9) for half in tokens.split(3)]
    assert [(~row).nonzero()[:, 0].tolist() for half in halves for row in half] == [
        list(range(9)),
        [1],
        [0, 8],
        [1, 5, 6],
    ]
    moved = batch.to("meta").kept
    assert moved is not None and moved.start.device.type == moved.ids.device.type == "meta"


def test_a_token_outside_its_own_set_is_refused() -> None:
    row = _trajectory([False, False, True, True], 1.0)
    row.kept = _kept([[2, 7], [2, 7]])
    with pytest.raises(ValueError, match="trajectory 0 of task t: token 3 is not in its kept set"):
        collate([Group(Task("t", "?"), [row])])


def test_with_leaves_the_original_alone() -> None:
    batch = collate([Group(Task("t", "?"), [_trajectory([False, False, True], 1.0)])])
    filled = batch.with_(weights=torch.ones(1, 3))
    assert batch.weights is None and filled.weights is not None
    assert isinstance(filled, Batch) and filled.tokens is batch.tokens
    with pytest.raises(AttributeError):
        batch.weights = torch.ones(1, 3)  # type: ignore[misc]


def _episode(sample: int, turns: tuple[float, float], final: float | None) -> Trajectory:
    """Two replies of two tokens and one, with an observation between them."""
    return Trajectory(
        "t",
        sample,
        [1, 2, 3, 9, 4],
        "pssos",
        [0.0, -1.0, -1.0, 0.0, -1.0],
        [-1, 0, 0, -1, 0],
        (Turn(1, 3, turns[0]), Turn(4, 5, turns[1])),
        reward=Reward(final),
    )


def test_rewards_of_turns_go_to_the_last_token_of_their_turn() -> None:
    """By hand. A turn without a reward is a step too, if other turns of the group have one.
    A row whose check failed has none of them in its total.
    """
    rows = [_episode(0, (0.5, -0.25), 1.0), _episode(1, (0.0, 0.0), 2.0)]
    batch = collate(
        [Group(Task("t", "?"), rows), Group(Task("u", "?"), [_episode(2, (0, 0), 3.0)])]
    )
    assert batch.rewards.tolist() == [[0, 0, 0.5, 0, 0.75], [0, 0, 0, 0, 2], [0, 0, 0, 0, 3]]
    assert batch.step_ends is not None
    assert batch.step_ends.int().tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
    assert batch.scores.tolist() == [1.25, 2.0, 3.0]
    assert Group(Task("t", "?"), [*rows, _episode(2, (1.0, 0.0), None)]).rewards == [1.25, 2, None]


@pytest.mark.parametrize(
    ("provenance", "logp", "version", "token"),
    [
        ("pssss", -1.0, -1, 3),  # the trap: an observation is trained on
        ("pssos", 0.0, 0, 3),  # a sampled token is lost
        ("pssos", -1.0, -1, 3),  # an observation has a log-prob
    ],
)
def test_a_mask_that_contradicts_the_engine_is_refused_by_task_sample_and_token(
    provenance: str, logp: float, version: int, token: int
) -> None:
    """A mask that disagrees with the tokens' versions is refused, with task, sample and token."""
    row = Trajectory(
        "sum-7",
        3,
        [1, 2, 3, 9, 4],
        provenance,
        [0.0, -1.0, -1.0, logp, -1.0],
        [-1, 0, 0, version, 0],
        turns_of(provenance),
        reward=Reward(1.0),
    )
    right = _episode(0, (0.0, 0.0), 1.0)
    with pytest.raises(ValueError, match=f"trajectory 3 of task sum-7: token {token} "):
        collate([Group(Task("sum-7", "?"), [right, row])])


def test_a_mask_changed_after_collate_is_found() -> None:
    batch = collate([Group(Task("t", "?"), [_episode(0, (0.0, 0.0), 1.0)])])
    check_mask(batch)
    mask = batch.mask.clone()
    mask[0, 3] = True
    with pytest.raises(ValueError, match="trajectory 0 of task t: token 3 is in the mask"):
        check_mask(batch.with_(mask=mask))


def test_text_that_no_policy_sampled_needs_no_versions() -> None:
    row = Trajectory.one_turn("t", 0, [1], [2, 3], [0.0, 0.0], [-1, -1], "stop", reward=Reward(0.0))
    assert collate([Group(Task("t", "?"), [row])]).mask.tolist() == [[False, True, True]]
