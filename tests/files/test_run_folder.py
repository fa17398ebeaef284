"""The run folder: who may write, what may be deleted, and files that are never half there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.files.durable import write_json_atomic, write_text_atomic
from sixfold.files.folder import MARKER, RunFolder, create_run, open_run


def finished_run(directory: Path, steps: int = 12) -> RunFolder:
    """A run that ended: recipe, metrics, rollouts, its lock released."""
    with create_run(directory, "demo") as run:
        write_text_atomic(run.recipe, 'run.name = "demo"\n')
        run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
        for step in range(1, steps + 1):
            run.rollout_file(step).write_bytes(b"zst")
    return run


def tree(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*"))


def in_child(action: str, *arguments: object) -> subprocess.Popen[str]:
    """A second process that runs `action` with `path` set, says so and then waits for its standard
    input to close.
    """
    setting = (
        "import os, sys, time\nfrom pathlib import Path\nfrom sixfold.files.folder import"
        " open_run\npath = Path(sys.argv[1])"
    )
    code = f"{setting}\n{action}\nos.write(1, b'done\\n')\nsys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_new_run_has_its_places(tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs", "demo")
    assert tree(run.path) == [MARKER, "checkpoints", "rollouts"]
    files = [
        run.recipe,
        run.metrics,
        run.summary,
        run.samples,
        run.environment,
        run.rollout_file(7),
    ]
    expected = (
        "recipe.toml metrics.jsonl summary.json samples.json environment.json"
        " rollouts/step-000007.jsonl.zst"
    )
    assert [f.relative_to(run.path).as_posix() for f in files] == expected.split()
    run.unlock()


def test_run_that_ended_before_its_start_blocks_no_other_run(tmp_path: Path) -> None:
    create_run(tmp_path, "demo").unlock()
    with create_run(tmp_path, "demo") as run:
        assert tree(run.path) == [MARKER, "checkpoints", "rollouts"]


def test_an_existing_run_is_refused_with_its_progress_and_untouched(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with run.metrics.open("a") as metrics:
        metrics.write('{"step": 13, "rew')  # cut short by a crash
    before = tree(run.path)
    with pytest.raises(UserError) as error:
        create_run(tmp_path, "demo")
    expected = (
        f"{run.path} already holds a run (step 12): use --resume {run.path}, --overwrite, or"
        " another --run.name"
    )
    assert str(error.value) == expected
    assert tree(run.path) == before
    run.metrics.unlink()
    with pytest.raises(UserError, match=r"already holds a run \(no step finished\)"):
        create_run(tmp_path, "demo")
    for stage in ("pretrain", "sft"):
        (run.path / "stages" / stage).mkdir(parents=True)
    run.recipe.write_text('[[stages]]\nname = "pretrain"\n[[stages]]\nname = "sft"\n')
    for stage, step in (("pretrain", 30), ("sft", 4)):
        folder = run.path / "stages" / stage
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        os.utime(folder / "metrics.jsonl", (100 - step, 100 - step))  # the second is newer
        with pytest.raises(UserError, match=rf"already holds a run \(step {step} of stage {stage}"):
            create_run(tmp_path, "demo")
    (run.path / "stages" / "pretrain" / "artifact.json").touch()
    with pytest.raises(UserError, match=r"already holds a run \(1 finished stage\)"):
        create_run(tmp_path, "demo")


def test_overwrite_empties_a_run(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = finished_run(tmp_path)
    (run.path / "link").symlink_to(outside)
    fresh = create_run(tmp_path, "demo", overwrite=True)
    assert tree(fresh.path) == [MARKER, "checkpoints", "rollouts"]
    fresh.end()
    assert (outside / "precious").exists() and sorted(p.name for p in tmp_path.iterdir()) == [
        "demo",
        "outside",
    ]
    fresh.unlock()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_a_run_is_never_emptied(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "recipe.toml").write_text("mine")
    with pytest.raises(
        UserError,
        match=(
            r"thesis holds files that are not a run's \(recipe\.toml, \.\.\.\): choose another"
            r" run\.name"
        ),
    ):
        create_run(tmp_path, "thesis", overwrite)
    assert tree(tmp_path / "thesis") == ["recipe.toml"]


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    create_run(tmp_path, "demo").unlock()
    assert tree(tmp_path / "demo") == [MARKER, "checkpoints", "rollouts"]


def test_open_run_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert open_run(run.path).path == run.path
    with pytest.raises(
        UserError, match=r"no run at .*/dmeo: there is no such folder\. Did you mean 'demo'\?"
    ):
        open_run(tmp_path / "dmeo")
    with pytest.raises(UserError, match=r"no run at .*/nowhere/demo"):
        open_run(tmp_path / "nowhere" / "demo")
    with pytest.raises(UserError, match=r"is not a run folder: no recipe\.toml in it"):
        open_run(tmp_path)


def test_a_second_process_is_told_who_holds_the_lock_until_that_one_is_killed(
    tmp_path: Path,
) -> None:
    run = finished_run(tmp_path)
    other = in_child("run = open_run(path); run.lock()", run.path)
    try:
        assert other.stdout is not None and other.stdout.readline() == "done\n"
        with pytest.raises(
            UserError,
            match=rf"{run.path} is locked by pid {other.pid} on host \S+ since 20\d\d-\d\d-\d\dT",
        ):
            run.lock()
        before = tree(run.path)
        with pytest.raises(UserError, match=f"is locked by pid {other.pid}"):
            create_run(tmp_path, "demo", overwrite=True)
        assert tree(run.path) == before
        assert open_run(run.path).last_step() == 12  # reading needs no lock
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    with run:
        assert json.loads((run.path / MARKER).read_text())["pid"] == os.getpid()
        run.lock()  # twice by the same object is once
    with open_run(run.path):
        pass


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("worker_does", ["pass", "run.unlock()"])
def test_a_forked_worker_that_outlives_the_trainer_does_not_keep_the_lock(
    tmp_path: Path, worker_does: str
) -> None:
    run = finished_run(tmp_path)
    # One os.write a line: pieces of two processes' prints may interleave on the pipe they share.
    report = "os.write(1, f'worker {os.getpid()} {outcome}\\n'.encode())"
    worker_code = (
        f"    try: {worker_does}; outcome = 'fine'\n    except OSError as e: outcome = e\n   "
        f" {report}\n    time.sleep(60)"
    )
    action = f"run = open_run(path)\nrun.lock()\nif os.fork() == 0:\n{worker_code}"
    trainer = in_child(action, run.path)
    assert trainer.stdout is not None
    lines = sorted(trainer.stdout.readline().split() for _ in range(2))
    assert lines[0] == ["done"] and lines[1][2:] == ["fine"]
    worker = int(lines[1][1])
    try:
        with pytest.raises(UserError, match=f"locked by pid {trainer.pid}"):
            run.lock()  # the worker's unlock took nothing from the trainer
        trainer.kill()
        trainer.wait()
        os.kill(worker, 0)  # still alive
        with run:
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.kill()
        trainer.wait()


def test_prepare_resume_drops_later_rollouts_and_leftovers_only(tmp_path: Path) -> None:
    run = finished_run(tmp_path, steps=4)
    run.rollout_file(1_000_000).write_bytes(b"")
    (run.rollouts / "notes.txt").write_text("mine")
    (run.path / ".summary.json.tmp-123").write_text("{")
    (run.path / ".hidden").write_text("mine")
    run.prepare_resume(2)
    assert tree(run.rollouts) == ["notes.txt", "step-000001.jsonl.zst", "step-000002.jsonl.zst"]
    assert tree(run.path)[:2] == [".hidden", MARKER] and run.metrics.exists()


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace"])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"accuracy": 0.5, "naïve": [1, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"accuracy": 0.5, "naïve": [1, None]}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(failing, full)
        with pytest.raises(
            UserError, match=r"cannot write .*summary\.json: no space left: free some"
        ):
            write_text_atomic(path, "new")
    assert json.loads(path.read_text(encoding="utf-8"))["accuracy"] == 0.5
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomic(path, float("inf"))
    assert tree(tmp_path) == ["summary.json"]


def test_the_new_text_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (log.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)),
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("replace"), replace(a, b)))
    write_text_atomic(tmp_path / "a.txt", "x")
    assert log == [f".a.txt.tmp-{os.getpid()}", "replace", tmp_path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become a user who may not write")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            create_run(tmp_path, "demo")
        except UserError as error:
            os._exit(
                7
                if "cannot create" in str(error)
                and "not writable: choose another folder (run.dir)" in str(error)
                else 8
            )
        except PermissionError:  # the parents of tmp_path are root's alone: not the case under test
            os._exit(9)
        finally:  # whatever happens, the child must not go on as a second pytest
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("x")
    with pytest.raises(UserError, match=r"cannot create .*demo: .*File exists"):
        create_run(tmp_path, "demo")


def test_environment_says_versions_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path, "demo")
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    run.write_environment(["sixfold", "train", "demo"], {"org/model": "abc", "org/data": "123"})
    environment = json.loads(run.environment.read_text())
    assert (
        environment["command"] == ["sixfold", "train", "demo"]
        and environment["git_revision"] is None
    )
    assert (
        environment["packages"]["torch"] == version("torch")
        and environment["cpus"] == os.cpu_count()
    )
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    run.write_environment(
        [], {"org/data": "456"}
    )  # a resumed run: the model came from its checkpoint
    assert json.loads(run.environment.read_text())["git_revision"] == head
    assert json.loads(run.environment.read_text())["hub_commits"] == {
        "org/model": "abc",
        "org/data": "456",
    }
    run.environment.write_text("[]")
    run.write_environment([], {})
    assert json.loads(run.environment.read_text())["hub_commits"] == {}
    run.unlock()


def test_torch_is_not_imported() -> None:
    code = "import sys, sixfold.files.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
