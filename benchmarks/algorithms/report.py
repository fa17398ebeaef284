"""README.md and plots/ from results.json: the claims, each with its figure and the 95 % interval
over seeds.

    python benchmarks/algorithms/report.py [--results FILE] [--out FOLDER]

Arms are compared seed by seed (same base, same tasks): Student's interval of the per-seed
differences, or of the per-seed log-ratios.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from sixfold.evaluation.statistics import Interval, mean_interval
from sixfold.report.numbers import number, percent
from sixfold.report.svg import HEIGHT, WIDTH, Line, line_chart

HERE = Path(__file__).parent
SIX = ("reinforce", "ppo", "grpo", "rloo", "dapo", "dr_grpo")
TARGET = 0.8
CLIPS = {"entropy": "0.05; higher: 0.2", "entropy-paper": "0.2; higher: 0.28"}
REMEDIES = ("clip-higher", "kl-cov", "bonus")
EARLY, LATE = 5, 10
"""Steps over which the beginning and the end of a run are averaged."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b07aa1", "#b8860b", "#56a4d8")
STYLE = (
    "svg{background:#fff} text{font:10px system-ui,sans-serif;fill:#626b75}"
    " .head{font-weight:600;font-size:12px;fill:#1d2126}.grid,.axis{stroke:#e3e5e8}"
    ".line{fill:none;stroke:var(--k);stroke-width:2;stroke-linejoin:round}"
    " .dot{fill:var(--k)} .band{fill:var(--k);opacity:.16} .hit{fill:none}.strip{visibility:hidden}"
    + "".join(f".c{i}{{--k:{colour}}}" for i, colour in enumerate(COLOURS))
)

Run = dict[str, Any]
Runs = dict[tuple[str, str], dict[int, Run]]
"""(study, arm) -> seed -> run."""


def by_arm(runs: Sequence[Run]) -> Runs:
    """The runs by study and arm, then by seed."""
    table: Runs = {}
    for run in sorted(runs, key=lambda r: r["seed"]):
        table.setdefault((run["study"], run["arm"]), {})[run["seed"]] = run
    return table


def gain(run: Run) -> float:
    """Held-out accuracy at the end less that of the base."""
    return run["heldout"][-1][1] - run["heldout"][0][1]


def samples_to(run: Run, target: float) -> float | None:
    """Samples drawn when held-out accuracy first reached the target, between two evaluations by a
    straight line; None: it never did.
    """
    for (before, low), (after, high) in pairwise(run["heldout"]):
        if high >= target:
            return (
                after
                if low >= high
                else before + (after - before) * max(0.0, target - low) / (high - low)
            )
    return None


def early(values: Sequence[float | None]) -> float:
    """Mean over the first steps that have a value."""
    return fmean([v for v in values if v is not None][:EARLY])


def late(values: Sequence[float | None]) -> float:
    """Mean over the last steps that have a value."""
    return fmean([v for v in values if v is not None][-LATE:])


def over_seeds(arm: dict[int, Run], measure: Callable[[Run], float]) -> Interval:
    """Mean over seeds with its interval."""
    return mean_interval([measure(run) for run in arm.values()])


def paired(a: dict[int, Run], b: dict[int, Run], measure: Callable[[Run], float]) -> Interval:
    """Mean over common seeds of the difference a - b, with its interval."""
    return mean_interval([measure(a[seed]) - measure(b[seed]) for seed in a if seed in b])


def ratio(a: dict[int, Run], b: dict[int, Run], measure: Callable[[Run], float]) -> Interval:
    """Geometric mean over common seeds of a / b, with its interval."""
    logs = mean_interval([math.log(measure(a[seed]) / measure(b[seed])) for seed in a if seed in b])
    return Interval(*(math.exp(v) if v < 700 else math.inf for v in logs))


def verdict(interval: Interval, null: float = 0.0) -> str:
    """Verdict of the interval on the claim that the figure is above `null`."""
    return (
        "yes"
        if interval.low > null
        else (
            "no: the opposite"
            if interval.high < null
            else "not shown: the interval holds it and its opposite"
        )
    )


def share(i: Interval) -> str:
    """Points of accuracy, signed."""
    return f"{100 * i.mean:+.1f} ({100 * i.low:+.1f} to {100 * i.high:+.1f})"


def plain(i: Interval) -> str:
    """A figure with its interval."""
    return f"{i.mean:.3g} ({i.low:.3g} to {i.high:.3g})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
        + "\n"
    )


def accuracy_section(runs: Runs) -> str:
    """Claim 1: all six raise held-out accuracy; and the rest of the zoo."""
    rows = []
    for (study, name), arm in runs.items():
        if study not in ("accuracy", "zoo"):
            continue
        first, last = (fmean(run["heldout"][i][1] for run in arm.values()) for i in (0, -1))
        needed = [samples_to(run, TARGET) for run in arm.values()]
        reached = [n for n in needed if n is not None]
        figure = over_seeds(arm, gain)
        samples = (
            f"{fmean(reached):.0f}"
            + ("" if len(reached) == len(needed) else f" ({len(reached)} of {len(needed)} seeds)")
            if reached
            else "never"
        )
        rows.append(
            [
                name,
                str(len(arm)),
                f"{first:.1%}",
                f"{last:.1%}",
                share(figure),
                verdict(figure),
                samples,
            ]
        )
    head = [
        "algorithm",
        "seeds",
        "SFT base",
        "after RL",
        "gain, points (95 %)",
        "above 0?",
        f"samples to {TARGET:.0%}",
    ]
    return table(head, rows)


def baseline_section(runs: Runs) -> str:
    """Claim 2: no baseline needs more samples. A run that never gets there counts as all it drew,
    which can only make REINFORCE look better as long as every run of GRPO does get there."""
    rows = []
    for study, reward in (("accuracy", "right: 1"), ("credit", "right: 1, and 1 for the form")):
        reinforce, grpo = runs[study, "reinforce"], runs[study, "grpo"]
        figure = ratio(reinforce, grpo, lambda run: samples_to(run, TARGET) or run["drawn"][-1])
        reached = [
            f"{sum(samples_to(run, TARGET) is not None for run in arm.values())} of {len(arm)}"
            for arm in (reinforce, grpo)
        ]
        final = paired(grpo, reinforce, lambda run: run["heldout"][-1][1])
        rows.append(
            [
                reward,
                " and ".join(reached),
                plain(figure),
                verdict(figure, 1.0),
                share(final),
                verdict(final),
            ]
        )
    head = [
        "reward",
        f"REINFORCE and GRPO that reach {TARGET:.0%}",
        "samples to it, REINFORCE over GRPO",
        "more?",
        "GRPO's lead at the end, points",
        "ahead?",
    ]
    return table(head, rows)


def entropy_section(runs: Runs) -> str:
    """Claim 3: the symmetric clip loses entropy faster."""
    rows = []
    for (study, name), arm in runs.items():
        if study in CLIPS:
            base = runs[study, "symmetric"]
            end, lead = (
                over_seeds(arm, lambda run: late(run["entropy"])),
                paired(arm, base, lambda run: late(run["entropy"])),
            )
            accuracy, clipped = (
                over_seeds(arm, lambda run: run["heldout"][-1][1]).mean,
                over_seeds(arm, lambda run: late(run["clipped"])).mean,
            )
            more = ["-", "-"] if arm is base else [plain(lead), verdict(lead)]
            rows.append(
                [f"{name} ({CLIPS[study]})", plain(end), *more, f"{clipped:.2%}", f"{accuracy:.1%}"]
            )
    head = [
        "arm (clip)",
        f"entropy, last {LATE} steps",
        "more than symmetric",
        "more?",
        "tokens whose clip is active",
        "held-out after",
    ]
    return table(head, rows)


def length_section(runs: Runs) -> str:
    """Claim 4: GRPO's wrong answers grow longer than Dr. GRPO's."""
    rows = []
    for study in ("accuracy", "length"):
        arms = {name: runs[study, name] for name in ("grpo", "dr_grpo")}

        def growth(run: Run) -> float:
            return late(run["wrong_length"]) - early(run["wrong_length"])

        def excess(run: Run) -> float:
            return late(run["wrong_length"]) - late(run["right_length"])

        more, gap = (
            paired(arms["grpo"], arms["dr_grpo"], growth),
            paired(arms["grpo"], arms["dr_grpo"], excess),
        )
        rate = "1e-4" if study == "accuracy" else "2e-4"
        rows.append(
            [
                rate,
                *(plain(over_seeds(arm, growth)) for arm in arms.values()),
                plain(more),
                verdict(more),
                plain(gap),
            ]
        )
    head = [
        "learning rate",
        "GRPO: growth, tokens",
        "Dr. GRPO: growth",
        "difference",
        "does GRPO's grow more?",
        "difference of (wrong - right) at the end",
    ]
    return table(head, rows)


def hole_section(runs: Runs) -> str:
    """Claim 5: without a KL the policy takes the hole."""
    rows = []
    for (study, name), arm in runs.items():
        if study == "hole":
            end = over_seeds(arm, lambda run: run["heldout"][-1][1])
            sampled = over_seeds(arm, lambda run: late(run["accuracy"]))
            rows.append(
                [
                    name,
                    share(over_seeds(arm, gain)),
                    f"{end.mean:.1%}",
                    f"{sampled.mean:.1%}",
                    plain(over_seeds(arm, lambda run: late(run["length"]))),
                ]
            )
    lead = paired(
        runs["hole", "beta 0.3"], runs["hole", "beta 0"], lambda run: run["heldout"][-1][1]
    )
    head = [
        "arm",
        "held-out, change from the base, points",
        "held-out after",
        "sampled, last steps",
        "length, last steps",
    ]
    return (
        table(head, rows)
        + f"\nWith beta = 0.3, held-out accuracy ends {share(lead)} points above that with 0. Does"
        f" the KL hold it? {verdict(lead)}.\n"
    )


def curve(
    arm: dict[int, Run],
    values: Callable[[Run], list[tuple[float, float | None]]],
    grid: Sequence[int],
    label: str,
    colour: int,
) -> Line:
    """Mean over seeds on the grid, with its interval as a band."""
    points: list[tuple[int, float | None]] = []
    band: list[tuple[int, float, float]] = []
    for x in grid:
        at = [v for run in arm.values() if (v := interpolate(values(run), x)) is not None]
        points.append((x, fmean(at) if at else None))
        if len(at) > 1:
            band.append((x, *mean_interval(at)[1:]))
    return Line(label, points, colour, band=band)


def interpolate(points: Sequence[tuple[float, float | None]], x: float) -> float | None:
    """The value at x by a straight line between neighbours; None outside, or where none is
    known.
    """
    known = [(a, v) for a, v in points if v is not None]
    for (a, v), (b, w) in pairwise(known):
        if a <= x <= b:
            return v + (w - v) * (x - a) / (b - a)
    return None


def smooth(column: str) -> Callable[[Run], list[tuple[float, float | None]]]:
    """A run's column by step, each value the mean of the five around it."""

    def values(run: Run) -> list[tuple[float, float | None]]:
        raw = run[column]
        near = [[v for v in raw[max(0, i - 2) : i + 3] if v is not None] for i in range(len(raw))]
        return [(i + 1, fmean(v) if v else None) for i, v in enumerate(near)]

    return values


def above(base: dict[int, Run]) -> Callable[[Run], list[tuple[float, float | None]]]:
    """A run's entropy, smoothed, less that of the base's run of the same seed."""

    def values(run: Run) -> list[tuple[float, float | None]]:
        pairs = zip(smooth("entropy")(run), smooth("entropy")(base[run["seed"]]), strict=True)
        return [(x, None if v is None or w is None else v - w) for (x, v), (_, w) in pairs]

    return values


def picture(title: str, lines: Sequence[Line], show: Callable[[float], str]) -> str:
    """A chart as a file of its own: with title, legend and style."""
    chart = str(line_chart(lines, show)).replace(
        "<svg ", f'<svg y="18" width="{WIDTH}" height="{HEIGHT}" ', 1
    )
    key = ""
    for i, line in enumerate(lines):
        x, y = 46 + 105 * (i % 3), HEIGHT + 34 + 14 * (i // 3)
        key += (
            f'<rect class="dot c{line.colour}" x="{x}" y="{y - 8}" width="8" height="8"/><text'
            f' x="{x + 12}" y="{y}">{line.label}</text>'
        )
    tall = HEIGHT + 44 + 14 * ((len(lines) - 1) // 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}"'
        f' width="{2 * WIDTH}"><style>{STYLE}</style><text class="head" x="8"'
        f' y="14">{title}</text>{chart}{key}</svg>\n'
    )


def plots(runs: Runs) -> dict[str, str]:
    """File name -> SVG. The x axis counts steps of as many samples as a step of the task draws."""
    per_step = runs["accuracy", "grpo"][min(runs["accuracy", "grpo"])]["drawn"][0]

    def heldout(run: Run) -> list[tuple[float, float | None]]:
        return [(drawn / per_step, accuracy) for drawn, accuracy in run["heldout"]]

    def grid(study: str, name: str, gap: int) -> range:
        return range(
            0 if gap > 1 else 1,
            min(len(run["drawn"]) for run in runs[study, name].values()) + 1,
            gap,
        )

    steps = range(0, grid("accuracy", "grpo", 5)[-1] + 1, 5)
    made = {
        "accuracy": (
            "held-out accuracy",
            [curve(runs["accuracy", n], heldout, steps, n, i) for i, n in enumerate(SIX)],
            percent,
        )
    }
    tens = range(0, steps[-1] + 1, 10)
    for name in (name for study, name in runs if study == "zoo"):
        lines = [
            curve(runs["zoo", name], heldout, tens, name, 0),
            curve(runs["accuracy", "grpo"], heldout, steps, "grpo", 2),
        ]
        made[name] = ("held-out accuracy", lines, percent)
    for file, study, arms, column, title in (
        (
            "length",
            "accuracy",
            ("grpo", "dr_grpo"),
            "wrong_length",
            "length of wrong answers, tokens",
        ),
        (
            "hole",
            "hole",
            ("beta 0", "beta 0.1", "beta 0.3"),
            "accuracy",
            "exact accuracy of the samples, verifier with a hole",
        ),
    ):
        lines = [
            curve(runs[study, n], smooth(column), grid(study, n, 1), n, i)
            for i, n in enumerate(arms)
        ]
        made[file] = (title, lines, percent if column == "accuracy" else number)
    lines = [
        curve(runs["entropy", n], above(runs["entropy", "symmetric"]), grid("entropy", n, 1), n, i)
        for i, n in enumerate(REMEDIES)
    ]
    made["entropy"] = ("entropy, nats a token above the symmetric clip's", lines, number)
    return {
        f"{name}.svg": picture(title, lines, show) for name, (title, lines, show) in made.items()
    }


def main() -> None:
    """Write the README and the plots."""
    parser = argparse.ArgumentParser(description="README.md and plots/ from results.json.")
    parser.add_argument(
        "--results",
        type=Path,
        default=HERE / "results.json",
        help="what run/start.py wrote (default %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder for both (default %(default)s)"
    )
    asked = parser.parse_args()
    results = json.loads(asked.results.read_text())
    runs = by_arm(results["runs"])
    sections = {
        "ACCURACY": accuracy_section(runs),
        "BASELINE": baseline_section(runs),
        "ENTROPY": entropy_section(runs),
        "LENGTH": length_section(runs),
        "HOLE": hole_section(runs),
        "DATE": results["date"],
        "COMMAND": results["command"],
        "VERSIONS": ", ".join(f"{name} {v}" for name, v in results["versions"].items()),
    }
    text = (HERE / "README.in.md").read_text()
    for name, section in sections.items():
        text = text.replace(f"<!--{name}-->", section)
    (asked.out / "README.md").write_text(text)
    (asked.out / "plots").mkdir(exist_ok=True)
    for name, svg in plots(runs).items():
        (asked.out / "plots" / name).write_text(svg)


if __name__ == "__main__":
    main()
