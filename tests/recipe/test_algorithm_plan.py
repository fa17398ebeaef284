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

# settings of [algorithm] -> how the refusal begins; no end: all of it
ALONE: list[tuple[dict[str, object], str]] = [
    (dict(name="gpro"), f"algorithm.name: no algorithm 'gpro'. Did you mean 'grpo'? {KNOWN}"),
    (dict(name="zzz"), f"algorithm.name: no algorithm 'zzz'. {KNOWN}"),
    (
        dict(advantage="leave_one"),
        (
            "algorithm.advantage: no advantage 'leave_one'. Did you mean 'leave_one_out'? Known:"
            " no_baseline, group_mean, "
        ),
    ),
    (
        dict(loss="clipped_surogate"),
        (
            "algorithm.loss: no loss 'clipped_surogate'. Did you mean 'clipped_surrogate'? Known:"
            " policy_gradient, "
        ),
    ),
    (
        dict(name="reinforce", clip_high=0.2),
        (
            "algorithm.clip_high: policy_gradient has no ratio to clip; remove it, or use e.g."
            " algorithm.loss = 'clipped_surrogate'"
        ),
    ),
    (
        dict(name="sapo", clip_low=0.2),
        "algorithm.clip_low: soft_gate has no ratio to clip; remove it",
    ),
    (
        dict(name="reinforce", loss="clipped_surrogate"),
        (
            "algorithm.clip_low: clipped_surrogate needs it, and reinforce has none of its own;"
            " e.g. 0.2"
        ),
    ),
    (
        dict(name="reinforce", loss="clipped_surrogate", clip_low=0.2),
        "algorithm.clip_high: clipped_surrogate needs it, and reinforce has none",
    ),
    (
        dict(clip_low=1.0),
        "algorithm.clip_low = 1 lets the ratio fall to 0, where it never is; use less than 1",
    ),
    (dict(name="gspo", clip_low=1.5), "algorithm.clip_low = 1.5 lets the ratio fall to -0.5"),
    (
        dict(name="gspo", dual_clip=3.0),
        "algorithm.dual_clip belongs to clipped_surrogate, not to sequence_surrogate; remove it",
    ),
    (
        dict(dual_clip=1.2),
        "algorithm.dual_clip = 1.2 must be above the clip's upper end, 1.2; e.g. 3",
    ),
    (
        dict(beta=0.1, kl="k1"),
        (
            "algorithm.kl = 'k1' with kl_in = 'loss' has zero expected gradient: use 'k2' (or 'k3')"
            " in the loss, or kl_in = 'reward'"
        ),
    ),
    (
        dict(beta=0.1, kl="k3+", kl_in="reward"),
        (
            "algorithm.kl = 'k3+' only changes a gradient, and a reward has none: use 'k1' in the"
            " reward"
        ),
    ),
    (
        dict(beta=0.1, kl="k3-unbiased", kl_in="reward"),
        "algorithm.kl = 'k3-unbiased' only changes a gradient",
    ),
    (
        dict(kl_target=0.1),
        (
            "algorithm.kl_target adapts beta, which is 0 here: give algorithm.beta to start from,"
            " e.g. 0.02"
        ),
    ),
    (
        dict(name="opd", beta=0.1),
        (
            "opd measures against its teacher already: algorithm.beta = 0.1 has no model of its"
            " own; use 0"
        ),
    ),
    (dict(kl="k1"), "algorithm.kl without a KL: set algorithm.beta, or remove it"),
    (dict(name="dapo", kl_in="reward"), "algorithm.kl_in without a KL"),
    (
        dict(correction="truncated", correction_low=0.5),
        "algorithm.correction_low: 'truncated' has no lower bound; remove it",
    ),
    (
        dict(name="ppo", advantage="vtrace", correction="truncated"),
        (
            "algorithm.correction = 'truncated' would weigh each token twice: vtrace's advantages"
            " hold the weight; use 'none'"
        ),
    ),
    (
        dict(tau=1.0),
        (
            "algorithm.tau belongs to soft_gate and mirror_descent; clipped_surrogate has none:"
            " remove it"
        ),
    ),
    (
        dict(lam=0.9),
        (
            "algorithm.lam belongs to a critic's advantages; group_zscore has none: remove it, or"
            " use algorithm.advantage = 'gae'"
        ),
    ),
    (
        dict(correction_low=0.5),
        (
            "algorithm.correction_low without a rule: set algorithm.correction, one of truncated,"
            " truncated-sequence, "
        ),
    ),
    (dict(correction_high=2.0), "algorithm.correction_high without a rule"),
    (
        dict(correction="masked", correction_low=1.5),
        (
            "algorithm.correction_low = 1.5 and correction_high = 5.0 must lie on both sides of 1,"
            " the weight of an on-policy sample"
        ),
    ),
    (
        dict(correction="truncated", correction_high=0.5),
        "algorithm.correction_low = None and correction_high = 0.5 must lie on both sides of 1",
    ),
    (
        dict(name="gspo", entropy_rule="clip-cov"),
        (
            "algorithm.entropy_rule = 'clip-cov' picks tokens, and sequence_surrogate has one loss"
            " for a whole sequence: use 'none'"
        ),
    ),
    (
        dict(name="reinforce", epochs=2, minibatches=3),
        (
            "algorithm.epochs x minibatches = 6 updates a step, but policy_gradient has no ratio:"
            " after the first its samples are another policy's; use 1 and 1, or a loss with a"
            " ratio, e.g. algorithm.loss = 'clipped_surrogate'"
        ),
    ),
    (
        dict(name="maxrl", overlong_buffer=0.2),
        (
            "algorithm.overlong_buffer = 0.2 shapes rewards, and advantage 'maxrl' takes a reward"
            " above 0 for a right answer and 0 for a wrong one, as the verifier gives them;"
            " remove it"
        ),
    ),
    (
        dict(advantage="maxrl", name="dapo"),
        "algorithm.overlong_buffer = 0.2 shapes rewards, and advantage 'maxrl'",
    ),
    (
        dict(advantage="pass_at_k", length_penalty="kimi"),
        (
            "algorithm.length_penalty = 'kimi' shapes rewards, and advantage 'pass_at_k' takes a"
            " reward"
        ),
    ),
    (
        dict(name="maxrl", whiten="all"),
        "algorithm.whiten = 'all' shapes rewards, and advantage 'maxrl' takes a reward",
    ),
    (
        dict(advantage="pass_at_k", beta=0.1, kl="k1", kl_in="reward"),
        (
            "algorithm.beta = 0.1 with kl_in = 'reward' takes the KL off the reward, and advantage"
            " 'pass_at_k' takes a reward above 0 for a right answer and 0 for a wrong one, as the"
            " verifier gives them; use kl_in = 'loss'"
        ),
    ),
    (
        dict(name="gdpo", overlong_buffer=0.1),
        (
            "algorithm.overlong_buffer = 0.1 shapes rewards, and advantage 'normalise_then_sum'"
            " reads each reward by itself"
        ),
    ),
    (
        dict(name="gdpo", beta=0.1, kl="k1", kl_in="reward"),
        "algorithm.beta = 0.1 with kl_in = 'reward' takes the KL off the reward, and advantage",
    ),
    (
        dict(name="remax", whiten="all"),
        (
            "algorithm.whiten = 'all' shapes rewards, and advantage 'greedy_baseline' subtracts the"
            " reward of the greedy completion"
        ),
    ),
    (
        dict(name="opd", length_penalty="cosine"),
        (
            "algorithm.length_penalty = 'cosine' shapes rewards, and opd reads none: its advantage"
            " is the teacher's; remove it"
        ),
    ),
    (
        dict(name="opd", overlong_buffer=0.1),
        "algorithm.overlong_buffer = 0.1 shapes rewards, and opd reads none",
    ),
    (
        dict(name="opd", whiten="source"),
        "algorithm.whiten = 'source' shapes rewards, and opd reads none",
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

# flags -> how the refusal begins
TOGETHER: dict[str, str] = {
    "--rollout.samples_per_prompt=1 --algorithm.name=reinforce --rollout.oversample=4": (
        "rollout.oversample keeps samples whose rewards differ, and"
    ),
    "--rollout.oversample=8": (
        "rollout.oversample = 8 starts no more samples of a task than the 8 that are kept; use more"
        " than"
    ),
    "--algorithm.name=opd --reference.path=t --rollout.oversample=12": (
        "rollout.oversample chooses samples by their rewards, which opd does not train on; use 0"
    ),
    "--rollout.samples_per_prompt=1": (
        "rollout.samples_per_prompt = 1 gives every sample zero advantage under grpo; use >= 2"
    ),
    "--rollout.samples_per_prompt=3 --algorithm.advantage=pass_at_k": (
        "algorithm.advantage = 'pass_at_k' looks at 4 samples of a prompt;"
        " rollout.samples_per_prompt = 3"
    ),
    "--algorithm.name=opd --reference.path=t --algorithm.dynamic_sampling=2": (
        "algorithm.dynamic_sampling chooses groups by their rewards, which opd does not train on;"
        " use 0"
    ),
    "--rollout.samples_per_prompt=1 --algorithm.name=reinforce --algorithm.dynamic_sampling=2": (
        "algorithm.dynamic_sampling keeps groups whose rewards differ, and"
        " rollout.samples_per_prompt = 1 has none; use >= 2"
    ),
    "--rollout.prompts_per_step=4 --algorithm.minibatches=5": (
        "algorithm.minibatches = 5 splits whole prompts: rollout.prompts_per_step = 4 is too few"
    ),
    "--algorithm.advantage=process": (
        "algorithm.advantage = 'process' reads rewards of steps (Reward.steps), and a recipe's"
        " rewards speak of whole"
    ),
    "--algorithm.entropy_rule=kl-cov": (
        "algorithm.entropy_rule = 'kl-cov' charges for moving away from the sampler, and with one"
        " update a step nothing has moved; use algorithm.minibatches or epochs > 1, or 'clip-cov'"
    ),
    "--critic.warmup_steps=5": "critic.warmup_steps: grpo has no critic; remove it",
    "--reference.reset_every=5": (
        "reference.reset_every and placement speak of a reference, and grpo with beta = 0 keeps"
        " none"
    ),
    "--reference.placement=worker": "reference.reset_every and placement speak of a reference",
    "--algorithm.correction=truncated --algorithm.epochs=2": (
        "algorithm.correction = 'truncated' corrects for samples of older"
    ),
    "--algorithm.name=ppo --algorithm.advantage=vtrace": (
        "algorithm.correction = 'vtrace' corrects for samples of older"
    ),
    "--algorithm.name=ppo --critic.body=none": (
        "ppo takes its advantage (gae) from a critic, and critic.body = 'none'; use 'own' or"
        " 'policy'"
    ),
    "--algorithm.advantage=vtrace --algorithm.epochs=2 --critic.body=none": (
        "grpo takes its advantage (vtrace) from a critic"
    ),
    "--algorithm.correction=truncated": (
        "algorithm.correction = 'truncated' corrects for samples of older or rounded weights, but"
        " engine and trainer share their weights (sync.kind = 'shared') in float32. Use sync.kind ="
        " 'copy' with sync.every > 1, or remove it"
    ),
    "--algorithm.name=ppo --algorithm.advantage=vtrace --algorithm.epochs=1": (
        "algorithm.correction = 'vtrace' corrects for samples of older"
    ),
    "--sync.kind=int8": (
        "sync.kind = 'int8' changes the log-probs of the samples, but 'grpo' would take them for"
        " the policy's own. Set algorithm.correction, e.g. 'truncated': it scores the samples again"
        " with the trainer's weights and weights them by the difference"
    ),
    "--engine.kv_dtype=int8": (
        "engine.kv_dtype = 'int8' changes the log-probs of the samples, but 'grpo' would take them"
    ),
    "--sync.kind=fp8 --sync.every=4 --algorithm.correction=negative-sequence": (
        "sync.kind = 'fp8' changes the log-probs of the samples"
    ),
    "--sync.kind=fp8 --algorithm.name=reinforce": (
        "sync.kind = 'fp8' changes the log-probs of the samples, but 'reinforce'"
    ),
    "--algorithm.name=opd": (
        "opd distils from a teacher: name one with reference.path, a model with the policy's"
        " tokenizer"
    ),
    "--reference.path=teacher": (
        "reference.path: grpo with beta = 0 measures against no other model; set algorithm.beta >"
        " 0, or remove it"
    ),
    "--algorithm.name=opd --reference.path=teacher --reference.reset_every=5": (
        "reference.path names a model of its own, and reset_every or reset_patience would overwrite"
        " it with the policy; use one"
    ),
    "--algorithm.beta=0.1 --reference.path=other --reference.reset_patience=5": (
        "reference.path names a model of its own"
    ),
    "--algorithm.name=opd --reference.path=teacher --reference.placement=fused": (
        "reference.placement = 'fused' gives the reference's log-probs to the loss alone; a"
        " teacher's opinion needs them before"
    ),
    "--algorithm.name=rloo --algorithm.beta=0.1 --reference.placement=fused": (
        "reference.placement = 'fused' gives the reference's log-probs to the loss alone; a KL in"
        " the reward needs them before"
    ),
    "--algorithm.beta=0.1 --algorithm.kl_target=0.1 --reference.placement=fused": (
        "reference.placement = 'fused' gives the reference's log-probs to the loss alone; an"
        " adaptive beta (algorithm.kl_target) needs them before"
    ),
    "--reference.reset_patience=2": (
        "reference.reset_patience counts held-out evaluations and resets a reference: set"
        " eval.every > 0 and algorithm.beta > 0"
    ),
    "--algorithm.beta=0.1 --reference.reset_patience=2 --eval.every=0": (
        "reference.reset_patience counts held-out evaluations"
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


def check(flags: str) -> None:
    asked = recipe(flags)
    check_algorithm(asked, resolve_algorithm(asked.algorithm))


@pytest.mark.parametrize(
    ("settings", "begins"),
    ALONE,
    ids=[" ".join(f"{k}={v}" for k, v in settings.items()) for settings, _ in ALONE],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], begins: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_algorithm(AlgorithmConfig(**settings))  # type: ignore[arg-type]
    assert str(caught.value).startswith(begins) and "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", FINE, ids=str)
def test_their_neighbours_are_fine(settings: dict[str, object]) -> None:
    row = resolve_algorithm(AlgorithmConfig(**settings))  # type: ignore[arg-type]
    assert all(getattr(row, key) == value for key, value in settings.items())


@pytest.mark.parametrize("flags", TOGETHER)
def test_what_the_rest_of_the_recipe_does_not_allow(flags: str) -> None:
    with pytest.raises(UserError) as caught:
        check(flags)
    assert str(caught.value).startswith(TOGETHER[flags]) and "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", FINE_TOGETHER)
def test_the_same_with_what_they_ask_for(flags: str) -> None:
    check(flags)


@pytest.mark.parametrize(
    ("flags", "begins"),
    [
        ("--algorithm.name=grpoo", "algorithm.name: no algorithm 'grpoo'. Did you mean 'grpo'?"),
        (
            "--algorithm.beta=0.1 --algorithm.kl=k1",
            "algorithm.kl = 'k1' with kl_in = 'loss' has zero expected gradient",
        ),
        ("--algorithm.clip_low=0", "algorithm.clip_low: expected a finite number > 0, got 0"),
        ("--algorithm.beta=-1", "algorithm.beta: expected a finite number >= 0, got -1"),
        ("--algorithm.name=ppo --critic.body=none", "ppo takes its advantage (gae) from a critic"),
        (
            "--algorithm.correction=truncated",
            "algorithm.correction = 'truncated' corrects for samples of older",
        ),
        (
            "--algorithm.name=maxrl --algorithm.whiten=all",
            "algorithm.whiten = 'all' shapes rewards, and advantage 'maxrl'",
        ),
    ],
)
def test_explain_refuses_in_one_line(
    flags: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "demo", *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"sixfold: error: {begins}")


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
