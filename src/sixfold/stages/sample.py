"""Kind `sample`: sample completions, keep the good ones, and write them as a dataset.

Tasks are sampled in blocks, each of which is written whole before the next begins. A resume goes on
after the last block. The noise depends on the seed and the task, so blocks change nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..batch import Metrics
from ..controller.collector import Collector
from ..controller.stream import step_seed
from ..data.sources import load_tasks
from ..data.task_set import drawn_tasks
from ..errors import UserError
from ..files.blocks import done_blocks, join, read_rows, write_block
from ..files.durable import write_json_atomic
from ..plugins import ROLLOUTS, load
from ..ranks import together
from ..recipe.dump import flat
from ..recipe.resume_policy import settings_of
from ..recipe.schema import DataConfig
from ..recipe.stages import dataset_settings
from ..report.html import write_report
from ..report.loggers import truncate_after
from ..report.outputs import Loggers
from ..report.rewards import reward_metrics
from ..run.assemble import Assembly
from ..run.context import RunContext
from ..run.work import Work
from ..types import Task
from .artifact import DATASET
from .dataset import check_tasks, mixed_rows, sampled_row
from .diversity import Diversity
from .keepers import REASONS, check_enough, completion_of, select
from .kind import StageKind
from .step_labels import StepLabeller

BLOCKS = "blocks"
TOKENS, MILLISECONDS = "tokens", "milliseconds"
"""What a block notes beside its counts, so that a resumed run has the whole."""
SEARCHED = "search/sampled_tokens"
"""Metric of a search: all tokens that it has sampled, also those of chains that were dropped."""
INPUTS = "sampled_from.json"
"""File with the settings and the model that a dataset is sampled from."""


class SampleKind(StageKind):
    """Samples completions and keeps the good ones."""

    def work(self) -> Work:
        return SampleWork(self.method)


class SampleWork(Work):
    """Work of a run that samples a dataset."""

    trains = False

    def load(self, assembly: Assembly) -> None:
        """Check that rows of the tasks will load, and load what is mixed in."""
        config, seed = assembly.recipe.sample, assembly.recipe.run.seed
        if assembly.agent:
            raise UserError(
                "environment.agent: the conversations of an agent cannot become rows, because SFT"
                " could not play them again. Sample with environment.episode, or without an episode"
            )
        if config.labelled and assembly.player.environment:
            raise UserError(
                f"{config.labelled_by} labels solutions of one reply, and environment.episode"
                " plays several. Remove one of them"
            )
        if config.search.method and assembly.ranks.size > 1:
            raise UserError("sample.search needs one process. Start the stage without torchrun")
        self._tasks = drawn_tasks(assembly.tasks.train, config.tasks, seed + config.draw)
        if config.tasks > len(self._tasks):
            raise UserError(
                f"sample.tasks = {config.tasks}, but there are {len(self._tasks)} training tasks."
                " Lower it, or set 0 for all"
            )
        form, notes = check_tasks(self._tasks)
        assembly.tasks.notes += notes
        self._mixes = [
            load_tasks(
                DataConfig(**dataset_settings(mix.source, form), heldout=0), seed=seed, rewards=()
            ).train
            for mix in config.mix
        ]

    def go(self, context: RunContext, assembly: Assembly) -> None:
        SampleRun(context, assembly, self._tasks, self._mixes).go()


class SampleRun:
    """Samples block by block, and joins what is kept.

    Args:
        context: the run.
        assembly: model, environment and settings.
        tasks: tasks to sample.
        mixes: tasks with traces of each entry of [[sample.mix]].
    """

    def __init__(
        self,
        context: RunContext,
        assembly: Assembly,
        tasks: Sequence[Task],
        mixes: Sequence[Sequence[Task]],
    ) -> None:
        size = assembly.recipe.rollout.prompts_per_step
        self._context = context
        self._assembly = assembly
        self._config = assembly.recipe.sample
        self._seed = assembly.recipe.run.seed
        self._mixes = mixes
        self._blocks = [tasks[at : at + size] for at in range(0, len(tasks), size)]
        self._folder = context.folder.path / BLOCKS
        self._model = assembly.policy_hash()
        search = load(ROLLOUTS, "search")(assembly) if self._config.search.method else None
        self._scorer: str = search.scorer_weights if search else ""
        self._collector = Collector(
            rollout=search or assembly.rollout(self._config.samples),
            environment=assembly.environment,
            loop=assembly.loop,
        )

        self._labeller = (
            StepLabeller(
                assembly.rollout(max(self._config.label_steps, 1)),
                assembly.environment,
                assembly.loop,
                assembly.renderer,
                self._config,
            )
            if self._config.labelled
            else None
        )

    def go(self) -> None:
        """Sample what is missing, then write the dataset, its summary and the report.

        Raises:
            Interrupted: if a signal stops the run.
            UserError: if too few completions are kept.
        """
        context, ranks = self._context, self._context.ranks
        together(ranks, self._begin)
        if ranks.gather(self._finished())[0]:
            context.progress.note("already finished: the dataset is written")
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for note in self._assembly.tasks.notes:
            context.progress.note(note)
        # Asked of rank 0 alone: only it has written blocks.
        done = ranks.gather(_done(self._folder, len(self._blocks)))[0]
        context.progress.stage("sampling", len(self._blocks))
        recipe = self._assembly.recipe
        truncate_after(context.folder.metrics, done)
        log = Loggers(
            recipe.log, recipe.run.name, context.folder, flat(recipe), done + 1, context.warn
        )
        for number in range(done, len(self._blocks)):
            self._sample(number, log)
        log.close()
        with context.interrupts.finishing():
            together(ranks, self._end)
            context.folder.end()

    def _begin(self) -> None:
        """Record the recipe, or refuse blocks that were sampled from something else."""
        if self._context.ranks.rank:
            return
        inputs = {"model": self._model, **settings_of(self._assembly.recipe)}
        if self._scorer:
            inputs["sample.search.scorer, weights"] = self._scorer
        path = self._context.folder.path / INPUTS
        if not path.is_file():
            self._context.write_recipe()
            write_json_atomic(path, inputs)
            return
        saved = json.loads(path.read_bytes())
        changed = [key for key, value in inputs.items() if _decides(key, saved, value)]
        if changed:
            raise UserError(
                f"{path} was sampled under another {changed[0]} ({saved.get(changed[0])!r}, now"
                f" {inputs[changed[0]]!r}). Leave it as it was, or sample again with --from"
                f" {self._assembly.recipe.run.name}"
            )
        self._context.write_recipe()

    def _finished(self) -> bool:
        """True if the dataset is written, with its summary."""
        summary, target = self._context.folder.summary, self._context.folder.path / DATASET
        if not (summary.is_file() and target.is_file()):
            return False
        saved = json.loads(summary.read_bytes()).get("sha256")
        return bool(saved == hashlib.sha256(target.read_bytes()).hexdigest())

    def _sample(self, number: int, log: Loggers) -> None:
        """Sample a block, and write its metrics and then its rows."""
        context, assembly, began = self._context, self._assembly, time.perf_counter()
        context.interrupts.stop_here()
        seed = step_seed(self._seed, 1 + self._config.draw)
        groups = self._collector.collect(self._blocks[number], seed, context.progress.phase)
        read = partial(completion_of, decode=assembly.renderer.decode, stops=assembly.player.stops)
        selection = select(groups, self._config, read, assembly.renderer.has_special)
        counts = selection.counts()
        total = sum(counts.values())
        rows = [sampled_row(one, model=self._model, seed=seed) for one in selection.kept]
        stats = self._collector.stats()
        sampled = int(
            stats.get(SEARCHED, sum(t.sampled_length for g in groups for t in g.trajectories))
        )
        if labeller := self._labeller:
            found = labeller.label(selection.kept, groups, seed, context.progress.phase)
            rows = [row | labels.columns() for row, labels in zip(rows, found, strict=True)]
            sampled += labeller.tokens
        metrics: Metrics = {
            **stats,
            **reward_metrics(groups),
            "sample/kept": float(counts["kept"]),
            "sample/kept_frac": counts["kept"] / total,
            **{f"sample/dropped/{name}": float(counts[name]) for name in REASONS},
            "time/total_s": time.perf_counter() - began,
        }
        context.state.step = number + 1
        noted = {
            **counts,
            TOKENS: sampled,
            MILLISECONDS: round(1000 * (time.perf_counter() - began)),
        }

        def write() -> None:
            if context.ranks.rank == 0:
                log.log(number + 1, metrics)
                write_block(self._folder, number, rows, noted)

        with context.interrupts.finishing():
            together(context.ranks, write)
            context.progress.update({"step": float(number + 1), **metrics})

    def _end(self) -> None:
        """Join the blocks, with what is mixed in, and describe the dataset."""
        context, folder, count = self._context, self._folder, len(self._blocks)
        if context.ranks.rank:
            return
        counts: Counter[str] = Counter()
        for number, block in done_blocks(folder).items():
            counts.update(
                block if number < count else {}
            )  # of an earlier attempt: what is mixed in
        tokens, seconds = counts.pop(TOKENS, 0), counts.pop(MILLISECONDS, 0) / 1000
        check_enough(counts, self._config)
        diversity = Diversity(self._config.ngram)
        for row in read_rows(folder, count):
            said = row["completion"]
            diversity.add(said if isinstance(said, str) else "\n".join(said))
        if alarm := diversity.alarm():
            context.warn(alarm)
        for at, (mix, tasks) in enumerate(zip(self._config.mix, self._mixes, strict=True)):
            rows, note = mixed_rows(tasks, counts["kept"], mix.weight, number=at, seed=self._seed)
            write_block(folder, count + at, rows, {"mixed": len(rows)})
            if note:
                context.warn(note)
        target = context.folder.path / DATASET
        sha256 = join(folder, count + len(self._mixes), target)
        write_json_atomic(
            context.folder.summary,
            {
                "name": self._assembly.recipe.run.name,
                "seed": self._seed,
                "steps": count,
                "counts": dict(counts),
                "model": self._model,
                "sha256": sha256,
                "tokens_sampled": tokens,
                "seconds": round(max(seconds, context.seconds), 1),
                **diversity.metrics(),
            },
        )
        dropped = ", ".join(f"{n} {name}" for name, n in counts.items() if n and name != "kept")
        context.progress.note(
            f"kept {counts['kept']} of {sum(counts.values())} completions"
            f"{f' (dropped: {dropped})' if dropped else ''}: {target}"
        )
        context.progress.note(f"report: {write_report(context.folder.path)}")
        shutil.rmtree(folder)  # last: until now a resume would need it


def _done(folder: Path, count: int) -> int:
    """Number of blocks that are done, from the first on."""
    done = done_blocks(folder)
    return next((number for number in range(count) if number not in done), count)


def _decides(key: str, saved: Mapping[str, Any], value: Any) -> bool:
    """True if a value has changed that decides what is sampled, or how it is cut into blocks."""
    section = key.partition(".")[0]
    sampling = ("model", "data", "environment", "rollout", "sample", "engine", "sync")
    return section in sampling and saved.get(key, value) != value
