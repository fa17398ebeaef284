"""Preference losses as arguments of TRL 1.16's DPOConfig, KTOConfig, CPOConfig and ORPOConfig.

Does not import torch.
"""

from __future__ import annotations

from sixfold.errors import UserError
from sixfold.preference.loss import PreferenceLoss

from . import Conversion

DEFAULTS: dict[str, dict[str, object]] = {
    "DPOConfig": {
        "loss_type": ["sigmoid"],
        "loss_weights": None,
        "beta": 0.1,
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "use_weighting": False,
        "discopop_tau": 0.05,
    },
    "KTOConfig": {
        "loss_type": "kto",
        "beta": 0.1,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    },
    "CPOConfig": {
        "loss_type": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "cpo_alpha": 1.0,
        "simpo_gamma": 0.5,
    },
    "ORPOConfig": {"beta": 0.1},
}

_SORTED = "TRL sorts inside a micro-batch: the loss depends on per_device_train_batch_size"
_AVERAGED = "TRL averages over the tokens of a micro-batch, Sixfold over those of the step"
_OF_DPO = {
    "dpo": "sigmoid",
    "robust": "robust",
    "hinge": "hinge",
    "ipo": "ipo",
    "dpo_norm": "sigmoid_norm",
    "ld_dpo": "sigmoid",
    "wpo": "sigmoid",
    "exo": "exo_pair",
    "discopop": "discopop",
    "nca": "nca_pair",
    "bco_pair": "bco_pair",
    "sppo": "sppo_hard",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "aot": "aot",
    "aot_unpaired": "aot_unpaired",
    "sft": "sft",
}
"""Row -> loss_type of DPOConfig."""
_DIFFERS = {
    "wpo": "TRL also divides each probability by the sum of the squared probabilities",
    "kto": "TRL's z0 is that of a micro-batch, Sixfold's that of the step",
    "aot": _SORTED,
    "aot_unpaired": _SORTED,
    "sft": _AVERAGED,
    "cpo": _AVERAGED,
    "orpo": "TRL's cross-entropy includes the prompt",
    "cdpo": "written as a sum of two losses, which is equal to it",
}
_LACKS = {
    "ipo_sum": "sums over tokens: loss_type='ipo' divides by the length",
    "dpop": "the penalty of DPO-positive. Without it, the loss is DPO's",
    "dpo_shift": "a weight of the worse completion. With 1, the loss is DPO's",
    "beta_dpo": "a beta that follows the step. With a constant one, the loss is DPO's",
    "squared_po": "its divergence: f_divergence_type has reverse_kl, forward_kl, js and alpha",
    "bco": "BCO on single completions. KTOConfig 'kto' is the nearest, bco_pair needs pairs",
}


def converted_loss(row: PreferenceLoss) -> Conversion:
    """Settings of TRL that give the same numbers.

    Args:
        row: the loss, with its own settings.
    """
    entry, settings = _settings(row)
    defaults = DEFAULTS[entry]
    return Conversion(
        "trl",
        row.name,
        entry,
        {key: value for key, value in settings.items() if defaults[key] != value},
        kept={key: value for key, value in settings.items() if defaults[key] == value},
        also=(),
        differs=(_DIFFERS[row.name],) if row.name in _DIFFERS else (),
        lacks=(_LACKS[row.name],) if row.name in _LACKS else (),
    )


def _settings(row: PreferenceLoss) -> tuple[str, dict[str, object]]:
    s = row.defaults
    found: dict[str, object] = {"beta": s.beta}
    if row.name == "orpo":
        return "ORPOConfig", found
    if row.name in ("cpo", "simpo"):
        found |= {"label_smoothing": s.label_smoothing, "cpo_alpha": s.sft_weight}
        if row.name == "cpo":
            return "CPOConfig", {"loss_type": "sigmoid", **found}
        return "CPOConfig", {"loss_type": "simpo", "simpo_gamma": s.target_margin, **found}
    if row.unpaired:
        found |= {"desirable_weight": s.liked_weight, "undesirable_weight": s.disliked_weight}
        kind = "apo_zero_unpaired" if row.name == "apo_zero_unpaired" else "kto"
        return "KTOConfig", {"loss_type": kind, **found}
    found |= {"loss_type": [_OF_DPO.get(row.name, "sigmoid")]}
    if row.name == "cdpo":
        e = s.label_smoothing
        found |= {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - e), 2 * e - 1]}
    if "label_smoothing" in row.reads:
        found |= {"label_smoothing": s.label_smoothing}
    if s.needs_head:
        found |= {"ld_alpha": s.tail_weight}
    if s.policy_weights:
        found |= {"use_weighting": True}
    if row.name == "discopop":
        found |= {"discopop_tau": s.modulation}
    return "DPOConfig", found


def only_trl(framework: str, row: PreferenceLoss) -> None:
    """Refuse other frameworks.

    Raises:
        UserError: for a framework without a converter of preference losses.
    """
    if framework != "trl":
        raise UserError(
            f"'{row.name}' is a preference loss, which is converted to trl only, not to"
            f" {framework}. What others call it: sixfold algorithms {row.name}"
        )
