"""Environments of the programs that Sixfold is measured against: each in a folder of its own beside
the repository's files, made when missing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRL_VERSION = "1.16.0"
TCMALLOC = "libtcmalloc-minimal4"


def trl_python() -> str:
    """Python of `.venv-trl`. The environment is made, with TRL and peft, if it is missing."""
    home = ROOT / ".venv-trl"
    python = home / "bin" / "python"
    ready = home / f"trl-{TRL_VERSION}-peft.installed"
    if not ready.exists():
        print(f"installing trl {TRL_VERSION} into {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        packages = ["torch", "transformers", f"trl=={TRL_VERSION}", "peft"]
        subprocess.run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "-c",
                str(ROOT / "constraints.txt"),
                *packages,
            ],
            check=True,
        )
        ready.touch()  # last, so that an interrupted installation is not taken for a whole one
    return str(python)


def vllm_python() -> str:
    """The python of `.venv-vllm`, which the Makefile makes when missing; with tcmalloc in it where
    apt-get has that.
    """
    home = ROOT / ".venv-vllm"
    subprocess.run(
        ["make", "-s", f"PYTHON={sys.executable}", ".venv-vllm/installed"], cwd=ROOT, check=True
    )
    if not (home / "debian").exists():
        _unpack(TCMALLOC, home / "debian")
    return str(home / "bin" / "python")


def preloads(python: str) -> list[str]:
    """Of the libraries that vLLM's manual asks for in LD_PRELOAD (tcmalloc, Intel's OpenMP), those
    in the environment of `python`.
    """
    root = Path(python).parent.parent
    found = (next(root.rglob(name), None) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"))
    return [str(path) for path in found if path]


def _unpack(package: str, folder: Path) -> None:
    """Unpack a Debian package's files into `folder`; where that cannot be done, say so and go on
    without.
    """
    folder.mkdir()
    try:
        subprocess.run(
            ["apt-get", "download", package], cwd=folder, check=True, capture_output=True
        )
        subprocess.run(
            ["dpkg", "-x", str(next(folder.glob(f"{package}_*.deb"))), str(folder)], check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"going on without {package}: {error}", file=sys.stderr)
