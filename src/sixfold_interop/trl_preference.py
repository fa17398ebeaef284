"""Preference losses as arguments of TRL 1.16's DPOConfig, KTOConfig, CPOConfig and ORPOConfig.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.errors import UserError
from sixfold.preference.loss import PreferenceLoss, Settings

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
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
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
OF_DPO = {
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
"""Row -> loss_type of DPOConfig. `cdpo` and rows without one are written as sigmoid."""
_PACKAGES = {"CPOConfig": "cpo", "ORPOConfig": "orpo"}
_CPO = ("cpo", "simpo")
_SMOOTHED = ("cdpo", "robust", "exo", "aot", "aot_unpaired")
_DIVERGENCES = {"forward-kl": "forward_kl", "js": "js_divergence", "alpha": "alpha_divergence"}
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
    "beta_dpo": "a beta that follows the step. With a constant one, the loss is DPO's",
    "bco": "BCO on single completions. KTOConfig 'kto' is the nearest, bco_pair needs pairs",
    "outcome": "cross-entropy of single completions. KTOConfig 'kto' is the nearest",
}


Term = tuple[PreferenceLoss, Settings, float]
"""A loss, its settings, and its weight in a sum."""


def converted_loss(row: PreferenceLoss) -> Conversion:
    """Settings of TRL that give the same numbers."""
    return converted_sum(row.name, [(row, row.defaults, 1.0)])


def converted_sum(name: str, terms: Sequence[Term]) -> Conversion:
    """Settings of TRL that give the same numbers as a sum of losses.

    Args:
        terms: the losses. A sum of which TRL has no config is cut down to those of the first one's.
    """
    entry = _entry(terms[0][0])
    lacks = [
        f"the loss {row.name} in one sum with {terms[0][0].name}"
        for at, (row, _, _) in enumerate(terms)
        if _entry(row) != entry or (at and entry != "DPOConfig")
    ]
    kept = [term for term in terms if _entry(term[0]) == entry]
    kept = kept if entry == "DPOConfig" else kept[:1]
    for row, own, weight in kept:
        lacks += _lacking(row, own)
        if entry != "DPOConfig" and weight != 1:
            lacks.append(f"a weight of {row.name}, {weight:g}: multiply the learning rate by it")
    settings = _dpo(kept, lacks) if entry == "DPOConfig" else _alone(*kept[0][:2])
    defaults = DEFAULTS[entry]
    return Conversion(
        "trl",
        name,
        entry,
        {key: value for key, value in settings.items() if defaults[key] != value},
        kept={key: value for key, value in settings.items() if defaults[key] == value},
        also=(f"# from trl.experimental.{_PACKAGES[entry]}",) if entry in _PACKAGES else (),
        differs=tuple(_DIFFERS[row.name] for row, _, _ in kept if row.name in _DIFFERS),
        lacks=tuple(lacks),
    )


def _entry(row: PreferenceLoss) -> str:
    if row.unpaired:
        return "KTOConfig"
    return {"orpo": "ORPOConfig", "cpo": "CPOConfig", "simpo": "CPOConfig"}.get(
        row.name, "DPOConfig"
    )


def _lacking(row: PreferenceLoss, s: Settings) -> list[str]:
    """What no config of TRL gives of a loss."""
    found = [_LACKS[row.name]] if row.name in _LACKS else []
    if s.shift != 1:
        found.append("a weight of the worse completion. With 1, the loss is DPO's")
    if s.divergence == "squared":
        found.append("its divergence: f_divergence_type has reverse_kl, forward_kl, js and alpha")
    if s.needs_head and _entry(row) != "DPOConfig":
        found.append(f"tail_weight = {s.tail_weight:g}: only DPOConfig has ld_alpha")
    if row.name == "orpo" and s.sft_weight != 1:
        found.append(f"sft_weight = {s.sft_weight:g}: its cross-entropy has the weight 1")
    if row.name == "beta_dpo" and s.label_smoothing:
        found.append(f"label_smoothing = {s.label_smoothing:g} of this loss")
    return found


def _alone(row: PreferenceLoss, s: Settings) -> dict[str, object]:
    """Arguments of CPOConfig, ORPOConfig or KTOConfig."""
    found: dict[str, object] = {"beta": s.beta}
    if row.name == "cpo":
        found = {"loss_type": "sigmoid", **found}
    elif row.name == "simpo":
        found = {"loss_type": "simpo", "simpo_gamma": s.target_margin, **found}
    elif row.unpaired:
        kind = "apo_zero_unpaired" if row.name == "apo_zero_unpaired" else "kto"
        found = {"loss_type": kind, **found}
        found |= {"desirable_weight": s.liked_weight, "undesirable_weight": s.disliked_weight}
    if row.name in _CPO:
        found |= {"label_smoothing": s.label_smoothing, "cpo_alpha": s.sft_weight}
    return found


def _dpo(terms: Sequence[Term], lacks: list[str]) -> dict[str, object]:
    """Arguments of DPOConfig. Adds to `lacks` what the losses of a sum do not share."""
    types: list[str] = []
    weights: list[float] = []
    shared: dict[str, object] = {}
    for row, s, weight in terms:
        own = _shared_by_dpo(row, s)
        for key, value in own.items():
            if shared.setdefault(key, value) != value:
                lacks.append(f"another {key} for {row.name}, {value!r}: a sum has one")
        types.append(OF_DPO.get(row.name, "sigmoid"))
        weights.append(weight)
        if row.name == "cdpo":
            types.append("robust")
            weights[-1:] = [
                2 * (1 - s.label_smoothing) * weight,
                (2 * s.label_smoothing - 1) * weight,
            ]
        if s.sft_weight and row.name != "sft":
            types.append("sft")
            weights.append(s.sft_weight * weight)
        elif row.name == "sft":
            weights[-1] *= s.sft_weight
    found = {"beta": shared.pop("beta", 0.1), "loss_type": types}
    if set(weights) != {1.0}:
        found["loss_weights"] = weights
    unset = {"ld_alpha": None, "use_weighting": False, "f_divergence_type": "reverse_kl"}
    return found | {k: v for k, v in shared.items() if k not in unset or v != unset[k]}


def _shared_by_dpo(row: PreferenceLoss, s: Settings) -> dict[str, object]:
    """Arguments of DPOConfig that all losses of a sum share."""
    found: dict[str, object] = {"use_weighting": s.policy_weights}
    if row.name == "sft":  # reads nothing else
        return found
    found |= {"beta": s.beta, "ld_alpha": s.tail_weight if s.needs_head else None}
    if "divergence" in row.reads:
        kind = _DIVERGENCES.get(s.divergence, "reverse_kl")
        found["f_divergence_type"] = kind
        if kind == "alpha_divergence":
            found["f_alpha_divergence_coef"] = s.divergence_alpha
    if "label_smoothing" in row.reads and row.name in _SMOOTHED:
        found["label_smoothing"] = s.label_smoothing
    if row.name == "discopop":
        found["discopop_tau"] = s.modulation
    return found


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
