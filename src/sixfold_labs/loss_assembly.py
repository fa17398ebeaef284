"""The loss of a batch, token by token: ratio, clip, KL, mask and mean."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Table, Value

from .controls import SOURCE, seed_control


class Token(NamedTuple):
    """One token of the batch: text, log-probs at sampling and under the reference, A, mask."""

    trajectory: int
    text: str
    old: float
    ref: float
    advantage: float
    mask: bool


BATCH = (
    Token(0, "a", -0.40, -0.30, 0.71, True),
    Token(0, "b", -0.10, -0.20, 0.71, True),
    Token(0, "c", -1.20, -1.10, 0.71, True),
    Token(0, "#", 0.0, 0.0, 0.71, False),
    Token(1, "a", -0.50, -0.30, -0.71, True),
    Token(1, "1", -0.90, -0.80, -0.71, True),
    Token(1, "#", -0.20, -0.30, -0.71, True),
    Token(1, "P", 0.0, 0.0, -0.71, False),
)


class Terms(NamedTuple):
    """Terms of one token's loss."""

    ratio: float
    surrogate: float
    kl: float
    outside: bool
    active: bool


def terms(token: Token, new: float, eps: float) -> Terms:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A) with r = exp(new - old), and k3 of new and ref."""
    ratio = math.exp(new - token.old)
    clipped = min(max(ratio, 1 - eps), 1 + eps)
    objective = min(ratio * token.advantage, clipped * token.advantage)
    away = token.ref - new
    return Terms(
        ratio=ratio,
        surrogate=-objective,
        kl=math.exp(away) - away - 1,
        outside=ratio != clipped,
        active=objective != ratio * token.advantage,
    )


def library_terms(new: list[float], eps: float) -> list[Terms]:
    """The same terms of the whole batch from sixfold.algorithm."""
    import torch

    from sixfold.algorithm.kl import k3
    from sixfold.algorithm.losses import clipped_surrogate

    def row(values: list[float]) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    logp = row(new)
    found = clipped_surrogate(
        logp, row([t.old for t in BATCH]), row([t.advantage for t in BATCH]), eps, eps
    )
    kl = k3(logp, row([t.ref for t in BATCH]))
    columns = (found.ratio, found.loss, kl, found.outside, found.active)
    return [Terms(*cells) for cells in zip(*(c[0].tolist() for c in columns), strict=True)]


def loss_assembly(
    *,
    eps: float,
    beta: float,
    spread: float,
    show_old: bool,
    show_ref: bool,
    show_advantage: bool,
    seed: int,
    source: str,
) -> Outcome:
    """Clipped surrogate plus KL, averaged over the tokens of the mask."""
    draw = random.Random(seed)
    new = [token.old + draw.uniform(-spread, spread) * token.mask for token in BATCH]
    found = (
        library_terms(new, eps)
        if source == "library"
        else [terms(token, logp, eps) for token, logp in zip(BATCH, new, strict=True)]
    )
    scored = [term for token, term in zip(BATCH, found, strict=True) if token.mask]
    pg = sum(term.surrogate for term in scored) / len(scored)
    kl = sum(term.kl for term in scored) / len(scored)
    shown = {"old": show_old, "ref": show_ref, "A": show_advantage}
    rows = [_row(*cells) for cells in zip(BATCH, new, found, strict=True)]
    columns = [name for name in rows[0] if shown.get(name, True)]
    return Outcome(
        values={
            "pg_mean": pg,
            "beta_kl": beta * kl,
            "total": pg + beta * kl,
            "frac_clipped": sum(term.outside for term in scored) / len(scored),
            "frac_clip_active": sum(term.active for term in scored) / len(scored),
        },
        tables=(Table("Tokens", tuple(columns), [[row[c] for c in columns] for row in rows]),),
        lines=(
            "frac clipped counts ratios outside the band; frac clip active counts tokens whose"
            " gradient the clip removed.",
        ),
    )


def _row(token: Token, new: float, term: Terms) -> dict[str, Value]:
    return {
        "trajectory": token.trajectory,
        "token": token.text,
        "mask": int(token.mask),
        "old": token.old,
        "ref": token.ref,
        "new": new,
        "A": token.advantage,
        "ratio": term.ratio,
        "pg": term.surrogate if token.mask else 0.0,
        "kl": term.kl if token.mask else 0.0,
    }


LOSS_ASSEMBLY = Lab(
    name="loss-assembly",
    title="The loss of two trajectories, token by token: ratio, clip, KL, mask",
    about=(
        "Loss = mean over masked tokens of -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta k3, with"
        " r = exp(new - old) and k3 = exp(ref - new) - (ref - new) - 1. PPO, arXiv:1707.06347; k3:"
        " Schulman (2020). Two trajectories of four tokens, the last of each without a mask."
    ),
    controls=(
        Control("eps", 0.20, "half-width of the clip band", low=0.05, high=0.4, step=0.01),
        Control("beta", 0.05, "weight of the KL term", low=0.0, high=0.5, step=0.01),
        Control("spread", 0.25, "size of the change of log-probs", low=0.0, high=1.0, step=0.05),
        Control("show_old", True, "show the log-probs at sampling"),
        Control("show_ref", True, "show the log-probs under the reference"),
        Control("show_advantage", True, "show the advantages"),
        seed_control("the new log-probs"),
        SOURCE,
    ),
    run=loss_assembly,
    breaking=Breaking(
        breaks={"spread": 1.0},
        safe={"spread": 0.05},
        why="A policy far from the sampler leaves the band with 30 % of its tokens or more.",
        failed=lambda outcome: outcome.number("frac_clipped") >= 0.3,
    ),
)

LABS = (LOSS_ASSEMBLY,)
