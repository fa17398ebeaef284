"""Preference losses against TRL 1.16's own functions: values, and gradients in the log-probs of
tokens, recorded in tests/data/trl_preference.json (tests/differential/trl_preference.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.preference.mixture import Mixture, Term
from sixfold.preference.pairs import Pairs, Unpaired
from sixfold.preference.zoo import LOSSES

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "trl_preference.json").read_text()
)
LENGTHS = torch.tensor(RECORD["lengths"], dtype=torch.float64)
HALF = len(LENGTHS) // 2
KINDS = {"forward_kl": "forward-kl", "js_divergence": "js"}

Ours = list[tuple[str, float, dict[str, Any]]]
"""Name, weight, and changed settings of each term."""

OURS: dict[str, Ours] = {
    **{
        theirs: [(name, 1.0, {})]
        for theirs, name in {
            "sigmoid": "dpo",
            "ipo": "ipo",
            "nca_pair": "nca",
            "bco_pair": "bco_pair",
            "sppo_hard": "sppo",
            "apo_zero": "apo_zero",
            "apo_down": "apo_down",
            "discopop": "discopop",
            "sft": "sft",
            "aot": "aot",
            "aot_unpaired": "aot_unpaired",
            "robust": "robust",
            "ld": "ld_dpo",
            "wpo": "wpo",
            "cpo": "cpo",
            "cpo, simpo": "simpo",
            "kto": "kto",
            "kto, apo_zero_unpaired": "apo_zero_unpaired",
        }.items()
    },
    "hinge": [("hinge", 1.0, {"beta": 0.1})],
    "sigmoid_norm": [("dpo_norm", 1.0, {"beta": 0.1})],
    "exo_pair": [("exo", 1.0, {"label_smoothing": 0.1})],
    "aot, smoothed": [("aot", 1.0, {"label_smoothing": 0.1})],
    "aot_unpaired, smoothed": [("aot_unpaired", 1.0, {"label_smoothing": 0.1})],
    "ld, aot": [("aot", 1.0, {"tail_weight": 0.5})],
    **{
        f"{theirs}, {kind}": [(name, 1.0, {"divergence": ours, "beta": 0.1})]
        for kind, ours in KINDS.items()
        for theirs, name in {"sigmoid": "dpo", "ipo": "ipo", "sigmoid_norm": "dpo_norm"}.items()
    },
    "sigmoid, alpha_divergence": [("dpo", 1.0, {"divergence": "alpha", "divergence_alpha": 0.3})],
    "mixture": [("dpo", 0.8, {}), ("bco_pair", 0.2, {}), ("sft", 1.0, {})],
    "cpo, smoothed": [("cpo", 1.0, {"label_smoothing": 0.1})],
    "orpo": [("orpo", 1.0, {"sft_weight": 0.0})],
    "kto, weighted": [("kto", 1.0, {"liked_weight": 1.5, "disliked_weight": 0.7})],
}


def table(name: str) -> Tensor:
    return torch.tensor(RECORD[name], dtype=torch.float64)


def rows_of(logp: Tensor, *, unpaired: bool) -> Pairs | Unpaired:
    """The record's completions as pairs, or as liked and disliked ones."""
    ref = table("ref_logp")
    if unpaired:
        liked = torch.arange(2 * HALF) < HALF
        mismatched = (table("kl_logp") - table("kl_ref_logp")).sum(-1)
        return Unpaired(logp.sum(-1), ref.sum(-1), liked, mismatched=mismatched)
    shorter = torch.minimum(LENGTHS[:HALF], LENGTHS[HALF:]).repeat(2)
    head = torch.arange(logp.shape[1]) < shorter[:, None]
    sums = [x.sum(-1) for x in (logp, ref, logp * head, ref * head)]
    (chosen, rejected), (ref_w, ref_l), heads, ref_heads = (x.split(HALF) for x in sums)
    return Pairs(
        *(chosen, rejected, LENGTHS[:HALF], LENGTHS[HALF:], ref_w, ref_l),
        chosen_head=heads[0],
        rejected_head=heads[1],
        ref_chosen_head=ref_heads[0],
        ref_rejected_head=ref_heads[1],
    )


@pytest.mark.parametrize("case", RECORD["cases"])
def test_value_and_gradient_are_those_of_trl(case: str) -> None:
    terms = [
        Term(LOSSES[name], replace(LOSSES[name].defaults, **changes), weight)
        for name, weight, changes in OURS[case]
    ]
    mixture = Mixture(terms)
    logp = table("logp").requires_grad_()
    rows = rows_of(logp, unpaired=mixture.unpaired)
    loss = mixture.per_pair(rows, mixture.whole_batch(rows)).mean()
    (gradient,) = torch.autograd.grad(loss, logp)
    mask = torch.arange(logp.shape[1]) < LENGTHS[:, None]
    recorded = RECORD["cases"][case]
    assert loss.item() == pytest.approx(recorded["loss"], rel=1e-6, abs=1e-6)
    # TRL weights tokens off the mask too; there is nothing to train there
    expected = torch.tensor(recorded["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient * mask, expected * mask, atol=1e-6, rtol=1e-6)


def test_every_loss_of_trl_has_its_row() -> None:
    """The fifteen of DPOConfig, and the two of KTOConfig."""
    assert set(OURS) == set(RECORD["cases"])
    theirs = {
        name
        for case in RECORD["cases"].values()
        for name in case["settings"].get("loss_types", [case["settings"].get("loss_type")])
    }
    assert len(theirs - {"kto", "apo_zero_unpaired", "simpo", None}) == 15
