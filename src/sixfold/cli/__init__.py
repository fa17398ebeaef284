"""The command line: `sixfold VERB ...`. One module a verb, imported only once the verb is known, so
that --help never waits for torch.

Exit codes: 0 done, 1 a bug (with its traceback), 2 a mistake of the user's (one line), 3 training
cannot go on (one line), 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from ..errors import RunFailed, UserError, check_platform, nearest

VERBS = {
    "train": "train a model by reinforcement learning, or resume a run",
    "sft": "only the supervised warm-up of a recipe",
    "eval": "mean reward and pass@k of a checkpoint on held-out tasks, with 95 % intervals",
    "generate": "sample completions of one prompt",
    "serve": "answer OpenAI-compatible requests for a model",
    "explain": "what a recipe resolves to, in plain words, with reasons",
    "algorithms": "the algorithms: who patches whom, one in full, what to set in another framework",
    "diff": "what differs between two runs",
    "report": "write a run's report.html",
}

HELP = f"""usage: sixfold VERB [ARGUMENTS] [--section.key VALUE ...]

{chr(10).join(f"  {verb:<12}{line}" for verb, line in VERBS.items())}

  sixfold VERB --help   its arguments and, where it takes a recipe, every setting
  --debug               show the traceback behind an error
  --version             print the version
"""

# what the machine refuses, as against what we got wrong: no space, over quota, no permission,
# read-only
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives back the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        code = _dispatch([argument for argument in arguments if argument != "--debug"])
        sys.stdout.flush()  # a closed pipe shows here and not at exit, where nobody could catch it
        return code
    except UserError as error:
        if debug:
            raise
        return _refuse(str(error))
    except RunFailed as error:
        if debug:
            raise
        return _refuse(str(error), 3)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the reader left (| head); Python flushes once more at exit
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
            f"SIXFOLD_KERNELS = '{kernels}': unset it for the compiled kernels, or 'torch' for"
            " PyTorch's operations alone"
        )
    code: int = importlib.import_module(f"sixfold.cli.{verb}").run(rest)
    return code


def _refuse(message: str, code: int = 2) -> int:
    print(f"sixfold: error: {' '.join(message.split())}", file=sys.stderr)
    return code
