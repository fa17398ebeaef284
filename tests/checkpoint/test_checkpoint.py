"""Checkpoints under kills at every point, full disks and damaged files: what loads is always the
old one or the new one, intact.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sixfold.checkpoint import manifest, payload, publication
from sixfold.checkpoint.checkpoint import load_checkpoint, load_newest, save_checkpoint
from sixfold.checkpoint.listing import list_checkpoints, newest_checkpoint
from sixfold.checkpoint.manifest import damage
from sixfold.checkpoint.payload import Payload
from sixfold.checkpoint.publication import clean, prune, publish, set_aside_after
from sixfold.errors import UserError
from sixfold.files.durable import faultpoint
from sixfold.trainer.optimizer_state import load_optimizer_tensors, optimizer_tensors

KILLED = 137
FILES = [
    "manifest.json",
    "model/config.json",
    "model/model.safetensors",
    "state.json",
    "trainer.safetensors",
]


def content(step: int) -> Payload:
    """Tensors and state that tell the steps apart."""
    tensors = {
        "policy/optimizer/step/w": torch.tensor(float(step)),
        "policy/optimizer/exp_avg/w": torch.arange(6.0).reshape(2, 3) / 7 + step,
    }
    progress = {"step": step, "ema": 0.1 + step, "rng": [3, [1, 2**64 + step], None]}
    return Payload(tensors, {"progress": progress, "policy": {"version": step}}, {"solved": "x"})


def of_tensors(**tensors: torch.Tensor) -> Payload:
    return Payload(tensors, {}, {})


def save(folder: Path, step: int, model: Callable[[Path], None] | None = None) -> Path:
    def write_model(path: Path) -> None:
        (path / "config.json").write_text(f'{{"step": {step}}}')
        faultpoint("checkpoint.half a model")
        save_file({"w": torch.full((4, 4), float(step))}, path / "model.safetensors")

    return save_checkpoint(
        folder, step, write_model=model or write_model, model_bytes=100, payload=content(step)
    )


def assert_is(path: Path, step: int) -> None:
    """The checkpoint loads and holds exactly what was saved at that step."""
    loaded = load_checkpoint(path)
    found, expected = loaded.payload, content(step)
    assert (loaded.path, loaded.step) == (path, step)
    assert (found.components, found.inputs) == (expected.components, expected.inputs)
    assert found.tensors.keys() == expected.tensors.keys() and all(
        torch.equal(found.tensors[k], v) for k, v in expected.tensors.items()
    )
    assert json.loads((loaded.model_path / "config.json").read_text()) == {"step": step}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def killed_at(point: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked child that dies, as by kill -9, at its point-th fault point; False
    if it ended before.
    """
    pid = os.fork()
    if pid == 0:
        os.environ["SIXFOLD_FAULT"] = f":{point}"
        action()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 100)
    assert path == tmp_path / "checkpoints" / "step-000100"
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == FILES
    assert_is(path, 100)
    assert names(path.parent) == ["step-000100"]


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_save_and_prune_leaves_old_or_new_intact(tmp_path: Path) -> None:
    seen = {"old": 0, "new": 0}
    point = 0
    alive = False
    while not alive:
        point += 1
        folder = tmp_path / f"kill-{point}"
        save(folder, 8)
        alive = not killed_at(point, lambda folder=folder: (save(folder, 9), prune(folder, keep=1)))
        newest, warnings = newest_checkpoint(folder)
        assert newest is not None and warnings == [], f"point {point}: {warnings}"
        assert [damage(path) for path in list_checkpoints(folder)] in (
            [None],
            [None, None],
        ), f"point {point}: one is half deleted"
        step = int(newest.name[-1])
        assert_is(newest, step)
        seen["old" if step == 8 else "new"] += 1
        save(folder, 10)
        assert all(name.startswith("step-") for name in names(folder)), (
            f"point {point} left {names(folder)}"
        )
        assert_is(folder / "step-000010", 10)
    assert point >= 18 and seen["old"] >= 10 and seen["new"] >= 5, (point, seen)


@pytest.mark.slow
def test_a_kill_at_every_point_of_replacing_a_damaged_checkpoint_keeps_the_older_one(
    tmp_path: Path,
) -> None:
    point, alive = 0, False
    while not alive:
        point += 1
        folder = tmp_path / f"kill-{point}"
        save(folder, 8)
        (save(folder, 9) / "state.json").write_text("{}")
        alive = not killed_at(point, lambda folder=folder: save(folder, 9))
        newest, _ = newest_checkpoint(folder)
        assert newest is not None
        assert_is(newest, int(newest.name[-1]))
    assert_is(folder / "step-000009", 9)


def test_the_environment_variable_kills_at_the_counted_point(tmp_path: Path) -> None:
    loop = "for i in range(9): print(i, flush=True); faultpoint('other'); faultpoint('save.fsync')"
    code = f"from sixfold.files.durable import faultpoint\n{loop}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SIXFOLD_FAULT": "save:3"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split()) == (KILLED, ["0", "1", "2"])


def test_every_byte_is_synced_before_the_rename_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        log.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))
        fsync(descriptor)

    def recording_rename(source: Path, target: Path) -> None:
        log.append(("rename", os.path.relpath(target, tmp_path)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    save(tmp_path / "c", 1)
    published = log.index(("rename", "c/step-000001"))
    before = [path for _, path in log[:published]]
    staging = "c/.saving-step-000001"
    assert {f"{staging}/{name}" for name in FILES} | {f"{staging}/model", staging, "."} == set(
        before
    )
    assert before.index(f"{staging}/manifest.json") > max(
        before.index(f"{staging}/{name}") for name in FILES[1:]
    )
    assert before[-1] == staging
    assert log[published + 1 :] == [("fsync", "c")]


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 8)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 400_000_000)
    )
    with pytest.raises(
        UserError, match=r"step-000009 needs 3\.2 GB, 0\.4 GB free in .*checkpoint\.keep"
    ):
        save_checkpoint(
            tmp_path, 9, write_model=pytest.fail, model_bytes=3_200_000_000, payload=of_tensors()
        )
    assert names(tmp_path) == ["step-000008"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fails_midway_leaves_only_the_earlier_checkpoint(
    tmp_path: Path, number: int
) -> None:
    def write_model(path: Path) -> None:
        (path / "config.json").write_text("{")
        raise OSError(number, os.strerror(number))

    save(tmp_path, 8)
    with pytest.raises(
        UserError,
        match=(
            r"cannot save checkpoint .*step-000009: (no space left: free some|not writable: choose)"
        ),
    ):
        save(tmp_path, 9, write_model)
    assert names(tmp_path) == ["step-000008"]
    assert_is(tmp_path / "step-000008", 8)


def test_a_full_disk_inside_safetensors_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise payload.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(payload, "save_file", full)
    with pytest.raises(UserError, match="no space left: free some"):
        save(tmp_path, 9)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        monkeypatch.setattr(publication, "_require_space", lambda *_: None)
        save(disk, 8)
        with pytest.raises(UserError, match="no space left: free some"):
            save(
                disk,
                9,
                lambda path: save_file({"w": torch.zeros(10**6)}, path / "model.safetensors"),
            )
        with pytest.raises(UserError, match="no space left: free some"):
            save_checkpoint(
                disk,
                9,
                write_model=lambda _: None,
                model_bytes=0,
                payload=of_tensors(m=torch.zeros(10**6)),
            )
        assert names(disk) == ["step-000008"]
        assert_is(disk / "step-000008", 8)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_error_in_the_model_is_not_hidden_and_leaves_nothing(tmp_path: Path) -> None:
    def write_model(path: Path) -> None:
        raise RuntimeError("tied weights")

    with pytest.raises(RuntimeError, match="tied weights"):
        save(tmp_path, 9, write_model)
    with pytest.raises(ValueError, match="JSON compliant"):
        save_checkpoint(
            tmp_path,
            9,
            write_model=pytest.fail,
            model_bytes=0,
            payload=Payload({}, {"progress": {"ema": float("nan")}}, {}),
        )
    assert names(tmp_path) == []


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_found_and_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, 8)
    file = save(tmp_path, 9) / name
    original = file.read_bytes()
    for position in range(
        0, len(original), 1 if name == "manifest.json" else max(1, len(original) // 40)
    ):
        altered = bytearray(original)
        altered[position] ^= 1 << (position % 8)
        file.write_bytes(altered)
        with pytest.raises(UserError) as error:
            load_checkpoint(tmp_path / "step-000009")
        if name != "manifest.json":
            assert str(error.value).startswith(f"{file}: sha256 mismatch")
    newest, warnings = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-000008" and len(warnings) == 1 and name in warnings[0]
    file.write_bytes(original)
    assert_is(tmp_path / "step-000009", 9)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "truncated", "empty"])
def test_missing_and_truncated_files_are_named(tmp_path: Path, name: str, how: str) -> None:
    path = save(tmp_path, 9)
    size = (path / name).stat().st_size
    if how == "missing":
        (path / name).unlink()
    else:
        os.truncate(path / name, size - 1 if how == "truncated" else 0)
    expected = {
        ("missing", True): f"{path} is not a checkpoint: no manifest.json",
        ("missing", False): f"{path} is incomplete (missing {name})",
        ("truncated", False): f"{path / name} is truncated: {size - 1} bytes, {size} were saved",
        ("empty", False): f"{path / name} is truncated: 0 bytes, {size} were saved",
    }
    with pytest.raises(UserError) as error:
        load_checkpoint(path)
    assert str(error.value) == expected.get((how, name == "manifest.json")) or str(
        error.value
    ).startswith(f"{path / name} is damaged")
    assert newest_checkpoint(tmp_path)[0] is None


def test_foreign_directories_and_newer_formats(tmp_path: Path) -> None:
    for foreign in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"^{foreign} is not a checkpoint: no manifest.json$"):
            load_checkpoint(foreign)
    (tmp_path / "manifest.json").write_text("[1]")
    with pytest.raises(UserError, match="is not a manifest of Sixfold"):
        load_checkpoint(tmp_path)
    save(tmp_path, 8)
    sealed = save(tmp_path, 9) / "manifest.json"
    sealed.write_text(json.dumps({**json.loads(sealed.read_text()), "format": 99}))
    message = r"format 99 is newer than this release \(max 2\); upgrade sixfold"
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path / "step-000009")


def test_file_with_valid_hash_but_invalid_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "save_file", lambda _, path: path.write_bytes(b"\xff" * 40))
    path = save(tmp_path, 9, lambda _: None)
    with pytest.raises(UserError, match=f"^{path} is damaged: .*header"):
        load_checkpoint(path)


def test_an_intact_checkpoint_is_never_overwritten_and_a_damaged_one_is_replaced(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 9)
    assert save(tmp_path, 9, pytest.fail) == path
    assert_is(path, 9)
    (path / "state.json").write_text("{}")
    assert save(tmp_path, 9) == path
    assert_is(path, 9)
    assert names(tmp_path) == ["step-000009"]


def test_prune_keeps_the_newest_intact_ones(tmp_path: Path) -> None:
    paths = {step: save(tmp_path, step) for step in (2, 999_999, 30, 1_000_000)}
    assert list_checkpoints(tmp_path) == [paths[2], paths[30], paths[999_999], paths[1_000_000]]
    (paths[1_000_000] / "state.json").write_text("{}")
    assert prune(tmp_path, keep=2) == [paths[2]]
    assert prune(tmp_path, keep=1) == [paths[30]]
    assert_is(paths[999_999], 999_999)
    (paths[999_999] / "trainer.safetensors").unlink()
    assert prune(tmp_path, keep=1) == []
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        prune(tmp_path, keep=0)


def test_publication_verification_and_pruning_work_on_any_files(tmp_path: Path) -> None:
    """A payload of other files, such as shards, needs no change there."""

    def write(directory: Path) -> None:
        (directory / "shards").mkdir()
        for rank in range(2):
            (directory / "shards" / f"{rank}.bin").write_bytes(bytes([rank]) * 9)

    paths = [publish(tmp_path, f"step-{step:06d}", step, 18, write) for step in (1, 2, 3)]
    assert list_checkpoints(tmp_path) == paths and not any(map(damage, paths))
    assert prune(tmp_path, keep=2) == paths[:1]
    (paths[2] / "shards" / "1.bin").write_bytes(bytes(9))
    assert "shards/1.bin: sha256 mismatch" in (damage(paths[2]) or "")
    assert newest_checkpoint(tmp_path)[0] == paths[1]


def test_prune_never_deletes_the_only_intact_one_however_old(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"step-00000{step}" / "state.json").unlink()
    assert prune(tmp_path, keep=1) == []
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "step-000001"


def test_checkpoints_after_the_one_in_use_are_set_aside_and_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "damaged-step-000003").mkdir()
    assert set_aside_after(tmp_path, tmp_path / "step-000001") == [
        tmp_path / "damaged-step-000002",
        tmp_path / "damaged-step-000003-2",
    ]
    assert names(tmp_path) == [
        "damaged-step-000002",
        "damaged-step-000003",
        "damaged-step-000003-2",
        "step-000001",
    ]
    assert set_aside_after(tmp_path, tmp_path / "step-000001") == []
    assert set_aside_after(tmp_path, None) == [tmp_path / "damaged-step-000001"]


def test_a_checkpoint_of_the_warm_up_is_older_than_every_one_of_rl(tmp_path: Path) -> None:
    save(tmp_path, 0)
    late = save_checkpoint(
        tmp_path, 900, write_model=lambda _: None, model_bytes=0, payload=of_tensors(), stage="sft"
    )
    early = save_checkpoint(
        tmp_path, 20, write_model=lambda _: None, model_bytes=0, payload=of_tensors(), stage="sft"
    )
    assert list_checkpoints(tmp_path) == [early, late, tmp_path / "step-000000"]
    assert prune(tmp_path, keep=1) == [late, early]


def test_without_a_readable_checkpoint_nothing_is_chosen_or_deleted(tmp_path: Path) -> None:
    assert load_newest(tmp_path) == (None, [])
    for step in (1, 2):
        (save(tmp_path, step) / "state.json").write_text("{}")
    with pytest.raises(
        UserError,
        match=(
            r"no checkpoint in .* can be read: .*step-000002/state.json is"
            r" truncated"
        ),
    ):
        load_newest(tmp_path)
    save(tmp_path, 0)
    checkpoint, warnings = load_newest(tmp_path)
    assert checkpoint and checkpoint.step == 0 and len(warnings) == 2


def test_an_older_checkpoint_never_stands_in_for_one_of_a_newer_release(tmp_path: Path) -> None:
    save(tmp_path, 8)
    sealed = save(tmp_path, 9) / "manifest.json"
    sealed.write_text(json.dumps({**json.loads(sealed.read_text()), "format": 99}))
    for choose in (load_newest, newest_checkpoint):
        with pytest.raises(UserError, match="format 99 is newer"):
            choose(tmp_path)
    save(tmp_path, 7)
    prune(tmp_path, keep=1)
    assert "step-000009" in names(tmp_path)


def test_a_file_that_was_added_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 8)
    added = save(tmp_path, 9) / "model" / "adapter_config.json"
    added.write_text("{}")
    with pytest.raises(
        UserError,
        match=(
            r"step-000009 holds files that were not saved with it \(model/adapter_config.json\):"
            r" move them"
        ),
    ):
        load_checkpoint(tmp_path / "step-000009")
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "step-000008"
    added.unlink()
    added.symlink_to("nowhere")
    assert damage(tmp_path / "step-000009")
    added.unlink()
    assert damage(tmp_path / "step-000009") is None


def test_a_save_hashes_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    sha256 = manifest._sha256
    monkeypatch.setattr(manifest, "_sha256", lambda path: (hashed.append(path), sha256(path))[1])
    for step in (1, 2, 3, 4):
        hashed.clear()
        save(tmp_path, step)
        assert len(prune(tmp_path, keep=2)) == (step > 2)
        assert len(hashed) == 4 and {path.parts[len(tmp_path.parts)] for path in hashed} == {
            f".saving-step-{step:06d}"
        }
    (tmp_path / "step-000004" / "state.json").write_text("{}")
    assert prune(tmp_path, keep=1) == [], "what was touched since is verified again"


def test_clean_removes_our_temporary_names_and_nothing_else(tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    for name in (
        ".saving-step-000009",
        ".deleting-step-000003",
        ".saving-mine",
        ".git",
        "step-000001",
        "saving-step-000001",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".saving-step-000004").symlink_to(precious)
    assert [p.name for p in clean(tmp_path)] == [".deleting-step-000003", ".saving-step-000009"]
    assert names(tmp_path) == [
        ".git",
        ".saving-mine",
        ".saving-step-000004",
        "elsewhere",
        "saving-step-000001",
        "step-000001",
    ]
    assert clean(tmp_path / "nowhere") == [] and newest_checkpoint(tmp_path / "nowhere") == (
        None,
        [],
    )


def tiny(width: int = 4) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2), nn.Linear(5, 5)
    )  # `train` uses the last one from step 4 on
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model[:3](x[:, :3]).pow(2).sum()  # type: ignore[index]
        if step >= 4:
            loss = loss + model[3](x).pow(2).sum()  # type: ignore[index]
        loss.backward()
        optimizer.step()


def test_the_optimizer_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = tiny()
    train(model, optimizer, range(3))
    path = save_checkpoint(
        tmp_path,
        3,
        write_model=lambda directory: save_file(
            model.state_dict(), directory / "model.safetensors"
        ),
        model_bytes=1000,
        payload=Payload(optimizer_tensors(optimizer, model), {}, {}),
    )
    loaded = load_checkpoint(path)
    of_first_bias = {
        name.removesuffix("/0.bias") for name in loaded.payload.tensors if name.endswith("/0.bias")
    }
    assert of_first_bias == {"optimizer/step", "optimizer/exp_avg", "optimizer/exp_avg_sq"}
    assert (
        loaded.payload.tensors["optimizer/step/2.weight"] == 3.0
        and loaded.payload.tensors["optimizer/step/3.weight"] == 0.0
    )

    resumed, resumed_optimizer = tiny()
    resumed.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    load_optimizer_tensors(resumed_optimizer, resumed, loaded.payload.tensors)
    before = {name: tensor.clone() for name, tensor in loaded.payload.tensors.items()}
    train(model, optimizer, range(3, 6))
    train(resumed, resumed_optimizer, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )
    after, resumed_after = (
        optimizer_tensors(optimizer, model),
        optimizer_tensors(resumed_optimizer, resumed),
    )
    assert after.keys() == resumed_after.keys() and all(
        torch.equal(after[k], resumed_after[k]) for k in after
    )
    assert all(torch.equal(before[k], loaded.payload.tensors[k]) for k in before), (
        "training on must not write into the loaded tensors"
    )


def test_moments_of_a_transposed_parameter_survive(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    model = nn.ParameterDict({"w": weight})
    optimizer = torch.optim.AdamW([weight])
    weight.square().sum().backward()
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    assert not tensors["optimizer/exp_avg/w"].is_contiguous()
    save_checkpoint(
        tmp_path, 1, write_model=lambda _: None, model_bytes=0, payload=Payload(tensors, {}, {})
    )
    assert torch.equal(
        load_checkpoint(tmp_path / "step-000001").payload.tensors["optimizer/exp_avg/w"],
        tensors["optimizer/exp_avg/w"],
    )


def test_another_model_is_refused_before_anything_changes() -> None:
    model, optimizer = tiny(width=4)
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model)
    wide, wide_optimizer = tiny(width=8)
    with pytest.raises(
        UserError,
        match=r"^checkpoint is for a different model: 0\.bias float32 \(4\) vs float32 \(8\)$",
    ):
        load_optimizer_tensors(wide_optimizer, wide, tensors)
    assert not wide_optimizer.state
    without = {k: v for k, v in tensors.items() if not k.endswith("/2.bias")}
    with pytest.raises(
        UserError, match=r"different model: 2\.bias is in the model but not in the checkpoint"
    ):
        load_optimizer_tensors(optimizer, model, without)
    with pytest.raises(
        UserError, match=r"different model: 9\.bias is in the checkpoint but not in the model"
    ):
        load_optimizer_tensors(
            optimizer, model, {**tensors, "optimizer/exp_avg/9.bias": torch.zeros(2)}
        )


def test_damage_of_an_unreadable_name_is_text_not_an_exception(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "state.json").unlink()
    (path / "state.json").mkdir()
    assert damage(path) == f"{path} is incomplete (missing state.json)"
