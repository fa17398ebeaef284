"""The core without the packages beside it: no file of theirs, and none of their entry points."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from one_interpreter import outputs

import sixfold

SRC = Path(sixfold.__file__).parents[1]
ROOT = SRC.parent
OTHERS = sorted(path.parent.name for path in SRC.glob("sixfold_*/__init__.py"))
BLOCK = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OTHERS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
TINY = (
    "--run.threads 1 --run.steps 2 --sft.steps 3 --sft.examples_per_step 4 --data.heldout 4"
    " --model.scratch.layers 1 --rollout.prompts_per_step 2 --rollout.samples_per_prompt 4"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that finds the core only."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(SRC / "sixfold", folder / "sixfold")  # with its bytecode
    (folder / "sitecustomize.py").write_text(BLOCK)
    metadata = folder / "sixfold-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sixfold\nVersion: 0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines: list[str] = []
    for group, points in groups.items():
        own = {name: spec for name, spec in points.items() if spec.startswith("sixfold.")}
        lines += [f"[{group}]", *(f"{name} = {spec}" for name, spec in own.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": str(folder)}


def ran(alone: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=alone,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
def test_the_demo_is_trained(alone: dict[str, str], tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes" / "demo.toml")
    done = ran(alone, tmp_path, "-m", "sixfold", "train", recipe, *TINY.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    mcp = ["--environment.episode", "tools", "--environment.tools.mcp", "['server']", "--overwrite"]
    done = ran(alone, tmp_path, "-m", "sixfold", "train", recipe, *mcp)
    assert done.returncode == 2
    assert "no installed package has 'mcp' among its tool_servers" in done.stderr


REFUSED = {
    "plan 7B": "unknown command 'plan'",
    "train demo.toml --environment.rewards math": "unknown reward 'math'",
    "train demo.toml --environment.episode web_shop": "unknown environment 'web_shop'",
}


def test_what_is_missing_is_unknown_and_the_rest_is_listed(
    alone: dict[str, str], tmp_path: Path
) -> None:
    shutil.copy(ROOT / "recipes" / "demo.toml", tmp_path)
    *refused, (code, listed) = outputs(alone, tmp_path, [*REFUSED, "env list"])
    for (said, text), expected in zip(refused, REFUSED.values(), strict=True):
        assert said == 2 and expected in text, text
    assert code == 0 and [line.split()[0] for line in listed.splitlines()] == [
        *("calculator", "tools")
    ]


@pytest.mark.nightly
def test_tests_of_the_core_pass(alone: dict[str, str]) -> None:
    """Those of the roles that hold the loop together."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow")
    folders = [f"tests/{name}" for name in ("controller", "sync")]
    done = ran(alone, ROOT, *words, *folders)
    assert done.returncode == 0, done.stdout[-3000:]
