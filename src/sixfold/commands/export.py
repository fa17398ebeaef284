"""`sixfold export RUN_OR_CHECKPOINT OUT [--merge]`: a model that other programs can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.model_source import model_folder
from ..checkpoint.publication import publish_folder
from ..cli.parsing import VerbParser, argument, option
from ..errors import UserError
from ..files.durable import disk_errors
from ..recipe.adapter_folder import BASE, CONFIG, adapter_settings, base_of, is_adapter

SOURCE = "RUN_OR_CHECKPOINT"


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument(
        "a run (its newest checkpoint), a checkpoint, or the model folder of one", metavar=SOURCE
    )
    out: Path = argument("folder to write; it must be new")
    merge: bool = option("merge the LoRA adapter into its base model", False)


PARSER = VerbParser(
    "export",
    "Write the model of a run or a checkpoint to a folder, in Hugging Face format. For a LoRA"
    " run, write the adapter in PEFT's format, or the merged model with --merge.",
    Options,
)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    return export(given.run, given.out, merge=given.merge)


def export(path: str, out: Path, *, merge: bool) -> int:
    """Write the model of a run or a checkpoint to a new folder.

    Args:
        path: a run (its newest intact checkpoint), a checkpoint, or a model folder.
        out: folder to write.
        merge: merge the adapter into its base. Otherwise an adapter is written without its base.

    Raises:
        UserError: if nothing can be exported, or `out` exists.
    """
    folder = Path(model_folder(path, SOURCE))
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not on this machine"
        raise UserError(f"{SOURCE} = '{path}' {what}. Give a run or a checkpoint")
    if not is_adapter(str(folder)) and not (folder / "config.json").is_file():
        raise UserError(
            f"{SOURCE} = '{path}' holds no model: it has no config.json and no {CONFIG}. Give a"
            " run, a checkpoint, or the model folder of one"
        )
    if out.exists():
        raise UserError(f"OUT = '{out}' exists. Name a new folder, or remove it")
    if out.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"OUT = '{out}' is inside the model folder {folder}. Name a folder outside it"
        )
    if merge and not is_adapter(str(folder)):
        raise UserError(
            f"--merge: '{path}' holds a whole model, so there is no adapter. Leave out --merge"
        )
    with disk_errors(f"cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    if merge:
        from ..model.loading import from_disk

        model, tokenizer = from_disk(str(folder), SOURCE)

        def write(staging: Path) -> None:
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)

        publish_folder(out, write)
    else:
        publish_folder(out, lambda staging: _copy(folder, staging))
    what = "model" if merge or not is_adapter(str(folder)) else "adapter"
    print(f"{what} of {folder.parent.name if folder.name == 'model' else folder}: {out}")
    return 0


def _copy(folder: Path, staging: Path) -> None:
    """Copy a model or an adapter. The copy of an adapter names its base by an absolute path."""
    shutil.copytree(folder, staging, dirs_exist_ok=True)
    if not is_adapter(str(folder)):
        return
    base = base_of(str(folder), SOURCE)
    config = adapter_settings(folder) | {"base_model_name_or_path": base.path}
    (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    own = {"path": "", "sha256": base.sha256, "rounded": base.rounded}
    (staging / BASE).write_text(json.dumps(own, indent=2) + "\n")
