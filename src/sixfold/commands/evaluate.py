"""`sixfold eval`: evaluate checkpoints on the same held-out tasks with the same sampling noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..checkpoint.manifest import MANIFEST, OtherRelease
from ..checkpoint.model_source import model_folder
from ..checkpoint.payload import read_state
from ..checkpoint.state import PROGRESS
from ..errors import UserError
from ..evaluation.evaluate import Evaluation, evaluate
from ..evaluation.record import faults, solved_if
from ..evaluation.results import check_out, completions_file, make_out, write_results
from ..evaluation.statistics import Interval, PairedTest, paired_test
from ..recipe.schema import LoraConfig, Recipe, SharedSyncConfig
from ..report.numbers import p_value, percent, percent_range, points
from ..run.assemble import build_world


@dataclass(frozen=True)
class Evaluated:
    """Evaluation of one checkpoint.

    Attributes:
        path: checkpoint as the user named it.
        model: model folder or hub id.
        step: step of the checkpoint. None for a plain model.
        version: version of the weights. None for a plain model.
        rule: rule by which a completion counts as solved.
        found: the evaluation.
    """

    path: str
    model: str
    step: int | None
    version: int | None
    rule: str
    found: Evaluation


def evaluate_command(
    recipe: Recipe, checkpoints: Sequence[str], against: str | None = None, out: Path | None = None
) -> int:
    """Evaluate checkpoints on the same held-out tasks with the same noise.

    Prints a table and writes the results.

    Args:
        recipe: sets the tasks, the sampling and what counts as solved.
        checkpoints: runs (their newest checkpoint), checkpoints, model folders or hub ids.
        against: baseline, compared with each of the others by a paired test.
        out: folder for results.json and the completions. None: the next free one under `run.dir`.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if a checkpoint cannot be loaded, there are no held-out tasks, or `out` is taken.
    """
    if recipe.eval.temperature == 0 and recipe.eval.samples > 1:
        raise UserError(
            "eval.samples > 1 with eval.temperature = 0 draws the same completion every time: set a"
            " temperature"
        )
    check_out(out)
    paths = list(dict.fromkeys([*checkpoints, *([against] if against else [])]))
    # Resolve all paths first: a wrong one must fail before anything is evaluated.
    models = [model_folder(path, "--checkpoint") for path in paths]
    results = [_evaluate(recipe, path, model) for path, model in zip(paths, models, strict=True)]
    tests = {r.path: _compare(r.found, results[-1].found) for r in results[:-1]} if against else {}
    console = Console()
    console.print(_table(recipe, results))
    for path, test in tests.items():
        d = test.difference
        console.print(
            f"{path} minus {against}: {points(d.mean)} points ({points(d.low)} to"
            f" {points(d.high)}), better on {test.wins} tasks, worse on {test.losses},"
            f" {p_value(test.p_value)} ({test.test})"
        )
    folder = make_out(out, Path(recipe.run.dir), recipe.run.name)
    written = write_results(
        folder, _results(recipe, results, against, tests), [r.found.groups for r in results]
    )
    console.print(f"results and completions: {written.parent}", soft_wrap=True)
    return 0


def _evaluate(recipe: Recipe, path: str, model: str) -> Evaluated:
    # Nothing is trained here: sample from the model itself, not from a quantised copy.
    engine = recipe.engine.model_copy(update={"kv_dtype": "auto"})
    source = recipe.model.model_copy(update={"lora": LoraConfig()})  # adapters are merged
    exact = recipe.model_copy(
        update={"sync": SharedSyncConfig(), "engine": engine, "model": source}
    )
    world = build_world(exact, model)
    try:
        if not world.tasks.heldout:
            raise UserError("no held-out tasks: set data.heldout or data.heldout_split")
        found = evaluate(
            world.evaluator(),
            world.environment,
            world.tasks.heldout,
            recipe.run.seed,
            world.loop,
            world.strict,
        )
        return Evaluated(
            path, model, *_trained(Path(model)), world.environment.solved_rule.text, found
        )
    finally:
        world.close()


def _trained(model: Path) -> tuple[int | None, int | None]:
    """RL step and version of a checkpoint's weights, read from its state.

    None for a plain model, for a checkpoint of SFT, and for one of another release.
    """
    if not (model.parent / MANIFEST).is_file():
        return None, None
    try:
        components = read_state(model.parent)["components"]
    except OtherRelease:
        return None, None
    if "policy" not in components:
        return None, None
    return components[PROGRESS]["step"], components["policy"]["version"]


def _compare(a: Evaluation, b: Evaluation) -> PairedTest:
    """Paired test on the share of solved samples per task."""
    return paired_test(*([sum(v) / len(v) for v in r.values] for r in (a, b)))


def _ks(samples: int) -> list[int]:
    return sorted({1, samples} | {k for k in (2, 4, 8, 16) if k <= samples})


def _table(recipe: Recipe, results: Sequence[Evaluated]) -> Table:
    """One row per checkpoint."""
    ks, parts = _ks(recipe.eval.samples), sorted({name for r in results for name in r.found.parts})
    shown_parts = parts if len(parts) > 1 else []
    has_faults = any(faults(r.found.verdicts) for r in results)
    title = f"{len(results[0].found.groups)} held-out tasks; {solved_if(results[0].rule)}"
    table = Table(
        Column("", overflow="fold"),
        "step",
        "version",
        "solved",
        "95% interval",
        *(f"pass@{k}" for k in ks if k > 1),
        "mean score",
        *shown_parts,
        *([recipe.eval.strict] if recipe.eval.strict else []),
        "checks failed",
        *(["other verdicts"] if has_faults else []),
    )
    table.title, table.title_justify = title, "left"
    for r in results:
        share, score, means = r.found.interval, r.found.score, r.found.parts
        verdicts = ", ".join(f"{n} {name}" for name, n in faults(r.found.verdicts).items())
        table.add_row(
            Text(r.path),
            *("-" if n is None else str(n) for n in (r.step, r.version)),
            percent(share.mean),
            percent_range(share.low, share.high),
            *(percent(r.found.pass_at(k)) for k in ks if k > 1),
            f"{score.mean:.3f}" if score else "-",
            *(f"{means[name]:.3f}" if name in means else "-" for name in shown_parts),
            *([percent(r.found.strict_share)] if r.found.strict_share is not None else []),
            str(r.found.errors),
            *([verdicts] if has_faults else []),
        )
    return table


def _results(
    recipe: Recipe,
    results: Sequence[Evaluated],
    against: str | None,
    tests: Mapping[str, PairedTest],
) -> dict[str, Any]:
    """Content of results.json."""
    return {
        "recipe": recipe.run.name,
        "seed": recipe.run.seed,
        "tasks": len(results[0].found.groups),
        "samples": recipe.eval.samples,
        "temperature": recipe.eval.temperature,
        "solved": results[0].rule,
        "checkpoints": [
            {
                "checkpoint": r.path,
                "model": r.model,
                "step": r.step,
                "version": r.version,
                "accuracy": r.found.interval.mean,
                "accuracy_interval": list(r.found.interval[1:]),
                "score": _ends(r.found.score),
                "reward": _ends(r.found.reward),
                "parts": r.found.parts,
                "pass_at": {str(k): r.found.pass_at(k) for k in _ks(recipe.eval.samples)},
                "checks_failed": r.found.errors,
                "verdicts": r.found.verdicts,
                "strict": r.found.strict_share,
                "strict_gap": r.found.strict_gap,
                "completions": completions_file(number),
            }
            for number, r in enumerate(results, start=1)
        ],
        "comparisons": [
            {
                "checkpoint": path,
                "against": against,
                "difference": test.difference.mean,
                "difference_interval": list(test.difference[1:]),
                "wins": test.wins,
                "losses": test.losses,
                "p_value": test.p_value,
                "test": test.test,
            }
            for path, test in tests.items()
        ],
        "versions": {name: metadata.version(name) for name in ("sixfold", "torch", "transformers")},
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
