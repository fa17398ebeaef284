"""The command line: `sixfold VERB ...`.

Each verb has a module, imported only when the verb is used. --help therefore does not import torch.

Exit codes: 0 success, 1 bug (with traceback), 2 user error (one line), 3 training cannot continue
(one line), 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import time
from collections.abc import Sequence

from ..errors import RankFailed, RunFailed, UserError, check_platform, nearest

VERBS = {
    "train": "train a model by reinforcement learning, or resume a run",
    "sft": "run only the supervised warm-up (SFT) of a recipe",
    "eval": "evaluate checkpoints on held-out tasks: share solved and pass@k, with 95 % intervals",
    "generate": "sample completions of one prompt",
    "serve": "serve a model with an OpenAI-compatible HTTP API",
    "export": "write the model of a checkpoint, or its LoRA adapter, to a folder",
    "explain": "explain a recipe: resolved values with reasons, and whether it fits in memory",
    "plan": "predict memory, step time and cost before a run, or check the model of them",
    "algorithms": "list the algorithms, show one, or convert it to settings of another framework",
    "diff": "show how two runs differ",
    "report": "write report.html of a run",
    "show": "print trajectories of a step, token by token",
    "lab": "run a small simulator of one idea, in the terminal or as a page with sliders",
    "env": "create the folder of a new environment, or list the environments",
    "sandbox": "test how well this machine isolates programs that a model has written",
    "audit": "look for faults of an environment before training on it",
    "critique": "make preference pairs by critique and revision of a model's answers",
    "replay": "recompute a recorded step of a run, and show what differs",
}

HELP = f"""usage: sixfold VERB [ARGUMENTS] [--section.key VALUE ...]

{chr(10).join(f"  {verb:<12}{line}" for verb, line in VERBS.items())}

  sixfold VERB --help   show the arguments of the verb and all settings of a recipe
  --debug               show the traceback behind an error
  --version             print the version
"""

# Errors of the machine, not of Sixfold: no space, over quota, no permission, read-only.
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}


_TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers whose warnings are silenced: they warn about torchao whenever transformers imports it."""

LEAD_OF_RANK_0_S = 10.0
"""Seconds for rank 0 to print an error that all ranks have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        code = _dispatch([argument for argument in arguments if argument != "--debug"])
        # A closed pipe raises here. At exit nobody could catch it.
        sys.stdout.flush()
        return code
    except UserError as error:
        if debug:
            raise
        return _refuse(str(error))
    except RankFailed as error:
        print(f"sixfold: error: {error}", file=sys.stderr)
        return 3
    except RunFailed as error:
        if debug:
            raise
        return _refuse(str(error), 3)
    except BrokenPipeError:
        # The reader has closed the pipe (| head), and Python flushes again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if debug or error.errno not in _REFUSED:
            raise
        return _refuse(
            f"{os.strerror(error.errno or 0).lower()}: {error.filename or 'while writing'}"
        )
    except KeyboardInterrupt:
        print("sixfold: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(HELP, end="", file=sys.stderr)
        return 2
    verb, *rest = arguments
    if verb in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if verb == "--version":
        from .. import __version__

        print(f"sixfold {__version__}")
        return 0
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "command"
        raise UserError(
            f"unknown {kind} '{verb}'.{nearest(verb, list(VERBS))} Commands: {', '.join(VERBS)}"
        )
    check_platform(os.name)
    kernels = os.environ.get("SIXFOLD_KERNELS", "")
    if kernels not in ("", "torch"):
        raise UserError(
            f"SIXFOLD_KERNELS = '{kernels}' is not valid. Unset it for the compiled kernels, or"
            " use 'torch' for PyTorch operations only"
        )
    code: int = importlib.import_module(f"sixfold.cli.{verb}").run(rest)
    return code


def _refuse(message: str, code: int = 2) -> int:
    if os.environ.get("RANK", "0") != "0":
        # All ranks refuse the same settings, and rank 0 prints the error. torchrun ends all ranks
        # when the first one exits, so this one must not be the first.
        time.sleep(LEAD_OF_RANK_0_S)
        return code
    print(f"sixfold: error: {' '.join(message.split())}", file=sys.stderr)
    return code
