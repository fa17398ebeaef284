"""The SFT stage: worked solutions through the same trainer, until a probe set is solved well enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .assembly import World
from .batch import Batch, Metrics
from .controller.stream import task_stream
from .data.task_set import drawn_tasks
from .errors import UserError
from .evaluation.evaluate import evaluate_policy
from .plan import SFT_PROBE_EVERY
from .trainer.sft import example, sft_batch, sft_loss
from .trainer.trainer import Trainer
from .types import Task

PROBE_TASKS = 128


@dataclass
class SftStage:
    """Warm-up of a world's policy. on_step: called with each step's metrics. stop: asked after each step whether to end early."""

    world: World
    on_step: Callable[[Metrics], None]
    stop: Callable[[], bool] = lambda: False

    def run(self) -> int:
        """Train; gives the number of steps taken. The probe set comes from the training tasks, so the held-out ones stay unseen."""
        recipe = self.world.recipe
        sft = recipe.sft
        tasks = self._solved_tasks()
        probe = drawn_tasks(tasks, PROBE_TASKS, recipe.run.seed) if sft.stop_at_accuracy and len(tasks) > 2 * PROBE_TASKS else []
        probed = {task.id for task in probe}
        rest = [task for task in tasks if task.id not in probed]
        stream = task_stream(rest, sft.examples_per_step, recipe.run.seed, self.world.tasks.weights)
        settings = recipe.trainer.model_copy(
            update={
                "learning_rate": sft.learning_rate,
                "warmup_steps": sft.warmup_steps,
                "weight_decay": sft.weight_decay,
                "schedule": "constant",
            }
        )
        # Solutions were not sampled: they are learned at temperature 1, whatever rollouts are drawn at.
        trainer = Trainer(self.world.policy.model, settings, replace(self.world.scoring, temperature=1.0), sft.steps)
        total, started = 0, time.perf_counter()
        for step in range(1, sft.steps + 1):
            batch = self._batch(stream(step)).to(self.world.device)
            metrics = trainer.train_step(batch, sft_loss)
            metrics = {k: v for k, v in metrics.items() if k.startswith("train/") and "ratio" not in k}
            total += int(batch.mask.sum())
            metrics |= {"step": float(step), "train/tok_s": total / (time.perf_counter() - started)}
            solved = False
            if probe and step % SFT_PROBE_EVERY == 0:
                metrics |= self._probe(probe)
                solved = float(metrics["heldout/accuracy"]) >= sft.stop_at_accuracy  # type: ignore[arg-type]
            self.on_step(metrics)
            if solved or self.stop():
                break
        self.world.sync.refresh()
        return step

    def _probe(self, probe: list[Task]) -> Metrics:
        return {**evaluate_policy(self.world, probe, version=0, probe=True).metrics()}

    def _solved_tasks(self) -> list[Task]:
        """Training tasks that bring a solution to imitate: a trace, or else the bare answer."""
        tasks = [t for t in self.world.tasks.train if t.trace or t.answer is not None]
        if not tasks:
            raise UserError("sft.steps > 0, but no task has a worked solution or an answer: set data.trace_field, or sft.steps = 0")
        return tasks

    def _batch(self, tasks: list[Task]) -> Batch:
        return sft_batch([example(t, self.world.codec.encode(t), self.world.codec.solution(t)) for t in tasks])
