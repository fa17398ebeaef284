"""`sixfold eval [RECIPE] RUN [RUN ...] [--against DIR] [--out DIR]`.

All checkpoints are evaluated on the same held-out tasks with the same sampling noise. Reward models
are evaluated on comparisons, process reward models on labelled solutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..checkpoint.manifest import MANIFEST, OtherRelease
from ..checkpoint.model_source import model_folder, with_model_folders
from ..cli.parsing import VerbParser, argument, option
from ..errors import UserError
from ..evaluation.evaluate import Evaluation, evaluate
from ..evaluation.record import faults, solved_if
from ..evaluation.results import check_out, completions_file, make_out, write_results
from ..evaluation.statistics import Interval, PairedTest, paired_test
from ..files.folder import RunFolder, model_stage
from ..recipe.dump import flat
from ..recipe.find import shipped_recipes
from ..recipe.hub_names import not_found
from ..recipe.plan import make_plan
from ..recipe.schema import ComparisonsConfig, EvalConfig, PrmConfig, Recipe, RunConfig
from ..recipe.stages import REFERENCE, STAGES, StagedRecipe
from ..recipe.toml import load_recipe, load_staged, split_stage
from ..report.numbers import percent
from ..stages.artifact import DATASET, read_artifact
from .eval_table import (
    add_interval,
    print_columns,
    print_differences,
    recorded_differences,
    versions,
)

TEXT = """\
Evaluate checkpoints on held-out tasks: share solved, pass@k and mean score, with 95 % intervals.

    sixfold eval runs/a                         # on the held-out tasks of its own recipe
    sixfold eval runs/a runs/b --against Qwen/Qwen2.5-0.5B-Instruct
    sixfold eval my.toml runs/a --eval.samples 8 --eval.temperature 1

Reward models are evaluated on the comparisons of a recipe: pairs in the right order, best of N, and
the score of RewardBench 2. Process reward models are evaluated on labelled solutions: F1 of the
first error, as in ProcessBench.

    sixfold eval comparisons.toml runs/p/stages/rm --data.heldout 0
    sixfold eval solutions.toml runs/p/stages/prm --data.heldout 0
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    given: tuple[str, ...] = argument(
        "a recipe, which sets tasks and sampling, and then checkpoints, runs or Hugging Face models"
        " to evaluate. Without a recipe: that of the first run",
        (),
        nargs="*",
        metavar="RECIPE_OR_RUN",
    )
    checkpoint: tuple[str, ...] = option(
        "further checkpoints, runs or models to evaluate",
        (),
        nargs="+",
        action="extend",
        metavar="DIR",
    )
    against: str | None = option(
        "baseline checkpoint; the others are compared with it by a paired test", metavar="DIR"
    )
    out: Path | None = option(
        "folder for results.json and completions (default: a new folder in DIR/evaluations)",
        metavar="DIR",
    )
    settings: tuple[str, ...] = ()


PARSER = VerbParser("eval", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    named = [*given.given, *given.checkpoint]
    if not named:
        raise UserError("sixfold eval: give a run to evaluate, such as sixfold eval runs/demo")
    from ..checkpoint.model_source import is_process_reward_model, is_reward_model
    from .eval_comparisons import evaluate_reward_models
    from .eval_steps import evaluate_process_reward_models

    own = None if given.given and named[0] in shipped_recipes() else own_recipe(named[0])
    checkpoints = named if own else named[1:]
    if own is None and not given.given:
        raise UserError(
            f"sixfold eval: {named[0]} is no run, so it has no recipe of its own. Name one first:"
            f" sixfold eval RECIPE {' '.join(named)}"
        )
    for kind, rows in ((is_reward_model, "comparisons"), (is_process_reward_model, "solutions")):
        if own and kind(named[0]):
            raise UserError(
                f"sixfold eval: {named[0]} is a reward model. Name a recipe with {rows} first:"
                f" sixfold eval RECIPE {' '.join(named)}"
            )
    recipe = with_model_folders(
        recipe_of(own, given.settings)
        if own
        else named_recipe(named[0], given.settings, checkpoints)
    )
    if not checkpoints:
        raise UserError(
            f"sixfold eval: name the runs, checkpoints or models to evaluate by {named[0]}, such as"
            f" sixfold eval {named[0]} runs/{recipe.run.name}"
        )
    every = [*checkpoints, *([given.against] if given.against else [])]
    for path in (part for whole in every for part in whole.split(",")):
        if not Path(path).expanduser().exists() and (reason := not_found(path, "models")):
            raise UserError(f"--checkpoint: no checkpoint, run or model at '{path}': {reason}")
    if own is None and (recipe.prm != PrmConfig() or any(map(is_process_reward_model, every))):
        return evaluate_process_reward_models(
            recipe.data,
            recipe.prm,
            recipe.environment,
            recipe.run,
            checkpoints,
            given.against,
            given.out,
        )
    if own is None and (
        recipe.comparisons != ComparisonsConfig() or any(map(is_reward_model, every))
    ):
        return evaluate_reward_models(
            recipe.data,
            recipe.comparisons,
            recipe.environment.reward_model,
            recipe.run,
            checkpoints,
            given.against,
            given.out,
        )
    if not make_plan(recipe).evaluations:
        raise UserError(
            "nothing to evaluate on: data.heldout = 0 and data.heldout_split is empty; set one of"
            " them"
        )
    if own is not None:
        print(f"recipe: {own}")
        for other in named[1:]:
            _note_differences(recipe, other, given.settings)
    return evaluate_checkpoints(recipe, checkpoints, given.against, given.out)


def own_recipe(text: str) -> Path | None:
    """recipe.toml of a run, from its folder or a checkpoint in it. None: it is no run."""
    folder = Path(text).expanduser()
    inside = [folder, *folder.resolve().parents[:3]] if folder.is_dir() else []
    return next((path for one in inside if (path := one / "recipe.toml").is_file()), None)


def recipe_of(own: Path, settings: Sequence[str]) -> Recipe:
    """Recipe by which a run evaluates its model. Of a run with stages, that of its last model.

    Args:
        own: recipe.toml of the run, or of one of its stages.
        settings: command-line flags.
    """
    whole = RunFolder(own.parent).whole
    staged = load_staged(str(RunFolder(whole).recipe), settings)
    if not staged.stages:
        return staged.base
    stage = model_stage(own.parent) if whole == own.parent else own.parent
    return staged.evaluation(stage.name, str(whole), _made(staged, whole))


def named_recipe(text: str, settings: Sequence[str], models: Sequence[str] = ()) -> Recipe:
    """Read a recipe, or one stage of it. Results of earlier stages come from the recipe's run.

    Args:
        text: recipe, with the name of a stage after a colon if it has stages.
        settings: command-line flags.
        models: what is evaluated. Reward models read the rows of the stage, policies its tasks.
    """
    from ..checkpoint.model_source import is_process_reward_model, is_reward_model

    file, name = split_stage(text)
    if not name:
        return load_recipe(text, settings)
    staged = load_staged(file, settings)
    made = _made(staged, Path(staged.base.run.dir) / staged.base.run.name)
    stage = staged.stages[staged.position(name, file)]
    scored = any(is_reward_model(model) or is_process_reward_model(model) for model in models)
    if scored or stage.recipe.comparisons != ComparisonsConfig():
        return replace(stage, recipe=staged.planned(name, text)).bound(made)
    return staged.evaluation(name, text, made)


def _made(staged: StagedRecipe, run: Path) -> dict[str, str]:
    """Path of each stage's result, by the stage's name.

    A dataset that is not finished has the path at which it will be. A model has none yet: its name
    remains `stage:NAME`, which is refused where it is loaded.
    """
    found = {}
    for stage in staged.stages:
        folder = run / STAGES / stage.name
        if artifact := read_artifact(folder):
            found[stage.name] = str(folder / artifact.path)
        else:
            dataset = stage.row.makes == "dataset"
            found[stage.name] = str(folder / DATASET) if dataset else REFERENCE + stage.name
    return found


def _note_differences(recipe: Recipe, run: str, settings: Sequence[str]) -> None:
    """Say which settings of the evaluation another run had otherwise."""
    path = own_recipe(run)
    if path is None:
        return
    theirs, ours = flat(recipe_of(path, settings)), flat(recipe)
    differ = [
        key
        for key in ours
        if key.split(".")[0] in ("data", "environment", "eval") and theirs.get(key) != ours[key]
    ]
    if differ:
        print(f"{run} was trained with another {', '.join(differ)}: all are evaluated alike")


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


def evaluate_checkpoints(
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
    others = [path for path in dict.fromkeys(checkpoints) if path != against]
    paths = [*others, against] if against else others  # the baseline is the last
    # Resolve all paths first: a wrong one must fail before anything is evaluated.
    models = [model_folder(path, "--checkpoint") for path in paths]
    results = [_evaluate(recipe, path, model) for path, model in zip(paths, models, strict=True)]
    tests = {r.path: _compare(r.found, results[-1].found) for r in results[:-1]} if against else {}
    console = Console()
    _print_figures(console, recipe.eval, results)
    print_differences(console, against, tests)
    folder = make_out(out, Path(recipe.run.dir), recipe.run.name)
    written = write_results(
        folder,
        _results(recipe.run, recipe.eval, results, against, tests),
        [r.found.groups for r in results],
    )
    console.print(f"results and completions: {written.parent}", soft_wrap=True)
    return 0


def _evaluate(recipe: Recipe, path: str, model: str) -> Evaluated:
    from ..run.assemble import assemble

    world = assemble(recipe.sampling_alone(), model)
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
    from ..checkpoint.payload import read_state
    from ..checkpoint.state import PROGRESS

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


def _print_figures(console: Console, config: EvalConfig, results: Sequence[Evaluated]) -> None:
    """One row per figure, and one column per checkpoint: as many side by side as there is room."""
    console.print(
        Text(f"{len(results[0].found.groups)} held-out tasks; {solved_if(results[0].rule)}")
    )
    columns = [_figures(config, result) for result in results]
    print_columns(console, [result.path for result in results], columns)


def _figures(config: EvalConfig, result: Evaluated) -> dict[str, str]:
    """Figures of one checkpoint by label, each with its interval in the row below."""
    found = result.found
    rows = {
        "step": "-" if result.step is None else str(result.step),
        "version": "-" if result.version is None else str(result.version),
    }

    add_interval(rows, "solved", found.interval)
    for k in _ks(config.samples):
        if k > 1:
            add_interval(rows, f"pass@{k}", found.pass_interval(k))
    if (score := found.score) is not None:
        add_interval(rows, "mean score", score, "{:.3f}".format)
    if len(found.parts) > 1:
        rows |= {name: f"{mean:.3f}" for name, mean in found.parts.items()}
    if (strict := found.strict_share) is not None:
        rows[config.strict] = percent(strict)
    rows["checks failed"] = str(found.errors)
    return rows | {name: str(count) for name, count in faults(found.verdicts).items()}


def _results(
    run: RunConfig,
    config: EvalConfig,
    results: Sequence[Evaluated],
    against: str | None,
    tests: Mapping[str, PairedTest],
) -> dict[str, Any]:
    """Content of results.json."""
    return {
        "recipe": run.name,
        "seed": run.seed,
        "tasks": len(results[0].found.groups),
        "samples": config.samples,
        "temperature": config.temperature,
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
                "pass_at": {str(k): r.found.pass_at(k) for k in _ks(config.samples)},
                "pass_at_interval": {
                    str(k): list(r.found.pass_interval(k)[1:]) for k in _ks(config.samples)
                },
                "checks_failed": r.found.errors,
                "not_applicable": r.found.not_applicable,
                "verdicts": r.found.verdicts,
                "strict": r.found.strict_share,
                "strict_gap": r.found.strict_gap,
                "completions": completions_file(number),
            }
            for number, r in enumerate(results, start=1)
        ],
        "comparisons": recorded_differences(against, tests),
        "versions": versions(),
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
