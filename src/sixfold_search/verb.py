"""`sixfold search RECIPE [MODEL] --out DIR`: compare methods of test-time search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from sixfold.checkpoint.model_source import model_folder, with_model_folders
from sixfold.cli.parsing import (
    RECIPE_HELP,
    PositiveFloat,
    PositiveInt,
    VerbParser,
    argument,
    option,
)
from sixfold.commands.eval_table import (
    add_interval,
    print_columns,
    print_differences,
    recorded_differences,
    versions,
)
from sixfold.data.profile import read_profile
from sixfold.errors import UserError, nearest
from sixfold.evaluation.statistics import Interval, PairedTest, paired_test, task_interval
from sixfold.recipe.reward_models import VERIFIER
from sixfold.recipe.toml import load_recipe
from sixfold.steps import absolute_name, own_ends_of, steps_of

from .settings import Settings

if TYPE_CHECKING:
    from .compare import Difficulties
    from .difficulty import Buckets
    from .searcher import Plan

PURPOSE = "compare methods of test-time search at equal budgets: best of N, beams, tree search"

TEXT = """\
Search for solutions of held-out tasks by several methods, and compare them at equal budgets of
model tokens: those that the policy prefills and samples, and those that the scorer's model reads.

    sixfold search demo runs/demo --out found
    sixfold search demo runs/demo --scorer runs/rm --methods majority best_of_n beam mcts \\
        --budget 2000 --tasks 100 --out found

METHODS
  greedy          the most probable tokens
  majority        self-consistency: the answer of most completions
  weighted        the answer with the largest sum of values
  best_of_n       the completion with the largest value
  beam            keep the n / M best chains of each step, extend each M times
  diverse_beam    n / M beams that keep one chain each (DVTS)
  lookahead       a beam whose chains are scored some greedy steps later
  mcts            Monte Carlo tree search over steps
  regenerate      delete the first wrong step and complete again
  budget_forcing  think for a number of tokens, then answer

With --profile and --choose-from, a further column has the method and the budget that solved most
tasks of the same difficulty in earlier searches of other tasks (Snell et al. 2024).

With --budget, a method goes on until the next completion might not fit; --n is the size of a round.
Without it, --n completions are sampled, or n chains are extended in each step, or n simulations
are made. Chosen completions that the recipe's verifier accepts are written as rows for SFT
(solutions.jsonl) and for preferences (pairs.jsonl). An interrupted search goes on with the same
command.
"""

_DEFAULT = ("greedy", "majority")
_DEFAULT_SCORED = (*_DEFAULT, "best_of_n", "beam")
BUCKETS = 5
"""Most buckets of difficulty, if the user does not say: Snell et al. have five."""
_ORACLE = "it knows the answers"
_NEEDS_STEPS = "{} the score of each step, and --scorer is no process reward model"


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = argument(RECIPE_HELP)
    model: str = argument(
        "run, checkpoint or model to search with (default: the recipe's model)", ""
    )
    out: Path = option("folder for the results", MISSING, metavar="DIR")
    methods: tuple[str, ...] = option(
        "methods to compare; differences are those to the first (default: greedy majority, and"
        " with a scorer also best_of_n beam)",
        (),
        nargs="+",
        metavar="METHOD",
    )
    budget: PositiveInt | None = option("most model tokens of one search (default: no limit)")
    scorer: str = option(
        "outcome or process reward model that scores completions; verifier: the recipe's own, which"
        " knows the answer and so shows what a perfect scorer would reach; POLICY,REFERENCE: an"
        " implicit process reward model",
        "",
        metavar="MODEL",
    )
    tasks: PositiveInt | None = option("number of tasks, drawn by run.seed (default: all)")
    train: bool = option("search training tasks, for data to train on", False)
    tasks_at_once: PositiveInt | None = option(
        "tasks that are searched at the same time, which changes no result with the own engine"
        " (default: as many as its KV cache has room for; 1 with an engine elsewhere, which may"
        " drop prefixes unseen)"
    )
    profile: Path | None = option(
        "pass rates of the tasks (sixfold data, stage stratify): figures by difficulty",
        metavar="FILE",
        group="choice by difficulty",
    )
    choose_from: tuple[Path, ...] = option(
        "finished searches of other tasks, from which method and budget are chosen for each"
        " difficulty; --budget then also bounds the mean tokens of that choice",
        (),
        nargs="+",
        metavar="DIR",
    )
    buckets: PositiveInt | None = option("most buckets of difficulty (default 5)")
    n: PositiveInt | None = option(
        "completions, chains or simulations (default 16)", group="settings of methods"
    )
    expand: PositiveInt | None = option("extensions per chain and step, M (default 4)")
    steps: str | None = option(
        "where steps end: newline, blank_line, sentence, token:TEXT, xml:TAG, every:N or"
        " path.py:function (default newline)",
        metavar="WHERE",
    )
    step_tokens: PositiveInt | None = option("most tokens of a step (default 128)")
    aggregate: Literal["min", "mean", "product", "last", "sum"] | None = option(
        "value of a chain from the scores of its steps (default min)"
    )
    lookahead: PositiveInt | None = option("greedy steps before a chain is scored (default 1)")
    explore: PositiveFloat | None = option(
        "constant of the upper confidence bound of tree search (default 1)", metavar="C"
    )
    threshold: PositiveFloat | None = option(
        "a step with a smaller score is wrong (default 0.5)", metavar="SCORE"
    )
    think: PositiveInt | None = option("most tokens of thinking (default 256)")
    think_min: PositiveInt | None = option("fewest tokens of thinking (default 0)")
    think_end: str | None = option("text that ends thinking (default </think>)", metavar="TEXT")
    think_more: str | None = option(
        "text in place of an end that comes too early (default Wait)", metavar="TEXT"
    )
    settings: tuple[str, ...] = ()


PARSER = VerbParser("search", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    """Search, print the table, and write the files.

    Raises:
        UserError: for bad input, before anything is sampled.
    """
    given = PARSER.parse(arguments)
    methods = given.methods or (_DEFAULT_SCORED if given.scorer else _DEFAULT)
    recipe = with_model_folders(load_recipe(given.recipe, given.settings))
    if recipe.environment.several_turns:
        raise UserError(
            "environment.episode and environment.agent play several replies, and a search completes"
            " one. Search a recipe whose tasks are answered by one reply"
        )
    from sixfold.run.assemble import assemble

    from .compare import check_out, compare_methods, end
    from .difficulty import choose
    from .methods import METHODS
    from .scorers import named_scorer, scorer_folders

    if unknown := [name for name in methods if name not in METHODS]:
        raise UserError(
            f"--methods {unknown[0]}: unknown.{nearest(unknown[0], [*METHODS])} Methods:"
            f" {', '.join(METHODS)}"
        )
    if len(set(methods)) < len(methods):
        raise UserError(f"--methods {' '.join(methods)}: a method is named twice")
    check_out(given.out)
    path = given.scorer
    if path not in ("", VERIFIER):  # which checkpoint of a run
        path = scorer_folders(path)
    plan = _plan(given, methods, path)
    for name in methods:
        METHODS[name].check(plan.settings, recipe.rollout.max_new_tokens)
    if own_ends_of(plan.stepping.name):
        steps_of(plan.stepping.name)  # the user's file fails before anything is loaded
    known = _difficulties(given)
    if known and known.earlier:
        count = given.buckets or BUCKETS
        chosen = choose(known.earlier, known.profile, known.path, count, plan.budget)
        plan = replace(plan, choice=chosen)
    place = model_folder(given.model, "MODEL") if given.model else ""
    scorer, ends = named_scorer(path, recipe.environment, given.steps or "")
    if ends and not given.steps:  # the steps that the model has learned to score
        if given.step_tokens and ends.startswith("every:"):
            raise UserError(f"--step-tokens has no effect: the steps of --scorer end by {ends}")
        plan = replace(plan, stepping=replace(plan.stepping, name=ends))
    world = assemble(recipe.sampling_alone(), place)
    try:
        rows = compare_methods(world, plan, given.out, scorer, known, given.tasks_at_once)
    finally:
        world.close()
    names = [*rows[0]["found"]]
    figures, tests = _figures(rows, names), _tests(rows, names)
    if known:
        buckets = plan.choice.buckets if plan.choice else None
        add_difficulties(figures, rows, buckets, given.buckets or BUCKETS)
    console = _show(plan, figures, len(rows))
    print_differences(console, methods[0], tests)
    results = {
        "recipe": recipe.run.name,
        "seed": recipe.run.seed,
        "tasks": len(rows),
        "plan": asdict(plan),
        "methods": figures,
        "comparisons": recorded_differences(methods[0], tests, "method"),
        "versions": versions(),
    }
    end(given.out, results)
    print(f"results, completions and rows for training: {given.out}")
    return 0


def _plan(given: Options, methods: tuple[str, ...], scorer: str) -> Plan:
    """What is compared.

    Args:
        given: the options.
        methods: names of the methods.
        scorer: folder of the reward model, "verifier" or "".

    Raises:
        UserError: if an option has no effect, or a scorer is missing.
    """
    from .methods import METHODS
    from .scorers import scores_wholes
    from .searcher import Plan
    from .steps import Stepping

    scored = [name for name in methods if METHODS[name].scores != "nothing"]
    if scored and not given.scorer:
        raise UserError(f"--methods {scored[0]} needs --scorer MODEL, a reward model")
    if given.scorer and not scored and not given.choose_from:
        raise UserError(f"--scorer has no effect: {', '.join(methods)} score nothing")
    by_step = scorer not in ("", VERIFIER) and not scores_wholes(scorer)
    if "regenerate" in methods and not by_step:
        raise UserError(_NEEDS_STEPS.format("--methods regenerate needs"))
    if given.aggregate and not by_step:
        raise UserError(_NEEDS_STEPS.format("--aggregate has no effect without"))
    read = {one for name in methods for one in METHODS[name].reads}
    if given.budget and not any("n" in METHODS[name].reads for name in methods if name != "mcts"):
        read -= {"n"}  # with a budget, tree search has no rounds
    own = {one.name: getattr(given, one.name) for one in fields(Settings)}
    steps = {"steps": given.steps, "step_tokens": given.step_tokens}
    if given.step_tokens and (given.steps or "").startswith("every:"):
        raise UserError(f"--step-tokens has no effect with --steps {given.steps}")
    for name, value in (own | steps).items():
        used = name in read or (name in steps and "expand" in read)
        if value is not None and not (used or (name == "steps" and by_step)):
            raise UserError(
                f"--{name.replace('_', '-')} has no effect on {', '.join(methods)}. Leave it out"
            )
    ends = absolute_name(given.steps) if given.steps else None
    span: dict[str, Any] = {"name": ends, "tokens": given.step_tokens}
    stepping = Stepping(**{name: value for name, value in span.items() if value is not None})
    return Plan(
        methods,
        Settings(**{name: value for name, value in own.items() if value is not None}),
        stepping,
        given.aggregate or "min",
        given.budget,
        scorer,
        given.tasks or 0,
        given.train,
    )


def _difficulties(given: Options) -> Difficulties | None:
    """Pass rates of --profile, and the searches of --choose-from. None without a profile.

    Raises:
        UserError: if one cannot be read, or --choose-from or --buckets has no profile.
    """
    from .compare import Difficulties
    from .difficulty import read_earlier

    if given.profile is None:
        for name in ("choose_from", "buckets"):
            if getattr(given, name):
                raise UserError(f"--{name.replace('_', '-')} needs --profile FILE, the pass rates")
        return None
    earlier = [read_earlier(folder) for folder in given.choose_from]
    return Difficulties(read_profile(given.profile), given.profile, earlier)


def add_difficulties(
    figures: Mapping[str, dict[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    buckets: Buckets | None,
    count: int,
) -> None:
    """Add the share that is right and the tokens of each difficulty to the figures of each method.

    Args:
        figures: the figures of each method.
        rows: a line of each task, with its pass rate.
        buckets: the buckets of a choice. None: of the rates of these tasks.
        count: most buckets, if they are made here.
    """
    from .difficulty import Buckets, tokens_of

    buckets = buckets or Buckets.of([row["pass_rate"] for row in rows], count)
    for name, one in figures.items():
        one["by_difficulty"] = {}
        for number, label in enumerate(buckets.names):
            found = [row["found"][name] for row in rows if buckets.find(row["pass_rate"]) == number]
            if not found:
                continue
            interval = task_interval([[float(line["solved"])] for line in found])
            one["by_difficulty"][label] = {
                "tasks": len(found),
                "solved": interval.mean,
                "solved_interval": list(interval[1:]),
                "tokens": fmean(map(tokens_of, found)),
                "ways": sorted({line["way"] for line in found}),
            }


def _figures(
    rows: Sequence[Mapping[str, Any]], methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Figures of each method, as results.json has them.

    Args:
        rows: a line of each task (`compare_methods`).
        methods: the methods.
    """
    made: dict[str, dict[str, Any]] = {}
    sources = sorted({row["source"] for row in rows})
    for name in methods:
        found = [row["found"][name] for row in rows]
        figures: dict[str, Any] = {}
        for key in ("solved", "covered"):
            interval = task_interval([[float(one[key])] for one in found])
            figures |= {key: interval.mean, f"{key}_interval": list(interval[1:])}
        figures["solved_by_source"] = {
            one: fmean(float(row["found"][name]["solved"]) for row in rows if row["source"] == one)
            for one in sources
        }
        for key in ("prefilled", "sampled", "scored"):
            figures[f"tokens_{key}"] = fmean(one[key] for one in found)
        figures["candidates"] = fmean(len(one["candidates"]) for one in found)
        figures["checks_failed"] = sum(one["unchecked"] for one in found)
        made[name] = figures | {"texts_refused": sum(one["refused"] for one in found)}
    return made


def _tests(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, PairedTest]:
    """Each method against the first, on the same tasks."""
    first, *others = ([float(row["found"][name]["solved"]) for row in rows] for name in methods)
    return {
        name: paired_test(values, first) for name, values in zip(methods[1:], others, strict=True)
    }


def _show(plan: Plan, figures: Mapping[str, Mapping[str, Any]], tasks: int) -> Console:
    """Print one column per method."""
    console = Console()
    by = f"the verifier scores (oracle: {_ORACLE})" if plan.scorer == VERIFIER else plan.scorer
    limit = f", at most {plan.budget:,} model tokens each" if plan.budget else ""
    console.print(Text(f"{tasks} tasks{limit}{f'; scorer: {by}' if by else ''}"))
    if plan.choice:
        console.print(Text("chosen by difficulty on other tasks:"))
        for bucket, way in zip(plan.choice.buckets.names, plan.choice.ways, strict=True):
            console.print(Text(f"  {bucket}: {way}"))
    columns = []
    for one in figures.values():
        rows: dict[str, str] = {}
        add_interval(rows, "solved", Interval(one["solved"], *one["solved_interval"]))
        if len(one["solved_by_source"]) > 1:
            rows |= {f"  {name}": f"{part:.1%}" for name, part in one["solved_by_source"].items()}
        for name, part in one.get("by_difficulty", {}).items():
            low, high = part["solved_interval"]
            rows[f"  {name} ({part['tasks']})"] = f"{part['solved']:.0%} ({low:.0%} to {high:.0%})"
            rows[f"    tokens at {name}"] = f"{part['tokens']:,.0f}"
        add_interval(rows, "any solved", Interval(one["covered"], *one["covered_interval"]))
        parts = [one[f"tokens_{key}"] for key in ("prefilled", "sampled", "scored")]
        labels = ("  prefilled", "  sampled", "  by the scorer")
        rows["tokens per task"] = f"{sum(parts):,.0f}"
        rows |= {label: f"{part:,.0f}" for label, part in zip(labels, parts, strict=True)}
        rows["completions per task"] = f"{one['candidates']:.1f}"
        rows["checks failed"] = str(one["checks_failed"])
        columns.append(rows | {"refused by the scorer": str(one["texts_refused"])})
    print_columns(console, list(figures), columns)
    return console
