"""Preference losses of TRL's trainers on one table of log-probs: values, and gradients per token.

    PYTHONPATH=src:. python -m tests.differential.trl_preference > tests/data/trl_preference.json

writes what the daily tests compare with (tests/preference/test_preference_trl.py). Importing this
needs TRL. Its methods are called unbound, on a stub with the settings and our log-probs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import KTOTrainer
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer

PAIRS, TOKENS = 4, 6
LENGTHS = torch.tensor([6, 2, 4, 3, 3, 5, 4, 1])
"""Tokens of the better, then of the worse completions."""
MASK = torch.arange(TOKENS) < LENGTHS[:, None]

CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_types": [name]}
        for name in (
            *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero"),
            *("apo_down", "discopop", "sft", "sigmoid_norm", "aot", "aot_unpaired"),
        )
    },
    **{name: {"loss_types": [name], "label_smoothing": 0.1} for name in ("robust", "exo_pair")},
    "aot, smoothed": {"loss_types": ["aot"], "label_smoothing": 0.1},
    "aot_unpaired, smoothed": {"loss_types": ["aot_unpaired"], "label_smoothing": 0.1},
    "ld": {"loss_types": ["sigmoid"], "ld_alpha": 0.5},
    "ld, aot": {"loss_types": ["aot"], "ld_alpha": 0.5},
    "wpo": {"loss_types": ["sigmoid"], "use_weighting": True},
    **{
        f"{loss}, {kind}": {"loss_types": [loss], "f_divergence_type": kind}
        for kind in ("forward_kl", "js_divergence")
        for loss in ("sigmoid", "ipo", "sigmoid_norm")
    },
    "sigmoid, alpha_divergence": {
        "loss_types": ["sigmoid"],
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 0.3,
    },
    "mixture": {
        "loss_types": ["sigmoid", "bco_pair", "sft"],
        "loss_weights": [0.8, 0.2, 1.0],
    },
    "cpo": {"trainer": "cpo", "loss_type": "sigmoid"},
    "cpo, simpo": {"trainer": "cpo", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
    "cpo, smoothed": {"trainer": "cpo", "loss_type": "sigmoid", "label_smoothing": 0.1},
    "orpo": {"trainer": "orpo"},
    "kto": {"trainer": "kto", "loss_type": "kto"},
    "kto, weighted": {"trainer": "kto", "loss_type": "kto", "weights": [1.5, 0.7]},
    "kto, apo_zero_unpaired": {"trainer": "kto", "loss_type": "apo_zero_unpaired"},
}


def tables() -> dict[str, Tensor]:
    """logp, ref_logp, and those of mismatched completions: [2 PAIRS, TOKENS], 0 off the mask."""
    g = torch.Generator().manual_seed(5)

    def logp(scale: float) -> Tensor:
        return torch.where(MASK, -0.05 - scale * torch.rand(MASK.shape, generator=g), 0.0).double()

    names = {"logp": 4.0, "ref_logp": 4.0, "kl_logp": 2.0, "kl_ref_logp": 4.0}
    return {name: logp(scale).round(decimals=6) for name, scale in names.items()}


def _outputs(log_probs: Tensor) -> SimpleNamespace:
    zeros = torch.zeros_like(log_probs)
    return SimpleNamespace(
        log_probs=log_probs,
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
        log_sum_sq_probs=zeros,
    )


class _Model(torch.nn.Module):
    """A model with given log-probs, in evaluation."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.log_probs = log_probs
        self.eval()

    def forward(self, **inputs: Any) -> SimpleNamespace:
        return _outputs(self.log_probs)


def _stub(**own: Any) -> SimpleNamespace:
    same: Any = lambda value: value  # noqa: E731
    return SimpleNamespace(
        **{
            "accelerator": SimpleNamespace(
                device="cpu", gather=same, gather_for_metrics=same, unwrap_model=same
            ),
            "model": _Model(torch.zeros(0)),
            "args": SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_total_train_tokens": 0,
            "aux_loss_enabled": False,
            "beta": 0.1,
            "label_smoothing": 0.0,
            **own,
        }
    )


def dpo(logp: Tensor, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """DPOTrainer's loss. It has no alpha divergence in float64: that case is in float32."""
    if settings.get("f_divergence_type") == "alpha_divergence":
        logp, given = logp.float(), {name: value.float() for name, value in given.items()}
    stub = _stub(
        **{
            "ld_alpha": None,
            "precompute_ref_logps": False,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "loss_weights": [1.0],
            "use_weighting": False,
            "ref_model": _Model(given["ref_logp"]),
        }
        | settings
    )
    whole = torch.cat([torch.zeros(len(MASK), 1, dtype=torch.bool), MASK], 1)
    inputs = {
        "input_ids": torch.zeros_like(whole, dtype=torch.long),
        "attention_mask": torch.ones_like(whole, dtype=torch.long),
        "completion_mask": whole.long(),
    }
    return DPOTrainer._compute_loss(stub, _Model(logp), inputs, False)


def kto(logp: Tensor, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """KTOTrainer's loss: the better completions are liked."""
    liked, disliked = settings.pop("weights", [1.0, 1.0])
    stub = _stub(
        precompute_ref_logps=False,
        calculate_KL=True,
        desirable_weight=liked,
        undesirable_weight=disliked,
        ref_model=_Model(given["ref_logp"]),
        **settings,
    )
    model = _Model(logp)
    stub._compute_kl_logps = lambda asked, batch: given[
        "kl_logp" if asked is model else "kl_ref_logp"
    ].sum(-1)
    whole = torch.cat([torch.zeros(len(MASK), 1, dtype=torch.bool), MASK], 1)
    inputs = {
        "input_ids": torch.zeros_like(whole, dtype=torch.long),
        "attention_mask": torch.ones_like(whole, dtype=torch.long),
        "completion_mask": whole.long(),
        "label": torch.arange(len(MASK)) < PAIRS,
    }
    return KTOTrainer._compute_loss(stub, model, inputs, False)


def _sides(logp: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    sums = logp.sum(-1) / (LENGTHS if mean else 1)
    return sums[:PAIRS], sums[PAIRS:]


def cpo(logp: Tensor, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """CPOTrainer's loss; SimPO is without the cross-entropy (cpo_alpha 0)."""
    stub = _stub(**({"alpha": 0.0, "simpo_gamma": 0.5} | settings))
    mean = settings["loss_type"] == "simpo"
    loss = CPOTrainer.cpo_loss(stub, *_sides(logp, mean))[0].mean()
    return loss - logp[:PAIRS].sum() / LENGTHS[:PAIRS].sum() if not mean else loss


def orpo(logp: Tensor, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """ORPOTrainer's odds-ratio term. Its cross-entropy is over prompts too, so it is left out."""
    return -ORPOTrainer.odds_ratio_loss(_stub(), *_sides(logp, True))[0].mean()


def recorded() -> dict[str, Any]:
    """Every case: its settings, loss, and gradient in the log-probs."""
    given, cases = tables(), {}
    for name, settings in CASES.items():
        call = {"cpo": cpo, "orpo": orpo, "kto": kto}.get(settings.get("trainer", ""), dpo)
        logp = given["logp"].clone().requires_grad_()
        plain = {key: value for key, value in settings.items() if key != "trainer"}
        loss = partial(call, logp, given)(**plain)
        (gradient,) = torch.autograd.grad(loss, logp)
        rounded = [[round(float(x), 10) for x in line] for line in gradient]
        cases[name] = {"settings": settings, "loss": round(loss.item(), 10), "gradient": rounded}
    tokens = {name: value.tolist() for name, value in given.items()}
    return {"lengths": LENGTHS.tolist(), **tokens, "cases": cases}


def main() -> None:
    made = recorded()
    lines = [f' "{name}": {json.dumps(made[name])}' for name in made if name != "cases"]
    cases = [f'  "{name}": {json.dumps(case)}' for name, case in made["cases"].items()]
    inner = ",\n".join(cases)
    print("{\n" + ",\n".join(lines) + ',\n "cases": {\n' + inner + "\n }\n}")


if __name__ == "__main__":
    main()
