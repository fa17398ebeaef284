"""Stage `stratify`: pass rate of each task under the current model, and who may train on it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from sixfold.checkpoint.model_source import model_folder
from sixfold.data.profile import (
    Measurement,
    Profile,
    ProfileFile,
    ProfileKey,
    TaskProfile,
    task_key,
)
from sixfold.data.task_set import TaskSet
from sixfold.environment.pass_rate import (
    advantage_power,
    degenerate_probability,
    estimated_advantage_power,
    pool_signal,
)
from sixfold.errors import UserError
from sixfold.evaluation.statistics import wilson_interval
from sixfold.run.profile_key import profile_key
from sixfold.seeds import STEP_BYTES, seed_number
from sixfold.types import Group, Task, Trajectory
from sixfold_environments.maths.stated import answer_of

from .evidence import Bucket, Rule, agree
from .stage import Context, Decision, Health, Record, Rows, Stage
from .tasks import TaskReader, chunks, model_version, training_recipe, verifier_version

if TYPE_CHECKING:
    from sixfold.run.assemble import Assembly

LONGEST_ANSWER = 200
"""Characters from which a text is no answer that rollouts could agree on."""
MOST_OUTSIDE = 0.4
"""Share of tasks outside the training bucket from which there is an alarm (lessons, stage 5)."""
BLOCK = 64
"""Tasks whose rollouts are stored together. A kill loses at most one block."""
BINS = 10
READ = 1024


class Stratify(Stage):
    """Measure pass rates by rollouts, and keep the tasks that are neither solved nor failed always.

    A task is held, or dropped, only on evidence: an exact binomial test must refuse that its pass
    rate is inside the bounds. So a task that no rollout solves, or all do, has more rollouts, until
    one differs or the test decides: 64 for a bound of 0.05. A task that is held, and whose rollouts
    agree on another answer, is held as `held_conflict`: its reference may be wrong.

    The columns `pass_rate`, `prompt_tokens`, `completion_tokens` (mean) and `length_stratum` are
    added, by which a later stage can mix. Tasks with equal prompts and answers share rollouts.

    Args:
        model: run, checkpoint, model folder or hub id that is trained next. "": the recipe's model.
        samples: rollouts per task (K), and per round for those that need more.
        hard_until: a task is held for a later checkpoint if its pass rate is below. 0: none is.
        easy_from: a task is dropped if its pass rate is above. 1: none is.
        lengths: upper ends of the strata of length: tokens of prompt and mean completion.
        profiles: folder of stored profiles, one file per model, sampling and verifier. Rollouts
            that a file has are not sampled again.
    """

    kind: ClassVar[str] = "stratify"

    model: str = ""
    samples: int = Field(default=8, ge=1)
    hard_until: float = Field(default=0.05, ge=0, le=1)
    easy_from: float = Field(default=0.95, ge=0, le=1)
    lengths: tuple[int, ...] = (256, 1024, 4096)
    profiles: str = Field(default="profiles", min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> Stratify:
        if self.hard_until >= self.easy_from:
            raise ValueError(
                f"hard_until = {self.hard_until} must be below easy_from = {self.easy_from}"
            )
        if list(self.lengths) != sorted(set(self.lengths)) or min(self.lengths, default=1) < 1:
            raise ValueError(f"lengths = {list(self.lengths)}: give rising numbers of tokens")
        return self

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        recipe, reader = training_recipe(context, self.kind)
        if not (self.model or recipe.model.path):
            raise UserError(
                f"the model of the recipe {context.recipe!r} is made from scratch, so it solves"
                " nothing yet. Name a run or a checkpoint: model = 'runs/NAME'"
            )
        from sixfold.run.assemble import assemble

        folder = model_folder(self.model, "model") if self.model else ""
        alone = recipe.sampling_alone().with_settings({"data.overlong": "drop"})
        tasks, names = _tasks_of(reader, rows)
        measured, keys = self._measure(
            lambda chosen: assemble(alone, folder, tasks=chosen), tasks, context
        )
        counted = _Strata(self, measured)
        for record, name in zip(rows, names, strict=True):
            yield counted.decision(record, name, keys)
        return counted.health()

    def _measure(
        self, start: Callable[[TaskSet], Assembly], tasks: list[Task], context: Context
    ) -> tuple[Profile, dict[str, str]]:
        """The profile of all tasks, and the key of each task that the model can read, by its id."""
        if not tasks:
            return Profile(ProfileKey("", "", {}, {})), {}
        world = start(TaskSet(tasks, []))
        try:
            return self._sampled(world, context)
        finally:
            world.close()

    def _sampled(self, world: Assembly, context: Context) -> tuple[Profile, dict[str, str]]:
        keys = {task.id: task_key(task) for task in world.tasks.train}
        key = profile_key(world)
        file = ProfileFile(profile_path(self.profiles, key), key)
        known, rule = file.profile.tasks, self.rule
        try:
            rollout = world.rollout(self.samples)
            for turn in range(rule.rounds):
                seed = seed_number(f"stratify/{context.seed}/{self.samples}/{turn}", STEP_BYTES)
                missing = [t for t in world.tasks.train if rule.lacks(known.get(keys[t.id]), seed)]
                for some in chunks(missing, BLOCK):
                    for group in world.sample(rollout, some, seed, scored=True):
                        file.add(measurement(group, keys[group.task.id], seed))
                    context.progress(sum(rule.decides(known[keys[task.id]]) for task in some))
            return file.profile, keys
        finally:
            file.close()

    @property
    def rule(self) -> Rule:
        """How rollouts decide."""
        return Rule(self.samples, self.hard_until, self.easy_from)

    def depends_on(self, context: Context) -> str:
        """The verifier and the weights of the model, without loading them."""
        recipe, _ = training_recipe(context, self.kind)
        return f"{verifier_version(context, self.kind)} {model_version(self.model, recipe.model)}"


def profile_path(folder: str, key: ProfileKey) -> Path:
    """File of the profile with this key in a folder of profiles."""
    return Path(folder).expanduser() / f"{key.digest[:16]}.jsonl"


def measurement(group: Group, key: str, seed: int) -> Measurement:
    """What the rollouts of a task have shown.

    Args:
        group: the task and its scored rollouts.
        key: `task_key` of the task.
        seed: seed of the noise.
    """
    scored = [t for t in group.trajectories if t.total_reward is not None]
    return Measurement(
        task=key,
        id=group.task.columns.get("id", group.task.id),
        seed=seed,
        solved=sum(bool(t.reward and t.reward.solved) for t in scored),
        rewards=tuple(float(t.total_reward or 0.0) for t in scored),
        failed=len(group.trajectories) - len(scored),
        prompt_tokens=group.trajectories[0].prompt_length,
        tokens=sum(t.sampled_length for t in group.trajectories),
        truncated=sum(t.truncated for t in group.trajectories),
        others=_other_answers(group.task, scored),
    )


def _other_answers(task: Task, scored: Iterable[Trajectory]) -> dict[str, int]:
    """Answers of whole rollouts that do not solve a task, other than the reference.

    Empty if the task asks for no short answer.
    """
    reference = str(task.answer) if isinstance(task.answer, str | int | float) else ""
    if not 0 < len(reference) <= LONGEST_ANSWER:
        return {}
    given = (
        answer_of(t.graded_text)
        for t in scored
        if not t.truncated and not (t.reward and t.reward.solved)
    )
    own = answer_of(reference)
    return dict(Counter(one for one in given if one != own and 0 < len(one) <= LONGEST_ANSWER))


def _tasks_of(reader: TaskReader, rows: Iterable[Record]) -> tuple[list[Task], list[str]]:
    """Different tasks, and for each row the id of its task, or "!" and what is wrong with it.

    The id is a hash of prompt and answer, so the noise of a task does not depend on its row.
    """
    tasks: dict[str, Task] = {}
    names = []
    for records in chunks(rows, READ):
        for task in reader.read(records):
            if isinstance(task, str):
                names.append(f"!{task}")
                continue
            name = task_key(task)
            tasks.setdefault(name, replace(task, id=name))
            names.append(name)
    return [*tasks.values()], names


@dataclass
class _Strata:
    """Decides by the profile, and counts.

    Args:
        stage: the settings.
        profile: what was measured.
    """

    stage: Stratify
    profile: Profile

    def __post_init__(self) -> None:
        self.buckets: Counter[str] = Counter()
        self.bins: Counter[int] = Counter()
        self.prompts: Counter[str] = Counter()
        self.completions: Counter[str] = Counter()
        self.seen: dict[Bucket, dict[str, TaskProfile]] = defaultdict(dict)

    def decision(self, record: Record, name: str, keys: dict[str, str]) -> Decision:
        """Decision about a row.

        Args:
            record: the row.
            name: id of its task, or "!" and what is wrong with it.
            keys: keys of the tasks that the model can read, by id.
        """
        if name.startswith("!"):
            return self._out(record, "unreadable", name[1:])
        if name not in keys:
            return self._out(record, "too_long", "the prompt leaves no room for a completion")
        found = self.profile.tasks[keys[name]]
        rate = found.rate
        if rate is None:
            return self._out(record, "not_measured", "the checks of all its rollouts failed")
        bucket = self.stage.rule.bucket(found)
        self.buckets[bucket] += 1
        self.bins[min(int(rate * BINS), BINS - 1)] += 1
        self.seen[bucket][keys[name]] = found
        self.prompts[self._stratum(found.prompt_tokens)] += 1
        self.completions[self._stratum(found.mean_tokens)] += 1
        interval = wilson_interval(found.solved, found.samples)
        note = (
            f"{found.solved} of {found.samples} rollouts solved: {rate:.2f}"
            f" [{interval.low:.2f}, {interval.high:.2f}]; {found.mean_tokens:.0f} tokens"
        )
        other, votes = found.rival
        if votes and not found.solved:
            note += f"; {votes} rollouts answer {other!r}"
        fields = {
            **record.fields,
            "pass_rate": rate,
            "prompt_tokens": found.prompt_tokens,
            "completion_tokens": found.mean_tokens,
            "length_stratum": self._stratum(found.prompt_tokens + found.mean_tokens),
        }
        kept = bucket == "train"
        return Decision(replace(record, fields=fields), kept, "" if kept else bucket, note)

    def _out(self, record: Record, reason: str, note: str) -> Decision:
        self.buckets[reason] += 1
        return Decision(record, False, reason, note)

    def _stratum(self, tokens: float) -> str:
        """Stratum of a length, such as "257-1024"."""
        above = 0
        for end in self.stage.lengths:
            if tokens <= end:
                return f"{above + 1 if above else 0}-{end}"
            above = end
        return f"over {above}"

    def health(self) -> Health:
        rated = sum(self.bins.values())
        hard, easy = self.buckets["held_hard"], self.buckets["easy"]
        conflict = self.buckets["held_conflict"]
        outside = (hard + easy + conflict) / rated if rated else math.nan
        every = [task for some in self.seen.values() for task in some.values()]
        alarm = ""
        if outside > MOST_OUTSIDE:
            alarm = (
                f"{outside:.0%} of {rated} tasks are outside ({self.stage.hard_until:g},"
                f" {self.stage.easy_from:g}): {hard} hard, {easy} easy,"
                f" {conflict} in conflict with their reference. Most groups would have equal"
                " rewards: add tasks in between, or train the model on solutions first"
            )
        figures: dict[str, Any] = {
            "buckets": dict(self.buckets),
            "pass rates": {
                f"{n / BINS:.1f} to {(n + 1) / BINS:.1f}": self.bins[n] for n in range(BINS)
            },
            "prompt tokens": self._by_length(self.prompts),
            "completion tokens": self._by_length(self.completions),
            "signal": signal(every),
            "pool": {"all": self._pool(every), "kept": self._pool(self.seen["train"].values())},
            "rollouts": sum(task.rollouts for task in every),
            "tasks whose rollouts agree": {
                "on the reference": sum(agree(task.solved, task.samples) for task in every),
                "on another answer": len(self.seen["held_conflict"]),
            },
            "profile": self.profile.key.digest,
        }
        return Health("share of tasks outside the training bucket", outside, alarm, figures)

    def _pool(self, tasks: Iterable[TaskProfile]) -> dict[str, float]:
        """Learning signal of some tasks, by the formulas."""
        rates = [task.rate for task in tasks if task.rate is not None]
        if not rates:
            return {"tasks": 0}
        found = pool_signal(rates, self.stage.samples)
        return {
            "tasks": found.prompts,
            "wasted groups": found.wasted,
            "signal per 100 rollouts": 100 * found.per_sample,
        }

    def _by_length(self, counts: Counter[str]) -> dict[str, int]:
        names = [self._stratum(end) for end in (*self.stage.lengths, math.inf)]
        return {name: counts[name] for name in names}


def signal(tasks: Iterable[TaskProfile]) -> dict[str, float]:
    """Learning signal of measured rollouts beside the formulas for rewards of 0 and 1.

    - measured E[A^2]: mean variance of a group's rewards, unbiased.
    - p (1 - p): at the share solved, times K / (K - 1), because that share is an estimate too. It
      equals the measured value if rewards are 0 and 1. Other rewards differ: E[A^2] = Var(R | x).
    - measured wasted share: groups whose rewards are equal.
    - p^K + (1 - p)^K: at the share solved. It is above the measured value on average, because an
      estimate is farther from 1/2 than the pass rate.

    Only the first rollouts of each task count: more are sampled of those that they do not tell.

    Args:
        tasks: the tasks. Those with fewer than two first rollouts are left out.

    Returns:
        The figures. Empty if there is no group.
    """
    groups, power, wasted = [], 0.0, 0.0
    for task in tasks:
        first = task.measured[0]
        if (count := len(first.rewards)) > 1:
            rate = first.solved / count
            groups.append(first.rewards)
            power += advantage_power(rate) * count / (count - 1)
            wasted += degenerate_probability(rate, count)
    if not groups:
        return {}
    return {
        "E[A^2], measured": estimated_advantage_power(groups),
        "p (1 - p)": power / len(groups),
        "wasted groups, measured": sum(len(set(group)) == 1 for group in groups) / len(groups),
        "p^K + (1 - p)^K": wasted / len(groups),
    }
