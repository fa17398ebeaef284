"""--overwrite: whatever happens, the new run has a checkpoint or the earlier one is whole; nothing
is left lying about.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.files.folder import MARKER, RunFolder, check_free, create_run, open_run, recover

REPLACE = """
import sys
from pathlib import Path
from sixfold.files.folder import create_run
with create_run(Path(sys.argv[1]), "demo", overwrite=True) as run:
    run.recipe.write_text("new")
    if sys.argv[2] == "finishes":
        (run.checkpoints / "step-000001").mkdir()
        run.end()
"""


def make_run(directory: Path, mark: str, *, checkpoint: bool = True) -> None:
    with create_run(directory, "demo") as run:
        run.recipe.write_text(mark)
        run.metrics.write_text('{"step": 7}\n')
        if checkpoint:
            (run.checkpoints / "step-000007").mkdir()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def replace_in_child(directory: Path, how: str, fault: str = "") -> int:
    environment = {**os.environ, **({"SIXFOLD_FAULT": fault} if fault else {})}
    return subprocess.run(
        [sys.executable, "-c", REPLACE, str(directory), how], env=environment, check=False
    ).returncode


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["finishes", "fails"])
def test_a_kill_anywhere_leaves_the_old_run_or_the_new_one(tmp_path: Path, how: str) -> None:
    for arrival in range(1, 20):
        directory = tmp_path / str(arrival)
        make_run(directory, "old")
        code = replace_in_child(directory, how, f"replace.:{arrival}")
        assert code in (0, 137)
        try:
            run = open_run(directory / "demo")
        except UserError:
            pytest.fail(f"no run after the kill at point {arrival}: {names(directory)}")
        if run.recipe.read_text() == "old":
            assert run.last_step() == 7 and names(run.checkpoints) == ["step-000007"]
        else:
            kept = directory / ".demo.replaced"
            assert (
                names(run.checkpoints) == ["step-000001"]
                or (kept / "recipe.toml").read_text() == "old"
            )
        with create_run(directory, "demo", overwrite=True) as run:
            run.recipe.write_text("third")
            (run.checkpoints / "step-000001").mkdir()
            run.end()
        assert (
            names(directory) == ["demo"]
            and (directory / "demo" / "recipe.toml").read_text() == "third"
        )
        if code == 0:
            break
    assert arrival > 5


def test_run_that_fails_before_its_first_checkpoint_can_be_replaced(tmp_path: Path) -> None:
    make_run(tmp_path, "old")
    with pytest.raises(ZeroDivisionError), create_run(tmp_path, "demo", overwrite=True) as run:
        run.recipe.write_text("new")
        assert "the earlier run is back" in run.says_of_earlier()
        raise ZeroDivisionError
    assert names(tmp_path) == ["demo"] and (tmp_path / "demo" / "recipe.toml").read_text() == "old"
    with open_run(tmp_path / "demo"):
        pass


def test_a_run_with_a_checkpoint_keeps_the_earlier_one_until_it_has_ended(tmp_path: Path) -> None:
    make_run(tmp_path, "old")
    with pytest.raises(ZeroDivisionError), create_run(tmp_path, "demo", overwrite=True) as run:
        run.recipe.write_text("new")
        (run.checkpoints / "sft-000001").mkdir()
        assert f"kept in {tmp_path / '.demo.replaced'}" in run.says_of_earlier()
        raise ZeroDivisionError
    assert names(tmp_path) == [".demo.replaced", "demo"]
    with pytest.raises(
        UserError,
        match=r"already holds a run .*the run that it would have replaced is in .*\.demo\.replaced",
    ):
        check_free(tmp_path, "demo")
    with open_run(tmp_path / "demo") as resumed:
        resumed.end()
    assert names(tmp_path) == ["demo"]


@pytest.mark.parametrize("made", ["dataset.jsonl", "blocks/block-000000.jsonl"])
def test_a_run_that_has_only_sampled_keeps_what_it_has(tmp_path: Path, made: str) -> None:
    make_run(tmp_path, "old")
    with pytest.raises(ZeroDivisionError), create_run(tmp_path, "demo", overwrite=True) as run:
        run.recipe.write_text("new")
        file = run.path / "stages/keepers" / made
        file.parent.mkdir(parents=True)
        file.touch()
        raise ZeroDivisionError
    assert (tmp_path / "demo/stages/keepers" / made).is_file()
    assert names(tmp_path) == [".demo.replaced", "demo"]


@pytest.mark.parametrize(("checkpoint", "kept"), [(True, "second"), (False, "first")])
def test_run_with_a_checkpoint_is_kept_over_one_without(
    tmp_path: Path, checkpoint: bool, kept: str
) -> None:
    make_run(tmp_path, "first")
    (tmp_path / "demo").rename(tmp_path / ".demo.replaced")
    (tmp_path / "demo").mkdir()
    with RunFolder(tmp_path / "demo") as second:
        second.recipe.write_text("second")
        second.checkpoints.mkdir()
        if checkpoint:
            (second.checkpoints / "step-000001").mkdir()
    with create_run(tmp_path, "demo", overwrite=True):
        assert (tmp_path / ".demo.replaced" / "recipe.toml").read_text() == kept
        with pytest.raises(UserError, match="is locked by"):
            RunFolder(tmp_path / ".demo.replaced").lock()
    assert names(tmp_path) == ["demo"] and (tmp_path / "demo" / "recipe.toml").read_text() == kept


def test_run_is_not_restored_while_another_process_replaces_it(tmp_path: Path) -> None:
    make_run(tmp_path, "old")
    with create_run(tmp_path, "demo", overwrite=True) as run:
        for attempt in (recover, open_run):
            with pytest.raises(UserError, match="is locked by"):
                attempt(run.path)
        with pytest.raises(UserError, match="is locked by"):
            create_run(tmp_path, "demo", overwrite=True)
        run.recipe.write_text("new")
        assert open_run(run.path).recipe.read_text() == "new"


def test_link_to_a_run_is_kept(tmp_path: Path) -> None:
    make_run(tmp_path / "disk", "old")
    (tmp_path / "demo").symlink_to(tmp_path / "disk" / "demo")
    with create_run(tmp_path, "demo", overwrite=True) as run:
        run.recipe.write_text("new")
        (run.checkpoints / "step-000001").mkdir()
        run.end()
    assert (tmp_path / "demo").is_symlink() and names(tmp_path / "disk") == ["demo"]
    assert (tmp_path / "disk" / "demo" / "recipe.toml").read_text() == "new" and (
        tmp_path / "disk" / "demo" / MARKER
    ).is_file()
