"""Stages of a recipe: `[[stages]]`, an ordered list of what a run does. No torch.

Each table has a `kind`, a `name`, and settings of any section, which replace those of the recipe
for this stage. So every stage resolves to a whole recipe. What a stage makes is its artifact: a
model or a dataset. Later stages name it by `stage:NAME`. A stage that names no model continues from
the newest model that an earlier stage made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..environment.episodes import library_of
from ..environment.registry import SOURCES
from ..errors import UserError, nearest
from ..plugins import Registered
from .distill import DISTILL
from .dump import dump_recipe, flat, toml_literal
from .online import ONLINE
from .reward_models import listed_models, reward_model_paths, with_paths
from .schema import DataConfig, ModelConfig, Recipe

STAGES = "stages"
"""Name of the list in a recipe, and of the folder of its stages in a run."""
REFERENCE = "stage:"
"""Start of the name of an earlier stage's artifact."""

Made = Literal["model", "dataset", "reward_model"]
Reads = Literal["tasks", "solutions", "texts", "comparisons", "step_labels"]


@dataclass(frozen=True)
class Kind:
    """A kind of stage.

    Attributes:
        purpose: one line for the user.
        makes: what its artifact is.
        spec: `module:class`, a `stages.kind.StageKind`.
        sections: sections of the recipe that only some kinds read.
        steps: setting with its number of steps. Empty if that follows from its data.
        reads: what [data] holds: tasks; worked solutions of tasks, or conversations; texts;
            comparisons of completions; or solutions whose steps are labelled.
        loss: its loss in words. Empty for the loss of the recipe's algorithm, or for none.
        epochs: setting with its number of passes over the data, from which its steps may follow.

    The first of `sections` holds the settings of a stage that trains on examples.
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
    "preference": Kind(
        purpose="prefer better completions to worse ones",
        makes="model",
        spec="sixfold.stages.preference:PreferenceKind",
        sections=("preference", "comparisons"),
        steps="preference.steps",
        reads="comparisons",
        epochs="preference.epochs",
    ),
    "reward_model": Kind(
        purpose="train a reward model on comparisons",
        makes="reward_model",
        spec="sixfold.stages.reward_model:RewardModelKind",
        sections=("reward_model", "comparisons"),
        steps="reward_model.steps",
        reads="comparisons",
        loss="of the differences of the scores of better and worse completions",
        epochs="reward_model.epochs",
    ),
    "prm": Kind(
        purpose="train a process reward model on solutions whose steps are labelled",
        makes="reward_model",
        spec="sixfold.stages.prm:PrmKind",
        sections=("prm",),
        steps="prm.steps",
        reads="step_labels",
        loss="cross-entropy of every labelled step; every solution has the same weight",
        epochs="prm.epochs",
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


def ignores(kind: str, section: str) -> bool:
    """True if stages of a kind never read a section. Kinds of packages may read any section."""
    if kind not in KINDS:
        return False
    if section in ("algorithm", "critic"):
        return kind != "rl"
    if section == "reference" and kind == "reward_model":
        return True
    owned = any(section in row.sections for row in KINDS.values())
    return owned and section not in KINDS[kind].sections


def kind_names() -> list[str]:
    """Names of all kinds that a recipe may name."""
    return [*KINDS, DISTILL, ONLINE, *OTHER_KINDS]


def kind_row(name: str) -> Kind:
    """The row of a kind.

    Raises:
        UserError: if a package registers it, and cannot be imported.
    """
    return KINDS[name] if name in KINDS else OTHER_KINDS.row(name)


SCORER = "sample.search.scorer"
"""Setting that names one reward model, or two models: a policy and its reference."""

ACCEPTS: Mapping[str, Made] = {
    "model.path": "model",
    "reference.path": "model",
    "data.source": "dataset",
    "data.heldout_split": "dataset",
    "data.sources": "dataset",
    "sample.mix": "dataset",
    SCORER: "reward_model",
    "environment.rewards": "reward_model",
}
"""Setting that may name a stage -> what that stage has to make."""


_TABLES = ("data.sources", "sample.mix")
"""Lists of tables with a `source`."""
_REWARDS = "environment.rewards"
"""List of names, some of them of stages."""


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
    def passes(self) -> int:
        """Passes over its examples. 0: its steps are given."""
        return int(flat(self.recipe)[self.row.epochs]) if self.row.epochs else 0

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
        """The recipe with paths in place of stage names."""

        def path(text: str) -> str:
            name = text.removeprefix(REFERENCE)
            return text if name == text else artifacts[name]

        values: dict[str, object] = {
            key: path(value)
            for key, value in flat(self.recipe).items()
            if isinstance(value, str) and value.startswith(REFERENCE) and key != SCORER
        }
        for key in _TABLES:
            section, _, name = key.partition(".")
            tables = getattr(getattr(self.recipe, section), name)
            values[key] = tuple(t.model_copy(update={"source": path(t.source)}) for t in tables)
        values[SCORER] = ",".join(map(path, listed_models(self.recipe.sample.search.scorer)))
        rewards = self.recipe.environment.rewards
        values[_REWARDS] = tuple(with_paths(reward, path) for reward in rewards)
        return self.recipe.with_settings(values)


@dataclass(frozen=True)
class Table:
    """A table [[stages]] with the flags of the stage.

    Attributes:
        kind: a name of `kind_names`.
    """

    kind: str
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class StagedRecipe:
    """A recipe with its stages.

    Attributes:
        base: the recipe without the settings of the stages.
        stages: in the order in which they run. Empty for a recipe without stages.
        tables: as they are written. One of kind `distill` or `online` stands for several stages.
    """

    base: Recipe
    stages: tuple[Stage, ...] = ()
    tables: tuple[Table, ...] = ()

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
        """The [data] whose held-out tasks a stage is evaluated on. None: it is not evaluated.

        A stage that reads no tasks (pretraining text, sampled answers) uses the recipe's [data].
        """
        if stage.row.makes == "reward_model":  # it solves no tasks
            return None
        own = {"data.heldout", "data.heldout_split"} & stage.settings.keys()
        sampled = {"data.source", "data.sources"} & dict(stage.inputs).keys()
        if stage.reads_tasks and (own or not sampled):
            return stage.recipe.data
        data = self.base.data
        if data == stage.recipe.data:
            return None
        readers = [other for other in self.stages if other.recipe.data.names == data.names]
        if readers:
            return data if any(other.reads_tasks for other in readers) else None
        return None if data == DataConfig() else data  # nobody has asked for the default

    def evaluation(self, name: str, where: str, artifacts: Mapping[str, str]) -> Recipe:
        """The recipe by which the model of a stage is evaluated.

        Args:
            where: the recipe or the run, for messages.
            artifacts: path of the artifact of each stage, by name.

        Raises:
            UserError: if neither the stage nor the recipe has tasks.
        """
        stage = self.stages[self.position(name, where)]
        data = self.evaluated_on(stage)
        if data is None:
            raise UserError(
                f"{where}, stage '{name}': neither it nor [data] of the recipe has tasks, so there"
                " is nothing to solve. Name a recipe with tasks: sixfold eval RECIPE RUN"
            )
        recipe = self.planned(name, where).model_copy(update={"data": data})
        return replace(stage, recipe=recipe).bound(artifacts)

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
                    f"kind = {toml_literal(table.kind)}",
                    f"name = {toml_literal(table.name)}",
                    *(f"{key} = {toml_literal(value)}" for key, value in table.settings.items()),
                ]
            )
            for table in self.tables
        )
        return "\n".join([dump_recipe(self.base), *(f"{table}\n" for table in tables)])


def reads_tasks(reads: Reads, data: DataConfig, form: str) -> bool:
    """True if a stage's [data] holds tasks, which can be sampled.

    Args:
        data: [data] of the stage.
        form: its `sft.form`.
    """
    generated = bool(generated_source(data))
    if reads == "solutions":
        return form == "tasks" if form != "auto" else bool(data.trace_field) or generated
    return reads == "tasks" or (reads == "texts" and generated)


def generated_source(data: DataConfig) -> str:
    """The first source that generates tasks. Empty if none does."""
    return next((name for name in data.names if name in SOURCES or library_of(name)), "")


def dataset_settings(source: str, form: str) -> dict[str, Any]:
    """Settings of [data] with which a sampled dataset loads. All others have their defaults.

    Args:
        source: the .jsonl file.
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
    if key == _REWARDS:
        return [path for name in value for path in reward_model_paths(name)]
    if key == SCORER:
        return listed_models(value)
    return [value] if isinstance(value, str) else []
