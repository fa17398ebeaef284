"""One step of the training loop, phase by phase: which role works, and what it has filled in."""

from __future__ import annotations

from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Table, Value

from .controller_record import OLD_LOGP, PROMPT, REF_LOGP, StepRecord, reward
from .controls import SOURCE
from .group_advantages import degenerate, zscore

PHASES = ("rollout", "environment", "batch", "reference", "algorithm", "trainer", "sync", "log")
"""Phases of `sixfold.controller.loop.Controller.step`, in order."""

MIXED, EQUAL = ("12#", "11#", "14#"), ("10#", "11#", "14#")


def recorded_step(responses: tuple[str, ...]) -> StepRecord:
    """One step by the arithmetic of the labs. A token is a character."""
    rewards = [reward(response) for response in responses]
    longest = len(PROMPT) + max(map(len, responses))
    return StepRecord(PHASES, rewards, zscore(rewards), (len(responses), longest))


def controller_steps(*, clicks: int, equal_rewards: bool, source: str) -> Outcome:
    """State of the loop after a number of phases."""
    responses = EQUAL if equal_rewards else MIXED
    if source == "library":
        from .controller_roles import controller_step

        record = controller_step(responses)
    else:
        record = recorded_step(responses)
    done, within = divmod(max(clicks - 1, 0), len(record.phases))
    phase = record.phases[within] if clicks else "idle"
    seen = set(record.phases[: within + 1]) if clicks else set[str]()
    equal = degenerate(record.rewards)
    return Outcome(
        values={
            "phase": phase,
            "step": done + 1 if clicks else 0,
            "trajectories_sampled": len(responses) * (done + ("rollout" in seen)),
            "optimizer_steps": done + ("trainer" in seen),
            "weight_syncs": done + ("sync" in seen),
            "batch_shape": list(record.batch) if "batch" in seen else None,
            "degenerate": equal if "environment" in seen else None,
        },
        tables=(
            Table("Roles", ("phase", "now"), [(name, name == phase) for name in record.phases]),
            Table(
                "Trajectories",
                ("response", "old logp", "reward", "ref logp", "advantage"),
                [_row(record, seen, i, response) for i, response in enumerate(responses)],
            ),
        ),
        lines=(
            ("All rewards are equal: the advantages are 0 and the update has no gradient.",)
            if equal and "algorithm" in seen
            else ()
        ),
    )


def _row(record: StepRecord, seen: set[str], index: int, response: str) -> tuple[Value, ...]:
    cells: list[tuple[str, Value]] = [
        ("rollout", response),
        ("rollout", OLD_LOGP[index]),
        ("environment", record.rewards[index]),
        ("reference", REF_LOGP),
        ("algorithm", record.advantages[index]),
    ]
    return tuple(value if phase in seen else None for phase, value in cells)


CONTROLLER = Lab(
    name="controller",
    title="The training loop, phase by phase: which role fills in what",
    about=(
        "Three samples of one prompt go through the phases of sixfold's training loop. A phase"
        " fills in its column: rollout the responses and their log-probs, environment the rewards,"
        " reference its log-probs, algorithm the GRPO advantages (population std). With the library"
        " as source, the real controller runs on roles that give these values, and the phases are"
        " the events that it announces."
    ),
    controls=(
        Control("clicks", 5, "phases done; 8 are one step", low=0, high=24, sweep=tuple(range(25))),
        Control("equal_rewards", False, "all three responses are wrong"),
        SOURCE,
    ),
    run=controller_steps,
    breaking=Breaking(
        breaks={"clicks": 8, "equal_rewards": True},
        safe={"clicks": 8},
        why="A group with equal rewards passes through all roles and teaches nothing.",
        failed=lambda outcome: outcome.values["degenerate"] is True,
    ),
)

LABS = (CONTROLLER,)
