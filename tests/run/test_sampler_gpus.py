"""GPUs of samplers in processes: `placement.devices`, or that of the rank that starts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sixfold.backends import sampler_process
from sixfold.errors import UserError
from sixfold.ranks import ALONE, Ranks
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe
from sixfold.run import samplers

FLAGS = ("--placement.kind=processes", "--placement.samplers=2")


def rank(monkeypatch: pytest.MonkeyPatch, number: int, here: int, first: int = 0) -> Ranks:
    """A rank of a machine with `here` of them, whose first has the number `first`."""
    monkeypatch.setenv("LOCAL_RANK", str(number))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    return cast(Ranks, SimpleNamespace(size=4, rank=first + number))


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found: list[str | None] = []
    for number in range(2):
        own = rank(monkeypatch, number, 2, first=2)
        found += samplers._own_gpus("2,3,4,5", f"cuda:{number}", 2, own)
    assert found == ["2", "3", "4", "5"]
    assert samplers._own_gpus("1,3", "cuda", 2, ALONE) == ["1", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    assert samplers._own_gpus("1,3", "cuda", 2, ALONE) == ["6", "4"]
    with pytest.raises(UserError, match=r"placement\.devices = '4'.*there are 4 GPUs"):
        samplers._own_gpus("1,4", "cuda", 2, ALONE)


def test_without_a_list_it_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = rank(monkeypatch, 1, 2)
    assert samplers._own_gpus("", "cuda:1", 2, own) == ["1", "1"]
    assert samplers._own_gpus("", "cuda", 2, ALONE) == [None, None]


def test_a_list_of_another_length_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        own = rank(monkeypatch, number, 2)
        with pytest.raises(UserError, match=r"lists 2 GPUs, but .* have 4 samplers"):
            samplers._own_gpus("2,3", f"cuda:{number}", 2, own)


def test_on_a_cpu_it_has_no_effect_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert samplers._own_gpus("2,3", "cpu", 2, ALONE) == [None, None]
    assert "placement.devices has no effect: the policy is on the CPU" in capsys.readouterr().err
    for number in range(2):
        samplers._own_gpus("2,3,4,5", "cpu", 2, rank(monkeypatch, number, 2))
    assert capsys.readouterr().err.count("placement.devices") == 1


def test_a_process_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, dict[str, str]]] = []

    class Started:
        def __init__(self, program: str, environment: dict[str, str], **given: Any) -> None:
            started.append((program, environment))

    monkeypatch.setattr(sampler_process, "Child", Started)
    setup = samplers.Setup(
        **dict.fromkeys(samplers.Setup.__annotations__),
    )  # type: ignore[arg-type]
    setup = samplers.replace(setup, device="cuda:1", threads=3, silence_s=1.0)
    files = cast(samplers.WeightFiles, SimpleNamespace(publish=None))
    start, _ = samplers._here(setup, ["5", None], files, ALONE)
    devices = []
    for number in range(2):
        process = cast(sampler_process.SamplerProcess, start(number))
        devices.append(sampler_process.pickle.loads(cast(bytes, process._setup)).device)
    assert devices == ["cuda", "cuda:1"]
    assert [environment for _, environment in started] == [
        {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5"},
        {"OMP_NUM_THREADS": "3"},
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--placement.devices=1,2,3"], "lists 3 GPUs, which is no multiple of placement.samplers"),
        (
            ["--placement.devices=1,2", "--rollout.backend.kind=vllm"],
            "list the GPUs of vLLM in rollout.backend.devices",
        ),
    ],
)
def test_other_lists_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_plan(load_recipe("demo", [*FLAGS, *flags]))
    assert "\n" not in str(caught.value)


def test_the_trainers_gpu_holds_no_sampler() -> None:
    """Memory of the run without them: neither weights of samplers, nor copies, nor a KV cache."""
    from sixfold.recipe.memory import memory_of

    flags = [*FLAGS, "--run.precision=bfloat16"]
    beside, apart = (
        memory_of(make_plan(load_recipe("demo", [*flags, *more])), 2)
        for more in ([], ["--placement.devices=1,2"])
    )
    assert beside and apart
    names = {part.name for part in beside.parts} - {part.name for part in apart.parts}
    assert {"samplers", "engine's weights", "sync copy"} <= names
    assert beside.cache_wanted > 0 == apart.cache_wanted
    assert apart.training < beside.training
