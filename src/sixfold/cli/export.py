"""`sixfold export RUN_OR_CHECKPOINT OUT [--merge]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .parsing import VerbParser


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "export",
        "Write the model of a run or a checkpoint to a folder, in Hugging Face format. For a LoRA"
        " run, write the adapter in PEFT's format, or the merged model with --merge.",
    )
    arguments.add_argument(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        help="a run (its newest checkpoint), a checkpoint, or the model folder of one",
    )
    arguments.add_argument("out", metavar="OUT", type=Path, help="folder to write; it must be new")
    arguments.add_argument(
        "--merge", action="store_true", help="merge the LoRA adapter into its base model"
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and export."""
    given, _ = parser().parse(argv)
    from ..commands.export import export_command

    return export_command(given.run, given.out, merge=given.merge)
