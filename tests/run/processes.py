"""Runs in processes of their own that can be killed: forked from a server that has imported
everything, so a start costs milliseconds.
"""

from __future__ import annotations

import json
import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sixfold.errors import UserError
from sixfold.processes import child
from sixfold.recipe.toml import parse_staged
from tests.forked_programs import FORKING
from tests.forkserver import CONTEXT, running_server, share_server

TINY = {
    "run.threads": 1,
    "model.scratch.hidden_size": 16,
    "model.scratch.layers": 1,
    "model.scratch.heads": 2,
    "model.scratch.kv_heads": 1,
    "model.scratch.head_dim": 8,
    "model.scratch.intermediate_size": 32,
    "model.scratch.context": 64,
    "data.arithmetic.digits": 1,
    "data.heldout": 8,
    "environment.preflight": 0,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 12,
    "trainer.learning_rate": 1e-3,
    "sft.steps": 4,
    "sft.examples_per_step": 8,
    "eval.every": 0,
    "checkpoint.every": 2,
}


def tiny_recipe(folder: Path, **overrides: Any) -> list[str]:
    """Flags of a run that takes about a second, under `folder`/NAME. Overrides use __ for
    the dot.
    """
    settings = {
        **TINY,
        "run.dir": str(folder),
        **{k.replace("__", "."): v for k, v in overrides.items()},
    }
    return [
        part
        for key, value in settings.items()
        for part in (f"--{key}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def _child(
    text: str,
    flags: list[str],
    asked: dict[str, Any],
    errors: str,
    fault: str,
    server: dict[str, Any],
) -> None:
    if server:
        share_server(server)
        child.subprocess = FORKING  # type: ignore[assignment]
    os.chdir(Path(errors).parent)
    os.environ["SIXFOLD_FAULT"] = fault
    os.fsync = lambda descriptor: None  # as in tests/conftest.py
    with open(errors, "w") as sink:
        os.dup2(sink.fileno(), 2)
        from sixfold.run.start import train_run
        from sixfold.stages.driver import train_stages

        try:
            staged = parse_staged(text, "test", flags)
            code = (
                train_stages(staged, **asked) if staged.stages else train_run(staged.base, **asked)
            )
        except UserError as error:
            print(error, file=sink, flush=True)
            code = 2
    os._exit(code)


def start(
    flags: list[str],
    errors: Path,
    resume: Path | None = None,
    fault: str = "",
    forking: bool = True,
    text: str = 'run.name = "run"',
    **asked: Any,
) -> BaseProcess:
    """Start a run in a process.

    Args:
        flags: flags of the run.
        errors: file for its standard error.
        resume: folder of the run to resume.
        fault: its SIXFOLD_FAULT.
        forking: fork the programs that need torch (`forked_programs.py`).
        text: the recipe.
        asked: other arguments of `train_run`, or of `train_stages`.
    """
    server = running_server() if forking else {}
    asked = {"resume": resume, **asked}
    process = CONTEXT.Process(target=_child, args=(text, flags, asked, str(errors), fault, server))
    process.start()
    return process


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the timings, which no two runs share."""
    timed = (
        *("time/", "busy/", "sampler/", "sync/pause_s"),
        *("rollout/tok_s", "train/tok_s", "dynamic/check_s"),
    )
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
