"""`sixfold eval` of process reward models: on solutions with labelled steps (ProcessBench)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..checkpoint.model_source import model_folder
from ..data.step_labels import LabelledSolution, load_step_labels
from ..errors import UserError
from ..evaluation.results import check_out
from ..evaluation.statistics import task_interval
from ..recipe.schema import DataConfig, EnvironmentConfig, PrmConfig, RunConfig
from ..types import Group, Reward, Trajectory
from .eval_table import EvaluatedModel, add_interval, models_to_evaluate, report_models

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Judged:
    """A solution with the scores of its steps."""

    solution: LabelledSolution
    text: str
    scores: list[float]
    labels: list[float]
    tokens: list[int]
    prompt: list[int]


def evaluate_process_reward_models(
    data: DataConfig,
    prm: PrmConfig,
    environment: EnvironmentConfig,
    run: RunConfig,
    paths: Sequence[str],
    against: str | None = None,
    out: Path | None = None,
) -> int:
    """Evaluate process reward models on labelled solutions: the held-out ones, or all if none is.

    Prints a table and writes the results.

    Args:
        data: the recipe's [data] section, which names the solutions.
        prm: its [prm] section, which has what stands between their steps.
        environment: its [environment] section, which says how models are read.
        run: its [run] section.
        paths: runs (their last reward model), checkpoints, model folders or hub ids; or
            POLICY,REFERENCE.
        against: baseline, compared with each of the others by a paired test.
        out: folder for results.json and the scores. None: the next free one under `run.dir`.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if one cannot be loaded, there are no solutions, or `out` is taken.
    """
    check_out(out)
    named = models_to_evaluate(paths, against)
    models = [_folders(path) for path in named]  # a wrong path must fail before any is evaluated
    found = [
        _scored(data, prm, environment, run.seed, path, model)
        for path, model in zip(named, models, strict=True)
    ]
    report_models("process_reward_models", "solutions", found, against, run, out)
    return 0


def _folders(path: str) -> str:
    parts = path.split(",")
    one = len(parts) == 1
    return ",".join(model_folder(part, "--checkpoint", reward_model=one) for part in parts)


def _scored(
    data: DataConfig,
    prm: PrmConfig,
    environment: EnvironmentConfig,
    seed: int,
    path: str,
    model: str,
) -> EvaluatedModel:
    """Score the solutions by one model."""
    from ..reward_model.step_quality import UNLABELLED
    from ..reward_model.step_reward import load_process_scorer
    from ..stages.step_examples import joined

    scorer = load_process_scorer(
        model.split(","), environment.prm, environment.reward_model, "--checkpoint"
    )
    loaded = load_step_labels(data, seed=seed)
    used, notes = loaded.heldout or loaded.train, list(loaded.notes)
    if loaded.heldout:
        notes.append(
            f"{len(used)} held-out solutions. data.heldout = 0, without data.heldout_split,"
            f" evaluates {len(used) + len(loaded.train)}"
        )
    judged: list[_Judged] = []
    for task in used:
        assert isinstance(task, LabelledSolution)
        own = prm.separator if task.separator is None else task.separator
        text, ends = joined(task, own)
        try:
            (scores,) = scorer.score(task, [text], [ends])
        except UserError as error:
            if data.overlong != "drop":
                raise UserError(
                    f"task {task.id}: {error}. Set data.overlong = 'drop' to leave out such"
                    " solutions"
                ) from error
            continue
        labels = [UNLABELLED if one is None else one for one in task.labels]
        renderer = scorer.renderer
        tokens, prompt = renderer.plain(text), list(renderer.encode(task))
        judged.append(_Judged(task, text, scores, labels, tokens, prompt))
    if not judged:
        raise UserError(f"--checkpoint {path}: it can score none of the {len(used)} solutions")
    if left := len(used) - len(judged):
        notes.append(f"{left} of {len(used)} solutions are left out: the model cannot score them")
    names = list(dict.fromkeys(one.solution.source for one in judged)) if data.sources else []
    parts = {name: [one for one in judged if one.solution.source == name] for name in names}
    subsets = {name: _figures(rows) for name, rows in {**parts, "": judged}.items()}
    labelled, groups = _labelled(subsets), [_group(row) for row in judged]
    return EvaluatedModel(
        path, model, _right(judged), labelled, {"subsets": subsets}, groups, notes
    )


def _figures(judged: Sequence[_Judged]) -> dict[str, Any]:
    """Figures of solutions, as results.json has them."""
    from ..reward_model.step_quality import first_errors, step_quality

    scores, labels = _tensors(judged)
    figures: dict[str, Any] = {"solutions": len(judged), **asdict(step_quality(scores, labels))}
    errors = first_errors(scores, labels)
    for name, wrong in (("error_found", True), ("all_right", False)):
        agree = [[float(true == seen)] for true, seen in errors if (true >= 0) == wrong]
        if agree:
            figures[f"{name}_interval"] = list(task_interval(agree)[1:])
        else:
            figures[name] = None
    if figures["error_found"] is None or figures["all_right"] is None:
        figures["first_error_f1"] = None
    return figures


def _tensors(judged: Sequence[_Judged]) -> tuple[list[Tensor], list[Tensor]]:
    """Scores and labels of the steps of each solution, float64."""
    import torch

    scores = [torch.tensor(one.scores, dtype=torch.float64) for one in judged]
    return scores, [torch.tensor(one.labels, dtype=torch.float64) for one in judged]


def _right(judged: Sequence[_Judged]) -> dict[str, float]:
    """By id, whether the first error that the scores show is the labelled one."""
    from ..reward_model.step_quality import first_errors

    found = {}
    for one in judged:
        for true, seen in first_errors(*_tensors([one])):
            found[one.solution.id] = float(true == seen)
    return found


def _labelled(subsets: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Figures of one model by label."""
    from ..evaluation.statistics import Interval

    rows: dict[str, str] = {}
    for name, one in subsets.items():
        before = f"{name}: " if name else ""
        rows[f"{before}solutions"] = str(one["solutions"])
        for key, label in (("error_found", "first error found"), ("all_right", "all right")):
            if one[key] is not None:
                share = Interval(one[key], *one[f"{key}_interval"])
                add_interval(rows, before + label, share)
        if one["first_error_f1"] is not None:
            rows[f"{before}F1"] = f"{100 * one['first_error_f1']:.1f}"
        rows[f"{before}steps right"] = f"{one['accuracy']:.1%}"
    known = [one["first_error_f1"] for name, one in subsets.items() if name]
    if len(known) > 1 and None not in known:
        rows["mean F1"] = f"{100 * fmean(known):.1f}"
    return rows


def _group(one: _Judged) -> Group:
    """A solution with the scores of its steps, for the file of completions."""
    count = len(one.tokens)
    made = Trajectory.one_turn(
        one.solution.id,
        0,
        one.prompt,
        one.tokens,
        [0.0] * count,
        [-1] * count,
        "stop",
        text=one.text,
    )
    parts = {f"step {number}": score for number, score in enumerate(one.scores)}
    made.reward = Reward(min(one.scores), parts)
    return Group(one.solution, [made])
