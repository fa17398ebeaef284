"""Stages of a recipe: `[[stages]]`, an ordered list of what a run does. No torch.

Each table has a `kind`, a `name`, and settings of any section, which replace those of the recipe
for this stage. So every stage resolves to a whole recipe. What a stage makes is its artifact: a
model or a dataset. Later stages name it by `stage:NAME`. A stage that names no model continues from
the newest model that an earlier stage made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..environment.episodes import library_of
from ..environment.registry import SOURCES
from ..errors import UserError, nearest
from ..plugins import Registered
from .distill import DISTILL, TEACHER, distill_stages
from .dump import dump_recipe, flat, toml_literal
from .keys import check_keys
from .knobs import knobs, sections
from .schema import NAME, DataConfig, ModelConfig, Recipe
from .settled import settled
from .toml_lines import TomlText

STAGES = "stages"
"""Name of the list in a recipe, and of the folder of its stages in a run."""
REFERENCE = "stage:"
"""Start of the name of an earlier stage's artifact."""

Made = Literal["model", "dataset"]
Reads = Literal["tasks", "solutions", "texts"]


@dataclass(frozen=True)
class Kind:
    """A kind of stage.

    Attributes:
        purpose: one line for the user.
        makes: what its artifact is.
        spec: `module:class`, a `stages.kind.StageKind`.
        sections: sections of the recipe that only some kinds read.
        steps: setting with its number of steps. Empty if that follows from its data.
        reads: what [data] holds: tasks; worked solutions of tasks, or conversations; or texts.
        loss: its loss in words. Empty for the loss of the recipe's algorithm, or for none.
        epochs: setting with its number of passes over the data, from which its steps may follow.
    """

    purpose: str
    makes: Made
    spec: str
    sections: tuple[str, ...] = ()
    steps: str = "run.steps"
    reads: Reads = "tasks"
    loss: str = ""
    epochs: str = ""


KINDS: Mapping[str, Kind] = {
    "pretrain": Kind(
        purpose="predict the next token of texts",
        makes="model",
        spec="sixfold.stages.pretrain:PretrainKind",
        sections=("pretrain",),
        steps="pretrain.steps",
        reads="texts",
        loss="cross-entropy of every token of a window but the first",
    ),
    "sft": Kind(
        purpose="train on worked solutions or conversations",
        makes="model",
        spec="sixfold.stages.sft:SftKind",
        sections=("sft",),
        steps="sft.steps",
        reads="solutions",
        loss="cross-entropy of the replies; prompts are only read",
        epochs="sft.epochs",
    ),
    "sample": Kind(
        purpose="sample completions and keep the good ones as a dataset",
        makes="dataset",
        spec="sixfold.stages.sample:SampleKind",
        sections=("sample",),
        steps="",
    ),
    "rl": Kind(
        purpose="train by reinforcement learning on sampled completions",
        makes="model",
        spec="sixfold.stages.rl:RlKind",
    ),
}

OTHER_KINDS = Registered("sixfold.stages", Kind, partial(Kind, "a kind of a package", "model"))
"""Kinds of installed packages."""


def kind_names() -> list[str]:
    """Names of all kinds that a recipe may name."""
    return [*KINDS, DISTILL, *OTHER_KINDS]


def kind_row(name: str) -> Kind:
    """The row of a kind.

    Raises:
        UserError: if a package registers it, and cannot be imported.
    """
    return KINDS[name] if name in KINDS else OTHER_KINDS.row(name)


ACCEPTS: Mapping[str, Made] = {
    "model.path": "model",
    "reference.path": "model",
    "data.source": "dataset",
    "data.heldout_split": "dataset",
    "data.sources": "dataset",
    "sample.mix": "dataset",
}
"""Setting that may name a stage -> what that stage has to make."""


_TABLES = ("data.sources", "sample.mix")
"""Lists of tables with a `source`."""


@dataclass(frozen=True)
class Stage:
    """One stage, resolved.

    Attributes:
        kind: a key of `KINDS`.
        name: unique within the recipe.
        settings: its own settings by dotted key, as the recipe's file and flags give them.
        recipe: the whole recipe of the stage. Names of earlier stages stand for their artifacts.
    """

    kind: str
    name: str
    settings: Mapping[str, Any]
    recipe: Recipe

    @property
    def row(self) -> Kind:
        return kind_row(self.kind)

    @property
    def reads_tasks(self) -> bool:
        """True if [data] holds tasks, which can be sampled. False: texts or conversations."""
        return reads_tasks(self.row.reads, self.recipe.data, self.recipe.sft.form)

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """Earlier stages that this one reads: (dotted setting, name)."""
        return [
            (key, text.removeprefix(REFERENCE))
            for key, value in flat(self.recipe).items()
            for text in _texts(key, value)
            if text.startswith(REFERENCE)
        ]

    def bound(self, artifacts: Mapping[str, str]) -> Recipe:
        """The recipe with paths in place of stage names.

        Args:
            artifacts: path of the artifact of each earlier stage, by name.
        """

        def path(text: str) -> str:
            name = text.removeprefix(REFERENCE)
            return text if name == text else artifacts[name]

        values: dict[str, object] = {
            key: path(value)
            for key, value in flat(self.recipe).items()
            if isinstance(value, str) and value.startswith(REFERENCE)
        }
        for key in _TABLES:
            section, _, name = key.partition(".")
            tables = getattr(getattr(self.recipe, section), name)
            values[key] = tuple(t.model_copy(update={"source": path(t.source)}) for t in tables)
        return self.recipe.with_settings(values)


@dataclass(frozen=True)
class StagedRecipe:
    """A recipe with its stages.

    Attributes:
        base: the recipe without the settings of the stages.
        stages: in the order in which they run. Empty for a recipe without stages.
    """

    base: Recipe
    stages: tuple[Stage, ...] = ()

    def position(self, name: str, where: str) -> int:
        """Number of a stage, from 0.

        Raises:
            UserError: if there is no such stage.
        """
        names = [stage.name for stage in self.stages]
        if name not in names:
            known = f"Its stages are {', '.join(names)}" if names else "It has no [[stages]]"
            raise UserError(f"{where} has no stage '{name}'.{nearest(name, names)} {known}")
        return names.index(name)

    def evaluated_on(self, stage: Stage) -> DataConfig | None:
        """[data] with the held-out tasks that a stage is evaluated on. None: there are none.

        A stage that trains on other rows is evaluated as the other stages are: on the tasks of the
        recipe's [data], if that holds tasks.
        """
        own = {"data.heldout", "data.heldout_split"} & stage.settings.keys()
        sampled = "data.source" in dict(stage.inputs)
        if stage.reads_tasks and (own or not sampled):
            return stage.recipe.data
        data = self.base.data
        readers = [other for other in self.stages if other.recipe.data.names == data.names]
        texts = readers and not any(other.reads_tasks for other in readers)
        return None if texts or data in (DataConfig(), stage.recipe.data) else data

    def evaluation(self, name: str, where: str) -> Recipe:
        """The recipe by which the model of a stage is evaluated.

        Raises:
            UserError: if neither the stage nor the recipe has tasks.
        """
        data = self.evaluated_on(self.stages[self.position(name, where)])
        if data is None:
            raise UserError(
                f"{where}, stage '{name}': neither it nor [data] of the recipe has tasks, so there"
                " is nothing to solve. Name a recipe with tasks: sixfold eval RECIPE RUN"
            )
        return self.planned(name, where).model_copy(update={"data": data})

    def planned(self, name: str, where: str) -> Recipe:
        """The recipe of a stage, with the sizes of the model that it will get.

        An artifact need not exist: the model that an earlier stage starts from has its sizes.
        """
        stages = {stage.name: stage.recipe for stage in self.stages}
        recipe = self.stages[self.position(name, where)].recipe

        def start(model: ModelConfig) -> ModelConfig:
            while model.path.startswith(REFERENCE):
                model = stages[model.path.removeprefix(REFERENCE)].model
            return model

        source, reference = start(recipe.model), recipe.reference
        sizes = {"path": source.path, "revision": source.revision, "scratch": source.scratch}
        path = start(ModelConfig(path=reference.path)).path
        return recipe.model_copy(
            update={
                "model": recipe.model.model_copy(update=sizes),
                "reference": reference.model_copy(update={"path": path}),
            }
        )

    def dump(self) -> str:
        """TOML that loads back to an equal StagedRecipe."""
        tables = (
            "\n".join(
                [
                    f"[[{STAGES}]]",
                    f"kind = {toml_literal(stage.kind)}",
                    f"name = {toml_literal(stage.name)}",
                    *(f"{key} = {toml_literal(value)}" for key, value in stage.settings.items()),
                ]
            )
            for stage in self.stages
        )
        return "\n".join([dump_recipe(self.base), *(f"{table}\n" for table in tables)])


def reads_tasks(reads: Reads, data: DataConfig, form: str) -> bool:
    """True if a stage's [data] holds tasks, which can be sampled.

    Args:
        reads: what its kind reads.
        data: [data] of the stage.
        form: its `sft.form`.
    """
    generated = any(name in SOURCES or library_of(name) for name in data.names)
    if reads == "solutions":
        return form == "tasks" if form != "auto" else bool(data.trace_field) or generated
    return reads == "tasks" or generated


def dataset_settings(source: str, form: str) -> dict[str, Any]:
    """Settings of [data] with which a sampled dataset loads. All others have their defaults.

    Args:
        source: the .jsonl file.
        form: form of its prompts.
    """
    return {
        "source": source,
        "format": "rows",
        "prompt_field": "prompt",
        "prompt_form": form,
        "answer_field": "answer",
        "trace_field": "completion",
        "id_field": "id",
    }


@contextmanager
def in_stage(name: str) -> Iterator[None]:
    """Context in which errors of the user name the stage."""
    try:
        yield
    except UserError as error:
        raise UserError(f"stage '{name}': {error}") from error


def _texts(key: str, value: Any) -> list[str]:
    """Texts of a setting that may name a stage."""
    if key in _TABLES:
        return [table["source"] for table in value]
    return [value] if isinstance(value, str) else []


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
        parts = [(table["kind"], name, own)]
        if table["kind"] == DISTILL:
            parts = distill_stages(name, own, table.get(TEACHER), f"{place('')}, stage '{name}'")
        for kind, part, settings in parts:
            if part in names[number + 1 :] or part in names[:number]:
                raise UserError(
                    f"stages: '{part}' is the name of another stage, and of the answers of"
                    f" '{name}'. Rename one ({place('name')})"
                )
            stages.append(_stage(asked, kind, part, for_all, settings, stages, file, place))
    return StagedRecipe(base, tuple(stages))


def _names(tables: Sequence[Mapping[str, Any]], file: TomlText) -> list[str]:
    """Names of the stages: given, or else their kind."""
    names: list[str] = []
    for number, table in enumerate(tables):
        place = file.places_in(STAGES, number)
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in kind_names():
            said = "has no kind" if kind is None else f"has the unknown kind {kind!r}"
            raise UserError(
                f"stages: entry {number + 1} {said}.{nearest(str(kind), kind_names())} Kinds are"
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
    """Settings of a stage's table by dotted key."""
    beside = ("kind", "name", *((TEACHER,) if table["kind"] == DISTILL else ()))
    tree = {key: value for key, value in table.items() if key not in beside}
    if isinstance(model := tree.get("model"), str) and model.startswith(REFERENCE):
        tree["model"] = {"path": model}
    check_keys(tree, place)
    return dict(_leaves(tree))


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
        kind: kind of the stage.
        name: name of the stage.
        for_all: values of flags for all stages.
        own: values of this stage's table and flags.
        earlier: the stages before this one.
        file: says where keys of the recipe were written.
        place: says where keys of the stage were written.
    """
    where = f"{place('')}, stage '{name}'"
    for key in own:
        _check_own(key, kind, where)
    models = [stage.name for stage in earlier if stage.row.makes == "model"]
    continues = {}
    if "model.path" in own:
        if "model.revision" not in {**for_all, **own}:  # that of [model] is of another model
            continues = {"model.revision": ""}
    elif models and not any(key.startswith(("model.path", "model.scratch")) for key in own):
        continues = {"model.path": REFERENCE + models[-1], "model.revision": ""}

    def given_at(key: str) -> str:
        return f"--{key}" if key in for_all else place(key)

    form: dict[str, Any] = {}
    for sampled in earlier:
        if own.get("data.source") == REFERENCE + sampled.name:
            form = _loads_sampled(sampled)
    values = {**for_all, **form, **own, **continues}
    recipe = settled(deepcopy(dict(asked)), values, where, file.place, given_at)
    steps, epochs = _length(kind_row(kind), flat(recipe), where)
    if recipe.model.lora.rank and not recipe.model.path and kind != "rl":
        raise UserError(
            f"{where}: model.lora.rank = {recipe.model.lora.rank}, but the stage starts from random"
            " weights, all of which have to be trained. Set model.lora in the stages after it"
        )
    if recipe.sft.stop_at_accuracy:
        raise UserError(
            f"{where}: sft.stop_at_accuracy ends the SFT of recipes without stages; a stage makes"
            " all of its steps. Remove it, and set sft.steps"
        )
    # SFT is a stage of its own: none warms up.
    recipe = recipe.with_settings({"run.steps": steps, "sft.steps": 0, "sft.epochs": epochs})
    stage = Stage(kind, name, own, recipe)
    _check_inputs(stage, earlier, where)
    return stage


def _length(kind: Kind, settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Steps and epochs of a stage. One of them is 0, and both are if its data decides.

    Raises:
        UserError: if it would do nothing, or if both are given.
    """
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


def _loads_sampled(sampled: Stage) -> dict[str, Any]:
    """Settings of [data] for the dataset of a stage: nothing of the recipe's own form is left."""
    data = sampled.recipe.data
    form = "continued" if data.prefill else data.prompt_form
    found = {knob.name: knob.default for knob in knobs().values() if knob.section == "data"}
    found |= dataset_settings(REFERENCE + sampled.name, form)
    return {f"data.{name}": value for name, value in found.items()}


def _check_own(key: str, kind: str, where: str) -> None:
    """Refuse settings that a stage cannot have.

    Raises:
        UserError: with the place where they belong.
    """
    if key in ("run.name", "run.dir"):
        raise UserError(
            f"{where}: {key} belongs to the whole run; a stage's folder has its name (`name`)"
        )
    row = kind_row(kind)
    if key == "run.steps" != row.steps:
        instead = f"Set {row.steps}" if row.steps else "Leave it out"
        raise UserError(f"{where}: run.steps counts the steps of RL. {instead}")
    section = key.partition(".")[0]
    owners = [other for other, known in KINDS.items() if section in known.sections]
    if owners and section not in row.sections:
        raise UserError(
            f"{where}: {key} belongs to stages of kind {' or '.join(owners)}, and this one is of"
            f" kind {kind}"
        )


def _check_inputs(stage: Stage, earlier: Sequence[Stage], where: str) -> None:
    """Check that a stage names earlier stages that make what it needs.

    Raises:
        UserError: if it does not.
    """
    made = {other.name: other.row.makes for other in earlier}
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
        if made[name] != ACCEPTS[key]:
            raise UserError(
                f"{said}: that stage makes a {made[name]}, and this setting takes a {ACCEPTS[key]}"
            )
