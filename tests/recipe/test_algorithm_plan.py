"""Every algorithm setting that cannot work is refused before anything is loaded, with its reason;
each refusal beside a neighbour that is fine.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sixfold.algorithm.method import CORRECTION_BANDS
from sixfold.algorithm.zoo import ZOO
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.recipe import algorithm_plan as plan_algorithm
from sixfold.recipe.algorithm_plan import check_algorithm, resolve_algorithm
from sixfold.recipe.schema import AlgorithmConfig, Recipe
from sixfold.recipe.toml import parse_recipe

KNOWN = f"Known: {', '.join(ZOO)}"

# settings of [algorithm] -> what the refusal names: setting, problem, remedy
ALONE: list[tuple[dict[str, object], tuple[str, ...]]] = [
    (dict(name="gpro"), (f"algorithm.name: no algorithm 'gpro'. Did you mean 'grpo'? {KNOWN}",)),
    (dict(name="dpo"), ("'dpo' is a preference loss: use a stage of kind preference",)),
    (dict(name="zzz"), (f"algorithm.name: no algorithm 'zzz'. {KNOWN}",)),
    (
        dict(advantage="leave_one"),
        (
            "algorithm.advantage: no advantage 'leave_one'. Did you mean 'leave_one_out'?"
            " Known: no_baseline, group_mean, ",
        ),
    ),
    (
        dict(loss="clipped_surogate"),
        (
            "algorithm.loss: no loss 'clipped_surogate'. Did you mean 'clipped_surrogate'?"
            " Known: policy_gradient, ",
        ),
    ),
    (
        dict(name="reinforce", clip_high=0.2),
        ("algorithm.clip_high", "algorithm.loss = 'clipped_surrogate'"),
    ),
    (
        dict(name="sapo", clip_low=0.2),
        ("algorithm.clip_low", "algorithm.loss = 'clipped_surrogate'"),
    ),
    (
        dict(name="reinforce", loss="clipped_surrogate"),
        ("algorithm.clip_low", "'clipped_surrogate'", "0.2"),
    ),
    (
        dict(name="reinforce", loss="clipped_surrogate", clip_low=0.2),
        ("algorithm.clip_high", "'clipped_surrogate'", "0.2"),
    ),
    (
        dict(clip_low=1.0),
        ("algorithm.clip_low = 1", "less than 1"),
    ),
    (dict(name="gspo", clip_low=1.5), ("algorithm.clip_low = 1.5", "less than 1")),
    (
        dict(name="gspo", dual_clip=3.0),
        ("algorithm.dual_clip", "'sequence_surrogate'", "Remove it"),
    ),
    (
        dict(dual_clip=1.2),
        ("algorithm.dual_clip = 1.2", "algorithm.clip_high", "e.g. 3"),
    ),
    (
        dict(beta=0.1, kl="k1"),
        ("algorithm.kl = 'k1'", "'k2' or 'k3'", "algorithm.kl_in = 'reward'"),
    ),
    (
        dict(beta=0.1, kl="k3+", kl_in="reward"),
        ("algorithm.kl = 'k3+'", "Use 'k1'"),
    ),
    (
        dict(beta=0.1, kl="k3-unbiased", kl_in="reward"),
        ("algorithm.kl = 'k3-unbiased'", "Use 'k1'"),
    ),
    (
        dict(kl_target=0.1),
        ("algorithm.kl_target", "Set algorithm.beta"),
    ),
    (
        dict(name="opd", beta=0.1),
        ("algorithm.beta = 0.1", "'opd'", "Use 0"),
    ),
    (dict(kl="k1"), ("algorithm.kl ", "Set algorithm.beta")),
    (dict(name="dapo", kl_in="reward"), ("algorithm.kl_in ", "Set algorithm.beta")),
    (
        dict(correction="truncated", correction_low=0.5),
        ("algorithm.correction_low", "'truncated'", "Remove it"),
    ),
    (
        dict(name="ppo", advantage="vtrace", correction="truncated"),
        ("algorithm.correction = 'truncated'", "'vtrace'", "Use 'none'"),
    ),
    (
        dict(tau=1.0),
        ("algorithm.tau", "'clipped_surrogate'", "Remove it"),
    ),
    (
        dict(lam=0.9),
        ("algorithm.lam", "'group_zscore'", "algorithm.advantage = 'gae'"),
    ),
    (
        dict(correction_low=0.5),
        (
            "algorithm.correction_low",
            "algorithm.correction.",
            "one of truncated, truncated-sequence, ",
        ),
    ),
    (
        dict(correction_high=2.0),
        ("algorithm.correction_high", "algorithm.correction.", "one of truncated, "),
    ),
    (
        dict(correction="masked", correction_low=1.5),
        ("algorithm.correction_low = 1.5", "algorithm.correction_high = 5.0", "Lower"),
    ),
    (
        dict(correction="truncated", correction_high=0.5),
        ("algorithm.correction_low = None", "algorithm.correction_high = 0.5", "raise"),
    ),
    (
        dict(name="gspo", entropy_rule="clip-cov"),
        (
            "algorithm.entropy_rule = 'clip-cov'",
            "'sequence_surrogate'",
            "algorithm.entropy_rule = 'none'",
        ),
    ),
    (
        dict(name="reinforce", epochs=2, minibatches=3),
        (
            "algorithm.epochs x algorithm.minibatches = 6",
            "'policy_gradient'",
            "algorithm.loss = 'clipped_surrogate'",
        ),
    ),
    (
        dict(name="maxrl", overlong_buffer=0.2),
        ("algorithm.overlong_buffer = 0.2", "'maxrl'", "Remove it"),
    ),
    (
        dict(advantage="maxrl", name="dapo"),
        ("algorithm.overlong_buffer = 0.2", "'maxrl'", "Remove it"),
    ),
    (
        dict(advantage="pass_at_k", length_penalty="kimi"),
        ("algorithm.length_penalty = 'kimi'", "'pass_at_k'", "Remove it"),
    ),
    (
        dict(name="maxrl", whiten="all"),
        ("algorithm.whiten = 'all'", "'maxrl'", "Remove it"),
    ),
    (
        dict(advantage="pass_at_k", beta=0.1, kl="k1", kl_in="reward"),
        ("algorithm.beta = 0.1", "'pass_at_k'", "algorithm.kl_in = 'loss'"),
    ),
    (
        dict(name="gdpo", overlong_buffer=0.1),
        ("algorithm.overlong_buffer = 0.1", "'normalise_then_sum'", "Remove it"),
    ),
    (
        dict(name="gdpo", beta=0.1, kl="k1", kl_in="reward"),
        ("algorithm.beta = 0.1", "'normalise_then_sum'", "algorithm.kl_in = 'loss'"),
    ),
    (
        dict(name="remax", whiten="all"),
        ("algorithm.whiten = 'all'", "'greedy_baseline'", "Remove it"),
    ),
    (
        dict(name="opd", length_penalty="cosine"),
        ("algorithm.length_penalty = 'cosine'", "'opd'", "Remove it"),
    ),
    (
        dict(name="opd", overlong_buffer=0.1),
        ("algorithm.overlong_buffer = 0.1", "'opd'", "Remove it"),
    ),
    (
        dict(name="opd", whiten="source"),
        ("algorithm.whiten = 'source'", "'opd'", "Remove it"),
    ),
]

FINE: list[dict[str, object]] = [
    *(dict(name=name) for name in ZOO),
    dict(name="reinforce", loss="clipped_surrogate", clip_low=0.2, clip_high=0.2),
    dict(name="gmpo", clip_low=1.5),  # of a log-ratio
    dict(name="cispo", clip_low=0.5),
    dict(dual_clip=1.21),
    dict(beta=0.1, kl="k1", kl_in="reward"),
    dict(beta=0.1, kl="k3+"),
    dict(beta=0.1, kl="k3-unbiased"),
    dict(beta=0.1, kl_target=0.1),
    dict(name="sapo", tau=2.0),
    dict(name="kimi", tau=0.2),
    dict(name="ppo", lam=0.9),
    dict(correction="masked", correction_low=0.9, correction_high=1.0),
    dict(correction="negative-sequence", correction_high=0.5),
    dict(name="ppo", advantage="vtrace", correction="negative-sequence"),
    dict(entropy_rule="clip-cov"),
    dict(epochs=2, minibatches=3),
    dict(name="maxrl", beta=0.1),
    dict(name="gdpo", beta=0.1),
    dict(name="remax", beta=0.1),  # k1 in the reward
    dict(length_penalty="kimi", overlong_buffer=0.2, whiten="all"),
]

# flags -> what the refusal names: setting, problem, remedy
TOGETHER: dict[str, tuple[str, ...]] = {
    "--rollout.samples_per_prompt=1 --algorithm.name=reinforce --rollout.oversample=4": (
        "rollout.oversample",
        "rollout.samples_per_prompt = 1",
        "at least 2",
    ),
    "--rollout.oversample=8": (
        "rollout.oversample = 8",
        "rollout.samples_per_prompt = 8",
        "or use 0",
    ),
    "--algorithm.name=opd --reference.path=t --rollout.oversample=12": (
        "rollout.oversample",
        "'opd'",
        "Use 0",
    ),
    "--rollout.samples_per_prompt=1": ("rollout.samples_per_prompt = 1", "'grpo'", "at least 2"),
    "--rollout.samples_per_prompt=3 --algorithm.advantage=pass_at_k": (
        "algorithm.advantage = 'pass_at_k'",
        "at least 4",
        "rollout.samples_per_prompt = 3",
    ),
    "--algorithm.name=opd --reference.path=t --algorithm.dynamic_sampling=2": (
        "algorithm.dynamic_sampling",
        "'opd'",
        "Use 0",
    ),
    "--rollout.samples_per_prompt=1 --algorithm.name=reinforce --algorithm.dynamic_sampling=2": (
        "algorithm.dynamic_sampling",
        "rollout.samples_per_prompt = 1",
        "at least 2",
    ),
    "--rollout.prompts_per_step=4 --algorithm.minibatches=5": (
        "algorithm.minibatches = 5",
        "rollout.prompts_per_step = 4",
        "Lower algorithm.minibatches",
    ),
    "--algorithm.advantage=process": (
        "algorithm.advantage = 'process'",
        "environment.rewards = ['arithmetic']",
        "Grade with steps",
        "gymnasium:ID",
    ),
    "--algorithm.advantage=process --environment.rewards=reward_model:m": (
        "algorithm.advantage = 'process'",
        "environment.rewards = ['reward_model:m']",
        "Grade with steps",
    ),
    "--algorithm.advantage=process --environment.episode=calculator": (
        "algorithm.advantage = 'process'",
        "environment.episode = 'calculator'",
        "gymnasium:ID",
    ),
    "--algorithm.entropy_rule=kl-cov": (
        "algorithm.entropy_rule = 'kl-cov'",
        "algorithm.minibatches or algorithm.epochs above 1",
        "'clip-cov'",
    ),
    "--reference.reset_every=5": ("reference.reset_every", "'grpo'", "algorithm.beta > 0"),
    "--reference.placement=worker": ("reference.placement", "'grpo'", "algorithm.beta > 0"),
    "--algorithm.correction=truncated --algorithm.epochs=2": (
        "algorithm.correction = 'truncated'",
        "sync.kind = 'copy' with sync.every > 1",
        "remove it",
    ),
    "--algorithm.name=ppo --algorithm.advantage=vtrace": (
        "algorithm.correction = 'vtrace'",
        "sync.kind = 'copy' with sync.every > 1",
        "remove it",
    ),
    "--algorithm.name=ppo --critic.body=none": (
        "critic.body = 'none'",
        "'ppo'",
        "'own' or 'policy'",
    ),
    "--algorithm.advantage=vtrace --algorithm.epochs=2 --critic.body=none": (
        "critic.body = 'none'",
        "'grpo'",
        "'own' or 'policy'",
    ),
    "--algorithm.correction=truncated": (
        "algorithm.correction = 'truncated'",
        "sync.kind = 'shared'",
        "sync.kind = 'copy' with sync.every > 1",
        "remove it",
    ),
    "--algorithm.name=ppo --algorithm.advantage=vtrace --algorithm.epochs=1": (
        "algorithm.correction = 'vtrace'",
        "sync.kind = 'copy' with sync.every > 1",
        "remove it",
    ),
    "--sync.kind=int8": ("sync.kind = 'int8'", "'grpo'", "Set algorithm.correction"),
    "--engine.kv_dtype=int8": ("engine.kv_dtype = 'int8'", "'grpo'", "Set algorithm.correction"),
    "--sync.kind=fp8 --sync.every=4 --algorithm.correction=negative-sequence": (
        "sync.kind = 'fp8'",
        "Set algorithm.correction",
    ),
    "--sync.kind=fp8 --algorithm.name=reinforce": (
        "sync.kind = 'fp8'",
        "'reinforce'",
        "Set algorithm.correction",
    ),
    "--algorithm.name=opd": ("reference.path", "'opd'", "policy's tokenizer"),
    "--reference.path=teacher": ("reference.path", "'grpo'", "algorithm.beta > 0"),
    "--algorithm.name=opd --reference.path=teacher --reference.reset_every=5": (
        "reference.path",
        "reference.reset_every",
        "Remove one",
    ),
    "--algorithm.beta=0.1 --reference.path=other --reference.reset_patience=5": (
        "reference.path",
        "reference.reset_patience",
        "Remove one",
    ),
    "--algorithm.name=opd --reference.path=teacher --reference.placement=fused": (
        "reference.placement = 'fused'",
        "distillation",
        "'inline' or 'worker'",
    ),
    "--algorithm.name=rloo --algorithm.beta=0.1 --reference.placement=fused": (
        "reference.placement = 'fused'",
        "KL in the reward",
        "'inline' or 'worker'",
    ),
    "--algorithm.beta=0.1 --algorithm.kl_target=0.1 --reference.placement=fused": (
        "reference.placement = 'fused'",
        "algorithm.kl_target",
        "'inline' or 'worker'",
    ),
    "--reference.reset_patience=2": (
        "reference.reset_patience",
        "eval.every > 0 and algorithm.beta > 0",
    ),
    "--algorithm.beta=0.1 --reference.reset_patience=2 --eval.every=0": (
        "reference.reset_patience",
        "eval.every > 0 and algorithm.beta > 0",
    ),
}

FINE_TOGETHER = [
    "--rollout.oversample=9",
    "--rollout.samples_per_prompt=1 --algorithm.name=reinforce",
    "--rollout.samples_per_prompt=1 --algorithm.name=ppo --critic.body=policy",
    "--rollout.samples_per_prompt=1 --algorithm.name=reinforce_pp",
    "--rollout.samples_per_prompt=4 --algorithm.advantage=pass_at_k",
    "--rollout.prompts_per_step=4 --algorithm.minibatches=4",
    "--algorithm.correction=negative-sequence --algorithm.epochs=2",
    "--algorithm.entropy_rule=kl-cov --algorithm.epochs=2",
    "--algorithm.name=ppo --critic.warmup_steps=5",
    "--algorithm.correction=truncated --run.precision=bfloat16",
    "--algorithm.correction=truncated --sync.kind=copy",
    "--algorithm.correction=truncated --engine.kv_dtype=int8",
    *(
        f"--algorithm.correction={rule} --sync.kind=int8"
        for rule in CORRECTION_BANDS
        if rule not in ("none", "negative-sequence")
    ),
    "--algorithm.name=ppo --algorithm.advantage=vtrace --sync.kind=fp8",
    "--algorithm.name=reinforce --algorithm.correction=decoupled --sync.kind=fp8 --sync.every=4",
    "--algorithm.name=opd --reference.path=teacher --reference.placement=worker",
    "--algorithm.beta=0.1 --reference.path=other",
    "--algorithm.beta=0.1 --reference.placement=fused",
    "--algorithm.beta=0.1 --reference.reset_every=5 --reference.reset_patience=2",
]


def recipe(flags: str) -> Recipe:
    return parse_recipe('run.name = "x"', "x.toml", flags.split())


def assert_names(message: str, named: tuple[str, ...]) -> None:
    """The refusal is one line that names the setting, the problem and the remedy."""
    assert "\n" not in message
    assert all(part in message for part in named), message


def check(flags: str) -> None:
    asked = recipe(flags)
    check_algorithm(asked, resolve_algorithm(asked.algorithm))


@pytest.mark.parametrize(
    ("settings", "named"),
    ALONE,
    ids=[" ".join(f"{k}={v}" for k, v in settings.items()) for settings, _ in ALONE],
)
def test_settings_that_contradict_each_other(
    settings: dict[str, object], named: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        resolve_algorithm(AlgorithmConfig(**settings))  # type: ignore[arg-type]
    assert_names(str(caught.value), named)


@pytest.mark.parametrize("settings", FINE, ids=str)
def test_similar_valid_settings_are_accepted(settings: dict[str, object]) -> None:
    row = resolve_algorithm(AlgorithmConfig(**settings))  # type: ignore[arg-type]
    assert all(getattr(row, key) == value for key, value in settings.items())


@pytest.mark.parametrize("flags", TOGETHER)
def test_settings_that_contradict_the_rest_of_the_recipe(flags: str) -> None:
    with pytest.raises(UserError) as caught:
        check(flags)
    assert_names(str(caught.value), TOGETHER[flags])


@pytest.mark.parametrize("flags", FINE_TOGETHER)
def test_remedies_are_accepted(flags: str) -> None:
    check(flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--algorithm.name=grpoo", ("algorithm.name: no algorithm 'grpoo'. Did you mean 'grpo'?",)),
        (
            "--algorithm.beta=0.1 --algorithm.kl=k1",
            ("algorithm.kl = 'k1'", "algorithm.kl_in = 'reward'"),
        ),
        ("--algorithm.clip_low=0", ("algorithm.clip_low: expected a finite number > 0, got 0",)),
        ("--algorithm.beta=-1", ("algorithm.beta: expected a finite number >= 0, got -1",)),
        ("--algorithm.name=ppo --critic.body=none", ("critic.body = 'none'", "'own' or 'policy'")),
        (
            "--algorithm.correction=truncated",
            ("algorithm.correction = 'truncated'", "sync.kind = 'copy' with sync.every > 1"),
        ),
        (
            "--algorithm.name=maxrl --algorithm.whiten=all",
            ("algorithm.whiten = 'all'", "'maxrl'", "Remove it"),
        ),
    ],
)
def test_explain_refuses_in_one_line(
    flags: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "demo", *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("sixfold: error: ")
    assert_names(printed.err.rstrip("\n"), named)


def test_every_refusal_of_the_module_is_met_here() -> None:
    """Each `raise UserError` of the file, as a pattern of the words that its message has whatever
    the settings, fits a message of a case above.
    """
    said = [message(resolve_algorithm, AlgorithmConfig(**settings)) for settings, _ in ALONE]  # type: ignore[arg-type]
    said += [message(check, flags) for flags in TOGETHER]
    raised = [
        node.exc
        for node in ast.walk(ast.parse(Path(plan_algorithm.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
    ]
    assert len(raised) >= 25
    for error in raised:
        assert isinstance(error, ast.Call)
        text = error.args[0]
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        pattern = "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts
        )
        assert any(re.fullmatch(pattern, line) for line in said), ast.unparse(text)


def message(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)
