"""`sixfold eval` of reward models: on the comparisons of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.model_source import architectures, model_folder
from ..errors import UserError
from ..evaluation.results import check_out
from ..evaluation.reward_bench import (
    TIES,
    ComparisonFigures,
    ScoredComparison,
    SubsetFigures,
    comparison_figures,
    ties_prompt,
)
from ..recipe.schema import ComparisonsConfig, DataConfig, RewardScoringConfig, RunConfig
from ..recipe.stages import generated_source
from ..types import Group, Reward, Task
from .eval_table import EvaluatedModel, add_interval, models_to_evaluate, report_models


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
    named = models_to_evaluate(paths, against)
    # Resolve all paths first: a wrong one must fail before anything is evaluated.
    models = [model_folder(path, "--checkpoint", reward_model=True) for path in named]
    for path, model in zip(named, models, strict=True):
        check_is_reward_model(architectures(model), path)
    found = [
        _scored(data, comparisons, scoring, run.seed, path, model)
        for path, model in zip(named, models, strict=True)
    ]
    report_models("reward_models", "comparisons", found, against, run, out)
    return 0


def _scored(
    data: DataConfig,
    comparisons: ComparisonsConfig,
    scoring: RewardScoringConfig,
    seed: int,
    path: str,
    model: str,
) -> EvaluatedModel:
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
    figures = comparison_figures(rows)
    shares = {row.id: row.accuracy for row in rows}
    labelled, recorded = _labelled(figures), _recorded(figures)
    return EvaluatedModel(path, model, shares, labelled, recorded, groups, examples.notes)


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


def _recorded(figures: ComparisonFigures) -> dict[str, Any]:
    """Figures of one model for results.json."""
    return {
        **figures.every.record(),
        "subsets": {name: part.record() for name, part in figures.subsets.items()},
        "reward_bench_2": figures.score,
    }
