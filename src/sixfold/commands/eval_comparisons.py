"""`sixfold eval` of reward models: on the comparisons of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoint.model_source import architectures, model_folder
from ..errors import UserError
from ..evaluation.results import check_out, completions_file, make_out, write_results
from ..evaluation.reward_bench import (
    TIES,
    ComparisonFigures,
    ScoredComparison,
    SubsetFigures,
    comparison_figures,
    ties_prompt,
)
from ..evaluation.statistics import PairedTest, paired_test
from ..recipe.schema import ComparisonsConfig, DataConfig, RewardScoringConfig, RunConfig
from ..recipe.stages import generated_source
from ..types import Group, Reward, Task
from .eval_table import (
    add_interval,
    print_columns,
    print_differences,
    recorded_differences,
    versions,
)


@dataclass(frozen=True)
class _Scored:
    """A reward model's evaluation: its path as the user named it, its folder, and the groups."""

    path: str
    model: str
    rows: list[ScoredComparison]
    figures: ComparisonFigures
    groups: list[Group]
    notes: list[str]


def evaluate_reward_models(
    data: DataConfig,
    comparisons: ComparisonsConfig,
    scoring: RewardScoringConfig,
    run: RunConfig,
    paths: Sequence[str],
    against: str | None = None,
    out: Path | None = None,
) -> int:
    """Evaluate reward models on comparisons: those that are held out, or all if none is.

    Prints a table and writes the results.

    Args:
        data: the recipe's [data] section, which names the comparisons.
        comparisons: its [comparisons] section.
        scoring: its [environment.reward_model] section.
        run: its [run] section.
        paths: runs (their last reward model), checkpoints, model folders or hub ids.
        against: baseline, compared with each of the others by a paired test.
        out: folder for results.json and the scores. None: the next free one under `run.dir`.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if one is no reward model, there are no comparisons, or `out` is taken.
    """
    from ..reward_model.model import check_is_reward_model

    check_out(out)
    if generated := generated_source(data):
        raise UserError(
            f"reward models are evaluated on comparisons, and data.source = '{generated}' generates"
            " tasks. Name a file or dataset with completions to compare"
        )
    others = [path for path in dict.fromkeys(paths) if path != against]
    named = [*others, against] if against else others  # the baseline is the last
    # Resolve all paths first: a wrong one must fail before anything is evaluated.
    models = [model_folder(path, "--checkpoint", reward_model=True) for path in named]
    for path, model in zip(named, models, strict=True):
        check_is_reward_model(architectures(model), path)
    found = [
        _scored(data, comparisons, scoring, run.seed, path, model)
        for path, model in zip(named, models, strict=True)
    ]
    tests = {one.path: _compare(one, found[-1]) for one in found[:-1]} if against else {}
    console = Console()
    for one in found:
        for note in one.notes:
            console.print(f"{one.path}: {note}", soft_wrap=True, markup=False)
    print_columns(console, named, [_labelled(one.figures) for one in found])
    print_differences(console, against, tests, "comparisons")
    folder = make_out(out, Path(run.dir), run.name)
    written = write_results(
        folder, _results(run, found, against, tests), [one.groups for one in found]
    )
    console.print(f"results and scores: {written.parent}", soft_wrap=True)
    return 0


def _scored(
    data: DataConfig,
    comparisons: ComparisonsConfig,
    scoring: RewardScoringConfig,
    seed: int,
    path: str,
    model: str,
) -> _Scored:
    """Score the comparisons by one reward model."""
    from ..data.comparisons import SUBSET, load_comparisons
    from ..reward_model.reward import load_scorers
    from ..stages.preference_examples import PreferenceExamples

    (scorer,) = load_scorers([model], scoring, "--checkpoint")
    whole = comparisons.model_copy(update={"pairs": "all"})  # best of N is of all completions
    loaded = load_comparisons(data, whole, seed=seed, chat=scorer.renderer.has_template)

    def subset(task: Task) -> str:
        return str(task.columns.get(SUBSET) or (task.source if data.sources else ""))

    used = loaded.heldout or loaded.train
    if loaded.heldout:
        loaded.notes.append(
            f"{len(used)} held-out comparisons. data.heldout = 0, without data.heldout_split,"
            f" evaluates {len(used) + len(loaded.train)}"
        )
    for task in used:
        if subset(task).lower() == TIES:
            ties_prompt(task.id)  # a wrong id must fail before anything is scored
    examples = PreferenceExamples(
        replace(loaded, train=used, heldout=[], weights={}),
        scorer.renderer,
        whole,
        examples_per_step=1,
        context=scorer.context,
        overlong=data.overlong,
        seed=seed,
    )
    if examples.unpaired:
        raise UserError(
            "the data has single completions with a label, and no right one beside a wrong one."
            " Reward models are evaluated on comparisons: comparisons.form = 'pair', 'best_of',"
            " 'labelled' or 'ranked'"
        )
    rows, groups = [], []
    for group in examples.everything():
        first, shown = group.trajectories[0], scorer.renderer.shown
        rewards = scorer.rewards(
            first.tokens[: first.prompt_length],
            [t.tokens[t.prompt_length :] for t in group.trajectories],
        ).tolist()
        grades = [float(grade or 0.0) for grade in group.rewards]
        rows.append(
            ScoredComparison(group.task.id, subset(group.task), tuple(rewards), tuple(grades))
        )
        scored = [
            replace(
                t,
                text=shown(t.tokens[t.prompt_length :], special=False),
                reward=Reward(value, score=grade, solved=grade == max(grades)),
            )
            for t, value, grade in zip(group.trajectories, rewards, grades, strict=True)
        ]
        groups.append(Group(group.task, scored))
    return _Scored(path, model, rows, comparison_figures(rows), groups, examples.notes)


def _compare(a: _Scored, b: _Scored) -> PairedTest:
    """Paired test on the accuracy of each comparison that both have scored."""
    ours, theirs = ({row.id: row.accuracy for row in one.rows} for one in (a, b))
    both = [one for one in ours if one in theirs]
    return paired_test([ours[one] for one in both], [theirs[one] for one in both])


def _labelled(figures: ComparisonFigures) -> dict[str, str]:
    """Figures of one model by label."""
    rows = {"comparisons": str(figures.every.comparisons)}

    def add(name: str, found: SubsetFigures) -> None:
        add_interval(rows, f"{name}accuracy", found.accuracy)
        add_interval(rows, f"{name}best of N", found.best_of)
        if found.ties:
            rows[f"{name}score"] = f"{100 * found.ties.score:.1f}"

    for name, found in figures.subsets.items():
        add(f"{name}: ", found)
    add("", figures.every)
    if figures.score is not None:
        rows["RewardBench 2"] = f"{100 * figures.score:.1f}"
    return rows


def _results(
    run: RunConfig, found: Sequence[_Scored], against: str | None, tests: dict[str, PairedTest]
) -> dict[str, Any]:
    """Content of results.json."""
    return {
        "recipe": run.name,
        "seed": run.seed,
        "reward_models": [
            {
                "checkpoint": one.path,
                "model": one.model,
                **one.figures.every.record(),
                "subsets": {name: part.record() for name, part in one.figures.subsets.items()},
                "reward_bench_2": one.figures.score,
                "notes": one.notes,
                "completions": completions_file(number),
            }
            for number, one in enumerate(found, start=1)
        ],
        "comparisons": recorded_differences(against, tests),
        "versions": versions(),
    }
