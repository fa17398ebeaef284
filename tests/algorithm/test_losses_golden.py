"""Token losses against the published formulas worked out in float64
(tests/data/golden_algorithms.json): every value and gradient of every case.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import ALGORITHM_CASES as CASES
from golden import close, spread
from torch import Tensor

from sixfold.algorithm import losses, sequence_losses
from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.losses import Surrogate

torch.set_num_threads(1)


Inputs = dict[str, Tensor]
Loss = Callable[[Inputs, dict[str, float]], Surrogate | Tensor]

# The file's case -> how it is asked of us. i: the inputs, p: the case's parameters.
TOKEN_LOSSES: dict[str, Loss] = {
    "reinforce_pg": lambda i, p: losses.policy_gradient(i["logp"], i["advantages"]),
    "ppo_clip": lambda i, p: losses.clipped_surrogate(
        i["logp"], i["old_logp"], i["advantages"], p["eps"], p["eps"]
    ),
    "ppo_clip_token_adv": lambda i, p: losses.clipped_surrogate(
        i["logp"], i["old_logp"], i["advantages"], p["eps"], p["eps"]
    ),
    "bypass_ppo": lambda i, p: losses.clipped_surrogate(
        i["logp"], i["rollout_logp"], i["advantages"], p["eps"], p["eps"]
    ),
    "dapo_clip_higher": lambda i, p: losses.clipped_surrogate(
        i["logp"], i["old_logp"], i["advantages"], p["eps_low"], p["eps_high"]
    ),
    "ppo_dual_clip": lambda i, p: losses.clipped_surrogate(
        i["logp"], i["old_logp"], i["advantages"], p["eps"], p["eps"], dual_clip=p["c"]
    ),
    "grpo_two_sided_delta": lambda i, p: losses.clipped_surrogate(
        i["logp"], i["old_logp"], i["advantages"], p["eps"], p["eps"], dual_clip=p["delta"]
    ),
    "cispo_one_plus_eps": lambda i, p: losses.clipped_weight(
        i["logp"], i["old_logp"], i["advantages"], p["eps_low"], p["eps_high"]
    ),
    "cispo_absolute_cap": lambda i, p: losses.clipped_weight(
        i["logp"], i["old_logp"], i["advantages"], None, p["e_max"] - 1
    ),
    "sapo": lambda i, p: losses.soft_gate(
        i["logp"], i["old_logp"], i["advantages"], p["tau_pos"], p["tau_neg"]
    ),
    "gspo_token": lambda i, p: sequence_losses.sequence_token_surrogate(
        i["logp"], i["old_logp"], i["advantages"], i["mask"], p["eps_low"], p["eps_high"]
    ),
}
SEQUENCE_LOSSES: dict[str, Loss] = {
    "gspo_paper_eps": lambda i, p: _gspo(i, p),
    "gspo_wide_eps": lambda i, p: _gspo(i, p),
    "luspo": lambda i, p: sequence_losses.length_scaled_sequence_surrogate(
        i["logp"], i["old_logp"], i["advantages"], i["mask"], p["eps_low"], p["eps_high"]
    ),
    "gmpo": lambda i, p: _gmpo(i, p),
    "gmpo_narrow": lambda i, p: _gmpo(i, p),
    "kimi_mirror_descent": lambda i, p: sequence_losses.mirror_descent(
        i["logp"],
        i["old_logp"],
        spread(i["rewards"] - i["rewards"].mean(), i["mask"]),
        i["mask"],
        p["tau"],
    ),
}


def _gspo(i: Inputs, p: dict[str, float]) -> Surrogate:
    return sequence_losses.sequence_surrogate(
        i["logp"], i["old_logp"], i["advantages"], i["mask"], p["eps_low"], p["eps_high"]
    )


def _gmpo(i: Inputs, p: dict[str, float]) -> Surrogate:
    return sequence_losses.geometric_surrogate(
        i["logp"], i["old_logp"], i["advantages"], i["mask"], p["eps_log"], p["eps_log"]
    )


def _inputs(case: str) -> Inputs:
    """The case's tables in float64, advantages on every token, and a gradient asked of logp."""
    tables = {
        name: torch.tensor(values, dtype=torch.float64)
        for name, values in CASES[case]["inputs"].items()
    }
    tables["mask"] = tables["mask"].bool()
    if "advantages" in tables:
        tables["advantages"] = spread(tables["advantages"], tables["mask"])
    if "logp" in tables:
        tables["logp"].requires_grad_()
    return tables


def _expected(case: str, key: str) -> Tensor:
    return torch.tensor(CASES[case]["expected"][key], dtype=torch.float64)


def _loss(case: str, loss: Loss, inputs: Inputs) -> Surrogate:
    found = loss(inputs, CASES[case]["params"])
    nothing = torch.zeros_like(inputs["mask"])
    return (
        found
        if isinstance(found, Surrogate)
        else Surrogate(found, torch.ones_like(found), nothing, nothing)
    )


def _mean(table: Tensor, mask: Tensor, ours: str, horizon: int = 1) -> Tensor:
    weights = AGGREGATIONS[ours](mask, torch.arange(len(mask)), horizon)
    return torch.where(mask, weights * table, 0.0).sum()


TOKEN_KEYS = [
    (case, key)
    for case in TOKEN_LOSSES
    for key in CASES[case]["expected"]
    if key == "per_token_loss" or key.startswith(("loss_", "grad_logp_"))
]


@pytest.mark.parametrize(("case", "key"), TOKEN_KEYS)
def test_token_losses(case: str, key: str) -> None:
    inputs = _inputs(case)
    mask = inputs["mask"]
    table = _loss(case, TOKEN_LOSSES[case], inputs).loss
    if key == "per_token_loss":
        close(torch.where(mask, table, 0.0), _expected(case, key))
        return
    kind, theirs = (
        ("grad", key.removeprefix("grad_logp_"))
        if key.startswith("grad")
        else ("loss", key.removeprefix("loss_"))
    )
    loss = _mean(
        table, mask, OURS[theirs], CASES[case]["params"]["seq_mean_token_sum_norm_constant"]
    )
    (grad,) = torch.autograd.grad(loss, inputs["logp"])
    close(loss if kind == "loss" else grad, _expected(case, key))


@pytest.mark.parametrize("case", SEQUENCE_LOSSES)
def test_sequence_losses(case: str) -> None:
    """The papers' mean over sequences is our aggregation "sequence": loss and gradient."""
    inputs, expected = _inputs(case), CASES[case]["expected"]
    loss = _mean(_loss(case, SEQUENCE_LOSSES[case], inputs).loss, inputs["mask"], "sequence")
    close(loss, _expected(case, "loss"))
    if "grad_logp" in expected:
        (grad,) = torch.autograd.grad(loss, inputs["logp"])
        close(grad, _expected(case, "grad_logp"))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("gspo_paper_eps", "seq_ratio"),
        ("gspo_wide_eps", "seq_ratio"),
        ("gmpo", "geo_ratio"),
        ("gmpo_narrow", "geo_ratio"),
    ],
)
def test_the_rows_ratio_is_on_every_scored_token(case: str, key: str) -> None:
    inputs = _inputs(case)
    ratio = _loss(case, SEQUENCE_LOSSES[case], inputs).ratio
    close(ratio, torch.where(inputs["mask"], _expected(case, key)[:, None], 1.0))


@pytest.mark.parametrize("case", ["gspo_paper_eps", "gspo_wide_eps"])
def test_the_rows_loss_is_on_every_scored_token(case: str) -> None:
    inputs = _inputs(case)
    s = _loss(case, SEQUENCE_LOSSES[case], inputs)
    close(s.loss, torch.where(inputs["mask"], _expected(case, "per_seq_loss")[:, None], 0.0))
    close(_mean(s.active.double(), inputs["mask"], "sequence"), _expected(case, "clip_frac_seq"))


def test_kimi_residual() -> None:
    inputs = _inputs("kimi_mirror_descent")
    s = _loss("kimi_mirror_descent", SEQUENCE_LOSSES["kimi_mirror_descent"], inputs)
    close(
        s.loss,
        torch.where(
            inputs["mask"], _expected("kimi_mirror_descent", "residual")[:, None].square(), 0.0
        ),
    )


def test_vespo() -> None:
    """phi is what the gradient of a row's token is multiplied by, beside -A."""
    inputs, p = _inputs("vespo"), CASES["vespo"]["params"]
    s = sequence_losses.power_weight(
        inputs["logp"], inputs["old_logp"], inputs["advantages"], inputs["mask"], **p
    )
    close(_mean(s.loss, inputs["mask"], "token"), _expected("vespo", "loss_token_mean"))
    (grad,) = torch.autograd.grad(s.loss.sum(), inputs["logp"])
    close(grad, -inputs["advantages"] * _expected("vespo", "phi")[:, None])


def test_clip_fractions() -> None:
    """PPO's: tokens whose gradient the clip took. The dual clip's: those that the cap takes
    besides.
    """
    plain, dual = (
        _loss(case, TOKEN_LOSSES[case], _inputs(case)) for case in ("ppo_clip", "ppo_dual_clip")
    )
    mask = _inputs("ppo_clip")["mask"]
    close(_mean(plain.active.double(), mask, "token"), _expected("ppo_clip", "clipfrac"))
    close(
        _mean((dual.active & ~plain.active).double(), mask, "token"),
        _expected("ppo_dual_clip", "dual_clip_frac"),
    )


def test_value_loss() -> None:
    i, eps = _inputs("value_loss_clip"), CASES["value_loss_clip"]["params"]["eps"]
    clipped = losses.clipped_value_loss(i["vpred"], i["vold"], i["returns"], eps)
    plain = losses.clipped_value_loss(i["vpred"], i["vold"], i["returns"], math.inf)
    close(_mean(clipped, i["mask"], "token"), _expected("value_loss_clip", "clipped_token_mean"))
    close(_mean(plain, i["mask"], "token"), _expected("value_loss_clip", "unclipped_token_mean"))
    close(
        _mean((clipped > plain).double(), i["mask"], "token"),
        _expected("value_loss_clip", "clipfrac"),
    )


@pytest.mark.parametrize("theirs", sorted(OURS))
def test_loss_aggregation(theirs: str) -> None:
    i = _inputs("loss_aggregation")
    junk = torch.where(i["mask"], i["loss"], math.nan)
    close(
        _mean(junk, i["mask"], OURS[theirs], CASES["loss_aggregation"]["params"]["norm_constant"]),
        _expected("loss_aggregation", theirs),
    )
