"""Read the stages of a recipe, each of which resolves to a whole recipe. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..environment.registry import REWARDS
from ..errors import UserError, nearest
from ..plugins import ROLLOUTS, load
from ..preference.zoo import LOSSES
from .distill import DISTILL, TEACHER, distill_stages
from .dump import flat
from .keys import check_keys
from .knobs import knobs, sections
from .online import ONLINE, ROUNDS, online_stages
from .preference_plan import READ_BY, check_reference, check_sampled, resolve_losses
from .resume_policy import settings_of
from .reward_models import PRM, is_implicit, listed_models, reward_model_paths
from .schema import NAME, LoraConfig, SampleConfig, SourceConfig
from .settled import settled
from .stages import (
    ACCEPTS,
    KINDS,
    REFERENCE,
    SCORER,
    STAGES,
    Kind,
    Stage,
    StagedRecipe,
    Table,
    dataset_settings,
    generated_source,
    ignores,
    in_stage,
    kind_names,
    kind_row,
)
from .toml_lines import TomlText

COMPOSED = {DISTILL: distill_stages, ONLINE: online_stages}
"""Kinds that stand for several stages."""


def read_stages(
    asked: Mapping[str, Any], tables: Any, given: Mapping[str, Any], file: TomlText
) -> StagedRecipe:
    """Resolve and check the stages of a recipe.

    Args:
        asked: values of the recipe's file by section, without `[[stages]]`.
        tables: value of `stages` in the file.
        given: values of flags. `stages.NAME.KEY` is a setting of one stage.
        file: says where keys were written.

    Raises:
        UserError: for any mistake.
    """
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise UserError(
            f"stages: expected tables [[stages]], each with a kind ({', '.join(kind_names())})"
            f" ({file.place(STAGES)})"
        )
    for_all = {key: value for key, value in given.items() if not key.startswith(f"{STAGES}.")}
    base = settled(deepcopy(dict(asked)), for_all, file.where, file.place)
    names = _names(tables, file)
    for_one = _flags_by_stage(given, names)
    stages: list[Stage] = []
    written: list[Table] = []
    for number, (table, name) in enumerate(zip(tables, names, strict=True)):
        place = file.places_in(STAGES, number)
        own = _own_settings(table, place)
        for key in for_all:
            if key in own:
                raise UserError(
                    f"--{key}: stage '{name}' sets {key} itself ({place(key)}). Write"
                    f" --{STAGES}.{name}.{key} for this stage"
                )
        own |= for_one[name]
        if table["kind"] == DISTILL and TEACHER in own:
            own[f"{TEACHER}.path"] = own.pop(TEACHER)
        written.append(Table(table["kind"], name, own))
        parts = [(table["kind"], name, own)]
        if expand := COMPOSED.get(table["kind"]):
            parts = expand(name, own, f"{place('')}, stage '{name}'")
        for kind, part, settings in parts:
            if part in names[number + 1 :] or part in names[:number]:
                raise UserError(
                    f"stages: '{part}' is the name of another stage, and of a part of"
                    f" '{name}'. Rename one ({place('name')})"
                )
            stages.append(_stage(asked, kind, part, for_all, settings, stages, file, place))
    return StagedRecipe(base, tuple(stages), tuple(written))


def _names(tables: Sequence[Mapping[str, Any]], file: TomlText) -> list[str]:
    """Names of the stages: given, or else their kind."""
    names: list[str] = []
    for number, table in enumerate(tables):
        place = file.places_in(STAGES, number)
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in kind_names():
            said = "has no kind" if kind is None else f"has the unknown kind {kind!r}"
            hint = nearest(kind, kind_names()) if isinstance(kind, str) else ""
            if isinstance(kind, str) and kind.casefold() in LOSSES:
                loss = kind.casefold()
                hint = f" Write kind = 'preference' and preference.losses = ['{loss}']."
            raise UserError(
                f"stages: entry {number + 1} {said}.{hint} Kinds are"
                f" {', '.join(kind_names())} ({place('kind')})"
            )
        name = table.get("name", kind)
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise UserError(
                f"stages: entry {number + 1}: name = {name!r}; expected letters, digits, '.', '_'"
                f" and '-', with a letter or digit first ({place('name')})"
            )
        if name in names:
            raise UserError(
                f"stages: two stages have the name '{name}'. Set `name` in one of them"
                f" ({place('name')})"
            )
        names.append(name)
    return names


def _flags_by_stage(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Values of flags `--stages.NAME.KEY` by stage and key."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for flag, value in given.items():
        if not flag.startswith(f"{STAGES}."):
            continue
        rest = flag.removeprefix(f"{STAGES}.")
        # A name may have dots: the longest that fits.
        fitting = [name for name in names if rest.startswith(f"{name}.")]
        if not fitting:
            raise UserError(
                f"--{flag}: no such stage.{nearest(rest.partition('.')[0], list(names))} Write"
                f" --{STAGES}.NAME.KEY with one of the stages {', '.join(names)}"
            )
        name = max(fitting, key=len)
        found[name][rest.removeprefix(f"{name}.")] = value
    return found


def _own_settings(table: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """Settings in a stage's table, by dotted key. `model = "stage:..."` becomes `model.path`."""
    tree = {key: value for key, value in table.items() if key not in ("kind", "name")}
    if isinstance(model := tree.get("model"), str) and model.startswith(REFERENCE):
        tree["model"] = {"path": model}
    teacher: dict[str, Any] = {}
    if ROUNDS in tree and table["kind"] != ONLINE:
        raise UserError(
            f"rounds belongs to stages of kind {ONLINE}, and this one is of kind {table['kind']}"
            f" ({place(ROUNDS)})"
        )
    rounds = {ROUNDS: tree.pop(ROUNDS)} if ROUNDS in tree else {}
    if table["kind"] == DISTILL and TEACHER in tree:
        given = tree.pop(TEACHER)
        if not isinstance(given, str | dict):
            raise UserError(
                f"teacher = {given!r}: expected a folder, a hub id, 'stage:NAME', or a table like"
                f" [model] ({place(TEACHER)})"
            )
        teacher = {"model": {"path": given} if isinstance(given, str) else given}
        check_keys(teacher, lambda key: place(key.replace("model", TEACHER, 1)))
    check_keys(tree, place)
    shown = {key.replace("model", TEACHER, 1): value for key, value in _leaves(teacher)}
    return shown | rounds | dict(_leaves(tree))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if prefix + name in sections():
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _stage(
    asked: Mapping[str, Any],
    kind: str,
    name: str,
    for_all: Mapping[str, Any],
    own: dict[str, Any],
    earlier: Sequence[Stage],
    file: TomlText,
    place: Callable[[str], str],
) -> Stage:
    """Resolve one stage.

    Args:
        asked: values of the recipe's file by section.
        for_all: values of flags for all stages.
        own: values of this stage's table and flags.
        file: says where keys of the recipe were written.
        place: says where keys of the stage were written.
    """
    where = f"{place('')}, stage '{name}'"
    for key in own:
        _check_own(key, kind, where)
    models = [stage.name for stage in earlier if stage.row.makes == "model"]
    continues = {}
    if "model.path" in own:
        if "model.revision" not in own:  # that of [model] is of another model
            continues = {"model.revision": ""}
    elif models and not any(key.startswith(("model.path", "model.scratch")) for key in own):
        continues = {"model.path": REFERENCE + models[-1], "model.revision": ""}

    def given_at(key: str) -> str:
        return f"--{key}" if key in for_all else place(key)

    form: dict[str, Any] = {}
    for sampled in earlier:
        if own.get("data.source") == REFERENCE + sampled.name:
            form = _loads_sampled(sampled, where)
            if kind_row(kind).reads == "comparisons":
                form |= _sampled_columns(own, where)
    own = own | _whole_tables(own, earlier, where)
    values = {**for_all, **_other_source(own), **form, **own, **continues}
    recipe = settled(deepcopy(dict(asked)), values, where, file.place, given_at)
    steps, epochs = _length(kind_row(kind), flat(recipe), where)
    if recipe.model.lora.rank and not recipe.model.path and kind != "rl":
        raise UserError(
            f"{where}: model.lora.rank = {recipe.model.lora.rank}, but the stage starts from random"
            " weights, all of which have to be trained. Set model.lora in the stages after it"
        )
    if recipe.sft.stop_at_accuracy:
        raise UserError(
            f"{where}: sft.stop_at_accuracy ends the SFT of recipes without stages. Set"
            " run.target_accuracy in the stage instead"
        )
    # SFT is a stage of its own: none warms up.
    row = kind_row(kind)
    lengths = {"sft.steps": 0, "sft.epochs": 0, "preference.steps": 0, "preference.epochs": 0}
    own_length = {} if kind == "sft" else {key: steps for key in [row.steps] if key}
    own_length |= {key: epochs for key in [row.epochs] if key}
    recipe = recipe.with_settings({**lengths, **own_length, "run.steps": steps})
    if "preference" in row.sections:
        with in_stage(name):
            resolve_losses(recipe.preference)
            check_reference(recipe.preference, recipe.reference)
    if row.makes == "reward_model":
        _check_reward_model(kind, recipe.model.lora, where)
    if row.makes == "dataset":
        _check_labels(recipe.environment.rewards, recipe.sample, where)
        if recipe.sample.search.method:
            with in_stage(name):
                load(ROLLOUTS, "search").check(
                    recipe.sample,
                    recipe.environment.several_turns,
                    recipe.rollout.max_new_tokens,
                )
    stage = Stage(kind, name, own, recipe)
    _check_inputs(stage, earlier, where)
    _check_named_models(stage, earlier, where)
    if stage.row.reads == "solutions" and stage.reads_tasks and recipe.sft.train_on == "all":
        raise UserError(
            f"{where}: sft.train_on = 'all' is for conversations; of tasks, the solutions are"
            " trained. Set it in the stages that train on conversations"
        )
    _check_rows(stage, earlier, where)
    return stage


def _check_rows(stage: Stage, earlier: Sequence[Stage], where: str) -> None:
    """Refuse data whose rows have no labels or completions that the kind reads.

    Raises:
        UserError: names the setting and the remedy.
    """
    row, recipe = stage.row, stage.recipe
    named = {name for key, name in stage.inputs if key.startswith("data.")}
    for sampled in earlier:
        unlabelled = sampled.kind == "sample" and not sampled.recipe.sample.labelled
        if row.reads == "step_labels" and unlabelled and sampled.name in named:
            raise UserError(
                f"{where}: data.source = '{REFERENCE}{sampled.name}': that stage labels no steps."
                " Set sample.label_steps, or sample.labels = 'outcome', in it"
            )
        compares = row.reads == "comparisons" and sampled.kind == "sample"
        if compares and recipe.data.source == REFERENCE + sampled.name:
            made = sampled.recipe
            with in_stage(stage.name):
                check_sampled(
                    made.sample, made.environment.rewards, made.eval.solved_at, recipe.comparisons
                )
    tasks = generated_source(recipe.data)
    if row.reads == "step_labels" and tasks:
        raise UserError(
            f"{where}: data.source = '{tasks}' generates tasks, which have no solutions with"
            " labelled steps. Name a file of them"
        )
    if row.reads == "comparisons" and tasks:
        raise UserError(
            f"{where}: data.source = '{tasks}' generates tasks, which have no completions to"
            " compare. Use a stage of kind online, which samples them, or data.source ="
            " 'stage:NAME' with the dataset of a sample stage with sample.keep = 'all'"
        )


def _check_named_models(stage: Stage, earlier: Sequence[Stage], where: str) -> None:
    """Refuse the name of an earlier reward model without `stage:` before it."""
    made = {other.name for other in earlier if other.row.makes == "reward_model"}
    for reward in stage.recipe.environment.rewards:
        if reward in REWARDS:  # the name of a function
            continue
        for name in reward_model_paths(reward) or [reward]:
            if name in made and not Path(name).exists():
                raise UserError(
                    f"{where}: environment.rewards: '{name}' is an earlier stage. Write"
                    f" '{PRM * reward.startswith(PRM)}{REFERENCE}{name}'"
                )


def _check_reward_model(kind: str, lora: LoraConfig, where: str) -> None:
    """Refuse settings that no reward model can have."""
    if lora.rank and kind == "prm":
        raise UserError(
            f"{where}: a process reward model has no adapter: all of its weights are trained. Set"
            " model.lora.rank = 0 in this stage"
        )
    if lora.rank and lora.base == "nf4":
        raise UserError(
            f"{where}: model.lora.base = 'nf4': a reward model is saved with its adapter merged"
            " into its base, whose weights are not stored. Use 'bfloat16' in this stage"
        )


def _check_labels(rewards: Sequence[str], sample: SampleConfig, where: str) -> None:
    """Refuse labels of steps by a process reward model, which rewards whole replies alone."""
    judges = [name for name in rewards if name.startswith(PRM)]
    if judges and sample.labelled:
        raise UserError(
            f"{where}: {sample.labelled_by} needs rewards that say what is solved, and"
            f" '{judges[0]}' rewards steps alone, of whole replies. Set environment.rewards to a"
            " verifier in this stage"
        )


def _other_source(own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of [data] that belong to the recipe's source, for a stage with another one."""
    given = own.keys() & {"data.source", "data.sources"}
    names = ("source", "sources", "subset", "revision", "split", "heldout_split", "limit")
    return {f"data.{name}": knobs()[f"data.{name}"].default for name in names if given}


def _whole_tables(own: Mapping[str, Any], earlier: Sequence[Stage], where: str) -> dict[str, Any]:
    """`data.sources` with the form of the dataset in each table that names a stage."""
    tables = own.get("data.sources")
    if not isinstance(tables, list):
        return {}
    sampled = {REFERENCE + stage.name: stage for stage in earlier if stage.row.makes == "dataset"}
    plain = {"answer_after": "", "system_prompt": "", "prompt_suffix": "", "prefill": ""}
    found = []
    for table in tables:
        source = table.get("source") if isinstance(table, dict) else None
        form = {}
        if isinstance(source, str) and source in sampled:
            form = plain | dataset_settings(source, _form(sampled[source], where))
        found.append({**form, **table} if form else table)
    return {"data.sources": found}


def _length(kind: Kind, settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Steps and epochs of a stage. One of them is 0, and both are if its data decides."""
    steps, epochs = (settings[key] if key else 0 for key in (kind.steps, kind.epochs))
    if steps and epochs:
        raise UserError(
            f"{where}: {kind.steps} = {steps} and {kind.epochs} = {epochs} both say how long the"
            " stage trains. Set one of them to 0"
        )
    if kind.steps and not (steps or epochs):
        also = f" or {kind.epochs} = 2" if kind.epochs else ""
        raise UserError(
            f"{where}: {kind.steps} is 0, so the stage would do nothing. Set it, e.g. {kind.steps}"
            f" = 100{also}"
        )
    return steps, epochs


def _loads_sampled(sampled: Stage, where: str) -> dict[str, Any]:
    """Settings of [data] for the dataset of a stage: nothing of the recipe's own form is left."""
    kept = ("overlong", "max_prompt_tokens")
    found = {
        knob.name: knob.default
        for knob in knobs().values()
        if knob.section == "data" and knob.name not in kept
    }
    # Stages are evaluated on tasks of the recipe, so none of the dataset need be set aside.
    found |= {**dataset_settings(REFERENCE + sampled.name, _form(sampled, where)), "heldout": 0}
    return {f"data.{name}": value for name, value in found.items()}


def _sampled_columns(own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of [comparisons] for the dataset of a stage: no column of the recipe's is left."""
    found = {f"comparisons.{name}": "" for name in READ_BY if name.endswith("_field")}
    found = {key: knobs()[key].default for key in found}
    for key, default in found.items():
        if own.get(key, default) != default:
            raise UserError(
                f"{where}: {key} = '{own[key]}' has no effect: the columns of a sample stage are"
                " known. Remove it"
            )
    return found


def _form(sampled: Stage, where: str) -> str:
    """Form of the prompts that a stage has sampled."""
    data = sampled.recipe.data
    forms = {
        "continued" if source.prefill or (source.prefill is None and data.prefill) else form
        for source in data.sources or (SourceConfig(source=data.source),)
        for form in [source.prompt_form or data.prompt_form]
    }
    if len(forms) > 1:
        raise UserError(
            f"{where}: the prompts of stage '{sampled.name}' have several forms"
            f" ({', '.join(sorted(forms))}), because its data.sources differ in prefill or"
            " prompt_form. Sample each form in a stage of its own"
        )
    return forms.pop()


_SOLVED = ("run.patience", "run.target_accuracy", "checkpoint.keep_best")
"""Settings that compare shares of solved held-out tasks."""


def _check_own(key: str, kind: str, where: str) -> None:
    """Refuse settings that a stage cannot have.

    Raises:
        UserError: with the place where they belong.
    """
    if key in ("run.name", "run.dir"):
        raise UserError(
            f"{where}: {key} belongs to the whole run; a stage's folder has its name (`name`)"
        )
    if key == "run.seed":
        raise UserError(
            f"{where}: run.seed belongs to the whole run, because it decides which tasks are held"
            " out: with another one a stage would train on them"
        )
    if reason := _why_unread(key, kind):
        raise UserError(f"{where}: {reason}")


def unread(staged: StagedRecipe) -> list[str]:
    """A note on each setting outside [[stages]] that no stage reads, with what to do about it."""
    found = []
    trained = [stage for stage in staged.stages if stage.row.makes != "dataset"] or staged.stages
    for key, value in settings_of(staged.base).items():
        if value == knobs()[key].default or key.startswith("comparisons."):  # read by sixfold eval
            continue
        stages = trained if key in _SOLVED or key.startswith("trainer.") else staged.stages
        reasons = [_why_unread(key, stage.kind) for stage in stages]
        if reasons and all(reasons):
            found.append(f"no stage reads {key}: {reasons[-1]}")
    return found


def _why_unread(key: str, kind: str) -> str:
    """Why stages of a kind do not read a setting, and what to do. Empty if they read it."""
    row = kind_row(kind)
    if key == "run.steps" != row.steps:
        instead = f"Set {row.steps}" if row.steps else "Leave it out"
        return f"run.steps counts the steps of RL. {instead}"
    if key in _SOLVED and row.makes == "reward_model":
        return (
            f"{key} compares shares of solved held-out tasks, and a reward model solves none."
            " Remove it"
        )
    section, _, name = key.partition(".")
    if section == "trainer" and f"{row.sections[0] if row.sections else ''}.{name}" in knobs():
        return (
            f"{key} has no effect, because stages of kind {kind} have their own. Set"
            f" {row.sections[0]}.{name}"
        )
    owners = [other for other, known in KINDS.items() if section in known.sections]
    if owners and section not in row.sections:
        return (
            f"{key} belongs to stages of kind {' or '.join(owners)}, and this one is of kind {kind}"
        )
    return (
        f"{key} has no effect on a stage of kind {kind}. Remove it"
        if ignores(kind, section)
        else ""
    )


def _check_inputs(stage: Stage, earlier: Sequence[Stage], where: str) -> None:
    """Check that a stage names earlier stages that make what it needs.

    Raises:
        UserError: if it does not.
    """
    made = {other.name: other.row.makes for other in earlier}
    rewards = stage.recipe.environment.rewards
    scorer = stage.recipe.sample.search.scorer
    implicit = [("environment.rewards", reward_model_paths(r)) for r in rewards if is_implicit(r)]
    if len(listed := listed_models(scorer)) == 2:
        implicit.append((SCORER, listed))
    pairs = {(key, path.removeprefix(REFERENCE)) for key, paths in implicit for path in paths}
    for key, name in stage.inputs:
        said = f"{where}: {key} = '{REFERENCE}{name}'"
        if key not in ACCEPTS:
            raise UserError(f"{said}: this setting cannot name a stage; {', '.join(ACCEPTS)} can")
        if name == stage.name:
            raise UserError(f"{said}: a stage cannot use its own artifact. Name an earlier stage")
        if name not in made:
            known = f"Earlier stages are {', '.join(made)}" if made else "It is the first stage"
            raise UserError(
                f"{said}: no earlier stage has this name.{nearest(name, list(made))} {known}"
            )
        wanted = "model" if (key, name) in pairs else ACCEPTS[key]
        if made[name] != wanted:
            raise UserError(
                f"{said}: that stage makes a {made[name]}, and this setting takes a {wanted}"
            )
    process = {other.name: other.kind == "prm" for other in earlier}
    for reward in rewards:
        for path in reward_model_paths(reward) if not is_implicit(reward) else ():
            of_steps = process.get(path.removeprefix(REFERENCE))
            if path.startswith(REFERENCE) and of_steps is not reward.startswith(PRM):
                right = f"{PRM}{path}" if of_steps else path
                raise UserError(
                    f"{where}: environment.rewards has {reward!r}, and that stage trains"
                    f" {'a process' if of_steps else 'an outcome'} reward model. Write {right!r}"
                )
