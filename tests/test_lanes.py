"""The daily lane runs what has changed since `make test-all` passed, and what no lane has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, lanes

sys.path.append(str(Path(__file__).parent / "shape"))

FILES = {
    "pyproject.toml": "",
    "constraints.txt": "",
    "docs/page.md": "",
    "recipes/sums.toml": "helper.py",
    "recipes/helper.py": "",
    "recipes/products.toml": "",
    "recipes/pieces/a.toml": "",
    "src/sixfold/__init__.py": "",
    "src/sixfold/a.py": "from .parts import (\n    left,\n    right,\n)\n",
    "src/sixfold/table.csv": "1",
    "src/sixfold/parts/__init__.py": "",
    "src/sixfold/parts/left.py": "def f():\n    from ..late import g\n",
    "src/sixfold/parts/right.py": "",
    "src/sixfold/late.py": "",
    "src/sixfold/other/__init__.py": "",
    "src/sixfold/other/alone.py": "",
    "src/sixfold/run/__init__.py": "",
    "src/sixfold/run/assemble.py": "",
    "src/sixfold_environments/maths.py": "",
    "src/sixfold_planning/a.py": "",
    "src/sixfold_labs/a.py": "",
    "src/sixfold.egg-info/SOURCES.txt": "",
    "tests/lanes.py": "sys.executable docs",
    "tests/conftest.py": (
        'from tests import lanes  # docs\n@pytest.fixture(scope="session")\ndef shared(): ...'
    ),
    "tests/help.py": "import sixfold.parts.right",
    "tests/unit/conftest.py": "",
    "tests/unit/near.py": "",
    "tests/unit/test_a.py": "from sixfold import a\nfrom tests.help import x\nfrom near import y",
    "tests/unit/test_alone.py": "import sixfold.other.alone",
    "tests/unit/test_run.py": "import sixfold.run.assemble",
    "tests/unit/test_started.py": "sys.executable",
    "tests/unit/test_docs.py": "Path('docs')\ndef test_x(shared): ...",
    "tests/unit/test_named.py": "train('sums')\nPath('pieces')",
    "tests/unit/test_shared.py": "def test_x(shared): ...",
    "tests/unit/test_lab.py": "main(['lab', 'list'])",
    "tests/cli/test_always.py": "",
}
TESTS = {name.rpartition("/")[2] for name in FILES if name.startswith("tests/unit/test_")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one lane that has passed."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, path in {"HERE": "tests", "ROOT": "", "SRC": "src"}.items():
        monkeypatch.setattr(lanes, name, tmp_path / path)
    monkeypatch.setattr(lanes, "FILE", tmp_path / "tests/lanes.json")
    assert lanes.unchanged() == set()
    found = lanes.fingerprints()
    lanes.note(found, {f"tests/{name}" for name in found}, set(), every=True)
    assert {path.name for path in lanes.unchanged()} == TESTS
    return tmp_path


WHOLE = {"test_run.py", "test_started.py"}
CHANGES = {
    "pyproject.toml": TESTS,
    "docs/page.md": {"test_docs.py"},
    "recipes/sums.toml": {"test_named.py"},
    "recipes/helper.py": {"test_named.py"},
    "recipes/pieces/a.toml": {"test_named.py"},
    "recipes/products.toml": set(),
    "recipes/new.toml": TESTS,
    "src/sixfold/a.py": {"test_a.py"} | WHOLE,
    "src/sixfold/table.csv": {"test_a.py"} | WHOLE,
    "src/sixfold/parts/__init__.py": {"test_a.py"} | WHOLE,
    "src/sixfold/parts/left.py": {"test_a.py"} | WHOLE,
    "src/sixfold/parts/right.py": {"test_a.py"} | WHOLE,
    "src/sixfold/late.py": {"test_a.py"} | WHOLE,
    "src/sixfold/other/alone.py": {"test_alone.py"} | WHOLE,
    "src/sixfold/new.py": WHOLE,
    "src/sixfold_environments/maths.py": WHOLE,
    "src/sixfold_labs/a.py": {"test_lab.py"},
    "src/sixfold.egg-info/SOURCES.txt": set(),
    "tests/conftest.py": {"test_docs.py", "test_shared.py"},
    "tests/lanes.py": set(),
    "tests/help.py": {"test_a.py"},
    "tests/unit/conftest.py": TESTS,
    "tests/unit/near.py": {"test_a.py"},
    "tests/unit/new.json": TESTS,
    "tests/unit/test_alone.py": {"test_alone.py"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_runs_again_when_something_that_it_tests_changes(name: str, project: Path) -> None:
    file = project / name
    added = "[project]\n" if name == "pyproject.toml" else "\n"
    file.write_text((file.read_text() if file.is_file() else "") + added)
    assert TESTS - {path.name for path in lanes.unchanged()} == CHANGES[name]


def test_settings_of_mypy_are_nothing_that_a_test_depends_on(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.mypy]\nstrict = true\n")
    assert {path.name for path in lanes.unchanged()} == TESTS


def test_what_has_passed_stays_noted_when_other_files_fail(project: Path) -> None:
    (project / "src/sixfold/other/alone.py").write_text("changed = 1\n")
    found = lanes.fingerprints()
    run = {f"tests/unit/{name}" for name in ("test_alone.py", "test_a.py")}
    lanes.note(found, run, {"tests/unit/test_a.py"}, every=False)
    assert {path.name for path in lanes.unchanged()} == {
        *("test_alone.py", "test_docs.py", "test_named.py", "test_lab.py", "test_shared.py")
    }


def test_a_record_of_other_files_leaves_nothing_out(project: Path) -> None:
    lanes.FILE.write_text(json.dumps({"files": {"unit/test_a.py": "0", "other.py": "1"}}))
    assert lanes.unchanged() == set()


SHORT = dict.fromkeys((f"tests/unit/{name}" for name in ("test_run.py", "test_lab.py")), 9.0)
LONGEST = {
    "tests/cli/test_always.py::test_a": 7.0,
    "tests/unit/test_run.py::test_b[x-y]": 5.0,
    "tests/unit/test_run.py::test_c": 3.0,
    "tests/unit/test_lab.py::test_d": 4.0,
}


@pytest.mark.parametrize(
    ("budget", "passed", "expected"),
    [
        (40.0, [], []),
        (27.0, [], []),
        (26.9, [], ["test_b[x-y]"]),
        (18.0, [], ["test_b[x-y]", "test_d"]),
        (0.0, [], ["test_b[x-y]", "test_d", "test_c"]),
        (0.0, ["test_run.py"], ["test_d"]),
        (18.0, ["test_run.py"], []),
    ],
)
def test_the_longest_tests_wait_where_more_has_changed_than_a_lane_holds(
    budget: float,
    passed: list[str],
    expected: list[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "SECONDS", project / "tests/seconds.json")
    monkeypatch.setattr(lanes, "BUDGET", budget)
    lanes.note_seconds(SHORT | {"tests/cli/test_always.py": 9.0}, LONGEST | {"quick": 0.4})
    found = lanes.postponed({project / "tests/unit" / name for name in passed})
    assert [name.partition("::")[2] for name in found] == expected


def test_every_room_is_there() -> None:
    assert all((lanes.HERE / lane).is_dir() for lane in lanes.ALWAYS)
    for folder, rooms in lanes.STARTED.items():
        assert (lanes.ROOT / folder).is_dir()
        assert all((lanes.SRC / "sixfold" / room).is_dir() for room in rooms)
    named = [folder for folders in lanes.BY_NAME.values() for folder in folders]
    assert all((lanes.ROOT / folder).is_dir() for folder in [*named, *lanes.MENTIONED.values()])
    sources = [str(path.relative_to(lanes.ROOT)) for path in lanes.SRC.rglob("*.py")]
    for key in lanes.BY_NAME:
        assert key.startswith("tests") or any(lanes.re.match(key, name) for name in sources), key


LONG = {
    "engine/test_same_seed_same_tokens.py::test_trajectories_do_not_depend_on_the_engine": 8.0,
    "environment/code/test_code_attacks.py::test_no_attack_is_paid_and_every_honest": 10.0,
    "search/test_sample_search.py::test_a_judge_of_an_earlier_stage_leads_the_search": 8.0,
    "search/test_verb.py::test_an_interrupted_search_goes_on": 10.0,
    "stages/test_prm_stage.py::test_a_process_reward_model_is_learned_resumed_and_used": 8.0,
    "stages/test_reward_model_stage.py::test_a_reward_model_is_learned_resumed_and_used": 8.0,
    "recipes/test_agents_of_the_sdk.py::": 10.0,
    "run/test_reference_ends.py::test_the_worker_ends_with_the_run": 10.0,
    "run/test_user_code.py::test_a_run_stops_and_saves_when_its_launcher_is_killed": 10.0,
    "run/test_resume.py::test_run_killed_at_a_step_equals_the_uninterrupted_run": 25.0,
    "trainer/test_sharded.py::test_metrics_equal_those_of_one_process_on_every_rank": 25.0,
    "trainer/test_tensor_parallel.py::test_step_equals_that_of_one_process_on_every_rank": 35.0,
}
"""Daily tests that may take longer, in CPU seconds: of runs in new interpreters, which need
seconds to import torch, and of promises that no shorter test covers.
"""


def test_daily_tests_are_short() -> None:
    """As noted when every test passed last: no file over 30 CPU seconds, no other test
    over 5.
    """
    noted = json.loads(lanes.SECONDS.read_text())
    assert noted["tests"]
    every = (noted["files"] | noted["tests"]).items()
    long = {name: seconds for name, seconds in every if seconds > allowed(name)}
    assert not long, "make them shorter, or mark as nightly what repeats another test"


def allowed(name: str) -> float:
    """Seconds that a test or a file may take."""
    if "::" not in name:
        return 30.0
    found = (most for test, most in LONG.items() if name.startswith(f"tests/{test}"))
    return next(found, 5.0)


@pytest.mark.slow
def test_the_imports_of_the_source_are_those_of_its_syntax_trees() -> None:
    from source import PACKAGES, imports, module_name, modules

    lanes.forget()  # what other tests of this file have made
    names = {name for name, _, _ in modules()}
    for name, path, tree in modules():
        expected = {i[1:] for i in imports(name, path, tree) if i.startswith(".")} & names
        expected -= {"", *(i for i in PACKAGES if i in expected)}
        found = {module_name(Path(file)) for file in lanes.imported(str(path))}
        assert expected <= found, (name, sorted(expected - found))


def test_a_file_that_has_passed_is_not_even_collected(tmp_path: Path) -> None:
    kept = {conftest.PASSED: frozenset({str(tmp_path / "test_a.py")})}
    for passed, expected in (
        (kept, {"test_a.py": True, "test_b.py": None}),
        ({}, {"test_a.py": None}),
    ):
        config: Any = SimpleNamespace(stash=passed)
        for name, ignored in expected.items():
            assert conftest.pytest_ignore_collect(tmp_path / name, config) is ignored
