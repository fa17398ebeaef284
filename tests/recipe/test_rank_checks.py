"""Settings that several ranks refuse."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.rank_checks import check_ranks
from sixfold.recipe.toml import parse_recipe


def check(flags: list[str], ranks: int = 2) -> None:
    recipe = parse_recipe('run.name = "run"', "test", flags)
    check_ranks(recipe, resolve_algorithm(recipe.algorithm), ranks)


def test_processes_of_ranks_sample_with_adapters_and_ahead() -> None:
    check(["--placement.kind=processes"])
    check(["--placement.kind=processes", "--model.lora.rank=4"])
    check(["--placement.kind=processes", "--rollout.staleness=1"])


@pytest.mark.parametrize("flag", ["--algorithm.dynamic_sampling=2", "--rollout.max_failures=2"])
def test_ranks_that_sample_ahead_do_not_replace_groups_of_a_curriculum(flag: str) -> None:
    ahead, curriculum = "--rollout.staleness=1", "--data.curriculum.every=5"
    check([flag, ahead])
    check([curriculum, ahead])
    check([flag, curriculum])
    with pytest.raises(UserError, match=r"rollout\.staleness must be 0 with several ranks"):
        check([flag, curriculum, ahead])


def test_ray_starts_the_ranks_that_the_recipe_names() -> None:
    on_ray = ["--placement.kind=ray", "--placement.ranks=2"]
    check([*on_ray, "--placement.samplers=0"])
    with pytest.raises(
        UserError, match=r"placement.ranks = 2, but 1 rank trains.*neither torchrun"
    ):
        check(on_ray, 1)
    with pytest.raises(UserError, match=r"placement.ranks = 1, but 2 .*Set placement.ranks = 2"):
        check(["--placement.kind=ray"])


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("sync.kind", "copy", "'shared'"),
        ("rollout.backend.kind", "sglang", "'engine'"),
        ("rollout.backend.sleep", "true", "false"),
        ("reference.placement", "worker", "'inline'"),
        ("reference.offload", "true", "false"),
        ("trainer.weights", "bfloat16", "'float32'"),
        ("trainer.offload", "optimizer", "'none'"),
        ("model.lora.dora", "true", "false"),
        ("sft.neftune_alpha", "5", "0"),
    ],
)
def test_settings_are_refused_with_their_remedy(setting: str, value: str, remedy: str) -> None:
    flags = [f"--{setting}={value}", "--model.lora.rank=4", "--algorithm.beta=0.1"]
    flags.append("--run.precision=bfloat16")
    if setting == "rollout.backend.sleep":
        flags.append("--rollout.backend.kind=vllm")
        check([flag for flag in flags if setting not in flag])  # the ranks share vLLM
    with pytest.raises(UserError, match=f"{setting} must be {remedy} with several ranks"):
        check(flags)
    check(flags, 1)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--model.lora.rank=4", "model.lora.rank = 4"),
        ("--trainer.optimizer=adamw8bit", "trainer.optimizer = 'adamw8bit'"),
        ("--reference.precision=bfloat16", "reference.precision = 'bfloat16'"),
    ],
)
def test_tensor_groups_refuse_more(flag: str, named: str) -> None:
    flags = [flag, "--algorithm.beta=0.1", "--run.precision=bfloat16"]
    check(flags)
    with pytest.raises(UserError, match=f"parallel.tensor = 2 does not support {named}"):
        check([*flags, "--parallel.tensor=2"])


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--model.lora.rank=4", "model.lora.rank = 4"),
        ("--trainer.optimizer=adamw8bit", "trainer.optimizer = 'adamw8bit'"),
        ("--parallel.tensor=2", "parallel.tensor = 2"),
    ],
)
def test_expert_groups_refuse_more(flag: str, named: str) -> None:
    check([flag])
    remedy = "Set parallel.experts = 1, or change the other setting"
    with pytest.raises(UserError, match=f"parallel.experts = 2 does not support {named}. {remedy}"):
        check([flag, "--parallel.experts=2"])


@pytest.mark.parametrize("setting", ["replicas", "tensor", "experts"])
def test_groups_need_several_ranks(setting: str) -> None:
    with pytest.raises(UserError, match=rf"parallel.{setting} = 2, .* or set .*{setting} = 1"):
        check([f"--parallel.{setting}=2"], 1)
