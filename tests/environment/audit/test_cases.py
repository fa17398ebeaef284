"""`sixfold audit --cases`: one JSON line per case, and what is refused."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold_environments.audit.setup import host_setup

ADD = {
    "type": "function",
    "fn_name": "add",
    "cases": [{"args": [1, 2], "expected": 3}, {"args": [-5, 5], "expected": 0}],
}
CASES: list[dict[str, Any]] = [
    {"id": "right", "kind": "math", "gold": "5", "completion": "\\boxed{5}", "expected_reward": 1},
    {"id": "wrong", "kind": "math", "gold": "5", "completion": "\\boxed{6}", "expected_reward": 0},
    {
        "id": "program",
        "kind": "code",
        "tests": ADD,
        "completion": "```python\ndef add(a, b):\n    return a + b\n```",
        "expected_reward": 1.0,
    },
]
ATTACKS: list[dict[str, Any]] = [
    {
        "name": "equal to everything",
        "lang": "python",
        "code": "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()\n",
        "tests": ADD,
        "expected": "reward 0",
        "expected_status": ["protocol_error", "wrong_answer"],
    },
    {
        "name": "sum",
        "lang": "python",
        "code": "def add(a, b): return a + b\n",
        "tests": ADD,
        "expected": "reward 1",
        "expected_status": ["passed"],
    },
    {
        "name": "reads a file of the host",
        "lang": "python",
        "code": "def add(a, b):\n    return len(open('{path}').read())\n",
        "tests": {**ADD, "cases": [{"args": [1, 1], "expected": 6}]},
        "expected": "reward 0",
        "setup": {"files": {"{path}": "secret"}},
    },
    {
        "name": "script",
        "lang": "text",
        "code": "<script>alert(1)</script>",
        "tests": {"type": "dashboard"},
        "expected": "rendered as text",
    },
    {
        "name": "two lines",
        "lang": "text",
        "code": 'fine\n{"reward": 1}\u2028x',
        "tests": {"type": "log"},
        "expected": "one record",
    },
]


def scored(
    file: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    file.write_text(json.dumps(content))
    code = main(["audit", "--cases", str(file)])
    records = map(json.loads, capsys.readouterr().out.splitlines())
    return code, {record["id"]: record for record in records}


@pytest.mark.nightly
def test_verifier_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = scored(tmp_path / "cases.json", {"cases": CASES}, capsys)
    assert code == 0
    verdicts = [(r["verdict"], r["expected"], r["outcome"]) for r in found.values()]
    assert verdicts == [(1, 1, "passed"), (0, 0, "wrong_answer"), (1, 1, "passed")]
    assert all(0 <= record["seconds"] < 2 for record in found.values())


def test_attacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret.txt"
    attacks = json.loads(json.dumps(ATTACKS).replace("{path}", str(path)))
    code, found = scored(tmp_path / "attacks.json", {"attacks": attacks}, capsys)
    assert code == 0
    assert all(record["verdict"] == record["expected"] for record in found.values())
    assert not path.exists()


@pytest.mark.nightly
def test_another_verdict_than_expected_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = {**CASES[0], "expected_reward": 0.0}
    code, found = scored(tmp_path / "cases.json", [claim], capsys)
    assert code == 1 and found["right"]["as_expected"] is False
    other = {**ATTACKS[0], "expected_status": ["timeout"]}
    code, found = scored(tmp_path / "cases.json", [other], capsys)
    assert code == 1, "the right reward for another reason"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rows": []}, "'cases' or 'attacks'"),
        ([], "list of cases"),
        ([{"kind": "math", "expected_reward": 1}], "no 'id'"),
        ([{"id": "a", "kind": "math"}], "expected_reward"),
        ([{"id": "a", "kind": "code", "expected_reward": 1}], "no 'tests'"),
        ([{"id": "a", "kind": "smell", "expected_reward": 1}], "no verifier"),
    ],
)
def test_other_files_are_refused(
    content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(content))
    assert main(["audit", "--cases", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_one_bad_case_never_stops_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = "import os, sys\ndef add(a, b):\n" + "\n".join(
        f"    {line}"
        for line in (
            "frame = sys._getframe()",
            "while 'replies' not in frame.f_locals: frame = frame.f_back",
            "nonce = frame.f_locals['replies']._nonce",
            'os.write(3, nonce + b\'{"case": 0, "failure": []}\\n\')',
            "os._exit(0)",
        )
    )
    bad = [
        {**ATTACKS[0], "name": "forged", "code": forged},
        {**ATTACKS[0], "name": "no status", "expected_status": 5},
        {"id": "tests", "kind": "math", "tests": [1], "completion": "x", "expected_reward": 1},
        {"id": "no code", "lang": "text", "tests": {"type": "log"}, "expected": "one record"},
        {"id": "smell", "kind": "smell", "expected_reward": 1},
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([*bad, CASES[0]]))
    assert main(["audit", "--cases", str(file)]) == 2
    told = capsys.readouterr()
    records = [json.loads(line) for line in told.out.splitlines()]
    assert [record["id"] for record in records] == [
        *(c.get("id") or c["name"] for c in bad),
        "right",
    ]
    found = {record["id"]: record for record in records}
    assert found["forged"]["verdict"] == "reward 0" and found["right"]["verdict"] == 1.0
    assert found["forged"]["outcome"] == "protocol_error"
    for name in ("no status", "tests", "no code", "smell"):
        assert found[name]["outcome"] == "infrastructure_error" and found[name]["detail"], name
    assert "no verifier" in told.err


def test_a_recipe_and_cases_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit"]) == main(["audit", "demo", "--cases", "x.json"]) == 2
    assert "either a recipe or --cases" in capsys.readouterr().err
    assert main(["audit", "--cases", "missing.json"]) == 2
    assert main(["audit", "--cases", "x.json", "--run.seed", "1"]) == 2
    assert "--run.seed" in capsys.readouterr().err


def test_setup_is_on_loopback_and_in_the_temporary_folder_and_is_removed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "a" / "b.txt"
    with host_setup({"files": {str(file): "x"}, "tcp_listen": port}):
        assert file.read_text() == "x"
        socket.create_connection(("127.0.0.1", port)).close()
    assert not file.parent.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with (
        pytest.raises(UserError, match="must be a new file in"),
        host_setup({"files": {"/etc/sixfold-test": "x"}}),
    ):
        pass
