"""Steps of runs whose samplers are elsewhere, in turn and ahead: sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.test_measured_rates import ARCH, CALLS, WORK, machine

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.recipe.toml import load_recipe
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.hardware import Accelerator, Cluster, find_accelerator
from sixfold_planning.hardware_file import hardware_text
from sixfold_planning.measured_rates import CostTable
from sixfold_planning.placed import Placed, ahead_seconds, placed_step
from sixfold_planning.planned_work import placed, trainer_threads
from sixfold_planning.planner import learning_seconds

PROCESSES = ("--placement.kind", "processes", "--run.threads", "1")
RAY = ("--placement.kind", "ray", "--placement.samplers", "4")
AHEAD = ("--rollout.staleness", "1")
STEP = CostTable((1, 1000), (0.0, 999.0), (0,) * 2, (0,) * 2, (0,) * 2)
"""A decode step of n sequences takes n - 1 seconds."""


def of_recipe(device: Accelerator, *flags: str) -> Placed:
    recipe = load_recipe("demo", flags)
    where = recipe.placement, recipe.rollout
    return placed(*where, trainer_threads(*where, recipe.run.threads), device)


@pytest.mark.parametrize(
    ("sampling", "check_s", "training", "staleness", "slowdown", "step"),
    [
        (2, 0, 5, 1, 1.0, 5),  # the trainer decides
        (5, 0, 2, 1, 1.0, 5),  # the engines do
        (2, 0, 5, 1, 1.25, 5.5),  # for 2 of the 5 seconds both compute
        (2, 0, 5, 3, 2.0, 7),  # one device: the sum, whatever the bound
        (1, 4, 1, 1, 1.0, 3),  # two batches share the 6 seconds of each
        (1, 4, 1, 2, 1.0, 2),
        (1, 4, 1, 9, 1.0, 1),  # enough batches: checks cost nothing
        (1, 4, 1, 9, 1.5, 1.5),
    ],
)
def test_the_slowest_side_decides(
    sampling: float, check_s: float, training: float, staleness: int, slowdown: float, step: float
) -> None:
    found = ahead_seconds(lambda batches: sampling, check_s, training, staleness, slowdown)
    assert found == pytest.approx(step, rel=1e-3)


def test_engines_decode_the_open_batches_together() -> None:
    """n batches take as long as one. Of two, one is trained for 1 of x seconds: x = 4 / (2 - 1/x).

    So 2 x - 1 = 4.
    """
    found = ahead_seconds(lambda batches: 4 / batches, 0.0, 1.0, 1, 1.0)
    assert found == pytest.approx(2.5, rel=1e-3)


@pytest.mark.parametrize(
    ("cores", "flags", "expected"),
    [
        (2, PROCESSES, Placed(1, 1, 0, 1.0, 1.25)),
        (2, (*PROCESSES, *AHEAD), Placed(1, 1, 1, 1.0, 1.25)),
        # Two samplers fill both cores. With the trainer, three processes share them.
        (2, (*PROCESSES, "--placement.samplers", "2"), Placed(2, 2, 0, 1.25, 1.5)),
        # A third of the idle cores is busy, and then two thirds are.
        (4, (*PROCESSES, "--placement.samplers", "2"), Placed(2, 2, 0, 1 + 0.25 / 3, 14 / 13)),
        (1, PROCESSES, Placed(1, 1, 0, 1.0, 2.0)),
        (2, (), Placed()),
        (2, AHEAD, Placed(staleness=1, slowdown=2.0)),
    ],
)
def test_processes_share_the_cores(cores: int, flags: tuple[str, ...], expected: Placed) -> None:
    device = machine(crowded=1.25, threads=1, cores=cores)
    found = of_recipe(device, *flags)
    assert replace(found, crowd=1, slowdown=1) == replace(expected, crowd=1, slowdown=1)
    assert found.crowd == pytest.approx(expected.crowd)
    if found.staleness or found.processes:
        assert found.slowdown == pytest.approx(expected.slowdown)


def test_a_gpu_is_shared_and_a_server_has_its_own() -> None:
    gpu = find_accelerator("H100")
    assert of_recipe(gpu, *PROCESSES, *AHEAD).slowdown == 2
    server = ("--rollout.backend.kind", "sglang", "--rollout.backend.url", "http://127.0.0.1:1")
    assert of_recipe(gpu, *server, *AHEAD) == Placed(staleness=1)


def test_actors_of_a_ray_cluster_have_devices_of_their_own() -> None:
    gpu, address = find_accelerator("H100"), ("--placement.address", "auto")
    assert of_recipe(gpu, *RAY, *AHEAD, *address) == Placed(4, 4, 1)
    ranks = of_recipe(gpu, *RAY, *AHEAD, *address, "--placement.ranks", "2")
    assert ranks == Placed(4, staleness=1, slowdown=2.0)  # processes beside each rank
    cpu = machine(crowded=1.25, threads=1, cores=2)
    assert of_recipe(cpu, *RAY, *address, "--run.threads", "1") == Placed(4, 4)
    assert of_recipe(cpu, *RAY, "--run.threads", "1").crowd == 2.5  # four on two cores


def test_without_a_number_of_threads_each_side_has_as_many_as_were_measured() -> None:
    assert of_recipe(machine(threads=4), *AHEAD) == Placed(staleness=1, slowdown=2.0)
    assert of_recipe(machine(threads=2), *AHEAD, "--run.threads", "4").slowdown == 2


def test_the_time_of_ranks_that_share_a_cpu_is_not_known() -> None:
    recipe = load_recipe("demo", ())
    with pytest.raises(UserError, match="2 trainer ranks share one CPU"):
        placed(recipe.placement, recipe.rollout, 1, machine(threads=1), sharing=2)


def test_a_plan_without_a_known_time_still_has_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.toml"
    path.write_text(hardware_text(Cluster(machine(train=CALLS, decode=STEP, threads=1), 1)))
    words = ("plan", "demo", "--hardware", str(path), "--run.threads", "4")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] is None and set(found["topologies"]) == {"colocated"}
    assert main([*words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "run not predicted: " in text and "Memory of each" in text
    assert "OMP_NUM_THREADS=4 sixfold plan --measure" in text


@pytest.mark.parametrize(
    ("measured", "flags", "said"),
    [
        (2, ("--run.threads", "1"), "OMP_NUM_THREADS=1 sixfold plan --measure"),
        # Each has half of the threads.
        (2, (*AHEAD, "--run.threads", "2"), "OMP_NUM_THREADS=1 sixfold plan --measure"),
        (2, (*RAY, "--placement.ranks", "2"), "OMP_NUM_THREADS=1 sixfold plan --measure"),
        (2, ("--placement.kind", "processes"), "run.threads and placement.threads"),
    ],
)
def test_other_numbers_of_threads_were_not_measured(
    measured: int, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        of_recipe(machine(threads=measured), *flags)


def test_a_step_in_turn_is_the_sum_and_weights_pass_through_a_file() -> None:
    """1360 parameters of 4 bytes are written and read at 1e-4 s, then copied at 2e-4 s per byte."""
    device = machine(decode=STEP, train=CALLS, file_byte_s=1e-4, sync_byte_s=2e-4)
    work, cluster = replace(WORK, shared_weights=False, reference=False), Cluster(device, 1)
    one = placed_step(ARCH, cluster, work, Placed(1), check_s=3.0)
    assert one.phases.rollout == pytest.approx(10 * 7, rel=0.03)  # 10 steps of 8 sequences
    assert one.phases.sync == pytest.approx(4 * 1360 * 3e-4)
    assert one.step.seconds == pytest.approx(one.phases.total)
    assert one.phases.verifier == 3.0
    two = placed_step(ARCH, cluster, work, Placed(2, 2, crowd=1.5), check_s=3.0)
    assert two.phases.rollout == pytest.approx(1.5 * 10 * 3, rel=0.03)  # 4 sequences each


def test_groups_that_are_not_trained_shorten_the_step_if_the_trainer_decides() -> None:
    device = machine(train=CALLS)
    work = replace(WORK, reference=False)
    cluster, where = Cluster(device, 1), Placed(staleness=1)
    whole = placed_step(ARCH, cluster, work, where).step.seconds
    half = placed_step(ARCH, cluster, work, where, trained_share=0.5).step.seconds
    assert whole == pytest.approx(learning_seconds(ARCH, device, work, 1, CONSTANTS)[1], rel=1e-3)
    part = replace(work, prompts=2)
    assert half == pytest.approx(learning_seconds(ARCH, device, part, 1, CONSTANTS)[1], rel=1e-3)


def test_plan_predicts_the_recipe_as_it_is_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.toml"
    path.write_text(hardware_text(Cluster(machine(train=CALLS, decode=STEP, crowded=1.0), 1)))

    def step(*flags: str) -> tuple[float, set[str]]:
        main(["plan", "demo", "--hardware", str(path), "--json", *PROCESSES, *flags])
        found = json.loads(capsys.readouterr().out)
        return found["run"]["step"], set(found["topologies"])

    in_turn, topologies = step("--check", "5")
    assert topologies == {"colocated", "in turn"}
    assert in_turn == pytest.approx(step()[0] + 5)
    ahead, topologies = step("--check", "5", *AHEAD)
    assert topologies == {"colocated", "ahead"} and in_turn / 2 <= ahead < in_turn - 5
