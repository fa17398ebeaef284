"""Everything before the first RL step: SFT, pre-flight, parity probe and first evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..algorithm.method import Method
from ..batch import Metrics, collate, number
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.publication import publish_folder
from ..checkpoint.registry import load_components, states_of
from ..checkpoint.state import with_progress
from ..checks.budget import RewardBudgetExceeded
from ..checks.trial import TRIAL_TASKS, try_rewards
from ..controller.dynamic_sampling import mixed
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
from ..errors import UserError
from ..evaluation.record import record, shown, solved_if
from ..ranks import together
from ..recipe.schema import EnvironmentConfig
from ..report.loggers import JsonlLogger
from ..report.numbers import percent
from ..report.verdicts import verdict_counts, verdict_line
from ..trainer.trainer import Trainer
from ..types import Group, Reward
from .assemble import Assembly
from .context import RunContext
from .last_step import unfinished
from .parity_probe import check_parity
from .policy_evaluation import evaluate_policy
from .sft import SftMark, SftStage

SFT = "sft"
"""Name of the SFT stage's trainer in the registry."""


def warm_up(
    context: RunContext, assembly: Assembly, method: Method, checkpoint: Checkpoint | None
) -> None:
    """Run SFT (from its `checkpoint`, if any), pre-flight, parity probe, first evaluation.

    Args:
        context: the run.
        assembly: model, tasks and settings.
        method: method that will be trained.
        checkpoint: checkpoint of SFT to resume from.
    """
    recipe, heldout = assembly.recipe, assembly.tasks.heldout
    if recipe.sft.steps and (checkpoint is None or context.state.warming_up):
        _sft(context, assembly, checkpoint)
    if recipe.model.lora.rank and assembly.policy.lora is None:
        _add_adapter(context, assembly)
    context.progress.phase("pre-flight")
    _preflight(context, assembly, method)
    if heldout:
        context.state.before = record(evaluate_policy(assembly, heldout, version=0))
        context.progress.note(
            f"held-out before RL: {shown(context.state.before)};"
            f" {solved_if(assembly.environment.solved_rule.text)}"
        )


def _sft(context: RunContext, assembly: Assembly, checkpoint: Checkpoint | None) -> None:
    """Run the SFT stage. Checkpoints are saved during it and at its end."""
    settings, saver = assembly.recipe.sft, context.saver
    context.progress.stage("SFT", settings.steps)
    context.progress.phase("SFT")
    log = JsonlLogger(
        context.folder.path / "sft.jsonl", lambda text: context.notes.add(0, text, warning=True)
    )

    def on_step(metrics: Metrics) -> None:
        context.check_folder()
        saver.check()
        log.log(int(number(metrics, "step")), metrics)
        context.progress.update(metrics)

    def save_at(trainer: Trainer, mark: SftMark, last: bool) -> None:
        now = replace(
            context.state_now(),
            sft_steps=mark.step,
            warming_up=True,
            unlogged=unfinished(mark.unlogged),
        )
        if last:
            context.keep_folder()
        registry = with_progress(now, {SFT: trainer})
        states = {**states_of(registry), SFT: dict(mark.counters)}
        saver.save("sft", assembly.policy, registry, states, required=last)

    def restore(trainer: Trainer) -> SftMark:
        state = context.state
        if checkpoint:
            load_components(checkpoint, with_progress(state, {SFT: trainer}))
        return SftMark(state.sft_steps, trainer.state(), state.unlogged)

    stage = SftStage(
        assembly, on_step, save_at, assembly.recipe.checkpoint.every, context.interrupts
    )
    done = stage.run(restore)
    log.close()
    if stage.enough and done < settings.steps:
        context.progress.note(
            f"SFT ended after {done} of {settings.steps} steps: {stage.enough}"
            f" (sft.stop_at_accuracy = {settings.stop_at_accuracy:g})"
        )
    context.state = replace(context.state, sft_steps=done, unlogged={}, warming_up=False)
    with context.interrupts.finishing():
        registry = with_progress(context.state_now(), {})
        saver.save("sft", assembly.policy, registry, states_of(registry))


def _add_adapter(context: RunContext, assembly: Assembly) -> None:
    """Save the model as the run's frozen base, and train an adapter on it from now on."""
    folder = context.folder.base
    with context.interrupts.finishing():
        save = partial(publish_folder, folder, assembly.whole_policy.save)
        together(context.ranks, (lambda: None) if context.ranks.rank else save)
        assembly.train_adapter(folder)


def _preflight(context: RunContext, assembly: Assembly, method: Method) -> None:
    """Sample a few training tasks: check their difficulty, and compare engine and trainer."""
    seed, asked = assembly.recipe.run.seed, assembly.recipe.environment.preflight
    rollout = assembly.rollout()
    count = -(-max(asked, 1) // rollout.samples)
    tasks = drawn_tasks(assembly.tasks.train, count, seed)
    groups = assembly.sample(rollout, tasks, step_seed(seed, 0), scored=asked > 0)
    if asked:
        rewards = [
            t.reward
            for g in groups
            for t in g.trajectories
            if t.reward and t.reward.value is not None
        ]
        if not rewards:
            raise _all_failed(assembly.recipe.environment, groups)
        difficulty, rule = (
            preflight([bool(r.solved) for r in rewards]),
            assembly.environment.solved_rule,
        )
        line = (
            f"pre-flight: {percent(difficulty.pass_rate, 0)} of {len(rewards)} rollouts solved"
            f" ({rule.text}), {difficulty.label}: {difficulty.advice}"
        )
        context.notes.add(0, line, warning=difficulty.label in ("too hard", "too easy"))
        every = [t.reward for g in groups for t in g.trajectories]
        verdicts = verdict_counts(every)
        if verdicts:
            context.notes.add(0, f"pre-flight: verdicts: {verdict_line(verdicts, len(every))}")
        if doubt := rule.doubt([r.score for r in rewards if r.score is not None]):
            context.notes.add(0, f"pre-flight: {doubt}", warning=True)
        if rounds := method.dynamic_sampling:
            extra, unfilled = expected_refill(
                sum(not mixed(g) for g in groups) / len(groups), rounds
            )
            context.progress.note(
                f"dynamic sampling: expect about {percent(extra, 0)} more rollouts; about"
                f" {percent(unfilled, 0)} of the groups will still have equal rewards"
            )
        context.state.preflight = {
            "solved": difficulty.pass_rate,
            "rollouts": len(rewards),
            "label": difficulty.label,
            **({"verdicts": verdicts} if verdicts else {}),
            **(_baseline(context, assembly) if _has_baseline(assembly.recipe.environment) else {}),
        }
    _check_parity(context, assembly, method, groups)


def _check_parity(
    context: RunContext, assembly: Assembly, method: Method, groups: Sequence[Group]
) -> None:
    """Compare engine and trainer on the trajectories of the pre-flight."""
    played = [t for g in groups for t in g.trajectories]
    if not any(t.turns for t in played):
        raise _all_failed(assembly.recipe.environment, groups)
    if cut := sum(t.outcome == "context" for t in played):
        context.notes.add(
            0,
            f"pre-flight: {cut} of {len(played)} episodes ended because the next observation did"
            " not fit. Raise rollout.max_episode_tokens, or lower data.max_prompt_tokens",
            warning=True,
        )
    for trajectory in played:
        trajectory.reward = trajectory.reward or Reward(0.0)
    batch = collate(groups).to(assembly.device)
    check_parity(assembly, batch, method, context.progress.note)


def _has_baseline(config: EnvironmentConfig) -> bool:
    """False for episodes, and for a judge that would compare made-up answers with each other."""
    return not config.several_turns and "judge_pairwise" not in config.rewards


def _baseline(context: RunContext, assembly: Assembly) -> dict[str, object]:
    """Record the rewards of random and constant answers. A failed check never ends the run."""
    try:
        tasks = drawn_tasks(assembly.tasks.train, BASELINE_TASKS, assembly.recipe.run.seed)
        baseline = baseline_scores(assembly.environment.score, tasks, _made_up(assembly))
    except RewardBudgetExceeded as error:
        context.notes.add(
            0,
            f"pre-flight: the rewards of random and constant answers are unknown: {error}",
            warning=True,
        )
        return {}
    if baseline.warning:
        context.notes.add(0, f"pre-flight: {baseline.warning}", warning=True)
    return {
        "random_answer": baseline.random,
        "constant_answer": baseline.constant,
        "constant": baseline.answer,
        "warning": baseline.warning,
    }


def _all_failed(config: EnvironmentConfig, groups: Sequence[Group]) -> UserError:
    """Error if no episode of the pre-flight can be used."""
    what, remedy = "reward check", "environment.rewards or the answers of the tasks"
    if config.several_turns:
        what, remedy = "episode", "environment.episode"
    if config.agent.command:
        remedy = "the agent (environment.agent.command)"
    return UserError(
        f"pre-flight: every {what} failed, the first with: {_first_error(groups)}. Correct {remedy}"
    )


def _first_error(groups: Sequence[Group]) -> str:
    return next(
        (t.reward.error for g in groups for t in g.trajectories if t.reward and t.reward.error),
        "no reason given",
    )


def tried(assembly: Assembly) -> str:
    """Try the rewards on made-up answers. Returns a warning, or "".

    Answers cannot be made up for episodes of several turns, or without tasks.
    """
    if assembly.recipe.environment.several_turns or not assembly.tasks.train:
        return ""
    tasks = drawn_tasks(assembly.tasks.train, TRIAL_TASKS, assembly.recipe.run.seed)
    return try_rewards(assembly.environment, tasks, _made_up(assembly))


def _made_up(assembly: Assembly) -> MakeAnswer:
    """Function that builds a trajectory from a task's prompt and a given answer.

    The answer ends with the token that ends a turn.
    """
    renderer, longest = assembly.renderer, assembly.recipe.rollout.max_new_tokens
    end = assembly.policy.stop_token_ids[:1]
    return made_up_answers(renderer.encode, renderer.plain, renderer.shown, end, longest)
