"""What `sixfold explain` says about samplers apart from the trainer, and what they refuse."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.explain import explain
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe
from sixfold.staleness import largest_age, window_groups

PROCESSES = ["--placement.kind=processes", "--placement.samplers=2"]
AHEAD = ["--rollout.staleness=2"]
RECOMPUTED = "--engine.update_kv=recomputed"
CORRECTION = "--algorithm.correction=truncated"
HALF, LORA = "--run.precision=bfloat16", "--model.lora.rank=4"


def facts(flags: list[str]) -> str:
    return " ".join(explain(make_plan(load_recipe("demo", flags))).split())


def test_who_samples_and_what_flows_is_shown() -> None:
    assert "placement" not in facts([]).partition("requested")[0]
    shown = facts(PROCESSES)
    weights = 4 * make_plan(load_recipe("demo", [])).model.size.parameters  # type: ignore[union-attr]
    assert "2 processes with an engine and a copy of the weights each" in shown
    assert f"after every step {weights / 1024**2:.3g} MiB of weights, read by 2" in shown
    assert "256 trajectories of 40 tokens" in shown


def test_the_bound_of_the_age_is_shown() -> None:
    window = window_groups(32, 2, 0.3)
    said = f"at most 96 groups are open, a step takes finished ones among the {window} oldest"
    assert (window, largest_age(32, 2, window)) == (28, 3)
    for flags in (AHEAD, [*AHEAD, *PROCESSES]):
        assert f"{said}, so a group is at most 3 steps old" in facts(flags)


def test_copies_of_the_weights_count_in_memory() -> None:
    def needed(flags: list[str]) -> str:
        return explain(make_plan(load_recipe("demo", flags))).partition("GPU memory")[2]

    assert "samplers" not in needed([])
    for flags, count in ((AHEAD, 1), (PROCESSES, 2)):
        assert f"{count} x a copy of the weights" in needed(flags)


@pytest.mark.parametrize(
    ("flags", "key", "remedy"),
    [
        (["--sync.kind=copy"], "sync.kind", '"shared"'),
        (["--engine.kv_dtype=int8", CORRECTION], "engine.kv_dtype", '"auto"'),
        (["--engine.release_kv=true"], "engine.release_kv", "false"),
        ([HALF, LORA, "--model.lora.base=nf4"], "model.lora.base", '"bfloat16"'),
    ],
)
@pytest.mark.parametrize("where", [PROCESSES, AHEAD])
def test_settings_of_a_shared_engine_are_refused(
    where: list[str], flags: list[str], key: str, remedy: str
) -> None:
    make_plan(load_recipe("demo", flags))
    with pytest.raises(UserError) as refused:
        make_plan(load_recipe("demo", [*where, *flags]))
    said = str(refused.value)
    assert f"Set {key} = {remedy}" in said
    assert where[0].partition("=")[0][2:] in said and "\n" not in said


def test_what_flows_between_ranks_and_what_they_share_is_explained() -> None:
    on_ray = ["--placement.kind=ray", "--placement.ranks=2", "--placement.samplers=3"]
    vllm = ["--rollout.backend.kind=vllm"]
    for flags, beside, width in (
        ([], "each with 3 processes that sample, and checks, beside it", 4),
        (vllm, "those of a machine share 3 processes with vLLM", 4),
        ([*vllm, "--run.precision=bfloat16"], "those of a machine share 3 processes with vLLM", 2),
    ):
        plan = make_plan(load_recipe("demo", [*on_ray, *flags]))
        size = plan.model.size
        assert size is not None
        shown = facts([*on_ray, *flags])
        assert beside in shown
        sent = f"after every step {width * size.parameters / 1024**2:.3g} MiB of weights, read by"
        assert f"{sent} the samplers of each machine" in shown
    alone = facts([*on_ray[:2], "--placement.samplers=0"])

    assert "it samples itself" in alone and "of weights, read by" not in alone


@pytest.mark.parametrize(
    ("where", "flags", "why"),
    [
        (
            PROCESSES,
            ["--engine.speculation.kind=draft", "--engine.speculation.path=x"],
            'engine.speculation.kind = "draft".*one model',
        ),
        ([RECOMPUTED, *AHEAD], ["--moe.routing=replay"], 'moe.routing = "replay".*other experts'),
        (PROCESSES, ["--rollout.backend.kind=sixfold"], "rollout.backend.kind.*embedded engine"),
        (["--placement.kind=ray"], ["--rollout.backend.kind=sglang"], "rollout.backend.kind.*vLLM"),
        (
            ["--placement.kind=ray", "--placement.ranks=2", "--placement.samplers=0"],
            ["--rollout.backend.kind=vllm"],
            "placement.samplers = 0 leaves no vLLM process",
        ),
        (
            ["--placement.kind=ray", "--rollout.backend.kind=vllm"],
            ["--rollout.backend.devices=1"],
            "rollout.backend.devices = '1' does not work with placement.kind = 'ray'",
        ),
        (
            [*PROCESSES, "--rollout.backend.kind=vllm"],
            ["--rollout.backend.tensor_parallel=2", "--rollout.backend.devices=1,2,3"],
            "lists 3 GPUs.*needs 4",
        ),
        (
            ["--rollout.backend.kind=sglang", "--rollout.backend.restarts=1"],
            ["--sync.kind=copy"],
            "sync.kind = 'copy' does not work with rollout.backend.replicas or restarts",
        ),
        (
            AHEAD,
            ["--rollout.backend.kind=vllm", "--rollout.backend.sleep=true"],
            "rollout.backend.sleep = true: they keep their memory",
        ),
        (AHEAD, [RECOMPUTED, "--rollout.backend.kind=sixfold"], "engine.update_kv.*no effect"),
    ],
)
def test_what_samplers_cannot_compute_is_refused(
    where: list[str], flags: list[str], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        make_plan(load_recipe("demo", [*where, *flags]))


def test_a_correction_has_an_effect_on_older_samples() -> None:
    correction = [CORRECTION]
    with pytest.raises(UserError, match=r"no effect.*rollout.staleness > 0"):
        make_plan(load_recipe("demo", correction))
    with pytest.raises(UserError, match="no effect"):  # the processes have the current weights
        make_plan(load_recipe("demo", [*correction, *PROCESSES]))
    make_plan(load_recipe("demo", [*correction, *AHEAD]))


def test_a_window_without_staleness_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.window = 0.5 has no effect"):
        make_plan(load_recipe("demo", ["--rollout.window=0.5"]))
    make_plan(load_recipe("demo", ["--rollout.window=0.5", *AHEAD]))


def test_recomputed_keys_without_staleness_are_refused() -> None:
    with pytest.raises(UserError, match=r"engine.update_kv = 'recomputed' has no effect"):
        make_plan(load_recipe("demo", [RECOMPUTED]))
    make_plan(load_recipe("demo", [RECOMPUTED, *AHEAD]))
