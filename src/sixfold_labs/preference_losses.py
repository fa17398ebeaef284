"""Losses of DPO and IPO as functions of the margin."""

from __future__ import annotations

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome, Table, Value

from .preferences import PREFERENCE_SOURCE, library_loss, logistic, softplus

SCALES = ("margin", "log-ratio")
LOW, HIGH, POINTS = -4.0, 8.0, 121


def dpo_loss(h: float) -> float:
    """-log sigmoid(h) = log(1 + exp(-h)) of the margin h = beta * (log-ratio_w - log-ratio_l).

    Rafailov et al. (2023), equation 7.
    """
    return softplus(-h)


def ipo_minimum(beta: float, scale: str) -> float:
    """Margin h at which the IPO loss is 0: 1/(2 beta), or 1/2 on the published scale."""
    return 1 / (2 * beta) if scale == "margin" else 0.5


def ipo_loss(h: float, beta: float, scale: str) -> float:
    """IPO loss of the margin h = beta * d, with d = log-ratio_w - log-ratio_l.

    The published loss is (d - 1/(2 beta))^2: Azar et al. (2023), equation 17. Some texts plot
    (h - 1/(2 beta))^2 instead.

    Args:
        scale: "log-ratio" for the published loss, "margin" for the other one.
    """
    return ((h if scale == "margin" else h / beta) - 1 / (2 * beta)) ** 2


def preference_losses(*, beta: float, scale: str, source: str) -> Outcome:
    """Loss curves of DPO and IPO."""

    def dpo(h: float) -> float:
        return dpo_loss(h) if source == "formula" else logistic(source)(h)[0]

    def ipo(h: float) -> float:
        if source == "formula":
            return ipo_loss(h, beta, scale)
        return library_loss("ipo_sum", beta, h if scale == "margin" else h / beta)[0]

    grid = [LOW + i * (HIGH - LOW) / (POINTS - 1) for i in range(POINTS)]
    minimum = ipo_minimum(beta, scale)
    rows: list[list[Value]] = [[h, dpo(h), ipo(h)] for h in (-4.0, -2.0, 0.0, 1.0, 2.0, 4.0, 8.0)]
    return Outcome(
        values={
            "ipo_minimum_margin": minimum,
            "ipo_minimum_log_ratio": minimum / beta,
            "ipo_minimum_in_plot": LOW <= minimum <= HIGH,
            "dpo_loss_at_ipo_minimum": dpo(minimum),
        },
        tables=(Table("Losses", ("margin", "DPO", "IPO"), rows),),
        figures=(
            Chart(
                "Losses",
                "margin h",
                "loss, nats",
                (
                    Curve("DPO", [(h, dpo(h)) for h in grid]),
                    Curve("IPO", [(h, ipo(h)) for h in grid]),
                ),
            ),
        ),
        lines=("The DPO loss falls for every larger margin. The IPO loss has a minimum.",),
    )


PREFERENCE_LOSSES = Lab(
    name="preference-losses",
    title="DPO and IPO losses: DPO has no minimum, IPO has one",
    about=(
        "h = beta * d is the margin, d the difference of the two log-ratios. DPO: log(1 + e^-h)."
        " IPO: (d - 1/(2 beta))^2 as published (Azar et al. 2023, equation 17), with its minimum"
        " at h = 1/2; or (h - 1/(2 beta))^2, with its minimum at h = 1/(2 beta). The control"
        " `scale` chooses: log-ratio is the published loss."
    ),
    controls=(
        Control("beta", 0.5, "KL weight", low=0.05, high=2.0, step=0.05),
        Control("scale", "margin", "what IPO compares with 1/(2 beta)", choices=SCALES),
        PREFERENCE_SOURCE,
    ),
    run=preference_losses,
    breaking=Breaking(
        breaks={"beta": 0.05, "scale": "margin"},
        safe={"beta": 0.05, "scale": "log-ratio"},
        why="On the margin scale a small beta moves the target to h = 10.",
        failed=lambda outcome: outcome.values["ipo_minimum_in_plot"] is False,
    ),
)

LABS = (PREFERENCE_LOSSES,)
