"""`sixfold train` with a sampler of rounded weights: the drift is measured, samples are scored
again with the trainer's, a resume repeats it.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sixfold.run.parity_probe
import sixfold.run.start
import sixfold.sync.sync
from sixfold.algorithm.composed import make_algorithm
from sixfold.batch import Batch, collate
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.toml import parse_recipe
from sixfold.report.alarms import KL_DRIFT
from sixfold.run.assemble import Assembly, assemble
from sixfold.run.start import train_run
from sixfold.run.trainable_roles import TrainableRoles, build_roles
from sixfold.sync.quantise import quantised_weights
from sixfold.trainer.logprobs import score_batch
from sixfold.trainer.mismatch import QUANTISED_LIMIT
from sixfold.trainer.parity import ParityLimits, parity_limits
from sixfold.types import Reward

from .processes import metrics, tiny_recipe

forms = pytest.mark.parametrize("form", ["int8", "fp8"])


def flags(folder: Path, form: str, **overrides: object) -> list[str]:
    return tiny_recipe(
        folder,
        **{"run__steps": 4, "sync__kind": form, "algorithm__correction": "truncated", **overrides},
    )


def train(folder: Path, form: str, **overrides: object) -> Path:
    """Four steps with a checkpoint after each, and rewards that are never all equal."""
    folder.mkdir(exist_ok=True)
    recipe, rewards = folder / "recipe.toml", folder / "rewards.py"
    recipe.write_text('run.name = "run"\n')
    rewards.write_text(
        "def odd(completion, task):\n    return float(sum(map(ord, completion)) % 2)\n"
    )
    more = {
        "environment__rewards": f'["{rewards}:odd"]',
        "checkpoint__every": 1,
        "checkpoint__keep": 9,
        **overrides,
    }
    assert main(["train", str(recipe), *flags(folder, form, **more)]) == 0
    return folder / "run"


def tensors(run: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the trainer's weights, the engine's) in a checkpoint."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    engine = {
        k.removeprefix("sync/"): v
        for k, v in load_file(folder / "trainer.safetensors").items()
        if k.startswith("sync/")
    }
    return load_file(folder / "model" / "model.safetensors"), engine


@pytest.mark.nightly
@pytest.mark.slow
@forms
def test_run_reports_the_distance_of_its_sampler(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, form)
    said = capsys.readouterr().err
    assert f"of them are rounded to {form} precision" in said
    assert f"{form} weights change log-probs: mean difference" in said
    steps = metrics(run)
    assert len(steps) == 4
    for m in steps:
        assert all(
            math.isfinite(m[f"mismatch/{key}"])
            for key in ("max_abs_logp", "mean_abs_logp", "kl_k3", "prob_error")
        )
        assert (
            parity_limits("float32", "cpu", outside=False).worst / 20
            < m["mismatch/max_abs_logp"]
            < 1
        ), "rounded weights are further off than another kernel, and not far"
        assert 0 < m["mismatch/kl_k3"] < KL_DRIFT and m["mismatch/mean_abs_logp"] < QUANTISED_LIMIT
        assert m["correction/ess_frac"] < 1
        assert m["sync/staleness"] == 0
    exact = metrics(train(tmp_path / "exact", "copy"))
    assert all(
        m["mismatch/max_abs_logp"] < e["mismatch/max_abs_logp"] / 10
        for m, e in zip(exact, steps, strict=True)
    )
    for step in (1, 4):
        policy, engine = tensors(run, step)
        rounded = [k for k in policy if not torch.equal(policy[k], engine[k])]
        assert len(rounded) == 7 and all("_proj" in k for k in rounded), (
            "the policy that is saved is not the rounded one"
        )


def scored(folder: Path, form: str) -> tuple[Assembly, TrainableRoles, Batch]:
    """A step's samples as the loop has them before the update, of a model with more of an opinion
    than a fresh one has.
    """
    recipe = parse_recipe(
        'run.name = "x"', "x.toml", flags(folder, form, sft__steps=0, trainer__learning_rate=1e-2)
    )
    assembly = assemble(recipe)
    with torch.no_grad():
        for p in assembly.policy.model.parameters():
            p.mul_(4.0 if p.dim() > 1 else 1.0)
    assembly.sync.refresh()
    roles = build_roles(assembly)
    groups = assembly.sample(assembly.rollout(), assembly.tasks.train[:4], seed=0)
    for group in groups:
        for t in group.trajectories:
            t.reward = Reward(float(t.sample % 2))
    return (
        assembly,
        roles,
        roles.algorithm.prepare(roles.scorers.score(collate(groups))),
    )


@pytest.mark.slow
@forms
def test_old_log_probs_are_the_trainers_own_computed_again(tmp_path: Path, form: str) -> None:
    """Ratios begin at 1 for the trainer's log-probs, and the loss is weighed by trainer over
    sampler, to the last digits.
    """
    assembly, roles, batch = scored(tmp_path, form)
    try:
        policy, m = assembly.policy.model, batch.mask
        assert (
            batch.prox_logp is not None
            and batch.weights is not None
            and batch.advantages is not None
        )
        own = score_batch(policy, batch, assembly.scoring, 4096, share_prefix=True)
        assert torch.equal(batch.prox_logp[m], own[m])
        assert float((own - batch.old_logp)[m].abs().max()) > 1e-4, "the sampler's are others"
        assert torch.allclose(
            score_batch(assembly.sampler, batch, assembly.scoring, 4096, True)[m],
            batch.old_logp[m],
            atol=1e-5,
        )
        u = (own - batch.old_logp).exp().clamp_max(2.0)
        by_hand = -float((batch.weights * u * batch.advantages)[m].sum())
        if_taken_for_its_own = -float((batch.weights * batch.advantages)[m].sum())
        step = roles.trainer.train_step(batch, roles.algorithm.compute_loss)
        assert step["train/pg_loss"] == pytest.approx(by_hand, abs=1e-7)
        assert abs(by_hand - if_taken_for_its_own) > 1e-5
        assert step["mismatch/max_abs_logp"] == pytest.approx(
            float((own - batch.old_logp)[m].abs().max()), rel=1e-3
        )
    finally:
        assembly.close()


@pytest.mark.nightly
@pytest.mark.slow
@forms
def test_a_resumed_run_repeats_it_bit_for_bit(tmp_path: Path, form: str) -> None:
    """Synced every second step, so at step 3 the engine holds what it got after step 2 and no
    trainer has any more.
    """
    whole = train(tmp_path, form, sync__every=2)
    before, ended = metrics(whole), tensors(whole, 4)
    assert [m["sync/version"] for m in before] == [0, 2, 2, 4]
    shutil.rmtree(whole / "checkpoints" / "step-000004")
    assert main(["train", "--resume", str(whole)]) == 0
    assert metrics(whole) == before
    for mine, theirs in zip(tensors(whole, 4), ended, strict=True):
        assert mine.keys() == theirs.keys() and all(
            mine[k].numpy().tobytes() == theirs[k].numpy().tobytes() for k in mine
        )
    trained = assemble(
        parse_recipe('run.name = "x"', "x.toml", flags(tmp_path, form)),
        str(whole / "checkpoints" / "step-000002" / "model"),
    )
    try:
        held, seen = tensors(whole, 3)[1], quantised_weights(trained.policy.model, form)
        assert all(torch.equal(seen[k], held[k]) for k in seen), (
            "what step 3 saved is not the rounded policy of step 2"
        )
    finally:
        trained.close()


@pytest.mark.slow
@forms
def test_the_engine_is_rounded_before_anything_is_sampled(tmp_path: Path, form: str) -> None:
    """Without a warm-up nothing is synced before the first step."""
    assembly = assemble(
        parse_recipe('run.name = "x"', "x.toml", flags(tmp_path, form, sft__steps=0))
    )
    try:
        seen, held = (
            quantised_weights(assembly.policy.model, form),
            dict(assembly.sampler.named_parameters()),
        )
        assert assembly.sampler is not assembly.policy.model and all(
            torch.equal(seen[k], held[k]) for k in seen
        )
    finally:
        assembly.close()


@pytest.mark.slow
def test_weights_too_far_off_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixfold.run.parity_probe, "QUANTISED_LIMIT", 1e-5)
    with pytest.raises(
        UserError,
        match=(
            r"sync.kind = 'fp8': rounding changes .*: mean difference 0.00\d+ nats \(limit"
            r" 1e-05\)\. Use 'copy'"
        ),
    ):
        train_run(parse_recipe('run.name = "x"', "x.toml", flags(tmp_path, "fp8")))
    train_run(
        parse_recipe(
            'run.name = "y"', "y.toml", flags(tmp_path, "copy", run__name="y", run__steps=1)
        )
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_the_parity_of_engine_and_trainer_is_asked_as_strictly_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the engine's own rounded weights: what rounding does to them excuses no other
    difference.
    """
    recipe = parse_recipe('run.name = "x"', "x.toml", flags(tmp_path, "int8"))
    monkeypatch.setattr(
        sixfold.run.parity_probe,
        "parity_limits",
        lambda *a, **k: ParityLimits(mean=1e-5, worst=1e-5),
    )
    train_run(recipe)
    score = sixfold.run.parity_probe.score_batch
    monkeypatch.setattr(sixfold.run.parity_probe, "score_batch", lambda *a: score(*a) + 2e-5)
    with pytest.raises(UserError, match=r"engine and trainer disagree .*run\.precision"):
        train_run(recipe, overwrite=True)


def test_user_method_without_a_correction_is_refused(tmp_path: Path) -> None:
    recipe = parse_recipe('run.name = "x"', "x.toml", flags(tmp_path, "int8"))
    plain = make_algorithm(
        resolve_algorithm(recipe.algorithm.model_copy(update={"correction": "none"})), 12
    )
    with pytest.raises(
        UserError,
        match=r"sync.kind = 'int8' .*'grpo'.* Set algorithm.correction",
    ):
        train_run(recipe, algorithm=plain)
    assert not (tmp_path / "x").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_eval_asks_the_policy_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path, "fp8", run__steps=1)

    def never(*_: object) -> None:
        raise AssertionError("evaluated with rounded weights")

    monkeypatch.setattr(sixfold.sync.sync, "quantised_weights", never)
    assert main(["eval", str(run / "recipe.toml"), "--checkpoint", str(run)]) == 0
    with pytest.raises(AssertionError, match="rounded weights"):
        assemble(parse_recipe('run.name = "x"', "x.toml", flags(tmp_path, "fp8")))
