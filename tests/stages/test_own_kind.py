"""The kind of docs/stages.md, installed as a package, runs as it is written there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sixfold import plugins
from sixfold.commands import explain, train
from sixfold.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs" / "stages.md").read_text(encoding="utf-8")
PART = PAGE[PAGE.index("## Write a kind") :]
SMALL = """
[model.scratch]
hidden_size = 8
layers = 1
heads = 1
kv_heads = 1
head_dim = 8
intermediate_size = 8
context = 128
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the page, found by this process."""
    row, kind = re.findall(r"```python\n(.*?)```", PART, re.DOTALL)
    group = re.search(r'entry-points\."(.+?)"\]\n +(.+)', PART)
    assert group
    package, info = tmp_path / "my_kinds", tmp_path / "my_kinds-1.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "row.py").write_text(row)
    (package / "curriculum.py").write_text(kind)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kinds\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{group[2]}\n".replace('"', ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plugins._every.cache_clear()
    yield
    plugins._every.cache_clear()
    for name in [name for name in sys.modules if name.startswith("my_kinds")]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_kind_of_the_page_trains_and_is_explained(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = re.search(r"```toml\n(.*?)```", PART, re.DOTALL)
    assert recipe
    text = recipe[1].replace("\n\n", f"\n{SMALL}\n", 1)
    (tmp_path / "short.toml").write_text(text)
    rows = ({"question": f"{i}=", "answer": f"{i}", "steps": "1+" * i + "1"} for i in range(24))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="Did you mean 'curriculum'"):
        (tmp_path / "bad.toml").write_text(text.replace('"curriculum"', '"curiculum"'))
        train.run(["bad.toml"])
    assert explain.run(["short.toml"]) == 0
    said = capsys.readouterr().out
    assert "1. curriculum (curriculum): train on worked solutions, the shortest first" in said
    assert "worked solutions of sums.jsonl" in said and "4 of 4 examples" in said
    assert train.run(["short.toml", "--run.device=cpu", "--rollout.max_new_tokens=4"]) == 0
    stage = tmp_path / "runs" / "short" / "stages" / "curriculum"
    lines = (stage / "metrics.jsonl").read_text().splitlines()
    tokens = [json.loads(line)["train/tokens"] for line in lines]
    assert len(tokens) == 4 and tokens[0] == min(tokens) < tokens[-1]
    assert json.loads((stage / "artifact.json").read_bytes())["made"] == "model"
