"""The command line: `sixfold VERB ...`.

Each verb is a module of `commands`, imported only when the verb is used. --help therefore does not
import torch.

Exit codes: 0 success, 1 bug (with traceback), 2 user error (one line), 3 training cannot continue
(one line), 130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any

from .. import plugins
from ..errors import RankFailed, RunFailed, UserError, check_platform, nearest
from ..report.untrusted import visible

CORE = {
    "train": "train a model by reinforcement learning, or resume a run",
    "sft": "run only the supervised warm-up (SFT) of a recipe",
    "eval": "evaluate checkpoints on held-out tasks: share solved and pass@k, with 95 % intervals",
    "generate": "sample completions of one prompt",
    "export": "write the model of a checkpoint, or its LoRA adapter, to a folder",
    "explain": "explain a recipe: resolved values with reasons, and whether it fits in memory",
    "algorithms": "list the algorithms, show one, or convert it to settings of another framework",
    "diff": "show how two runs differ",
    "report": "write report.html of a run",
    "show": "print trajectories of a step, token by token",
    "env": "create the folder of a new environment, or list the environments",
    "replay": "recompute a recorded step of a run, and show what differs",
}
"""The core's commands. Installed packages add theirs (`plugins.VERBS`)."""


def verbs() -> dict[str, str]:
    """Every command with its purpose."""
    added = [name for name in plugins.names(plugins.VERBS) if name not in CORE]
    return CORE | {name: plugins.text_of(plugins.VERBS, name, "PURPOSE") for name in added}


def overview() -> str:
    """The text of `sixfold --help`."""
    lines = "\n".join(f"  {verb:<12}{purpose}" for verb, purpose in verbs().items())
    return f"""usage: sixfold VERB [ARGUMENTS] [--section.key VALUE ...]

{lines}

  sixfold VERB --help   show the arguments of the verb and all settings of a recipe
  --debug               show the traceback behind an error
  --version             print the version
"""


# Errors of the machine, not of Sixfold: no space, over quota, no permission, read-only.
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}


END_S = 5.0
"""Seconds that threads of user code have to end after the command."""

LEAD_OF_RANK_0_S = 10.0
"""Seconds for rank 0 to print an error that all ranks have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments. None: those of this process, which then ends after the command.

    Returns:
        The exit code.
    """
    sys.excepthook = _show_traceback
    if argv is not None:
        return _run(argv)
    code = _run(sys.argv[1:])
    _end_in_time(code, END_S)
    return code


def _run(arguments: Sequence[str]) -> int:
    """Run one command, and print its error if it has one."""
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
        _print_error(str(error))
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


def _end_in_time(code: int, seconds: float) -> None:
    """End this process even if a thread of an environment goes on for ever.

    Python waits at its end for every thread that is no daemon.

    Args:
        code: exit code.
        seconds: time for these threads to end by themselves.
    """
    ended = threading.Event()
    atexit.register(ended.set)  # called after the threads have ended

    def watch() -> None:
        if ended.wait(seconds):
            return
        main = threading.main_thread()
        left = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
        print(
            f"sixfold: warning: {', '.join(left)} still runs {seconds:g} s after the end, and is"
            " ended with the process. Give threads daemon=True, or end them in `close`",
            file=sys.stderr,
        )
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    threading.Thread(target=watch, name="end", daemon=True).start()


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(overview(), end="", file=sys.stderr)
        return 2
    verb, *rest = arguments
    if verb in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0
    if verb == "--version":
        from ..version import __version__

        print(f"sixfold {__version__}")
        return 0
    added = () if verb in CORE else plugins.names(plugins.VERBS)
    if verb not in CORE and verb not in added:
        kind = "option" if verb.startswith("-") else "command"
        known = [*CORE, *added]
        raise UserError(
            f"unknown {kind} '{verb}'.{nearest(verb, known)} Commands: {', '.join(known)}"
        )
    check_platform(os.name)
    kernels = os.environ.get("SIXFOLD_KERNELS", "")
    if kernels not in ("", "torch"):
        raise UserError(
            f"SIXFOLD_KERNELS = '{kernels}' is not valid. Unset it for the compiled kernels, or"
            " use 'torch' for PyTorch operations only"
        )
    code: int = module_of(verb).run(rest)
    return code


def module_of(verb: str) -> Any:
    """The module of a command, imported only when the command is used."""
    if verb in CORE:
        return import_module(f"sixfold.commands.{verb}")
    return plugins.load(plugins.VERBS, verb)


def _refuse(message: str, code: int = 2) -> int:
    if os.environ.get("RANK", "0") != "0":
        # All ranks refuse the same settings, and rank 0 prints the error. torchrun ends all ranks
        # when the first one exits, so this one must not be the first.
        time.sleep(LEAD_OF_RANK_0_S)
        return code
    _print_error(message)
    return code


def _print_error(message: str) -> None:
    """Print an error on one line. Texts of models and files in it cannot control the terminal."""
    print(f"sixfold: error: {visible(' '.join(message.split()))}", file=sys.stderr)


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of a bug, for `sys.excepthook`, with the same care."""
    print(visible("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr)
