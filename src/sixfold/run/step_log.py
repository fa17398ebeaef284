"""The end of a step: complete its metrics, evaluate if due, and write and show them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ..algorithm.base import batch_metrics
from ..batch import Batch, Metrics, number
from ..controller.curriculum import Curriculum
from ..controller.dead_letters import DeadLetters
from ..controller.schedule import ScheduledGroup
from ..data.task_set import drawn_tasks
from ..errors import UserError
from ..evaluation.statistics import task_means
from ..files.appended import AppendedFile
from ..ranks import together
from ..recipe.dump import flat
from ..report.outputs import Loggers
from ..report.rewards import reward_metrics
from ..report.rollouts import Advantage, write_rollouts
from ..report.schema import adopt
from ..report.trace import write_trace
from ..sync.measured import MeasuredSync
from ..types import Group
from .assemble import Assembly
from .context import RunContext
from .last_step import LastStep, unfinished
from .monitors import Monitors
from .policy_evaluation import evaluate_policy
from .role_meter import RoleMeter
from .trainable_roles import TrainableRoles


class StepLog:
    """Completes and writes the metrics of each step, with an evaluation if it is due.

    Args:
        context: the run. Its state and its notes are updated.
        assembly: model, tasks and settings.
        monitors: watch the metrics.
        first_step: first step that this process will write.
    """

    def __init__(
        self, context: RunContext, assembly: Assembly, monitors: Monitors, first_step: int
    ) -> None:
        self._context = context
        self._assembly = assembly
        self._monitors = monitors
        recipe = assembly.recipe
        self._loggers = Loggers(
            recipe.log, recipe.run.name, context.folder, flat(recipe), first_step, context.warn
        )
        self._seconds = 0.0

    def close_step(self, step: int, metrics: Metrics, version: int) -> None:
        """Evaluate if due, and write the metrics of a finished step. A resume repeats only this."""
        context, every = self._context, self._assembly.recipe.eval.every
        fell = ""
        if every and step % every == 0 and self.heldout:
            began = time.perf_counter()
            context.phase("evaluation")
            found, fell = self.evaluated(step, version)
            metrics |= found
            context.phase("log")
            metrics["time/eval_s"] = time.perf_counter() - began
        began = time.perf_counter()
        parts = [metrics.get(key) for key in ("time/total_s", "time/eval_s", "time/log_s")]
        metrics["time/total_s"] = sum(part for part in parts if isinstance(part, float))
        together(context.ranks, lambda: self._write_metrics(step, metrics, fell))
        self._seconds += time.perf_counter() - began

    @property
    def heldout(self) -> bool:
        """True if there is something to evaluate on."""
        return bool(self._assembly.tasks.heldout)

    def evaluated(self, step: int, version: int) -> tuple[Metrics, str]:
        """Evaluate on held-out tasks.

        Args:
            step: the step.
            version: version of the policy's weights.

        Returns:
            Metrics, and a warning if accuracy falls while the reward rises.
        """
        recipe = self._assembly.recipe
        subset = drawn_tasks(self._assembly.tasks.heldout, recipe.eval.tasks, recipe.run.seed)
        found = evaluate_policy(self._assembly, subset, version)
        compared = self._monitors.divergence.observe(step, task_means(found.values))
        if compared is None:
            return {**found.metrics()}, ""
        return {**found.metrics(), **compared.metrics()}, compared.warning

    def _write_metrics(self, step: int, metrics: Metrics, fell: str) -> None:
        """Write and show the metrics of a step, and the alarms that they raise.

        Args:
            step: the step.
            metrics: its metrics.
            fell: warning about held-out accuracy, or "".
        """
        watching = (self._monitors.alarms, self._monitors.learning, self._monitors.drift)
        said = [line for one in watching for line in one.observe(metrics)]
        for alarm in filter(None, [fell, *said]):
            self._context.notes.add(step, alarm, warning=True)
        self._loggers.log(step, metrics)
        self._context.progress.update({"step": float(step), **metrics})

    def close(self) -> None:
        """Close the metric files. A run folder that was created again gets the metrics."""
        if self._context.gone and not self._context.folder.displaced():
            with suppress(UserError):
                self._loggers.complete()
        self._loggers.close()


class RolloutLog(StepLog):
    """Log of the steps of RL, with their trajectories.

    Args:
        context: as for `StepLog`, as are `assembly`, `monitors` and `first_step`.
        roles: trainer and reference, for their metrics.
        last: keeps the state at the end of the last step.
        sync: weight sync of the run, measured.
        scheduled: how the groups of the step were sampled. None: at the step.
        dead: prompts that were set aside.
        curriculum: decides which tasks are drawn, or None.
    """

    def __init__(
        self,
        context: RunContext,
        assembly: Assembly,
        monitors: Monitors,
        first_step: int,
        roles: TrainableRoles,
        last: LastStep,
        sync: MeasuredSync,
        scheduled: Callable[[], Sequence[ScheduledGroup]] | None = None,
        dead: DeadLetters | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(context, assembly, monitors, first_step)
        self._scheduled = scheduled
        self._schedule = AppendedFile(context.folder.schedule, context.warn) if scheduled else None
        self._dead = dead if dead and dead.max_failures else None
        self._letters = (
            AppendedFile(context.folder.dead_letters, context.warn) if self._dead else None
        )
        self._curriculum = curriculum
        self._decisions = (
            AppendedFile(context.folder.curriculum, context.warn) if curriculum else None
        )
        self._roles = roles
        self._last = last
        self._sync = sync
        self._meter = RoleMeter(assembly.player.generator, context.timeline)
        context.timeline.begin()

    def close(self) -> None:
        """As `StepLog.close`."""
        super().close()
        self.write_trace()
        for file in filter(None, (self._schedule, self._letters, self._decisions)):
            file.close()

    def write_trace(self) -> None:
        """Write the timeline of the newest steps, if the recipe keeps it."""
        context = self._context
        if not context.timeline.steps or context.gone:
            return
        try:
            write_trace(context.folder.trace, context.timeline.spans)
        except UserError as error:
            context.warn(f"the trace is not written: {error}")

    def log(self, step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
        """Seventh step of the loop: complete the metrics, evaluate if due, write and show."""
        context, assembly, state = self._context, self._assembly, self._context.state
        metrics |= self._meter.metrics(metrics)
        for line in adopt(metrics) if self._roles.given else ():
            context.progress.note(line)
        metrics |= reward_metrics(groups)
        if judge := assembly.judge:
            metrics |= judge.metrics(context.ranks)
        scored_s = metrics.pop("time/reference_s")
        if self._roles.scoring:
            metrics[f"time/{self._roles.scoring}_s"] = scored_s
        mean = metrics.get("dynamic/reward_mean", metrics.get("reward/mean"))
        if "replay/frac" in metrics:
            new = round((1 - number(metrics, "replay/frac")) * len(groups))
            mean = reward_metrics(groups[:new]).get("reward/mean")
        if isinstance(mean, float):
            self._monitors.divergence.reward(mean)
            state.ema = mean if state.ema is None else 0.9 * state.ema + 0.1 * mean
            metrics["reward/ema"] = state.ema
        state.step = step
        state.tokens_total += int(number(metrics, "rollout/tokens"))
        trainer = self._roles.trainer
        trained_at = trainer.version - int(number(metrics, "train/updates"))
        metrics |= {
            **batch_metrics(batch),
            **self._sync.metrics,
            "tokens_total": float(state.tokens_total),
            "train/tok_s": number(metrics, "train/tokens")
            / max(number(metrics, "time/trainer_s"), 1e-9),
            "sync/version": float(assembly.engine.version),
            "sync/staleness": float(trained_at - int(batch.version[batch.mask].min())),
        }
        if self._curriculum:
            metrics |= self._curriculum.metrics()
        if self._scheduled:
            ages = trained_at - batch.version[batch.mask]
            metrics["async/age_hist"] = torch.bincount(ages).tolist()
        if context.saver.failed:
            metrics["checkpoint/failed_total"] = float(context.saver.failed)
        if trainer.skip_reason and metrics["train/skipped"]:
            context.progress.note(f"step {step}: update skipped, {trainer.skip_reason}")
        began = time.perf_counter()
        metrics["time/log_s"] = self._seconds
        # First: if the disk refuses the trajectories, this step can still be saved.
        self._last.mark(replace(context.state_now(), unlogged=unfinished(metrics)))
        together(context.ranks, lambda: self._write_step(step, groups, batch, metrics, trained_at))
        self._seconds = time.perf_counter() - began
        self.close_step(step, metrics, trainer.version)

    def _write_step(
        self, step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics, trained_at: int
    ) -> None:
        """Write the records that a resume cannot make again: notes of the update, trajectories.

        Args:
            step: the step.
            groups: groups of the step.
            batch: batch of the step, with advantages.
            metrics: metrics of the step so far.
            trained_at: version of the weights before the update.
        """
        context, log = self._context, self._assembly.recipe.log
        for spike in self._roles.trainer.spikes:
            context.notes.add(step, spike, warning=True)
        if unfilled := metrics.get("dynamic/unfilled"):
            context.progress.note(
                f"step {step}: {unfilled:.0f} of {len(groups)} groups still have equal rewards"
                f" after {metrics['dynamic/rounds']:.0f} rounds"
            )
        if self._scheduled and self._schedule:
            recorded = [group.to_record() for group in self._scheduled()]
            line: dict[str, Any] = {"step": step, "groups": recorded}
            if context.ranks.size > 1:
                line["ranks"] = context.ranks.size
            self._schedule.append((json.dumps(line) + "\n").encode())
        if self._dead and self._letters and (taken := self._dead.taken):
            lines = (json.dumps({"step": step, **record}) + "\n" for record in taken)
            self._letters.append("".join(lines).encode())
            context.progress.note(
                f"step {step}: {len(taken)} prompts failed {self._dead.max_failures} times and are"
                f" set aside in {context.folder.dead_letters.name}"
            )
        if self._decisions and self._curriculum and (decided := self._curriculum.record):
            self._decisions.append((json.dumps({"step": step, **decided}) + "\n").encode())
        if log.rollouts_every and step % log.rollouts_every == 0:
            write_rollouts(
                context.folder.rollout_file(step),
                groups,
                dumped_advantages(groups, batch),
                self._assembly.renderer.piece,
                trained_at,
                self._roles.reference_version,
            )


def first_advantages(groups: Sequence[Group], batch: Batch) -> list[list[float]]:
    """One advantage per trajectory, nested as the groups: that of its first sampled token."""
    if batch.advantages is None:
        raise ValueError("advantages are not filled in")
    first = batch.mask.float().argmax(-1)
    flat_list = batch.advantages.gather(1, first[:, None])[:, 0].tolist()
    sizes = [len(g.trajectories) for g in groups]
    return [flat_list[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


def dumped_advantages(groups: Sequence[Group], batch: Batch) -> list[list[Advantage]]:
    """The advantages of the trajectories, nested as the groups.

    Each is one number if all sampled tokens of the trajectory have it. With rewards of turns or a
    critic they differ: then there is one number per token, 0 for tokens that were not sampled.
    """
    found: list[list[Advantage]] = [[*of_group] for of_group in first_advantages(groups, batch)]
    assert batch.advantages is not None
    values, mask = batch.advantages, batch.mask
    high = values.masked_fill(~mask, -torch.inf).amax(-1)
    low = values.masked_fill(~mask, torch.inf).amin(-1)
    differ = (high > low).tolist()
    row = 0
    for of_group, group in zip(found, groups, strict=True):
        for at, trajectory in enumerate(group.trajectories):
            if differ[row]:
                own = values[row].masked_fill(~mask[row], 0.0)
                of_group[at] = own[: len(trajectory.tokens)].tolist()
            row += 1
    return found
