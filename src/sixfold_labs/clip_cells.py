"""PPO's clip in its six cells: sign of the advantage, and ratio below, inside or above the band."""

from __future__ import annotations

from typing import NamedTuple

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table

from .controls import SOURCE

CELLS = {
    f"{zone}-{sign}": (ratio, advantage)
    for zone, ratio in (("low", 0.7), ("inside", 1.0), ("high", 1.4))
    for sign, advantage in (("positive", 1.0), ("negative", -1.0))
}
"""Name of a cell to its ratio and advantage."""


class Cell(NamedTuple):
    """Both terms of the clipped objective, the smaller one, and whether the gradient flows."""

    ratio: float
    advantage: float
    unclipped: float
    clipped: float
    objective: float
    branch: str
    gradient: bool


def cell(ratio: float, advantage: float, eps: float) -> Cell:
    """min(r A, clip(r, 1 - eps, 1 + eps) A) at one point."""
    one = ratio * advantage
    two = min(max(ratio, 1 - eps), 1 + eps) * advantage
    branch = "equal" if one == two else "unclipped" if one < two else "clipped"
    return Cell(ratio, advantage, one, two, min(one, two), branch, branch != "clipped")


def gradient_flows(ratio: float, advantage: float, eps: float) -> bool:
    """True if the library's surrogate has a gradient there, by automatic differentiation."""
    import torch

    from sixfold.algorithm.losses import clipped_surrogate

    logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    a = torch.full_like(logp, advantage)
    loss = clipped_surrogate(logp, torch.zeros_like(a), a.detach(), eps, eps).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return bool(gradient != 0)


def clip_cells(*, chosen: str, eps: float, source: str) -> Outcome:
    """The clipped objective in the chosen cell, and a table of all six."""
    cells = {name: cell(*point, eps) for name, point in CELLS.items()}
    if source == "library":
        cells = {
            name: found._replace(gradient=gradient_flows(found.ratio, found.advantage, eps))
            for name, found in cells.items()
        }
    here = cells[chosen]
    return Outcome(
        values={
            **here._asdict(),
            "cells_without_gradient": sum(not c.gradient for c in cells.values()),
        },
        tables=(
            Table(
                "All cells",
                ("cell", *Cell._fields),
                [(name, *found) for name, found in cells.items()],
            ),
        ),
        figures=(
            Bars(
                "Terms",
                "ratio x advantage",
                ("unclipped", "clipped"),
                (here.unclipped, here.clipped),
            ),
        ),
    )


CLIP_CELLS = Lab(
    name="clip-cells",
    title="PPO's clip in six cells: two of them have no gradient",
    about=(
        "Objective min(r A, clip(r, 1 - eps, 1 + eps) A), arXiv:1707.06347 eq. 7, at r = 0.7, 1.0"
        " and 1.4 and A = +1 and -1. The gradient is lost where the clipped term is the smaller"
        " one: A > 0 above the band, and A < 0 below it. Outside the band with the other sign of A,"
        " the gradient moves the ratio back towards the band."
    ),
    controls=(
        Control("chosen", "high-positive", "zone of the ratio and sign of A", choices=tuple(CELLS)),
        Control("eps", 0.2, "half-width of the clip band", low=0.05, high=0.5, step=0.05),
        SOURCE,
    ),
    run=clip_cells,
    breaking=Breaking(
        breaks={"chosen": "high-positive"},
        safe={"chosen": "high-negative"},
        why="A good token that is already much more likely than at sampling gets no gradient.",
        failed=lambda outcome: outcome.values["gradient"] is False,
    ),
)

LABS = (CLIP_CELLS,)
