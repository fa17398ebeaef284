"""Run a recipe: build the roles, warm up, train, evaluate and write the report.

A run can resume after any crash. The metrics and rollouts of a step are written before the
checkpoint that covers them. A resume deletes everything after the checkpoint and reproduces it bit
for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from ..algorithm.base import Algorithm, batch_metrics
from ..batch import Batch, Metrics, collate, number
from ..controller.loop import Controller
from ..controller.refill import mixed
from ..controller.stream import step_seed, task_stream
from ..data.task_set import drawn_tasks, given_tasks
from ..environment.preflight import (
    BASELINE_TASKS,
    MakeAnswer,
    baseline_scores,
    expected_refill,
    made_up_answers,
    preflight,
)
from ..environment.scorer import RewardBudgetExceeded
from ..environment.trial import TRIAL_TASKS, try_rewards
from ..errors import UserError
from ..evaluation.record import record, shown, upgraded
from ..recipe.algorithm_plan import check_recomputed
from ..recipe.dump import dump_recipe, flat
from ..recipe.schema import Recipe
from ..report.alarms import Alarms
from ..report.divergence import Divergence
from ..report.learning import Learning
from ..report.loggers import JsonlLogger, read_metrics
from ..report.notes import Notes
from ..report.outputs import Loggers
from ..report.progress import Progress
from ..report.rewards import reward_metrics
from ..report.rollouts import write_rollouts
from ..report.schema import adopt
from ..trainer.trainer import Trainer
from ..types import Group, Reward, Task
from .assemble import World, build_world
from .checkpoint import Checkpoint
from .durable import write_text_atomic
from .ending import Ending, how_to_go_on, why_ended
from .finish import finish
from .folder import RunFolder, check_free, create_run, open_run, recover
from .interrupts import Interrupted, Interrupts
from .last_step import LastStep, failures_in_words, last_ending, unfinished, where_it_stopped
from .learners import Learners, build_learners, method_of, teacher_of, training_rollout
from .parity_probe import check_parity
from .policy_evaluation import evaluate_policy
from .resume import cut_after, find_checkpoint
from .sft import SftMark, SftStage
from .state import (
    RunState,
    check_same,
    completed,
    own_ends,
    publish,
    publish_sft,
    restore,
    signature,
)


def train_run(
    recipe: Recipe,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    stop_after: Literal["sft"] | None = None,
    reward: Callable[..., Any] | None = None,
    algorithm: Algorithm | None = None,
    tasks: Sequence[Task] | None = None,
    heldout: Sequence[Task] = (),
    words: Callable[[str], str] = str,
) -> int:
    """Run a recipe, or resume an earlier run.

    Args:
        recipe: the whole run.
        resume: folder of the run to resume.
        overwrite: replace an earlier run of the same name.
        stop_after: stage after which the run ends.
        reward: replaces the recipe's rewards. For this and the following see `sixfold.train`.
        algorithm: replaces the recipe's algorithm.
        tasks: replace the recipe's dataset.
        heldout: held-out tasks, used with `tasks`.
        words: rewrites a line that names command-line flags for the caller's interface.

    Returns:
        The exit code: 0, or 130 / 143 if stopped by a signal.

    Raises:
        UserError: for an error that the user can fix.
    """
    started = time.perf_counter()
    # Check here: a plan has checked the recipe's method, but not the caller's.
    check_recomputed(recipe, method_of(recipe, algorithm))
    given = None if tasks is None else given_tasks(tasks, heldout)
    directory, name = Path(recipe.run.dir), recipe.run.name
    run = RunFolder(resume or directory / name)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress())
        interrupts = stack.enter_context(Interrupts(progress.note))
        stack.enter_context(failures_in_words(recipe, run, progress))
        try:
            checkpoint = None
            if resume:
                run = stack.enter_context(open_run(resume))
                checkpoint = find_checkpoint(run, recipe, progress.note)
            else:
                recover(directory / name)
                check_free(directory, name, overwrite)
            progress.phase("loading")
            source = str(checkpoint.model_path) if checkpoint else ""
            world = build_world(
                recipe, source, reward=reward, tasks=given, own_ends=own_ends(checkpoint)
            )
            stack.callback(world.close)
            teacher = teacher_of(world, algorithm)
            made_with = signature(world, (reward,) if reward else recipe.environment.rewards)
            for note in check_same(checkpoint, made_with) if checkpoint else ():
                progress.note(note)
            if warning := try_rewards(
                world.environment,
                drawn_tasks(world.tasks.train, TRIAL_TASKS, recipe.run.seed),
                _made_up(world),
            ):
                progress.note(warning)
            if not resume:  # only now: a mistake in the recipe must not create or move any folder
                run = stack.enter_context(create_run(directory, name, overwrite))
                stack.callback(
                    lambda: progress.note(run.says_of_earlier()) if run.says_of_earlier() else None
                )
            work = Run(recipe, run, world, progress, interrupts, started, algorithm, teacher, words)
            work.prepare(checkpoint, made_with)
            work.go(checkpoint, stop_after)
        except Interrupted:
            pass
        if interrupts.exit_code:
            progress.note(words(where_it_stopped(run)))
        return interrupts.exit_code


@dataclass
class Run:
    """Work of one process on a run."""

    recipe: Recipe
    run: RunFolder
    world: World
    progress: Progress
    interrupts: Interrupts
    started: float
    algorithm: Algorithm | None
    teacher: PreTrainedModel | None = None
    words: Callable[[str], str] = str
    state: RunState = field(default_factory=RunState)
    log_seconds: float = 0.0
    alarms: Alarms = field(default_factory=Alarms)
    divergence: Divergence = field(default_factory=Divergence)
    learning: Learning = field(default_factory=Learning)

    def __post_init__(self) -> None:
        self.notes = Notes(self.run.path, self.progress.note)

    def prepare(self, checkpoint: Checkpoint | None, made_with: Mapping[str, Any]) -> None:
        """Load the checkpoint's state, delete what came after it, and record what will run."""
        if checkpoint:
            self.state = RunState.of(checkpoint)
            self.alarms.load(self.state.alarms)
            self.divergence.load(self.state.divergence)
        self.state = replace(self.state, **made_with)
        self.state.before = upgraded(self.state.before)
        self.started -= self.state.seconds
        cut_after(self.run, checkpoint, self.state, self.progress.note)
        self.notes.cut_after(self.state.step if checkpoint and checkpoint.stage == "step" else None)
        write_text_atomic(self.run.recipe, dump_recipe(self.recipe))
        self.run.write_environment(
            sys.argv, {**self.world.policy.hub_commits, **self.world.tasks.hub_commits}
        )

    def go(self, checkpoint: Checkpoint | None, stop_after: Literal["sft"] | None) -> None:
        """Run the stages that the checkpoint lacks: SFT, first evaluation, RL and report.

        Raises:
            Interrupted: if a signal stops the run.
        """
        for note in self.world.tasks.notes:
            self.progress.note(note)
        in_rl = checkpoint is not None and checkpoint.stage == "step"
        if checkpoint and in_rl and self._has_ended():
            return
        if not in_rl:
            self._warm_up(checkpoint)
        learners = build_learners(self.world, self.algorithm, self.teacher)
        if checkpoint and in_rl:
            restore(checkpoint.tensors, self.state, self.world, learners)
            self._watch()
        else:
            self._save(learners)
        if stop_after != "sft":
            self._loop(learners)
            if learners.critic:
                learners.critic.save(self.run.path / "critic")
        finish(
            self,
            self._ended(self.state.step) if stop_after != "sft" else None,
            learners.trainer.version,
        )
        with self.interrupts.finishing():
            self.run.end()

    def _has_ended(self) -> bool:
        """True, with a note to the user, if an earlier process brought the run to its end."""
        ending = self._ended(self.state.step)
        if not ending or self.state.unlogged or last_ending(self.run) != ending.record()["step"]:
            return False
        self.progress.note(f"this run has ended: {ending.text}; {self.words(how_to_go_on(ending))}")
        self.run.end()
        return True

    def _warm_up(self, checkpoint: Checkpoint | None) -> None:
        """Run SFT (from its `checkpoint`, if any), pre-flight, parity probe, first evaluation."""
        if self.recipe.sft.steps and (checkpoint is None or self.state.warming_up):
            self._sft(checkpoint)
        self.progress.phase("pre-flight")
        self._preflight()
        if self.world.tasks.heldout:
            self.state.before = record(
                evaluate_policy(self.world, self.world.tasks.heldout, version=0)
            )
            self.progress.note(
                f"held-out before RL: {shown(self.state.before)}; solved means"
                f" {self.world.environment.solved_rule.text}"
            )
        self._watch()

    def _sft(self, checkpoint: Checkpoint | None) -> None:
        """Run the SFT stage. Checkpoints are saved during it and at its end."""
        self.progress.stage("SFT", self.recipe.sft.steps)
        self.progress.phase("SFT")
        log = JsonlLogger(self.run.path / "sft.jsonl")

        def on_step(metrics: Metrics) -> None:
            log.log(int(number(metrics, "step")), metrics)
            self.progress.update(metrics)

        def save_at(trainer: Trainer, mark: SftMark) -> None:
            now = replace(
                self._state_now(),
                sft_steps=mark.step,
                counters=dict(mark.counters),
                warming_up=True,
            )
            publish_sft(
                self.run, self.world, trainer, replace(now, unlogged=unfinished(mark.unlogged))
            )

        stage = SftStage(
            self.world, on_step, save_at, self.recipe.checkpoint.every, self.interrupts
        )
        begun = (
            SftMark(self.state.sft_steps, self.state.counters, self.state.unlogged)
            if checkpoint
            else None
        )
        done = stage.run(begun, checkpoint.tensors if checkpoint else None)
        log.close()
        self.state = replace(self.state, sft_steps=done, counters={}, unlogged={}, warming_up=False)
        with self.interrupts.finishing():
            publish_sft(self.run, self.world, None, self._state_now())

    def _preflight(self) -> None:
        """Sample a few training tasks: check their difficulty, and compare engine and trainer."""
        rollout = self.world.rollout()
        count = -(-max(self.recipe.environment.preflight, 1) // rollout.samples)
        groups = rollout.generate(
            drawn_tasks(self.world.tasks.train, count, self.recipe.run.seed),
            step_seed(self.recipe.run.seed, 0),
        )
        if self.recipe.environment.preflight:
            self.world.environment.score(groups)
            rewards = [
                t.reward
                for g in groups
                for t in g.trajectories
                if t.reward and t.reward.value is not None
            ]
            if not rewards:
                raise UserError(
                    f"pre-flight: every check failed, the first with: {_first_error(groups)}"
                )
            verdict, rule = (
                preflight([bool(r.solved) for r in rewards]),
                self.world.environment.solved_rule,
            )
            line = (
                f"pre-flight: {verdict.pass_rate:.0%} of {len(rewards)} rollouts solved"
                f" ({rule.text}), {verdict.label}: {verdict.advice}"
            )
            self.notes.add(0, line, warning=verdict.label in ("too hard", "too easy"))
            if above := rule.above([r.score for r in rewards if r.score is not None]):
                self.notes.add(0, f"pre-flight: {above}", warning=True)
            if rounds := method_of(self.recipe, self.algorithm).dynamic_sampling:
                extra, unfilled = expected_refill(
                    sum(not mixed(g) for g in groups) / len(groups), rounds
                )
                self.progress.note(
                    f"dynamic sampling: expect about {extra:.0%} more rollouts, and {unfilled:.0%}"
                    " of the groups never filled"
                )
            self.state.preflight = {
                "solved": verdict.pass_rate,
                "rollouts": len(rewards),
                "label": verdict.label,
                **self._baseline(),
            }
        self._check_parity(groups)

    def _check_parity(self, groups: Sequence[Group]) -> None:
        """Compare engine and trainer on the trajectories of the pre-flight."""
        for trajectory in (t for g in groups for t in g.trajectories):
            trajectory.reward = trajectory.reward or Reward(0.0)
        batch = collate(groups).to(self.world.device)
        check_parity(self.world, batch, method_of(self.recipe, self.algorithm), self.progress.note)

    def _baseline(self) -> dict[str, object]:
        """Record the rewards of random and constant answers. A failed check never ends the run."""
        try:
            tasks = drawn_tasks(self.world.tasks.train, BASELINE_TASKS, self.recipe.run.seed)
            baseline = baseline_scores(self.world.environment.score, tasks, _made_up(self.world))
        except RewardBudgetExceeded as error:
            self.notes.add(
                0,
                f"pre-flight: what random and constant answers earn is unknown: {error}",
                warning=True,
            )
            return {}
        if baseline.warning:
            self.notes.add(0, f"pre-flight: {baseline.warning}", warning=True)
        return {
            "random_answer": baseline.random,
            "constant_answer": baseline.constant,
            "constant": baseline.answer,
            "warning": baseline.warning,
        }

    def _loop(self, learners: Learners) -> None:
        recipe = self.recipe
        unlogged, self.state = self.state.unlogged, replace(self.state, unlogged={})
        loggers = Loggers(recipe, self.run, flat(recipe), self.state.step + (0 if unlogged else 1))
        last = LastStep(self.run, self.world, learners)
        stream = task_stream(
            self.world.tasks.train,
            recipe.rollout.prompts_per_step,
            recipe.run.seed,
            self.world.tasks.weights,
        )
        controller = Controller(
            rollout=training_rollout(self.world, self.algorithm),
            environment=self.world.environment,
            reference=learners.scorers,
            algorithm=learners.algorithm,
            trainer=learners.trainer,
            sync=self.world.sync,
            tasks=stream,
            seed=lambda step: step_seed(recipe.run.seed, step),
            log=lambda step, groups, batch, metrics: self._log(
                loggers, learners, last, step, groups, batch, metrics
            ),
            on_phase=lambda role: self._phase(
                (learners.scoring or "batch") if role == "reference" else role
            ),
            device=self.world.device,
            steps_done=self.state.step,
        )

        def until(step: int, metrics: Metrics) -> bool:
            heldout = metrics.get("heldout/accuracy")
            if why := learners.reset_reference(
                step, heldout if isinstance(heldout, float) else None
            ):
                self.progress.note(f"step {step}: the policy copied into the reference ({why})")
            done = self._ended(step) is not None or self.interrupts.exit_code != 0
            if done or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
                self._save(learners)
            last.mark(self._state_now())
            return done

        self.progress.stage("RL", recipe.run.steps)
        try:
            last.mark(replace(self._state_now(), unlogged=unlogged))
            done = self._ended(self.state.step) is not None
            if unlogged:
                self._close_step(loggers, self.state.step, unlogged, learners.trainer.version)
                done = until(self.state.step, unlogged)
            if not done:
                controller.run(until)
            self._phase("end")
        except (Exception, Interrupted) as error:
            with self.interrupts.finishing():
                last.save_after(error)
            raise
        finally:
            loggers.close()

    def _phase(self, name: str) -> None:
        """Announce a phase. From the trainer on, an interrupted step is finished first."""
        self.progress.phase(name)
        self.interrupts.finish_first(name in ("trainer", "sync", "log"))

    def _ended(self, step: int) -> Ending | None:
        return why_ended(self.recipe.run, step, self.state.ema, time.perf_counter() - self.started)

    def _log(
        self,
        loggers: Loggers,
        learners: Learners,
        last: LastStep,
        step: int,
        groups: Sequence[Group],
        batch: Batch,
        metrics: Metrics,
    ) -> None:
        """Seventh step of the loop: complete the metrics, evaluate if due, write and show."""
        for line in adopt(metrics) if self.algorithm else ():
            self.progress.note(line)
        metrics |= reward_metrics(groups)
        scored_s = metrics.pop("time/reference_s")
        if learners.scoring:
            metrics[f"time/{learners.scoring}_s"] = scored_s
        mean = metrics.get("dynamic/reward_mean", metrics.get("reward/mean"))
        if isinstance(mean, float):
            self.state.ema = mean if self.state.ema is None else 0.9 * self.state.ema + 0.1 * mean
            metrics["reward/ema"] = self.state.ema
        self.state.step = step
        self.state.tokens_total += int(number(metrics, "rollout/tokens"))
        trainer = learners.trainer
        trained_at = trainer.version - int(number(metrics, "train/updates"))
        metrics |= {
            **batch_metrics(batch),
            "tokens_total": float(self.state.tokens_total),
            "train/tok_s": number(metrics, "train/tokens")
            / max(number(metrics, "time/trainer_s"), 1e-9),
            "sync/version": float(self.world.engine.version),
            "sync/staleness": float(trained_at - int(batch.version[batch.mask].min())),
        }
        if trainer.skip_reason and metrics["train/skipped"]:
            self.progress.note(f"step {step}: update skipped, {trainer.skip_reason}")
        if unfilled := metrics.get("dynamic/unfilled"):
            self.progress.note(
                f"step {step}: {unfilled:.0f} of {len(groups)} groups still have equal rewards"
                f" after {metrics['dynamic/rounds']:.0f} rounds"
            )
        began = time.perf_counter()
        metrics["time/log_s"] = self.log_seconds
        if self.recipe.log.rollouts_every and step % self.recipe.log.rollouts_every == 0:
            write_rollouts(
                self.run.rollout_file(step), groups, _advantages(groups, batch), self._piece
            )
        self.log_seconds = time.perf_counter() - began
        last.mark(replace(self._state_now(), unlogged=unfinished(metrics)))
        self._close_step(loggers, step, metrics, trainer.version)

    def _close_step(self, loggers: Loggers, step: int, metrics: Metrics, version: int) -> None:
        """Evaluate if due, and write the metrics of a finished step. A resume repeats only this."""
        every = self.recipe.eval.every
        if every and step % every == 0 and self.world.tasks.heldout:
            subset = drawn_tasks(
                self.world.tasks.heldout, self.recipe.eval.tasks, self.recipe.run.seed
            )
            began = time.perf_counter()
            self._phase("evaluation")
            metrics |= evaluate_policy(self.world, subset, version).metrics()
            self._phase("log")
            if alarm := self.divergence.look(step, self.state.ema, metrics):
                self.notes.add(step, alarm, warning=True)
            metrics["time/eval_s"] = time.perf_counter() - began
        began = time.perf_counter()
        parts = [metrics.get(key) for key in ("time/total_s", "time/eval_s", "time/log_s")]
        metrics["time/total_s"] = sum(part for part in parts if isinstance(part, float))
        for alarm in [*self.alarms.look(metrics), *self.learning.look(metrics)]:
            self.notes.add(step, alarm, warning=True)
        loggers.log(step, metrics)
        self.progress.update({"step": float(step), **metrics})
        self.log_seconds += time.perf_counter() - began

    def _piece(self, token: int) -> str:
        return self.world.codec.piece(token)

    def _watch(self) -> None:
        """Start to track learning, from the first evaluation and the steps before a resume."""
        before = self.state.before
        self.learning = Learning((before["accuracy"], *before["interval"]) if before else None)
        if self.state.step:
            self.learning.replay(read_metrics(self.run.metrics))

    def _state_now(self) -> RunState:
        seconds = time.perf_counter() - self.started
        return replace(
            self.state,
            seconds=seconds,
            alarms=self.alarms.state(),
            divergence=self.divergence.state(),
        )

    def _save(self, learners: Learners) -> None:
        with self.interrupts.finishing():
            publish(
                self.run, self.world, learners, completed(self._state_now(), self.world, learners)
            )


def _first_error(groups: Sequence[Group]) -> str:
    return next(
        (t.reward.error for g in groups for t in g.trajectories if t.reward and t.reward.error),
        "no reason given",
    )


def _advantages(groups: Sequence[Group], batch: Batch) -> list[list[float]]:
    """One advantage per trajectory, nested as the groups: that of its first sampled token."""
    if batch.advantages is None:
        raise ValueError("advantages are not filled in")
    first = batch.mask.float().argmax(-1)
    flat_list = batch.advantages.gather(1, first[:, None])[:, 0].tolist()
    sizes = [len(g.trajectories) for g in groups]
    return [flat_list[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


def _made_up(world: World) -> MakeAnswer:
    """Function that builds a trajectory from a task's prompt and a given answer.

    The answer ends with the token that ends a turn.
    """
    end = list(world.policy.stop_token_ids[:1])
    return made_up_answers(world.codec.encode, lambda text: world.codec.plain(text) + end)
