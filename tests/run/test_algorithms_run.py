"""Every algorithm of the zoo through real runs: it trains, what it remembers survives a stop bit
for bit, and PPO is whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForTokenClassification

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, LossOutput
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.report.schema import find
from sixfold.run.start import train_run
from sixfold.types import Task

from . import processes
from .processes import tiny_recipe

TASKS = [
    Task(
        f"{a}+{b}",
        f"{a}+{b}=",
        answer=a + b,
        trace=f"#{a + b}",
        source="even" if a % 2 == 0 else "odd",
    )
    for a in range(6)
    for b in range(6)
]
Rewards = Callable[[str, Task], float]


def graded(completion: str, task: Task) -> float:
    """A reward that hardly any two answers share: every group is mixed, so every mini-batch has
    something to learn.
    """
    return sum((i + 1) * ord(c) for i, c in enumerate(completion)) % 97 / 97


def by_prompt(completion: str, task: Task) -> float:
    """A reward that the question alone decides, so a critic can know it."""
    return float(task.prompt_text[0] >= "2")


def train(
    folder: Path,
    name: str,
    reward: Rewards = arithmetic_reward,
    resume: bool = False,
    stop_after: Any = None,
    **overrides: Any,
) -> Path:
    """A run in this process on sums of two digits with answers of a few tokens. Its folder."""
    settings = {
        "rollout__max_new_tokens": 5,
        "model__scratch__alphabet": "0123456789+=#",
        "checkpoint__keep": 99,
    } | overrides
    recipe = parse_recipe(
        'run.name = "run"', "test", tiny_recipe(folder, run__name=name, **settings)
    )
    resumed = folder / name if resume else None
    assert (
        train_run(
            recipe,
            resume=resumed,
            reward=reward,
            tasks=TASKS[:28],
            heldout=TASKS[28:],
            stop_after=stop_after,
        )
        == 0
    )
    return folder / name


metrics = processes.metrics


def tensors(run: Path, step: int, file: str = "trainer.safetensors") -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / file)


def policy(run: Path, step: int) -> dict[str, Tensor]:
    return tensors(run, step, "model/model.safetensors")


def state(run: Path, step: int) -> dict[str, Any]:
    """State in a checkpoint, without the wall time and the alarms, which watch timings."""
    found: dict[str, Any] = json.loads(
        (run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text()
    )
    components: dict[str, Any] = found["components"]
    del components["progress"]["seconds"], components["alarms"]
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a
    )


def moved(run: Path, first: int, last: int) -> bool:
    return not same(policy(run, first), policy(run, last))


class Models:
    """Folders of two models after SFT, each trained when it is first asked for.

    Attributes:
        folder: where their runs are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def base(self) -> str:
        """It solves some sums."""
        return self._trained("base", 60)

    @cached_property
    def teacher(self) -> str:
        """It is trained longer, to distil from."""
        return self._trained("teacher", 150)

    def _trained(self, name: str, steps: int) -> str:
        settings = {"sft__steps": steps, "sft__learning_rate": 1e-2}
        run = train(self.folder, name, stop_after="sft", **settings)
        return str(run / "checkpoints" / "step-000000" / "model")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("base"))


def needs(name: str, models: Models) -> dict[str, Any]:
    """The settings with which a row of the zoo runs on the base."""
    teacher = {"reference__path": models.teacher} if ZOO[name].needs_teacher else {}
    return {"model__path": models.base, "sft__steps": 0, "algorithm__name": name, **teacher}


@pytest.mark.mostly_nightly(3)
@pytest.mark.parametrize("name", ZOO)
def test_every_row_trains(name: str, tmp_path: Path, models: Models) -> None:
    run = train(tmp_path, "run", run__steps=3, **needs(name, models))
    steps = metrics(run)
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert 0 < sum(m["reward/mean"] for m in steps) / 3 < 1, (
        "the base solves all or nothing: nothing is tested"
    )
    assert sum(m["train/updates"] for m in steps) >= 2 and moved(run, 0, 3)
    for key, value in ((key, value) for m in steps for key, value in m.items()):
        assert find(key), key
        assert all(
            v is not None and math.isfinite(v)
            for v in (value if isinstance(value, list) else [value])
        ), key
    assert all(m["sync/staleness"] == 0 and m["train/skipped_total"] == 0 for m in steps)
    assert steps[-1]["sync/version"] == sum(m["train/updates"] for m in steps)


@pytest.mark.slow
def test_an_entropy_bonus_alone_raises_the_entropy_of_a_run(tmp_path: Path, models: Models) -> None:
    """All rewards are equal, so the bonus is all that moves the policy: its gradient must have come
    through the trainer.
    """
    settings = needs("dr_grpo", models) | {
        "algorithm__entropy_bonus": 0.05,
        "trainer__learning_rate": 3e-3,
    }
    run = train(tmp_path, "run", lambda completion, task: 0.5, run__steps=6, **settings)
    entropy = [m["train/entropy"] for m in metrics(run)]
    assert moved(run, 0, 6) and sum(entropy[-2:]) > 1.1 * sum(entropy[:2]), entropy


STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"algorithm__minibatches": 2}),
    "ppo, a head on the policy": ("ppo", {"critic__body": "policy", "critic__learning_rate": 1e-2}),
    "ppo, stopped while only the critic learns": ("ppo", {"critic__warmup_steps": 3}),
    "ppo with a KL in the reward": (
        "ppo",
        {"algorithm__beta": 0.05, "algorithm__kl": "k1", "algorithm__kl_in": "reward"},
    ),
    "v-trace": ("ppo", {"algorithm__advantage": "vtrace", "sync__kind": "copy", "sync__every": 2}),
    "steered": (
        "grpo",
        {
            "algorithm__beta": 0.1,
            "algorithm__kl_target": 1e-4,
            "algorithm__entropy_target": 9.0,
            "algorithm__whiten": "source",
        },
    ),
    "dynamic sampling": ("dapo", {}),
    "corrected": (
        "grpo",
        {"algorithm__correction": "truncated", "sync__kind": "copy", "sync__every": 2},
    ),
    "decoupled": (
        "grpo",
        {
            "algorithm__correction": "decoupled",
            "algorithm__epochs": 2,
            "sync__kind": "copy",
            "sync__every": 3,
        },
    ),
    "clip-cov": ("dr_grpo", {"algorithm__entropy_rule": "clip-cov"}),
    "kl-cov": ("dr_grpo", {"algorithm__entropy_rule": "kl-cov"}),
    "top-entropy": ("dr_grpo", {"algorithm__entropy_rule": "top-entropy"}),
    "distilled": ("opd", {}),
    "reset on stagnation": (
        "grpo",
        {
            "algorithm__beta": 0.1,
            "reference__reset_patience": 2,
            "eval__every": 1,
            "trainer__learning_rate": 1e-5,
        },
    ),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", STATEFUL)
def test_stopped_and_resumed_run_equals_the_uninterrupted_run(
    case: str, tmp_path: Path, models: Models
) -> None:
    """Stopped after step 2 and resumed to 4: weights, moments, critic, what is steered, and every
    metric, bit for bit.
    """
    name, changes = STATEFUL[case]
    settings = needs(name, models) | changes
    whole = train(tmp_path, "whole", run__steps=4, **settings)
    train(tmp_path, "parts", run__steps=2, **settings)
    parts = train(tmp_path, "parts", resume=True, run__steps=4, **settings)
    assert moved(whole, 2, 4), "nothing was learnt after the stop: nothing is tested"
    assert same(policy(parts, 4), policy(whole, 4)) and same(tensors(parts, 4), tensors(whole, 4))
    assert state(parts, 4) == state(whole, 4) and metrics(parts) == metrics(whole)
    remembered = state(whole, 2)["components"]
    if case == "steered":
        assert (
            remembered["algorithm"]["beta"] != 0.1
            and remembered["algorithm"]["entropy_bonus"] > 0
            and len(remembered["algorithm"]["whiten"]) == 2
        )
    if case == "reset on stagnation":
        assert (
            remembered["resets"]["stale"] == 1
            and state(whole, 4)["components"]["resets"]["stale"] < 2
        )
        assert (
            not same(tensors(whole, 2), tensors(whole, 4))
            and float(max(tensors(whole, 4)[k].max() for k in tensors(whole, 4) if "step" in k)) < 4
        )
    if "critic" in case or name == "ppo":
        assert any(key.startswith("critic/weights/") for key in tensors(whole, 4))


@pytest.mark.slow
def test_a_resume_with_another_beta_uses_it(tmp_path: Path, models: Models) -> None:
    """Adapted values are restored, but a setting of the recipe is not overruled."""
    settings = needs("grpo", models)
    train(tmp_path, "run", graded, run__steps=2, algorithm__beta=0.1, **settings)
    run = train(tmp_path, "run", graded, resume=True, run__steps=4, algorithm__beta=0.7, **settings)
    last = metrics(run)[-1]
    assert last["train/loss"] - last["train/pg_loss"] == pytest.approx(
        0.7 * last["train/kl"], rel=0.2
    )  # one mean by rows, the other by tokens


# --- PPO


@pytest.mark.nightly
@pytest.mark.slow
def test_the_critic_comes_to_explain_the_returns(tmp_path: Path, models: Models) -> None:
    """A reward that the question decides: V is 0 at first, and after 12 steps knows most of it."""
    settings = needs("ppo", models) | {
        "critic__learning_rate": 2e-2,
        "critic__warmup_steps": 9,
        "trainer__learning_rate": 1e-5,
    }
    shape: dict[str, Any] = {
        "rollout__prompts_per_step": 8,
        "algorithm__epochs": 6,
        "algorithm__minibatches": 2,
        "log__rollouts_every": 0,
    }
    run = train(tmp_path, "run", by_prompt, run__steps=12, **settings, **shape)
    explained = [m["critic/explained_variance"] for m in metrics(run)]
    assert explained[0] == 0.0 and sum(explained[-4:]) / 4 > 0.5 > max(explained[:3]), explained


@pytest.mark.slow
def test_equal_returns_leave_nothing_to_explain(tmp_path: Path, models: Models) -> None:
    """Every reward is 0.5: returns are (A + V), equal up to float32, and the explained variance is
    0, not minus 10^13.
    """
    run = train(
        tmp_path,
        "run",
        lambda completion, task: 0.5,
        run__steps=5,
        critic__learning_rate=1e-3,
        **needs("ppo", models),
    )
    assert [m["critic/explained_variance"] for m in metrics(run)] == [0.0] * 5


@pytest.mark.slow
def test_the_warm_up_of_the_critic_leaves_the_policy_bit_for_bit(
    tmp_path: Path, models: Models
) -> None:
    run = train(
        tmp_path,
        "run",
        graded,
        run__steps=4,
        checkpoint__every=1,
        critic__warmup_steps=3,
        **needs("ppo", models),
    )
    assert not moved(run, 0, 3) and moved(run, 3, 4)
    critic = [
        {k: v for k, v in tensors(run, step).items() if k.startswith("critic/weights/")}
        for step in (0, 1, 3)
    ]
    assert not same(critic[0], critic[1]) and not same(critic[1], critic[2])
    assert [m["train/updates"] for m in metrics(run)] == [0, 0, 0, 2] and [
        m["sync/version"] for m in metrics(run)
    ] == [0, 0, 0, 2]


@pytest.mark.slow
def test_the_critic_of_a_run_is_a_transformers_model(tmp_path: Path, models: Models) -> None:
    run = train(tmp_path, "run", run__steps=2, **needs("ppo", models))
    model = AutoModelForTokenClassification.from_pretrained(run / "critic")
    kept = {
        k.removeprefix("critic/weights/"): v
        for k, v in tensors(run, 2).items()
        if k.startswith("critic/weights/")
    }
    assert model.config.num_labels == 1 and same(
        {name: p.detach() for name, p in model.named_parameters()}, kept
    )
    assert any(bool(p.any()) for name, p in kept.items() if name.startswith("score")), (
        "the head never learnt"
    )


# --- several updates a step


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["shared", "copy"])
def test_four_updates_a_step_count_four_versions(sync: str, tmp_path: Path, models: Models) -> None:
    every = {"sync__every": 2} if sync == "copy" else {}
    settings = needs("grpo", models) | {
        "algorithm__epochs": 2,
        "algorithm__minibatches": 2,
        "sync__kind": sync,
        **every,
    }
    steps = metrics(train(tmp_path, "run", graded, run__steps=3, **settings))
    assert [m["train/updates"] for m in steps] == [4, 4, 4]
    assert [m["sync/version"] for m in steps] == ([4, 8, 12] if sync == "shared" else [0, 8, 8])
    assert [m["sync/staleness"] for m in steps] == ([0, 0, 0] if sync == "shared" else [0, 4, 0])
    assert ["mismatch/max_abs_logp" in m for m in steps] == [True, sync == "shared", True]
    assert all(m["mismatch/max_abs_logp"] < 1e-4 for m in steps if "mismatch/max_abs_logp" in m), (
        "only the first update's weights are the sampler's"
    )
    assert all(abs(m["train/ratio_mean"] - 1) > 1e-5 for m in steps)


@pytest.mark.slow
def test_old_log_probs_stay_and_the_ratio_moves(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes of two updates: each trajectory is seen twice with the same old log-prob, by two
    policies. The first policy is the sampler.
    """
    seen: list[tuple[Batch, Tensor]] = []
    plain = Composed.compute_loss

    def spy(self: Composed, batch: Batch, logp: Tensor) -> LossOutput:
        seen.append((batch, logp.detach().clone()))
        return plain(self, batch, logp)

    monkeypatch.setattr(Composed, "compute_loss", spy)
    settings = needs("grpo", models) | {"algorithm__epochs": 2, "algorithm__minibatches": 2}
    train(tmp_path, "run", graded, run__steps=1, **settings)
    assert len(seen) == 4 and [b.minibatch.unique().tolist() for b, _ in seen] == [
        [0],
        [1],
        [0],
        [1],
    ]  # type: ignore[union-attr]
    gaps = [float((logp - b.old_logp)[b.mask].abs().max()) for b, logp in seen]
    assert gaps[0] < 1e-5 and all(gap > 1e-3 for gap in gaps[1:]), gaps
    for first, second in ((0, 2), (1, 3)):
        before, after = seen[first][0], seen[second][0]
        assert all(
            torch.equal(getattr(before, n), getattr(after, n))
            for n in ("tokens", "old_logp", "advantages", "weights")
        )


@pytest.mark.slow
def test_the_rewards_of_a_recipe_reach_gdpo_with_their_weights(
    tmp_path: Path, models: Models
) -> None:
    """Advantages of a run on two rewards, from the parts in its rollout dump: z-scores in the group
    plus a quarter of those of the second reward, over their std in the step.
    """
    (tmp_path / "form.py").write_text(
        "def long(completion, task):\n    return float(len(completion))\n\n"
        "def high(completion, task):\n    return float(sum(map(ord, completion)) % 7)\n"
    )
    settings = {"algorithm__name": "gdpo", "log__rollouts_every": 1, "run__steps": 1}
    rewards = ",".join(f"{tmp_path / 'form.py'}:{name}" for name in ("long", "high"))
    flags = {"environment__rewards": rewards, "environment__weights": "1,0.25"}
    recipe = parse_recipe(
        'run.name = "run"',
        "test",
        tiny_recipe(tmp_path, model__path=models.base, sft__steps=0, **settings, **flags),
    )
    assert train_run(recipe) == 0
    records = read_rollouts(RunFolder(tmp_path / "run").rollout_file(1))
    groups = list({r["task_id"]: 0 for r in records})
    group = torch.tensor([groups.index(r["task_id"]) for r in records])
    total = torch.zeros(len(records))
    for name, weight in (("long", 1.0), ("high", 0.25)):
        part = torch.tensor([r["reward"]["parts"][name] for r in records])
        for number in range(len(groups)):
            rows = part[group == number]
            total[group == number] += (
                weight * (rows - rows.mean()) / (rows.std(correction=0) + 1e-6)
            )
    expected = total / total.std(correction=0)
    advantages = torch.tensor([r["advantage"] for r in records])
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_remax_runs_with_dynamic_sampling_and_dynamic_k(tmp_path: Path, models: Models) -> None:
    settings = needs("remax", models) | {
        "algorithm__dynamic_sampling": 2,
        "rollout__oversample": 6,
        "rollout__samples_per_prompt": 3,
    }
    run = train(tmp_path, "run", graded, run__steps=2, **settings)
    for step in metrics(run):
        assert step["rollout/greedy_tokens"] > 0 and step["rollout/greedy_error_frac"] == 0
        assert step["dynamic/rounds"] >= 1 and step["train/updates"] == 1
