"""The settings that `sixfold algorithms --convert` names, against the frameworks' own
configuration: every key, every default, every value.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import MISSING, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.method import ADVANTAGES, CORRECTION_BANDS, LOSSES, Method
from sixfold.algorithm.sequence_losses import length_scaled_sequence_surrogate
from sixfold.algorithm.zoo import ZOO
from sixfold_interop import FRAMEWORKS, Sizes, convert
from sixfold_interop.trl_preference import DEFAULTS
from sixfold_interop.trl_stages import trainers

from .peers import peer, without_accelerators
from .tables import SEEDS, aggregated, assert_same_loss, make_tables

SIZES = Sizes(prompts=8, samples=8, horizon=64)

GRPO = ZOO["grpo"]

ROWS: list[Method] = [
    *ZOO.values(),
    *(replace(GRPO, advantage=name) for name in ADVANTAGES if name != "teacher"),
    *(replace(GRPO, loss=name) for name in LOSSES),
    *(replace(GRPO, aggregation=name) for name in AGGREGATIONS),
    *(replace(GRPO, beta=0.1, kl=kl) for kl in ("k2", "k3", "k3+", "k3-unbiased")),
    *(replace(GRPO, beta=0.1, kl="k1", kl_in="reward", kl_target=target) for target in (0.0, 0.2)),
    *(replace(GRPO, correction=name) for name in CORRECTION_BANDS),
    *(
        replace(GRPO, entropy_rule=name, entropy_bonus=0.01)
        for name in ("none", "clip-cov", "kl-cov", "top-entropy")
    ),
    replace(GRPO, entropy_target=0.2),
    replace(GRPO, dual_clip=3.0),
    replace(GRPO, length_penalty="stop-properly"),
    replace(ZOO["rloo"], beta=0.1),
]


def folder(package: str) -> Path:
    """Folder of a package, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


# verl


def verl_tree() -> dict[str, Any]:
    peer("verl")
    import yaml  # type: ignore[import-untyped]  # verl's own dependency

    text = (folder("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text(
        encoding="utf-8"
    )
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


def test_verls_keys_and_defaults() -> None:
    tree = verl_tree()
    (defaults,) = FRAMEWORKS["verl"].defaults.values()
    for key, stated in defaults.items():
        node: Any = tree
        for part in key.split("."):
            assert part in node, f"verl has no {key}"
            node = node[part]
        assert (tuple(node) if isinstance(node, list) else node) == stated, key


def test_verls_names_are_registered() -> None:
    core = peer("verl.trainer.ppo.core_algos")
    config = import_module("verl.workers.config")
    actor = "actor_rollout_ref.actor."
    for row in ROWS:
        found = convert("verl", row, SIZES)
        given = {**found.kept, **found.changed}
        core.get_adv_estimator_fn(given["algorithm.adv_estimator"])
        if f"{actor}policy_loss.loss_mode" in given:
            core.get_policy_loss_fn(given[f"{actor}policy_loss.loss_mode"])
        config.ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            loss_agg_mode=given[f"{actor}loss_agg_mode"],
        )
        logp = torch.zeros(2)
        for key in (f"{actor}kl_loss_type", "algorithm.kl_penalty"):
            if key in given:
                core.kl_penalty(logp, logp, given[key])


def test_verls_thresholds_are_read_as_the_band() -> None:
    helper = peer("verl.trainer.ppo.rollout_corr_helper")
    key = "algorithm.rollout_correction.rollout_is_threshold"
    for rule, expected in {
        "truncated": (2.0, None),
        "masked": (5.0, 0.5),
        "masked-sequence": (3.0, 1e-9),
        "decoupled": (5.0, 1e-9),
    }.items():
        found = convert("verl", replace(GRPO, correction=rule), SIZES)
        assert helper._parse_rollout_is_threshold({**found.kept, **found.changed}[key]) == expected


def test_verls_overlong_reward_reads_what_hydra_adds() -> None:
    verl_tree()
    code = (
        folder("verl") / "experimental" / "reward_loop" / "reward_manager" / "dapo.py"
    ).read_text(encoding="utf-8")
    added = [key for key in convert("verl", ZOO["dapo"], SIZES).changed if key.startswith("+")]
    assert len(added) == 5
    for key in added:
        section, *path = key.removeprefix("+").split(".")
        assert section == "reward" and all(part in code for part in path), key
    assert '@register("dapo")' in code


def test_verls_default_trainer_ignores_the_bound_of_its_refill() -> None:
    assert verl_tree()["trainer"]["use_v1"] is True
    code = (folder("verl") / "trainer" / "ppo" / "v1" / "trainer_base.py").read_text(
        encoding="utf-8"
    )
    assert "max_num_gen_batches=%s is ignored" in code


def test_the_distillation_loss_of_verl_has_no_key_for_its_dual_clip() -> None:
    config = peer("verl.workers.config")
    assert "clip_ratio_c" not in {field.name for field in fields(config.DistillationLossConfig)}


def test_a_group_of_one_keeps_its_reward_in_verl() -> None:
    """Why REINFORCE is told rollout.n = 1."""
    core = peer("verl.trainer.ppo.core_algos")
    rewards = torch.tensor([[0.0, 0.7], [0.0, -2.0]])
    advantages, _ = core.compute_grpo_outcome_advantage(
        rewards, torch.ones(2, 2), np.array(["a", "b"], dtype=object), norm_adv_by_std_in_grpo=False
    )
    assert torch.equal(advantages, torch.tensor([[0.7, 0.7], [-2.0, -2.0]]))


@pytest.mark.parametrize("seed", SEEDS)
def test_luspo_is_verls_gspo_summed_over_the_sequence(seed: int) -> None:
    core = peer("verl.trainer.ppo.core_algos")
    config = import_module("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.04,
        clip_ratio_high=0.05,
    )
    t = make_tables(seed, holes=True)

    def theirs(logp: Tensor) -> Tensor:
        loss = core.get_policy_loss_fn("gspo")
        return loss(
            t.old_logp,
            logp,
            t.advantages,
            t.counted,
            loss_agg_mode="seq-mean-token-sum",
            config=config,
        )[0]

    assert_same_loss(
        lambda logp: aggregated(
            length_scaled_sequence_surrogate(
                logp, t.old_logp, t.advantages, t.mask, 0.04, 0.05
            ).loss,
            t,
            "sequence",
        ),
        theirs,
        t.logp,
    )


# TRL


def trl_class(name: str) -> Any:
    module = {
        "GMPOConfig": "trl.experimental.gmpo",
        "IWOPDConfig": "trl.experimental.iw_opd",
        "CPOConfig": "trl.experimental.cpo",
        "ORPOConfig": "trl.experimental.orpo",
    }.get(name, "trl")
    return getattr(peer(module), name)


@pytest.mark.parametrize("name", FRAMEWORKS["trl"].defaults)
def test_trls_arguments_and_defaults(name: str) -> None:
    real = {field.name: field.default for field in fields(trl_class(name))}
    for key, stated in FRAMEWORKS["trl"].defaults[name].items():
        assert key in real and real[key] is not MISSING, f"{name} has no {key}"
        assert real[key] == stated, key


@pytest.mark.parametrize("name", trainers())
def test_trls_configs_of_stages(name: str) -> None:
    """Every name of the class is known, and the defaults are those of the tables."""
    trainer = trainers()[name]
    found = fields(trl_class(trainer.config))
    assert {field.name for field in found} <= trainer.table.names
    real = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in found
    }
    off = {"ld_alpha": 1.0, "center_rewards_coefficient": 0.0, "bf16": True}  # None, or by fp16
    for key, same in trainer.table.same.items():
        if same.default is not None and key in real:
            assert (off[key] if real[key] is None else real[key]) == same.default, key
    for key, stated in DEFAULTS.get(trainer.config, {}).items():
        assert real[key] == stated, key


def test_trl_takes_what_it_is_told(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    for row in ROWS:
        found = convert("trl", row, SIZES)
        made = trl_class(found.entry)(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **found.changed
        )
        assert all(getattr(made, key) == value for key, value in found.changed.items())


def test_trls_loss_types_are_those_of_its_trainer() -> None:
    trainer = peer("trl.trainer.grpo_trainer")
    code = Path(trainer.__file__).read_text(encoding="utf-8")
    names = {
        str(node.value) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)
    }
    for row in ROWS:
        found = convert("trl", row, SIZES)
        for key in (
            "loss_type",
            "importance_sampling_level",
            "scale_rewards",
            "vllm_importance_sampling_mode",
        ):
            assert str(found.changed.get(key, "dapo")) in names


def test_trl_has_no_ppo() -> None:
    assert not [name for name in dir(peer("trl")) if name.startswith("PPO")]


def test_trls_punishment_of_long_answers_is_what_the_line_calls() -> None:
    rewards = peer("trl.rewards")
    (line,) = convert("trl", ZOO["dapo"], SIZES).also
    punish = eval(
        line.removeprefix("reward_funcs.append(").partition(")  #")[0],
        {"get_soft_overlong_punishment": rewards.get_soft_overlong_punishment},
    )
    lengths = (51, 52, 64)
    assert punish([[0] * n for n in lengths]) == [0.0, -1 / 13, -1.0]


# OpenRLHF


def openrlhf_flags() -> dict[str, dict[str, Any]]:
    """Flag -> keywords of its add_argument, read from the source: the parser is made only when the
    file is run.
    """
    with without_accelerators():
        peer("openrlhf")
    code = (folder("openrlhf") / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            for prefix in ("actor", "critic"):
                scope = {"prefix": prefix, "datetime": _Now}
                flag = eval(ast.unparse(node.args[0]), scope)
                keywords = {
                    str(k.arg): eval(ast.unparse(k.value), scope)
                    for k in node.keywords
                    if k.arg in ("default", "choices", "action", "nargs")
                }
                found[flag.removeprefix("--")] = keywords
    return found


class _Now:
    """Stands for datetime in a default that names a run by the time."""

    @staticmethod
    def now() -> Any:
        return __import__("datetime").datetime(2000, 1, 1)


def test_openrlhfs_flags_and_defaults() -> None:
    flags = openrlhf_flags()
    (defaults,) = FRAMEWORKS["openrlhf"].defaults.values()
    for key, stated in defaults.items():
        assert key in flags, f"OpenRLHF has no --{key}"
        real = flags[key].get("default")
        assert (tuple(real) if isinstance(real, list) else real) == stated, key


def test_openrlhf_takes_what_it_is_told() -> None:
    flags = openrlhf_flags()
    for row in ROWS:
        for key, value in convert("openrlhf", row, SIZES).changed.items():
            spec = flags[key]
            assert spec.get("choices") is None or value in spec["choices"], key
            assert (spec.get("action") == "store_true") == (value is True), key
            assert isinstance(value, tuple) == ("nargs" in spec), key


def test_openrlhf_averages_the_kl_over_tokens_whatever_the_loss() -> None:
    openrlhf_flags()
    code = (folder("openrlhf") / "trainer" / "ray" / "ppo_actor.py").read_text(encoding="utf-8")
    calls = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "aggregate_loss"
    ]
    assert len(calls) == 2  # the KL and the entropy
    assert not [k.arg for call in calls for k in call.keywords if k.arg == "token_level_loss"]
