"""`sixfold lab`: the list, one lab as text and JSON, its help, and errors on one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold_labs.catalogue import LABS, find


def test_without_a_name_it_lists_every_lab_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["lab"]) == 0
    said = capsys.readouterr().out
    names = [line.split()[0] for line in said.splitlines() if not line.startswith(" ")]
    assert names == list(LABS)
    assert all(find(name).title in " ".join(said.split()) for name in names)


def test_json_holds_controls_values_tables_and_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["lab", "grpo-group", "--r1", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["controls"] == {"r0": 1, "r1": 1, "r2": 1, "r3": 0, "source": "formula"}
    assert record["values"]["advantages"] == pytest.approx([0.577, 0.577, 0.577, -1.732], abs=1e-3)
    assert record["values"]["degenerate"] is False
    assert record["tables"][0]["rows"][3][4] == "less likely"
    assert [figure["kind"] for figure in record["figures"]] == ["bars"]


def test_text_shows_controls_values_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "length-bias", "--short", "10", "--long=200"]) == 0
    text = capsys.readouterr().out
    assert "--short 10  --long 200" in text
    assert "grpo ratio" in text
    row = next(line for line in text.splitlines() if line.startswith("GRPO"))
    assert row.split() == ["GRPO", "0.05", "0.0025", "0.05"]


def test_help_names_range_default_and_meaning_of_each_control(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", "stale-weights", "--help"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--sync-every VALUE steps between weight syncs (an integer, 1 to 40; default 1)" in words


@pytest.mark.parametrize("name", list(LABS))
def test_every_lab_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(control.option in text for control in find(name).controls)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bandti"], ["bandti", "'bandit'"]),
        (["bandit", "--eat", "1"], ["--eat", "'--eta'"]),
        (["bandit", "--eta", "3"], ["--eta", "'3'", "0.01 to 2"]),
        (["bandit", "--eta"], ["--eta"]),
        (["bandit", "rest"], ["rest"]),
        (["tool-mask", "--mask", "perhaps"], ["--mask", "on or off"]),
        (["clip-cells", "--chosen", "hihg-positive"], ["'high-positive'"]),
        (["--json"], ["NAME"]),
        (["bandit", "--html", "/no such folder/page.html"], ["/no such folder/page.html"]),
        (["bandit", "--html", ""], ["it is a folder"]),
        (["bandit", "--html", "/"], ["cannot write /: it is a folder"]),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_a_lab_runs_without_torch_and_numpy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from sixfold.cli import main\n"
        "main(['lab'])\n"
        f"main(['lab', 'verifier', '--html', {str(tmp_path / 'page.html')!r}])\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
