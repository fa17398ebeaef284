"""Engine steps of episodes with tools.

Keys and values are reused from turn to turn, and slow tools do not leave the engine idle while
other episodes have tokens to decode.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.rollout.stepped import SteppedGenerator, drawn, endless, play_tooled

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.types import Task

BLOCK = 8
TURNS = 4


def played(
    policy: Policy, episodes: int, longest_tool: int, **sizes: Any
) -> tuple[SteppedGenerator, list[list[int]]]:
    """Episodes of four replies of 8 to 32 tokens, with tools of up to `longest_tool` steps."""
    options = {"kv_tokens": 12000, "max_running": 8, "block_size": BLOCK, **sizes}
    generator = SteppedGenerator(Engine(CausalLM(policy.model), **options), drawn(8, 32))
    groups = play_tooled(
        generator,
        endless(policy),
        [Task(f"t{i}", f"{i}+{i}=") for i in range(episodes)],
        turns=TURNS,
        delay=lambda task, turn: drawn(0, longest_tool)(task.id, turn),
        tokens=32,
    )
    return generator, [group.trajectories[0].tokens for group in groups]


def utilisation(generator: SteppedGenerator, slots: int) -> float:
    """Sampled tokens divided by the slots that the waiting requests could have used."""
    room = sum(min(step.ready, slots) for step in generator.steps)
    return sum(step.sampled for step in generator.steps) / room


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("slots", [8, 32])
def test_slow_tools_leave_the_engine_at_least_90_percent_as_busy(
    policy: Policy, slots: int
) -> None:
    """Tools take 0 to 200 engine steps. At 10 ms per step, that is 0 to 2 seconds."""
    quick, tokens = played(policy, 32, 0, max_running=slots)
    slow, same = played(policy, 32, 200, max_running=slots)
    assert tokens == same
    assert utilisation(slow, slots) >= 0.9 * utilisation(quick, slots)
    # A step that decodes includes every request for which there is a slot.
    for step in slow.steps:
        assert step.rows in (0, min(step.ready, slots)) or step.rows < step.ready <= slots


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_a_later_turn_computes_only_its_new_tokens(policy: Policy, kind: str) -> None:
    generator, rows = played(policy, 8, 30, prefix_cache=kind)
    before: dict[str, int] = {}
    for asked in generator.asked:  # in the order of time
        name, sampled = asked.key.name, before.get(asked.key.name, 0)
        if sampled:
            # The newest token of a reply was never computed.
            known = sampled - 1 if kind == "radix" else (sampled - 1) // BLOCK * BLOCK
            assert asked.reused >= known and asked.tokens - known < len("+1=") + 1 + BLOCK
        row = rows[int(name[1:])]
        length = drawn(8, 32)(asked.key, asked.tokens)
        before[name] = asked.tokens + length
        assert before[name] <= len(row)
    assert len(generator.asked) == 8 * TURNS


@pytest.mark.nightly
def test_episodes_whose_tool_has_returned_go_first_and_keep_their_cache(policy: Policy) -> None:
    """64 episodes, and a cache with room for two thirds of their tokens.

    In the order of arrival, all first turns would run before the second turns, and evict the keys
    and values that the second turns need.
    """
    large, tokens = played(policy, 64, 200)
    small, same = played(policy, 64, 200, kv_tokens=4000)
    assert tokens == same and sum(map(len, tokens)) > 1.3 * 4000

    def reused(generator: SteppedGenerator) -> float:
        later = [a for a in generator.asked if a.tokens != a.key.origin]
        return sum(a.reused for a in later) / sum(a.tokens for a in later)

    assert reused(large) > 0.92
    assert reused(small) > 0.85, "0.45 in the order of arrival"
