"""Explain the stages of a recipe: a block for each, or one stage whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..memory import memory_of
from ..plan import Plan
from ..schema import DataConfig, EnvironmentConfig
from ..stages import REFERENCE, Stage, StagedRecipe
from .fact import UNKNOWN, Fact, bytes_text
from .memory import gigabytes, memory_lines
from .model import model_facts
from .rollout import sampling_facts
from .tasks import eval_facts, held_out, sources
from .trainer import disk_facts

_EXAMPLES = {
    "texts": "windows",
    "solutions": "examples",
    "tasks": "examples",
    "comparisons": "comparisons",
    "step_labels": "solutions",
}


def overview(
    staged: StagedRecipe, plans: Mapping[str, Plan], where: str, times: Mapping[str, str]
) -> str:
    """One block per stage, in their order.

    Args:
        where: the recipe as the user named it.
        times: time of each stage in the run of the recipe, as far as there is one.
    """
    run = staged.base.run
    folder = f"{run.dir}/{run.name}"
    out = [f"{where}: {len(staged.stages)} stages, one after the other, in {folder}"]
    for number, stage in enumerate(staged.stages, start=1):
        plan = plans[stage.name]
        facts = [_model_fact(stage, plan), *_stage_facts(staged, stage), _size_fact(stage, plan)]
        took = times.get(stage.name, "")
        time = f"{took} in {folder}" if took else "known after its first steps, or from a run of it"
        facts += [Fact("time", time), _made_fact(staged, stage)]
        out += ["", f"{number}. {stage.name} ({stage.kind}): {stage.row.purpose}", *_lines(facts)]
    out += ["", f"one stage whole: sixfold explain {where}:{staged.stages[-1].name}"]
    return "\n".join(out)


def whole_stage(staged: StagedRecipe, stage: Stage, plan: Plan) -> list[Fact]:
    """All facts of a stage that does not sample to learn."""
    data, trains = staged.evaluated_on(stage), stage.row.makes != "dataset"
    model = [fact for fact in model_facts(plan)[1:] if trains or fact.topic != "memory"]
    begin = [_model_fact(stage, plan), *model, *_stage_facts(staged, stage)]
    end = _made_fact(staged, stage)
    if not trains:
        return [*begin, *sampling_facts(plan), _size_fact(stage, plan), end]
    return [
        *begin,
        _training_fact(stage),
        *(eval_facts(plan, data) if data else []),
        *disk_facts(plan)[1:],
        *(Fact("GPU memory", says, why) for says, why in memory_lines(plan)),
        end,
    ]


def with_artifacts(facts: Sequence[Fact], stage: Stage, plan: Plan) -> list[Fact]:
    """Facts of a stage whose plan has sizes in place of the artifacts of earlier stages."""
    own = [_model_fact(stage, plan)]
    if _is_stage(path := stage.recipe.reference.path):
        own.append(Fact("reference", f"of stage {_name(path)}"))
    named = {fact.topic: fact for fact in own}
    return [named.get(fact.topic, fact) for fact in facts]


def _lines(facts: Sequence[Fact]) -> list[str]:
    width = max(len(fact.topic) for fact in facts) + 2
    return [f"   {fact.topic:<{width}}{fact.says}" for fact in facts]


def _model_fact(stage: Stage, plan: Plan) -> Fact:
    model, recipe = plan.model, stage.recipe
    path = recipe.model.path
    origin = f"of stage {_name(path)}" if path.startswith(REFERENCE) else model.origin
    adapter = f", with an adapter of rank {rank}" if (rank := recipe.model.lora.rank) else ""
    size = UNKNOWN if model.parameters is None else f"{model.parameters:,}"
    return Fact("model", f"{origin}{adapter}; parameters: {size}")


def _stage_facts(staged: StagedRecipe, stage: Stage) -> list[Fact]:
    """Data, loss and number of steps."""
    recipe, loss = stage.recipe, stage.row.loss
    if loss and stage.kind == "sft" and recipe.sft.train_on != "assistant":
        loss = f"cross-entropy of the tokens that sft.train_on = '{recipe.sft.train_on}' chooses"
    if stage.kind == "preference":
        loss = f"of preference.losses {', '.join(recipe.preference.losses)}"
    if not loss and stage.kind == "rl":
        loss = (
            f"of the algorithm {recipe.algorithm.name}, on rewards {_rewards(recipe.environment)}"
        )
    reference = recipe.reference.path
    return [
        Fact("data", f"{_trains_on(stage)}; evaluated on {_evaluated(staged, stage)}"),
        *([Fact("loss", loss)] if loss else []),
        *([Fact("reference", f"of stage {_name(reference)}")] if _is_stage(reference) else []),
        Fact("steps", _steps(stage)),
    ]


def _trains_on(stage: Stage) -> str:
    data, reads = stage.recipe.data, stage.row.reads
    where = f"the dataset of stage {_name(data.source)}" if _is_stage(data.source) else ""
    if stage.kind == "sample":
        return f"samples the tasks of {where or sources(data)}"
    if reads == "texts":
        what = "tasks, written out," if stage.reads_tasks else "texts"
    elif reads == "solutions":
        what = "worked solutions" if stage.reads_tasks else "conversations"
    elif reads == "comparisons":
        what = "comparisons"
    elif reads == "step_labels":
        what = "solutions with labelled steps"
    else:
        what = "tasks"
    return f"{what} of {where or sources(data)}"


def _evaluated(staged: StagedRecipe, stage: Stage) -> str:
    data: DataConfig | None = staged.evaluated_on(stage)
    own = stage.recipe.data
    held = data is not None if stage.reads_tasks else own.heldout or own.heldout_splits
    unmeasured = stage.row.reads == "tasks" or not held
    loss = "" if unmeasured else "the loss of held-out examples"
    if stage.kind == "sample":
        return "nothing"
    tasks = (
        f"{held_out(data)} of {sources(data)}"
        if data and (data.heldout_splits or data.heldout)
        else ""
    )
    return " and ".join(filter(None, (tasks, loss))) or "nothing"


def _steps(stage: Stage) -> str:
    recipe, row = stage.recipe, stage.row
    if stage.kind == "sample":
        own = recipe.sample
        labels = f"; {own.label_steps} more after each kept step" if own.label_steps else ""
        if own.labels == "outcome":
            labels = "; its outcome labels each step of a completion"
        tasks = own.tasks or "all"
        drawn = f"{own.samples} completions"
        if own.search.method:
            drawn = f"{own.search.method} search, n = {own.samples},"
        return f"{drawn} of each of {tasks} tasks; kept: {own.keep}{labels}"
    if stage.kind == "rl":
        rollout = recipe.rollout
        return (
            f"{recipe.run.steps} of {rollout.prompts_per_step} prompts x"
            f" {rollout.samples_per_prompt} completions"
        )
    each = f"{_own(stage).examples_per_step} {_EXAMPLES[row.reads]}"
    if epochs := stage.passes:
        return f"{epochs} passes over the examples, {each} at a time"
    return f"{recipe.run.steps} of {each}"


def _training_fact(stage: Stage) -> Fact:
    own = _own(stage)
    return Fact(
        "training",
        f"AdamW, learning rate {own.learning_rate:g} ({own.schedule}, {own.warmup_steps} warm-up"
        f" steps), weight decay {own.weight_decay:g}",
    )


def _own(stage: Stage) -> Any:
    """Settings of a stage that trains on examples."""
    return getattr(stage.recipe, stage.row.sections[0])


def _size_fact(stage: Stage, plan: Plan) -> Fact:
    memory = memory_of(plan)
    peak = UNKNOWN if memory is None else gigabytes(memory.needed(memory.cache_wanted))
    size = (
        UNKNOWN if plan.checkpoint_bytes is None else f"about {bytes_text(plan.checkpoint_bytes)}"
    )
    checkpoint = f"; a checkpoint: {size}" if stage.row.makes != "dataset" else ""
    # The plan is one of RL, which holds more than sampling alone.
    most = "" if stage.row.makes != "dataset" else "at most "
    return Fact("memory", f"at the peak: {most}{peak}{checkpoint}")


def _made_fact(staged: StagedRecipe, stage: Stage) -> Fact:
    made = "adapter" if stage.recipe.model.lora.rank else "model"
    made = made if stage.row.makes == "model" else stage.row.makes.replace("_", " ")
    users = [
        other.name for other in staged.stages if stage.name in (name for _, name in other.inputs)
    ]
    return Fact("makes", f"{_article(made)} {made}, for {', '.join(users) or 'no later stage'}")


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _rewards(environment: EnvironmentConfig) -> str:
    return environment.episode or ", ".join(environment.rewards)


def _is_stage(path: str) -> bool:
    return path.startswith(REFERENCE)


def _name(path: str) -> str:
    return path.removeprefix(REFERENCE)
