"""Branches of an episode share tokens, keys and values up to the branch, and differ after it."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.rollout.episodes import Recording, Scripted, letters, scripted
from tests.rollout.stepped import SteppedGenerator, endless, play_tooled

from sixfold.batch import check_mask, collate
from sixfold.engine.engine import Engine
from sixfold.environment.episode import Action, End, MakeEpisode, Observation
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import tool
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.branches import Branching
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.player import Limits, Player
from sixfold.types import Group, SamplingParams, Task, ToolCall, Trajectory
from sixfold_environments.web.tools import BrowserTools

BLOCK = 8


def playing(
    generator: Any,
    text: Renderer,
    make: MakeEpisode,
    branching: Branching,
    samples: int = 4,
    tasks: int = 1,
) -> tuple[list[Trajectory], dict[str, float]]:
    player = Player(generator, text, Limits(400, 4, 5.0), make, (), "tests")
    driver = Driver(player, SamplingParams(max_tokens=8), samples, branching)
    asked = [Task(f"t{i}", f"{i}+1=") for i in range(tasks)]
    groups = asyncio.run(groups_in_order(driver.play(asked, 3), asked))
    return [t for group in groups for t in group.trajectories], driver.stats()


@pytest.fixture
def text(policy: Policy) -> Renderer:
    return endless(policy)


@pytest.fixture
def fake() -> tuple[Recording, Renderer]:
    renderer = Renderer(character_tokenizer("0123456789+=?#abcxyz "), (1,))
    return Recording(renderer, letters(renderer, None), context=1 << 20), renderer


Generators = Callable[..., EngineGenerator]


@pytest.fixture
def engine(policy: Policy, text: Renderer) -> Generators:
    def make(**sizes: Any) -> EngineGenerator:
        options = {"kv_tokens": 8000, "max_running": 64, "block_size": BLOCK, **sizes}
        return EngineGenerator(Engine(CausalLM(policy.model), **options), text)

    return make


@pytest.mark.parametrize("turn", [1, 2])
def test_branches_share_their_first_turns_and_then_differ(
    engine: Generators, text: Renderer, turn: int
) -> None:
    """The samples that play from the start are those of a run without branches, bit for bit."""
    make = scripted(Observation(text="+1="), Observation(text="+2="), End(1.0))
    branched, stats = playing(engine(), text, make, Branching(2, turn), tasks=3)
    alone, _ = playing(engine(), text, make, Branching(), tasks=3)
    assert [(t.task_id, t.sample) for t in branched] == [(t.task_id, t.sample) for t in alone]
    for trunk, branch, same in zip(branched[::2], branched[1::2], alone[::2], strict=True):
        at = trunk.turns[turn].start
        assert trunk.branch is None and branch.branch == (trunk.sample, at)
        assert (trunk.tokens, trunk.logp) == (same.tokens, same.logp)
        for name in ("tokens", "logp", "version", "provenance"):
            assert getattr(branch, name)[:at] == getattr(trunk, name)[:at], name
        assert branch.tokens[at:] != trunk.tokens[at:]
        assert branch.mask == [letter == "s" for letter in branch.provenance]
        assert len(branch.turns) == 3 and branch.turns[:turn] == trunk.turns[:turn]
    assert len({tuple(t.tokens) for t in branched}) == len(branched)
    assert stats["rollout/branched_frac"] == 0.5
    # Shared tokens were sampled once, and none was discarded.
    once = sum(t.provenance[t.branch[1] if t.branch else 0 :].count("s") for t in branched)
    assert (stats["rollout/tokens"], stats["rollout/dropped_tokens"]) == (once, 0)


def test_the_tokens_do_not_depend_on_the_engine(engine: Generators, text: Renderer) -> None:
    async def slowly(action: Action) -> Observation:
        await asyncio.sleep(0.01 * (len(action.text) % 3))
        return Observation(text="+1=")

    make = scripted(slowly, slowly, End(1.0))
    whole, _ = playing(engine(), text, make, Branching(4), tasks=2)
    small, _ = playing(engine(max_running=2), text, make, Branching(4), tasks=2)
    assert [t.tokens for t in whole] == [t.tokens for t in small]
    assert sum(1 for t in whole if t.branch) == 6


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_branches_share_keys_and_values(policy: Policy, text: Renderer, kind: str) -> None:
    """Four branches after a long first turn compute the observation once, and nothing else."""
    engine = Engine(
        CausalLM(policy.model), kv_tokens=4000, max_running=8, block_size=BLOCK, prefix_cache=kind
    )
    generator = SteppedGenerator(engine)
    ((group),) = play_tooled(
        generator, text, [Task("t", "1+1=")], turns=2, samples=4, tokens=30, branching=Branching(4)
    )
    (first,) = [a for a in generator.asked if a.key.origin == a.tokens]
    later = [a for a in generator.asked if a is not first]
    trunk = group.trajectories[0]
    known = trunk.turns[0].stop - 1  # the newest token was never computed
    known = known // BLOCK * BLOCK if kind == "hash" else known
    assert len(later) == 4 and {a.tokens for a in later} == {trunk.turns[1].start}
    assert sorted(a.reused for a in later) == [known] + [trunk.turns[1].start] * 3
    assert engine.stats.prefill_tokens == first.tokens + trunk.turns[1].start - known
    assert engine.usage().used == 0


def test_samples_play_from_the_start_if_the_episode_ends_before_its_branch(
    fake: tuple[Recording, Renderer],
) -> None:
    """So a task keeps K samples. Here the second sample is the first that reaches the branch."""
    lives = iter([1, 3, 3, 3])

    def make(task: Task) -> Scripted:
        turns = next(lives)
        return Scripted(task, *[Observation(text="=")] * (turns - 1), End(float(turns)))

    found, stats = playing(*fake, make, Branching(4))
    assert [t.sample for t in found] == [0, 1, 2, 3]
    assert [t.branch and t.branch[0] for t in found] == [None, None, 1, 1]
    assert [t.total_reward for t in found] == [1.0, 3.0, 3.0, 3.0]
    assert stats["rollout/branched_frac"] == 0.5
    assert found[0].tokens != found[1].tokens, "the second draws its own noise from the start"


def test_an_environment_may_choose_the_branch(fake: tuple[Recording, Renderer]) -> None:
    make = scripted(Observation(text="="), Observation(text="#", branch=True), End(1.0))
    found, _ = playing(*fake, make, Branching(2, turn=0))
    at = found[0].turns[2].start
    assert [t.branch for t in found] == [None, (0, at), None, (2, found[2].turns[2].start)]
    never = scripted(Observation(text="="), End(1.0))
    assert [t.branch for t in playing(*fake, never, Branching(2, turn=0))[0]] == [None] * 4


def test_branches_have_their_own_state_and_reward(fake: tuple[Recording, Renderer]) -> None:
    """Each branch continues with its own copy of the episode and of its task."""

    class Counting(Scripted):
        seen: tuple[str, ...] = ()

        async def step(self, action: Action) -> Observation | End:
            assert self.task == tasks[0]
            held.add(id(self.task))
            kept.append(self.task)
            self.seen = (*self.seen, action.text)
            said = ({"kind": "seen", "texts": list(self.seen)},)
            if len(self.seen) == 3:
                return End(float(len(set(self.seen))), events=said)
            return Observation(text="=", events=said, reward=0.5)

    tasks: list[Task] = []
    held: set[int] = set()
    kept: list[Task] = []

    def make(task: Task) -> Counting:
        tasks[:] = [task]
        return Counting(task)

    found, _ = playing(*fake, make, Branching(4))
    _, renderer = fake
    for t in found:
        replies = [renderer.decode(t.tokens[turn.start : turn.stop]) for turn in t.turns]
        assert [event["texts"] for event in t.events] == [replies[:1], replies[:2], replies]
        assert t.reward is not None and t.reward.value == len(set(replies))
        assert [turn.reward for turn in t.turns] == [0.5, 0.5, 0.0]
        assert [turn.events for turn in t.turns] == [1, 1, 1]
    assert len(held) == len(found)


class Shop(ToolEpisode):
    """Episode with state, a tool that is a method, and a tool that is a function."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, [lookup])
        self.cart: list[str] = []

    @tool
    def add(self, item: str) -> str:
        """Put an item into the cart."""
        self.cart.append(item)
        return ", ".join(self.cart)


def lookup(item: str) -> str:
    """Price of an item."""
    return f"{item}: 2"


def test_a_copied_tool_episode_has_its_own_state_and_the_tools_of_the_run() -> None:
    async def seen(episode: Shop, *items: str) -> list[str]:
        calls = tuple(ToolCall("add", json.dumps({"item": item})) for item in items)
        found = await episode.step(Action("", calls=(*calls, ToolCall("lookup", '{"item": "x"}'))))
        assert isinstance(found, Observation)
        return [str(message["content"]) for message in found.messages]

    async def branched() -> None:
        trunk = Shop(Task("t", "?"))
        await trunk.start()
        assert await seen(trunk, "a") == ["a", "x: 2"]
        branch = copy.deepcopy(trunk)
        assert await seen(branch, "b") == ["a, b", "x: 2"]
        assert await seen(trunk, "c") == ["a, c", "x: 2"]
        assert branch.setup is trunk.setup and branch.task == trunk.task

    asyncio.run(branched())


def test_episodes_in_a_browser_refuse_to_be_copied() -> None:
    """`deepcopy` does not copy closures, so both branches would act on the same site."""
    with pytest.raises(TypeError, match="browser"):
        copy.deepcopy(object.__new__(BrowserTools))


def test_an_environment_that_cannot_be_copied_fails_its_episodes(
    fake: tuple[Recording, Renderer],
) -> None:
    class Locked(Scripted):
        def __init__(self, task: Task) -> None:
            super().__init__(task, Observation(text="="), End(1.0))
            self.lock = threading.Lock()

    found, _ = playing(*fake, Locked, Branching(2))
    # The last sample of a trunk has no branches, so it plays to its end.
    assert [t.outcome for t in found] == ["error", "length", "error", "length"]
    error = found[0].reward.error if found[0].reward else ""
    assert "__deepcopy__" in str(error) and "rollout.branches" in str(error)


def test_a_cancelled_episode_leaves_no_sample_waiting(fake: tuple[Recording, Renderer]) -> None:
    """Dynamic K may cancel the playing sample while others wait for its branch."""
    generator, text = fake
    make = scripted(Observation(text="="), End(1.0))

    class First:
        keep = 1

        def __call__(self, task: Task, ended: Any) -> list[Trajectory]:
            return [ended[0]]

    player = Player(generator, text, Limits(400, 4, 5.0), make, (), "tests")
    driver = Driver(player, SamplingParams(max_tokens=8), 4, Branching(2))
    task = Task("t", "1+1=")

    async def group() -> list[Group]:
        stream = driver.play([task], 0, choose=First())
        return await asyncio.wait_for(groups_in_order(stream, [task]), 30)

    assert len(asyncio.run(group())[0].trajectories) == 1 and generator.running == 0


def test_a_branch_is_recorded_and_trained_like_any_sample(
    fake: tuple[Recording, Renderer],
) -> None:
    make = scripted(Observation(text="="), End(1.0))
    found, _ = playing(*fake, make, Branching(2))
    for t in found:
        record = t.to_record()
        assert Trajectory.from_record(record) == t
        assert ("branch" in record) == (t.branch is not None)
    group = Group(Task("t0", "0+1="), found)
    batch = collate([group])
    for row, t in enumerate(found):
        assert batch.mask[row, : len(t.tokens)].tolist() == t.mask
    check_mask(batch)
    with pytest.raises(ValueError, match="branch"):
        Trajectory.from_record({**found[1].to_record(), "branch": [0, 1000]})


def test_the_number_of_samples_must_be_a_multiple_of_the_branches(
    fake: tuple[Recording, Renderer],
) -> None:
    with pytest.raises(ValueError, match="multiple"):
        playing(*fake, scripted(End(1.0)), Branching(3))
