"""The prediction in a run's folder: the numbers of `sixfold plan`, and the same after a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sixfold.checkpoint.listing import newest_checkpoint
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.report.prediction import FILE, PHASES, read_prediction, write_prediction
from sixfold.report.run_record import read_run
from sixfold.run.start import train_run
from sixfold_planning import predict
from sixfold_planning.hardware import Cluster
from sixfold_planning.hardware_file import hardware_text
from sixfold_planning.predict import known_devices
from sixfold_planning.prediction import HARDWARE, Prediction
from tests.planning.test_measured_rates import CALLS, machine

from .processes import metrics, tiny_recipe

CPU = """\
name = "a CPU"
memory_gb = 8
bandwidth_gb_s = 20
link_gb_s = 20
network_gb_s = 1
[peak_tflops]
bf16 = 0.2
fp32 = 0.2
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's hardware file would be. Nothing was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "cache" / "sixfold" / HARDWARE
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def recipe(*flags: str) -> Recipe:
    return load_recipe("demo", ["--algorithm.beta", "0.1", *flags])


def written(folder: Path, step: int = 0, *flags: str) -> Prediction | None:
    return write_prediction(folder, recipe(*flags), device="cpu", ranks=1, step=step)


def test_prediction_is_what_sixfold_plan_prints(
    cache: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text(CPU)
    assert written(folder)
    seconds = json.loads((folder / FILE).read_text())["seconds"]
    assert main(["plan", "demo", "--algorithm.beta", "0.1", "--hardware", str(cache)]) == 0
    text = capsys.readouterr().out
    for phase in (*PHASES, "step"):
        printed = re.search(rf"^  {phase} +(?:time )?(\d[\d.]*)$", text, re.MULTILINE)
        assert printed and float(printed[1]) == pytest.approx(seconds[phase], abs=0.00501), phase
    assert seconds["reference"] > 0 and seconds["rollout"] > 0


def test_a_resume_on_the_same_machine_writes_the_same_bytes(cache: Path, folder: Path) -> None:
    cache.write_text(CPU)
    written(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {FILE, HARDWARE} and before[HARDWARE] == CPU.encode()
    found = written(folder, step=7)
    assert found and found.first_step == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("change", ["machine", "settings"])
def test_a_resume_under_other_conditions_predicts_anew(
    cache: Path, folder: Path, change: str
) -> None:
    cache.write_text(CPU)
    first = written(folder)
    if change == "machine":
        cache.write_text(CPU.replace("0.2", "0.02"))
        again = written(folder, step=7)
    else:
        again = written(folder, 7, "--rollout.samples_per_prompt", "4")
    assert first and again and again.first_step == 8
    assert again.seconds() != first.seconds()
    read = read_prediction(folder)
    assert isinstance(read, Prediction) and read.record() == again.record()


def test_a_machine_that_was_not_measured_gets_the_command_and_no_prediction(
    cache: Path, folder: Path
) -> None:
    assert not cache.exists() and written(folder) is None
    said = read_prediction(folder)
    assert isinstance(said, str) and "sixfold plan --measure" in said
    assert {path.name for path in folder.iterdir()} == {FILE}


def test_the_threads_of_the_run_count_and_not_those_that_were_measured(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text(hardware_text(Cluster(machine(train=CALLS, decode=CALLS, threads=3), 1)))
    cache.write_text(cache.read_text().replace("here", "a CPU", 1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert written(folder)
    assert write_prediction(folder, recipe(), device="cpu", ranks=2, step=0) is None
    assert "2 trainer ranks share" in str(read_prediction(folder))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert written(folder) is None
    assert "OMP_NUM_THREADS=4 sixfold plan --measure" in str(read_prediction(folder))


def test_a_broken_hardware_file_or_too_large_a_model_stops_no_run(
    cache: Path, folder: Path
) -> None:
    for text, said in (("memory_gb = 0", "hardware file"), (CPU, "cannot hold the weights")):
        cache.write_text(text.replace("memory_gb = 8", "memory_gb = 0.0001"))
        assert written(folder) is None
        assert said in str(read_prediction(folder))


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, gigabytes: float) -> None:
    properties = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


@pytest.mark.parametrize(
    ("name", "gigabytes", "listed"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "H100"),
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100"),
        ("NVIDIA GeForce RTX 4090", 25.4, "RTX 4090"),
        ("NVIDIA L4", 24.1, "L4"),
        ("NVIDIA A100-SXM4-40GB", 42.4, None),  # less memory and bandwidth than the table's
        ("NVIDIA H100 NVL", 100.3, None),
        ("Tesla T4", 15.8, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_memory(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, gigabytes: float, listed: str | None
) -> None:
    gpu(monkeypatch, name, gigabytes)
    if listed is None:
        with pytest.raises(UserError, match=re.escape(name) + r".*sixfold plan --measure"):
            known_devices("cuda", 4)
        return
    cluster, measured = known_devices("cuda", 4)
    assert (cluster.device.name, cluster.count, measured) == (listed, 4, False)


@pytest.mark.parametrize(
    ("named", "device", "used"),
    [
        ("this machine (Tesla T4)", "cuda", True),
        ("this machine (Tesla T4)", "cpu", False),
        ("this machine (Tesla T40)", "cuda", False),
        ("this machine (NVIDIA H100 80GB HBM3)", "cuda", False),
        ("this machine (x86_64 CPU, 2 threads)", "cpu", True),
        ("this machine (x86_64 CPU, 2 threads)", "cuda", False),
    ],
)
def test_a_measured_file_is_used_for_the_device_it_describes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, named: str, device: str, used: bool
) -> None:
    gpu(monkeypatch, "Tesla T4", 15.8)
    cache.write_text(CPU.replace("a CPU", named))
    if used:
        assert known_devices(device, 2)[1]
    else:
        with pytest.raises(UserError, match="is not known"):
            known_devices(device, 2)


def test_peak_memory_of_a_gpu_is_that_of_explain(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles in turn, with the KV cache that the recipe wants: all of it fits."""
    gpu(monkeypatch, "NVIDIA H100 80GB HBM3", 85.0)
    given = recipe("--run.device", "cuda")
    found = write_prediction(folder, given, device="cuda", ranks=1, step=0)
    memory = predict.memory_of(predict.planned_inputs("", given, mean_tokens=None).plan, 1)
    assert found and memory and memory.cache_wanted
    cache_bytes = memory.cache_wanted * memory.cache_token
    shared = cache_bytes if memory.cache_trains else 0
    expected = max(memory.sampling + cache_bytes, memory.training + shared)
    assert found.memory_bytes == expected


@pytest.mark.nightly
@pytest.mark.slow
def test_a_resumed_run_keeps_its_prediction_and_gives_the_numbers_of_a_run_without(
    cache: Path, tmp_path: Path
) -> None:
    """And a run on a measured machine rings for a machine that is not as fast as its file says."""

    def run(name: str, steps: int, resume: Path | None = None) -> Path:
        flags = tiny_recipe(tmp_path, run__name=name, run__steps=steps, sft__steps=0)
        given = parse_recipe('run.name = "r"', "test", flags)
        assert train_run(given, resume=resume) == 0
        return tmp_path / name

    plain = run("plain", 6)
    assert json.loads((plain / FILE).read_text()).keys() == {"missing"}
    assert not any("predicted" in note.text for note in read_run(plain).notes)
    assert "sixfold plan --measure" in (plain / "report.html").read_text()
    cache.write_text(
        CPU.replace("0.2", "1e9").replace("bandwidth_gb_s = 20", "bandwidth_gb_s = 1e9")
    )
    whole, parts = run("whole", 6), run("parts", 3)
    before = {name: (parts / name).read_bytes() for name in (FILE, HARDWARE)}
    run("parts", 6, resume=parts)
    for name, content in before.items():
        assert (parts / name).read_bytes() == content == (whole / name).read_bytes()
    assert metrics(plain) == metrics(whole) == metrics(parts)
    for folder in (whole, parts):
        ours = [newest_checkpoint(f / "checkpoints")[0] for f in (folder, plain)]
        mine, other = [(path / "model/model.safetensors").read_bytes() for path in ours if path]
        assert mine == other
        alarms = [note for note in read_run(folder).notes if "the predicted time" in note.text]
        assert {note.text.split()[0] for note in alarms} >= {"trainer"}
        assert all(note.warning and note.step == 6 for note in alarms)
        assert "a CPU, measured by sixfold plan --measure" in (folder / "report.html").read_text()
