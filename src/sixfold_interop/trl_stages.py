"""Stages of kind preference and reward_model as configs of TRL 1.16's trainers, and back.

A config is what `trl dpo --config FILE` reads: arguments of the trainer, the model and the data in
one file. No torch.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sixfold.data.files import file_type
from sixfold.errors import UserError, nearest
from sixfold.preference.loss import Settings
from sixfold.preference.zoo import LOSSES
from sixfold.recipe.dump import flat, toml_literal
from sixfold.recipe.preference_plan import resolve_losses
from sixfold.recipe.stages import REFERENCE, Stage

from . import Conversion
from .answer import LOGGERS, loggers
from .settings import Same, Table, left_over, ours, table, theirs
from .trl import TOGETHER
from .trl_preference import OF_DPO, converted_sum

_OWN_RATE = ("learning_rate", "schedule", "warmup_steps", "weight_decay")
"""Settings of [trainer] that these stages have in their own section."""
SIZES = "per_device_train_batch_size is for one process without gradient accumulation."
_LOSS = frozenset(f"preference.{name}" for name in Settings.__dataclass_fields__)
_SWITCHES = ("margin", "normalise", "length_debias")
_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_FORMATS = frozenset((*_FILES.values(), "text", "arrow"))
_OF_OTHERS = {
    "KTOConfig": {"kto": "kto", "apo_zero_unpaired": "apo_zero_unpaired"},
    "CPOConfig": {"sigmoid": "cpo", "simpo": "simpo"},
    "ORPOConfig": {"sigmoid": "orpo"},
}
"""loss_type -> row, of configs beside DPOConfig."""
_OLDER_LOSSES = {"aot_pair": "aot"}
_LOSSES_OF_RL = {str(one["loss_type"]) for one in TOGETHER.values() if one} | {"bnpo"}


@dataclass(frozen=True)
class Trainer:
    """A trainer of TRL.

    Attributes:
        config: class of its settings.
        section: section of the recipe with its learning rate and lengths, and kind of its stage.
        command: what reads a file of its settings.
        task_type: `lora_task_type` of an adapter that it trains.
    """

    config: str
    section: str
    command: str
    table: Table

    @property
    def task_type(self) -> str:
        return "SEQ_CLS" if self.section == "reward_model" else "CAUSAL_LM"


@cache
def trainers() -> Mapping[str, Trainer]:
    """The trainers by name: dpo, kto, cpo, orpo and reward."""
    read = tomllib.loads((Path(__file__).parent / "trl_stages.toml").read_text(encoding="utf-8"))
    same, decides = read.pop("same"), frozenset(read.pop("read").split())
    return {name: _trainer(own, same, decides) for name, own in read.items()}


def _trainer(own: Mapping[str, Any], same: Mapping[str, Any], decides: frozenset[str]) -> Trainer:
    rl = table("trl")
    section, names = own["section"], frozenset(own["names"].split()) | (rl.names - rl.of_rl)
    found = {
        name: one._replace(ours=one.ours.replace("trainer.", f"{section}."))
        if one.ours.removeprefix("trainer.") in _OWN_RATE
        else one
        for name, one in rl.same.items()
        if name in names - rl.of_rl
    }
    found["learning_rate"] = found["learning_rate"]._replace(default=own["learning_rate"])
    found |= {name: Same(*given) for name, given in same.items() if name in names}
    older = frozenset(("wandb_entity", "wandb_project"))
    known = Table(found, decides & names, rl.older, names, older)
    return Trainer(own["config"], section, own["command"], known)


def named_trainer(given: Mapping[str, Any]) -> str:
    """The trainer whose settings these are: a key of `trainers()`, or empty for one of RL.

    Raises:
        UserError: if they may be those of several.
    """
    rl = table("trl")
    own = {name: one.table.names - (rl.names - rl.of_rl) for name, one in trainers().items()}
    own[""] = rl.of_rl
    counts = {name: sum(key in known for key in given) for name, known in own.items()}
    types = {*_listed(given, "loss_type", str)}
    for name, one in trainers().items():
        known = _OF_OTHERS.get(one.config, (*OF_DPO.values(), *_OLDER_LOSSES))
        if "loss_type" in one.table.names and types:
            counts[name] += types <= {*known}
    counts[""] += bool(types) and types <= _LOSSES_OF_RL
    best = [name for name, count in counts.items() if count == max(counts.values())]
    if "" in best and own.pop("") & given.keys() - set().union(*own.values()):
        return ""
    if len(best) > 1:
        configs = [trainers()[name].config if name else "GRPOConfig" for name in best]
        raise UserError(
            f"these may be the settings of {', '.join(configs)}: say which by --trainer"
            f" {best[0] or 'grpo'}"
        )
    return best[0]


def read_stage(
    trainer: Trainer, given: Mapping[str, Any], processes: int
) -> tuple[dict[str, Any], list[str]]:
    """Settings of a recipe by key, and notes, from the settings of a trainer.

    Args:
        given: its settings by name. Its defaults hold for the others.
        processes: processes of the training, for batch sizes that count per process.

    Raises:
        UserError: if there is not one weight for each loss.
    """
    found, notes = ours(trainer.table, given)
    section = trainer.section
    rows = given.get("per_device_train_batch_size", 8) * processes
    found[f"{section}.examples_per_step"] = rows * given.get("gradient_accumulation_steps", 1)
    notes.append(f"batch sizes are for {processes} processes (--processes)")
    steps, epochs = given.get("max_steps") or -1, given.get("num_train_epochs", 3)
    if steps > 0:
        found[f"{section}.steps"] = steps
    else:
        found[f"{section}.epochs"] = max(1, round(epochs))
        if epochs != found[f"{section}.epochs"]:
            notes.append(f"num_train_epochs = {epochs}: {max(1, round(epochs))} whole epochs")
    if share := warmup_share(given):
        found[f"{section}.warmup_steps"] = math.ceil(share * steps) if steps > 0 else 0
        if steps <= 0:
            notes.append(f"a warm-up as a share of the run: set {section}.warmup_steps")
    for part in (_losses(trainer, given, found), _lengths(section, given), _data(given, found)):
        found |= part[0]
        notes += part[1]
    logged = given.get("report_to")
    found |= loggers(logged)
    if logged and "log.to" not in found and logged not in ("none", ["none"]):
        notes.append(f"report_to = {logged!r} has no counterpart: use {', '.join(LOGGERS)}")
    adapter, more = read_adapter(given)
    task = given.get("lora_task_type", trainer.task_type)
    if adapter and task != trainer.task_type:
        more.append(f"lora_task_type = {task!r} has no counterpart: {trainer.task_type!r} is used")
    found = {key: value for key, value in found.items() if not key.startswith("model.lora.")}
    found |= adapter
    notes += more
    if section == "reward_model":
        found["reward_model.normalise"] = False
        notes.append(
            "reward_model.margin: TRL reads a column 'margin' if there is one; set it to do so"
        )
    return found, notes


def read_adapter(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings of the adapter, and notes. TRL reads them with `use_peft` only."""
    names = {
        "lora_r": ("rank", 16),
        "lora_alpha": ("alpha", 32),
        "use_rslora": ("rslora", False),
        "use_dora": ("dora", False),
    }
    if not given.get("use_peft"):
        unread = [name for name in (*names, "lora_target_modules") if given.get(name)]
        return {}, [f"{name} = {given[name]!r} has no effect without use_peft" for name in unread]
    found = {f"model.lora.{ours}": given.get(name, own) for name, (ours, own) in names.items()}
    targets, notes = given.get("lora_target_modules"), []
    if targets:
        found["model.lora.targets"] = [targets] if isinstance(targets, str) else list(targets)
    else:
        notes.append("lora_target_modules: peft chooses by architecture; here all linear modules")
    if dropout := given.get("lora_dropout", 0.05):
        notes.append(f"lora_dropout = {dropout} has no counterpart")
    return found, notes


def warmup_share(given: Mapping[str, Any]) -> float:
    """Share of the run in which the learning rate rises. 0: `warmup_steps` is a number of steps."""
    steps = given.get("warmup_steps") or 0
    return float(steps) if 0 < steps < 1 else float(given.get("warmup_ratio") or 0)


def _losses(
    trainer: Trainer, given: Mapping[str, Any], found: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The losses and their settings. Removes from `found` the settings that no loss reads."""
    if trainer.section != "preference":
        return {}, []
    losses, weights, notes = _named_losses(trainer.config, given)
    rows = [LOSSES[one] for one in losses]
    for key in sorted(_LOSS & found.keys()):
        setting = key.partition(".")[2]
        readers = [row for row in rows if setting in row.reads]
        if setting == "label_smoothing" and "exo" in losses and not found[key]:
            found[key] = 1e-3  # as TRL does
        if all(getattr(row.defaults, setting) == found[key] for row in readers):
            del found[key]
    if found.get("preference.divergence") != "alpha":
        found.pop("preference.divergence_alpha", None)
    for key, same in trainer.table.same.items():
        if same.ours in _LOSS and key in given and given[key] not in (None, same.default):
            setting = same.ours.partition(".")[2]
            if not any(setting in row.reads for row in rows):
                notes.append(f"{key} = {given[key]!r} has no effect on {', '.join(losses)}")
    extra: dict[str, Any] = {"preference.weights": weights} if set(weights) != {1.0} else {}
    if trainer.config == "DPOConfig" and losses == ["cpo"]:
        # DPO without a reference has no cross-entropy.
        extra["preference.sft_weight"] = 0.0
    if "preference.reference" in found and not any(row.needs_reference for row in rows):
        del found["preference.reference"]
    return {"preference.losses": losses, **extra}, notes


def _named_losses(
    config: str, given: Mapping[str, Any]
) -> tuple[list[str], list[float], list[str]]:
    """The losses, their weights, and notes.

    Raises:
        UserError: if there is not one weight for each loss, or a value is of another type.
    """
    usual = ["kto" if config == "KTOConfig" else "sigmoid"]
    types = [_OLDER_LOSSES.get(one, one) for one in _listed(given, "loss_type", str) or usual]
    weights = [float(one) for one in _listed(given, "loss_weights", int, float)]
    weights = weights or [1.0] * len(types)
    if len(weights) != len(types):
        raise UserError(
            f"loss_weights has {len(weights)} numbers, but loss_type has {len(types)} losses. Give"
            " one weight for each loss"
        )
    known = {theirs: row for row, theirs in OF_DPO.items() if row not in ("ld_dpo", "wpo")}
    known = _OF_OTHERS.get(config, known)
    notes = [
        f"loss_type = {one!r} has no counterpart.{nearest(one, list(known))} It is left out"
        for one in types
        if one not in known
    ]
    kept = [
        (known[one], weight) for one, weight in zip(types, weights, strict=True) if one in known
    ]
    if not kept:
        kept = [(next(iter(known.values())), 1.0)]
        notes.append(f"no loss is left: preference.losses = ['{kept[0][0]}'] takes its place")
    kept = _with_cdpo(kept, given.get("label_smoothing", 0.0))
    if config == "DPOConfig" and (alpha := given.get("rpo_alpha")):
        notes.append(f"rpo_alpha = {alpha!r}: the loss sft with this weight")
        alpha += sum(weight for row, weight in kept if row == "sft")
        kept = [*((row, weight) for row, weight in kept if row != "sft"), ("sft", alpha)]
    if given.get("use_weighting"):
        if [row for row, _ in kept] == ["dpo"]:
            kept = [("wpo", kept[0][1])]
        else:
            notes.append("use_weighting = True has no counterpart for other losses than sigmoid")
    if given.get("reference_free"):
        if [row for row, _ in kept] == ["dpo"]:
            kept = [("cpo", kept[0][1])]
        else:
            notes.append("reference_free = True has no counterpart for other losses than sigmoid")
    return [row for row, _ in kept], [weight for _, weight in kept], notes


def _listed(given: Mapping[str, Any], key: str, *types: type) -> list[Any]:
    """A list that may be given as its only element."""
    value = given.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, types) for one in found):
        wanted = "names" if str in types else "mappings" if dict in types else "numbers"
        raise UserError(f"{key} = {value!r}: expected {wanted}")
    return found


def _with_cdpo(losses: list[tuple[str, float]], smoothing: float) -> list[tuple[str, float]]:
    """Losses and weights, with `cdpo` in place of the sum by which it is written."""
    found: list[tuple[str, float]] = []
    for row, weight in losses:
        before, other = found[-1] if found else ("", 0.0)
        scale = other / (2 * (1 - smoothing)) if smoothing < 1 else 0.0
        mirrored = math.isclose(weight, (2 * smoothing - 1) * scale, abs_tol=1e-9)
        if (before, row) == ("dpo", "robust") and mirrored:
            found[-1] = ("cdpo", round(scale, 12))
        else:
            found.append((row, weight))
    return found


def _lengths(section: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The longest comparison, and what happens to a longer one: it is cut, or left out."""
    limit = given.get("max_length", 1024) or 0
    if not limit:
        return {"comparisons.max_tokens": 0}, []
    cut = section == "preference"
    notes = []
    if given.get("truncation_mode") == "keep_end":
        notes.append("truncation_mode = 'keep_end' has no counterpart: the end is cut")
    kept = {"comparisons.max_tokens": limit, "data.overlong": "drop"}
    return kept | ({"comparisons.truncate": True} if cut else {}), notes


def _data(given: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Where the comparisons come from, which are held out, and the counts of steps."""
    made: dict[str, Any] = {}
    notes: list[str] = []
    listed = _listed(given, "datasets", dict)
    if len(listed) == 1 and isinstance(listed[0], Mapping):
        one = dict(listed[0])
        path, files = one.pop("path", None), one.pop("data_files", None)
        files = [files] if isinstance(files, str) else files
        if path in _FORMATS and isinstance(files, list) and len(files) == 1:
            made["data.source"] = files[0]
        elif path in _FORMATS:
            notes.append(f"datasets: name the files {files!r} by [[data.sources]]")
        else:
            made["data.source"] = path or ""
            one |= {"data_files": files} if files else {}
        if "name" in one:
            made["data.subset"] = one.pop("name")
        made["data.split"] = one.pop("split", "train")
        notes += [f"datasets: {key} = {value!r} has no counterpart" for key, value in one.items()]
    elif listed:
        notes.append(
            "datasets: TRL joins them; name them by [[data.sources]], which are drawn by weight"
        )
    strategy = given.get("eval_strategy", given.get("evaluation_strategy", "no"))
    if strategy in ("no", False, None):
        made["data.heldout"] = 0
    elif "data.source" in found and not listed:
        made["data.heldout_split"] = given.get("dataset_test_split", "test")
    else:
        made["data.heldout"] = 0
        notes.append(f"eval_strategy = {strategy!r}: name the held-out rows by data.heldout_split")
    if "data.heldout" not in made and isinstance(given.get("eval_steps"), int):
        made["eval.every"] = given["eval_steps"]
    elif "eval_steps" in given:
        notes.append(f"eval_steps = {given['eval_steps']!r} has no counterpart")
    if isinstance(given.get("save_steps"), int):
        made["checkpoint.every"] = given["save_steps"]
    elif "save_steps" in given:
        notes.append(f"save_steps = {given['save_steps']!r} has no counterpart")
    return made, notes


def converted_stage(stage: Stage) -> Conversion:
    """A stage of kind preference or reward_model as settings of a trainer.

    Args:
        stage: the stage. Names of earlier stages stand for their results.
    """
    recipe = stage.recipe
    values = {key: value for key, value in flat(recipe).items() if key not in _LOSS}
    if stage.kind == "reward_model":
        loss = Conversion("trl", stage.name, "RewardConfig", {}, {}, (), (), _reward(values))
    else:
        loss = converted_sum(stage.name, resolve_losses(recipe.preference))
    trainer = next(one for one in trainers().values() if one.config == loss.entry)
    lengths, cut = _their_lengths(trainer, values)
    data, from_data = _their_data(values)
    settings = {
        **theirs(trainer.table, values, critic=False),
        **data,
        **_their_sizes(trainer, values),
        **lengths,
        **loss.kept,
        **loss.changed,
    }
    if recipe.model.lora.rank:
        settings |= {"use_peft": True, "lora_dropout": 0.0}
        if trainer.task_type != "CAUSAL_LM":  # TRL's default
            settings["lora_task_type"] = trainer.task_type
    left = left_over(flat(recipe), _covered(trainer), stage.row)
    return Conversion(
        "trl",
        stage.name,
        trainer.command,
        settings,
        kept={},
        also=(),
        differs=(*loss.differs, *cut, *from_data, *left),
        lacks=loss.lacks,
    )


def _reward(values: Mapping[str, Any]) -> tuple[str, ...]:
    wanted = {"loss": "bradley_terry", "head": "last", **dict.fromkeys(_SWITCHES, False)}
    return tuple(
        f"reward_model.{name} = {toml_literal(values[f'reward_model.{name}'])}"
        for name, theirs in wanted.items()
        if values[f"reward_model.{name}"] != theirs
    )


def _their_sizes(trainer: Trainer, values: Mapping[str, Any]) -> dict[str, Any]:
    section = trainer.section
    found: dict[str, Any] = {"per_device_train_batch_size": values[f"{section}.examples_per_step"]}
    if steps := values[f"{section}.steps"]:
        found["max_steps"] = steps
    else:
        found["num_train_epochs"] = values[f"{section}.epochs"]
    if every := values["checkpoint.every"]:
        found["save_steps"] = every
    return found


def _their_lengths(
    trainer: Trainer, values: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    limit, cuts = values["comparisons.max_tokens"], values["comparisons.truncate"]
    if not limit:
        return {"max_length": None}, ()
    dropped = trainer.section == "reward_model"
    same = not cuts and values["data.overlong"] == "drop" if dropped else cuts
    does = "are left out" if dropped else "are cut"
    return {"max_length": limit}, () if same else (f"there, longer comparisons {does}",)


def _their_data(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    source, held = values["data.source"], values["data.heldout_split"]
    suffix = file_type(Path(source)).removesuffix(".gz")
    found: dict[str, Any] = {"dataset_name": source}
    notes = []
    if held.startswith(REFERENCE):  # which is said to be not converted
        held = ""
    if source.startswith(REFERENCE):
        found = {}
    elif suffix in _FILES:  # all rows of a file are in this split
        found = {"datasets": [{"path": _FILES[suffix], "data_files": source, "split": "train"}]}
    elif values["data.sources"]:
        found = {}
        notes.append("data.sources: list them as datasets, which TRL joins without weights")
    if held and suffix not in _FILES:
        found |= {"dataset_test_split": held, "eval_strategy": "steps"}
        found |= {"eval_steps": values["eval.every"]} if values["eval.every"] else {}
    elif held:
        notes.append(f"data.heldout_split = {toml_literal(held)}: a file of its own there")
    elif values["data.heldout"]:
        notes.append(
            f"data.heldout = {values['data.heldout']}: TRL trains on all rows. Give it a split"
        )
    return found, tuple(notes)


def _covered(trainer: Trainer) -> set[str]:
    """Settings of a recipe that are converted, or whose difference is said."""
    section = trainer.section
    covered = {same.ours.rstrip("0123456789").rstrip(".") for same in trainer.table.same.values()}
    covered |= _LOSS | {f"{section}.{name}" for name in ("steps", "epochs", "examples_per_step")}
    covered |= {f"preference.{name}" for name in ("losses", "weights")}
    covered |= {"comparisons.max_tokens", "comparisons.truncate", "data.overlong", "run.steps"}
    covered |= {"data.source", "data.sources", "data.heldout", "data.heldout_split"}
    covered |= {"checkpoint.every", "run.dir"}
    return covered | {f"reward_model.{name}" for name in ("loss", "head", *_SWITCHES)}


def yaml_lines(command: str, settings: Mapping[str, object]) -> list[str]:
    """Lines of a YAML file of settings."""
    return [f"# {command}", *(f"{key}: {_yaml(value)}" for key, value in settings.items())]


def _yaml(value: object) -> str:
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return toml_literal(value) if isinstance(value, str) else str(value)
