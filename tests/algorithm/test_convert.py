"""Every row has settings in each framework, or the words "no setting gives this"; the ones that are
easily got wrong, by hand.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import sqrt

import pytest
from tests.grid import on_grid

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.method import ADVANTAGES, CORRECTION_BANDS, LOSSES
from sixfold.algorithm.zoo import ZOO
from sixfold.recipe.schema import Recipe
from sixfold_interop import FRAMEWORKS, Conversion, Sizes, convert

SIZES = Sizes(prompts=8, samples=4, horizon=100)
ACTOR = "actor_rollout_ref.actor."


def settings(conversion: Conversion) -> dict[str, object]:
    return {**conversion.kept, **conversion.changed}


def rows_of_everything() -> list[tuple[str, object]]:
    """(field, value) of every choice by name, with a KL and an entropy bonus where one is needed to
    see it.
    """
    names: dict[str, list[str]] = {
        "advantage": list(ADVANTAGES),
        "loss": list(LOSSES),
        "aggregation": list(AGGREGATIONS),
        "kl": ["k1", "k2", "k3", "k3+", "k3-unbiased"],
        "entropy_rule": ["none", "clip-cov", "kl-cov", "top-entropy"],
        "correction": list(CORRECTION_BANDS),
        "length_penalty": ["none", "kimi", "cosine", "stop-properly"],
        "whiten": ["none", "all", "source"],
    }
    return [(field, value) for field, values in names.items() for value in values]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ZOO)
def test_every_row_has_an_answer(name: str, framework: str) -> None:
    found = convert(framework, ZOO[name], SIZES)
    defaults = FRAMEWORKS[framework].defaults[found.entry]
    assert found.changed and found.row == name
    assert all(
        key.startswith("+") or defaults[key] != value for key, value in found.changed.items()
    )
    assert all(defaults[key] == value for key, value in found.kept.items())
    assert all(note and not note.endswith(".") for note in (*found.differs, *found.lacks))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_choice_has_an_answer(framework: str) -> None:
    def check(choice: tuple[str, object]) -> None:
        field, value = choice
        row = replace(ZOO["grpo"], beta=0.1, entropy_bonus=0.01, **{field: value})
        for kl_in in ("loss",) if value in ("k3+", "k3-unbiased") else ("loss", "reward"):
            convert(framework, replace(row, kl_in=kl_in), SIZES)

    on_grid(check, choice=rows_of_everything())


def test_missing_settings_of_frameworks_are_reported() -> None:
    lacking = {
        framework: [name for name, row in ZOO.items() if convert(framework, row, SIZES).lacks]
        for framework in FRAMEWORKS
    }
    assert lacking == {
        "verl": ["reinforce", "maxrl", "kimi", "lite_ppo"],
        "trl": [
            "reinforce",
            "ppo",
            "dapo",
            "cispo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "opo",
            "maxrl",
            "kimi",
            "remax",
        ],
        "openrlhf": [
            "reinforce",
            "rloo",
            "dr_grpo",
            "cispo",
            "sapo",
            "gmpo",
            "opo",
            "maxrl",
            "kimi",
            "lite_ppo",
            "gdpo",
            "remax",
            "opd",
        ],
    }


def test_a_step_is_cut_into_as_many_updates() -> None:
    row = replace(ZOO["grpo"], epochs=3, minibatches=2)
    verl, trl, openrlhf = (settings(convert(framework, row, SIZES)) for framework in FRAMEWORKS)
    assert (
        verl["data.train_batch_size"],
        verl[f"{ACTOR}ppo_mini_batch_size"],
        verl[f"{ACTOR}ppo_epochs"],
    ) == (
        8,
        4,
        3,
    )  # prompts
    assert (
        trl["per_device_train_batch_size"],
        trl["steps_per_generation"],
        trl["num_iterations"],
    ) == (
        16,
        2,
        3,
    )  # samples
    assert (
        openrlhf["rollout.batch_size"],
        openrlhf["train.batch_size"],
        openrlhf["train.max_epochs"],
    ) == (8, 16, 3)


def test_the_std_and_its_epsilon() -> None:
    for framework, eps in (("verl", "1e-6"), ("trl", "1e-4"), ("openrlhf", "1e-9")):
        note = convert(framework, ZOO["grpo"], SIZES).differs[0]
        assert f"sqrt((K - 1) / K) = {sqrt(3 / 4):.4f} at K = 4; {eps} is added" in note
    assert f"= {sqrt(31 / 32):.4f} at N = 32" in convert("trl", ZOO["lite_ppo"], SIZES).differs[0]


def test_the_cap_of_cispo_counts_from_1_in_trl_and_from_0_in_verl() -> None:
    assert settings(convert("trl", ZOO["cispo"], SIZES))["epsilon_high"] == 5.0
    verl = settings(convert("verl", ZOO["cispo"], SIZES))
    assert (verl[f"{ACTOR}clip_ratio_low"], verl[f"{ACTOR}clip_ratio_high"]) == (
        1.0,
        4.0,
    )  # 1 - 1 = 0 bounds no ratio


def test_framework_defaults_are_switched_off() -> None:
    assert convert("verl", ZOO["grpo"], SIZES).changed[f"{ACTOR}clip_ratio_c"] == 1e9
    assert (
        convert("trl", ZOO["grpo"], SIZES).changed["vllm_importance_sampling_correction"] is False
    )
    assert convert("trl", ZOO["rloo"], SIZES).changed["beta"] == 0.0
    assert convert("openrlhf", ZOO["grpo"], SIZES).changed["algo.kl.init_coef"] == 0.0
    assert (
        convert("trl", replace(ZOO["grpo"], beta=0.1), SIZES).changed["use_bias_correction_kl"]
        is False
    )
    assert (
        convert("verl", replace(ZOO["grpo"], dual_clip=3.0), SIZES).kept[f"{ACTOR}clip_ratio_c"]
        == 3.0
    )
    assert convert("trl", replace(ZOO["grpo"], dual_clip=3.0), SIZES).changed["delta"] == 3.0


def test_rewards_are_normalised_one_by_one() -> None:
    verl = settings(convert("verl", ZOO["gdpo"], SIZES))
    assert (verl["algorithm.adv_estimator"], verl["reward.reward_manager.name"]) == ("gdpo", "gdpo")
    trl = settings(convert("trl", ZOO["gdpo"], SIZES))
    assert trl["multi_objective_aggregation"] == "normalize_then_sum"
    assert settings(convert("verl", ZOO["remax"], SIZES))["algorithm.adv_estimator"] == "remax"


def test_the_overlong_buffer_is_in_tokens() -> None:
    verl = convert("verl", ZOO["dapo"], SIZES).changed
    assert (
        verl["reward.reward_manager.name"] == "dapo"
        and verl["+reward.reward_kwargs.overlong_buffer_cfg.len"] == 20
    )
    assert (
        "max_completion_len=100, soft_punish_cache=20" in convert("trl", ZOO["dapo"], SIZES).also[0]
    )
    assert convert("openrlhf", ZOO["dapo"], SIZES).changed["reward.overlong_buffer_len"] == 20


def test_corrections_keep_their_band() -> None:
    masked = replace(ZOO["grpo"], correction="masked")
    assert (
        settings(convert("verl", masked, SIZES))[
            "algorithm.rollout_correction.rollout_is_threshold"
        ]
        == "0.5_5"
    )
    assert settings(convert("openrlhf", masked, SIZES))[
        "algo.advantage.is_correction_threshold"
    ] == (0.5, 5.0)
    geometric = settings(convert("verl", replace(ZOO["grpo"], correction="geometric"), SIZES))
    low, high = (
        float(bound)
        for bound in str(geometric["algorithm.rollout_correction.rollout_rs_threshold"]).split("_")
    )
    assert (1 / high, 1 / low) == pytest.approx(
        (0.999, 1.002), abs=1e-6
    )  # theirs is the band of the inverse


def test_the_optimizer_is_the_default_recipes() -> None:
    trainer, critic = Recipe().trainer, Recipe().critic
    verl = settings(convert("verl", ZOO["ppo"], SIZES))
    assert verl[f"{ACTOR}optim.betas"] == trainer.betas == verl["critic.optim.betas"]
    assert (
        verl[f"{ACTOR}optim.weight_decay"]
        == trainer.weight_decay
        == verl["critic.optim.weight_decay"]
    )
    assert (
        verl["critic.optim.lr"]
        == critic.learning_rate
        == settings(convert("openrlhf", ZOO["ppo"], SIZES))["critic.adam.lr"]
    )
    assert settings(convert("trl", ZOO["grpo"], SIZES))["adam_beta2"] == trainer.betas[1]
    assert (trainer.learning_rate, trainer.grad_clip, trainer.schedule) == (1e-6, 1.0, "constant")


def test_the_entropy_rules_have_our_numbers() -> None:
    from sixfold.algorithm import composed, steering

    loss = f"{ACTOR}policy_loss."
    clip = settings(convert("verl", replace(ZOO["grpo"], entropy_rule="clip-cov"), SIZES))
    assert clip[f"{loss}clip_cov_ratio"] == composed.CLIP_COV_FRACTION
    assert (clip[f"{loss}clip_cov_lb"], clip[f"{loss}clip_cov_ub"]) == composed.CLIP_COV_BAND
    kl = settings(convert("verl", replace(ZOO["grpo"], entropy_rule="kl-cov"), SIZES))
    assert (kl[f"{loss}kl_cov_ratio"], kl[f"{loss}ppo_kl_coef"]) == (
        composed.KL_COV_FRACTION,
        composed.KL_COV_BETA,
    )
    top = settings(convert("trl", replace(ZOO["grpo"], entropy_rule="top-entropy"), SIZES))
    assert top["top_entropy_quantile"] == pytest.approx(1 - composed.TOP_ENTROPY_QUANTILE)
    steered = settings(convert("trl", replace(ZOO["grpo"], entropy_target=0.3), SIZES))
    assert (steered["entropy_coef_delta"], steered["entropy_coef_max"]) == (
        steering.ENTROPY_STEP,
        steering.HIGHEST_ENTROPY_BONUS,
    )


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; import sixfold_interop, sixfold.algorithm.lineage; sys.exit('torch' in"
        " sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
