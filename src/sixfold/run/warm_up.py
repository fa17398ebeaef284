"""Everything before the first RL step: SFT, pre-flight, parity probe and first evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..batch import Metrics, collate, number
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.publication import publish_folder
from ..checkpoint.registry import load_components, states_of
from ..checkpoint.state import with_progress
from ..controller.refill import mixed
from ..controller.stream import step_seed
from ..data.task_set import drawn_tasks
from ..environment.preflight import (
    BASELINE_TASKS,
    MakeAnswer,
    baseline_scores,
    expected_refill,
    made_up_answers,
    preflight,
)
from ..environment.step_scorer import RewardBudgetExceeded
from ..environment.trial import TRIAL_TASKS, try_rewards
from ..errors import UserError
from ..evaluation.record import record, shown, solved_if
from ..ranks import together
from ..report.loggers import JsonlLogger
from ..report.numbers import percent
from ..report.verdicts import verdict_counts, verdict_line
from ..trainer.trainer import Trainer
from ..types import Group, Reward
from .assemble import World
from .last_step import unfinished
from .learners import method_of
from .parity_probe import check_parity
from .policy_evaluation import evaluate_policy
from .sft import SftMark, SftStage

if TYPE_CHECKING:
    from .start import Run

SFT = "sft"
"""Name of the SFT stage's trainer in the registry."""


def warm_up(work: Run, checkpoint: Checkpoint | None) -> None:
    """Run SFT (from its `checkpoint`, if any), pre-flight, parity probe, first evaluation."""
    if work.recipe.sft.steps and (checkpoint is None or work.state.warming_up):
        _sft(work, checkpoint)
    if work.recipe.model.lora.rank and work.world.policy.lora is None:
        _add_adapter(work)
    work.progress.phase("pre-flight")
    _preflight(work)
    if work.world.tasks.heldout:
        work.state.before = record(evaluate_policy(work.world, work.world.tasks.heldout, version=0))
        work.progress.note(
            f"held-out before RL: {shown(work.state.before)};"
            f" {solved_if(work.world.environment.solved_rule.text)}"
        )
    work.watch()


def _sft(work: Run, checkpoint: Checkpoint | None) -> None:
    """Run the SFT stage. Checkpoints are saved during it and at its end."""
    work.progress.stage("SFT", work.recipe.sft.steps)
    work.progress.phase("SFT")
    log = JsonlLogger(work.run.path / "sft.jsonl")

    def on_step(metrics: Metrics) -> None:
        work.saver.check()
        log.log(int(number(metrics, "step")), metrics)
        work.progress.update(metrics)

    def save_at(trainer: Trainer, mark: SftMark, last: bool) -> None:
        now = replace(
            work.state_now(),
            sft_steps=mark.step,
            warming_up=True,
            unlogged=unfinished(mark.unlogged),
        )
        registry = with_progress(now, {SFT: trainer})
        states = {**states_of(registry), SFT: dict(mark.counters)}
        work.saver.save("sft", work.world.policy, registry, states, required=last)

    def restore(trainer: Trainer) -> SftMark:
        if checkpoint:
            load_components(checkpoint, with_progress(work.state, {SFT: trainer}))
        return SftMark(work.state.sft_steps, trainer.state(), work.state.unlogged)

    stage = SftStage(work.world, on_step, save_at, work.recipe.checkpoint.every, work.interrupts)
    done = stage.run(restore)
    log.close()
    if stage.enough and done < work.recipe.sft.steps:
        work.progress.note(
            f"SFT ended after {done} of {work.recipe.sft.steps} steps: {stage.enough}"
            f" (sft.stop_at_accuracy = {work.recipe.sft.stop_at_accuracy:g})"
        )
    work.state = replace(work.state, sft_steps=done, unlogged={}, warming_up=False)
    with work.interrupts.finishing():
        registry = with_progress(work.state_now(), {})
        work.saver.save("sft", work.world.policy, registry, states_of(registry))


def _add_adapter(work: Run) -> None:
    """Save the model as the run's frozen base, and train an adapter on it from now on."""
    world, folder = work.world, work.run.base
    with work.interrupts.finishing():
        save = partial(publish_folder, folder, world.whole_policy.save)
        together(world.ranks, (lambda: None) if world.ranks.rank else save)
        world.train_adapter(folder)


def _preflight(work: Run) -> None:
    """Sample a few training tasks: check their difficulty, and compare engine and trainer."""
    rollout, asked = work.world.rollout(), work.recipe.environment.preflight
    count = -(-max(asked, 1) // rollout.samples)
    groups = work.world.sample(
        rollout,
        drawn_tasks(work.world.tasks.train, count, work.recipe.run.seed),
        step_seed(work.recipe.run.seed, 0),
        scored=asked > 0,
    )
    if asked:
        rewards = [
            t.reward
            for g in groups
            for t in g.trajectories
            if t.reward and t.reward.value is not None
        ]
        if not rewards:
            raise _all_failed(work, groups)
        difficulty, rule = (
            preflight([bool(r.solved) for r in rewards]),
            work.world.environment.solved_rule,
        )
        line = (
            f"pre-flight: {percent(difficulty.pass_rate, 0)} of {len(rewards)} rollouts solved"
            f" ({rule.text}), {difficulty.label}: {difficulty.advice}"
        )
        work.notes.add(0, line, warning=difficulty.label in ("too hard", "too easy"))
        every = [t.reward for g in groups for t in g.trajectories]
        verdicts = verdict_counts(every)
        if verdicts:
            work.notes.add(0, f"pre-flight: verdicts: {verdict_line(verdicts, len(every))}")
        if above := rule.above([r.score for r in rewards if r.score is not None]):
            work.notes.add(0, f"pre-flight: {above}", warning=True)
        if rounds := method_of(work.recipe, work.algorithm).dynamic_sampling:
            extra, unfilled = expected_refill(
                sum(not mixed(g) for g in groups) / len(groups), rounds
            )
            work.progress.note(
                f"dynamic sampling: expect about {percent(extra, 0)} more rollouts; about"
                f" {percent(unfilled, 0)} of the groups will still have equal rewards"
            )
        work.state.preflight = {
            "solved": difficulty.pass_rate,
            "rollouts": len(rewards),
            "label": difficulty.label,
            **({"verdicts": verdicts} if verdicts else {}),
            **(_baseline(work) if _has_baseline(work) else {}),
        }
    _check_parity(work, groups)


def _check_parity(work: Run, groups: Sequence[Group]) -> None:
    """Compare engine and trainer on the trajectories of the pre-flight."""
    played = [t for g in groups for t in g.trajectories]
    if not any(t.turns for t in played):
        raise _all_failed(work, groups)
    if cut := sum(t.outcome == "context" for t in played):
        work.notes.add(
            0,
            f"pre-flight: {cut} of {len(played)} episodes ended because the next observation did"
            " not fit. Raise rollout.max_episode_tokens, or lower data.max_prompt_tokens",
            warning=True,
        )
    for trajectory in played:
        trajectory.reward = trajectory.reward or Reward(0.0)
    batch = collate(groups).to(work.world.device)
    check_parity(work.world, batch, method_of(work.recipe, work.algorithm), work.progress.note)


def _has_baseline(work: Run) -> bool:
    """False for episodes, and for a judge that would compare made-up answers with each other."""
    config = work.recipe.environment
    return not config.several_turns and "judge_pairwise" not in config.rewards


def _baseline(work: Run) -> dict[str, object]:
    """Record the rewards of random and constant answers. A failed check never ends the run."""
    try:
        tasks = drawn_tasks(work.world.tasks.train, BASELINE_TASKS, work.recipe.run.seed)
        baseline = baseline_scores(work.world.environment.score, tasks, _made_up(work.world))
    except RewardBudgetExceeded as error:
        work.notes.add(
            0,
            f"pre-flight: the rewards of random and constant answers are unknown: {error}",
            warning=True,
        )
        return {}
    if baseline.warning:
        work.notes.add(0, f"pre-flight: {baseline.warning}", warning=True)
    return {
        "random_answer": baseline.random,
        "constant_answer": baseline.constant,
        "constant": baseline.answer,
        "warning": baseline.warning,
    }


def _all_failed(work: Run, groups: Sequence[Group]) -> UserError:
    """Error if no episode of the pre-flight can be used."""
    what, remedy = "reward check", "environment.rewards or the answers of the tasks"
    if work.recipe.environment.several_turns:
        what, remedy = "episode", "environment.episode"
    if work.recipe.environment.agent.command:
        remedy = "the agent (environment.agent.command)"
    return UserError(
        f"pre-flight: every {what} failed, the first with: {_first_error(groups)}. Correct {remedy}"
    )


def _first_error(groups: Sequence[Group]) -> str:
    return next(
        (t.reward.error for g in groups for t in g.trajectories if t.reward and t.reward.error),
        "no reason given",
    )


def tried(world: World) -> str:
    """Try the rewards on made-up answers. Returns a warning, or "".

    Answers cannot be made up for episodes of several turns.
    """
    if world.recipe.environment.several_turns:
        return ""
    tasks = drawn_tasks(world.tasks.train, TRIAL_TASKS, world.recipe.run.seed)
    return try_rewards(world.environment, tasks, _made_up(world))


def _made_up(world: World) -> MakeAnswer:
    """Function that builds a trajectory from a task's prompt and a given answer.

    The answer ends with the token that ends a turn.
    """
    end = list(world.policy.stop_token_ids[:1])
    return made_up_answers(world.renderer.encode, lambda text: world.renderer.plain(text) + end)
