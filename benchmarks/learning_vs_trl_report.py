"""Results of `learning_vs_trl.py`, from its JSON file: the tables of README.md on the screen, and
the curves as an SVG beside the file.

    python benchmarks/learning_vs_trl_report.py benchmarks/learning_vs_trl.json

A curve is a list of [step, held-out accuracy], the base at step 0 first. Evidence is paired by
seed: one difference a seed, Student's t.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sixfold.evaluation.statistics import paired_test
from sixfold.report.numbers import percent
from sixfold.report.svg import HEIGHT, WIDTH, Line, line_chart

LABELS = {"sixfold": "Sixfold", "trl": "TRL"}
Curve = Sequence[tuple[int, float]]


def differences(seeds: Sequence[Mapping[str, Any]], side: str, other: str) -> dict[str, Any]:
    """`side` minus `other`, a share: at the last checkpoint, on the mean of all checkpoints, and at
    each of them by its step.
    """
    steps = [step for step, _ in seeds[0][other]["curve"] if step]

    def compare(figure: Callable[[Curve], float]) -> dict[str, Any]:
        a, b = (
            [figure([point for point in seed[name]["curve"] if point[0]]) for seed in seeds]
            for name in (side, other)
        )
        test = paired_test(a, b)
        mean, *ends = test.difference
        low, high = (
            end if math.isfinite(end) else None for end in ends
        )  # one seed has no interval
        return {"mean": mean, "low": low, "high": high, "p": test.p_value, "test": test.test}

    by_step = {str(step): compare(lambda curve, i=i: curve[i][1]) for i, step in enumerate(steps)}  # type: ignore[misc]
    return {
        "end": by_step[str(steps[-1])],
        "mean_of_checkpoints": compare(lambda c: statistics.mean(y for _, y in c)),
        "by_step": by_step,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Two tables: a row a seed, and a row a checkpoint."""
    rows = [
        (
            "| seed | base | Sixfold | TRL | difference, points | replay | its distance | seconds,"
            " Sixfold / TRL |"
        ),
        "|" + "---|" * 8,
    ]
    for seed in found["seeds"]:
        base, ours, theirs, replay = (
            seed[side]["curve"][i][1]
            for side, i in (("trl", 0), ("sixfold", -1), ("trl", -1), ("replay", -1))
        )
        distance = seed["replay"]["distance"][-1][1]
        cells = [
            f"{base:.1%}",
            f"{ours:.1%}",
            f"{theirs:.1%}",
            f"{100 * (ours - theirs):+.1f}",
            f"{replay:.1%}",
            f"{distance:.2%}",
        ]
        seconds = " / ".join(f"{seed[side]['seconds']:.0f}" for side in LABELS)
        rows.append(f"| {seed['seed']} | {' | '.join(cells)} | {seconds} |")
    rows += [
        "",
        (
            "| after step | Sixfold, mean | TRL, mean | Sixfold minus TRL, points | replay minus"
            " TRL, points |"
        ),
        "|" + "---|" * 5,
    ]
    own, replayed = found["difference"], found["replay_difference"]
    for step in own["by_step"]:
        means = [
            statistics.mean(dict(seed[side]["curve"])[int(step)] for seed in found["seeds"])
            for side in LABELS
        ]
        rows.append(
            f"| {step} | {means[0]:.1%} | {means[1]:.1%} | {points(own['by_step'][step])} |"
            f" {points(replayed['by_step'][step], 2)} |"
        )
    rows.append(
        f"| mean of these | | | {points(own['mean_of_checkpoints'])} |"
        f" {points(replayed['mean_of_checkpoints'], 2)} |"
    )
    return "\n".join(rows)


def points(test: Mapping[str, Any], digits: int = 1) -> str:
    """A difference in percentage points, with its 95 % interval where there is one."""
    interval = (
        ""
        if test["low"] is None
        else f" ({100 * test['low']:+.{digits}f} to {100 * test['high']:+.{digits}f})"
    )
    return f"{100 * test['mean']:+.{digits}f}{interval}"


def chart(found: Mapping[str, Any]) -> str:
    """Held-out accuracy over samples trained on, as a standalone SVG: a thin line a seed, a thick
    one for each side's mean.
    """
    samples = found["settings"]["prompts_per_step"] * found["settings"]["samples_per_prompt"]
    lines = []
    for colour, (side, label) in enumerate(LABELS.items()):
        curves = [
            [(step * samples, accuracy) for step, accuracy in seed[side]["curve"]]
            for seed in found["seeds"]
        ]
        lines += [
            Line(f"{label}, seed {seed['seed']}", curve, colour, thin=True)
            for seed, curve in zip(found["seeds"], curves, strict=True)
        ]
        mean = [
            (column[0][0], statistics.mean(value for _, value in column))
            for column in zip(*curves, strict=True)
        ]
        lines.append(Line(f"{label}, mean", mean, colour, dots=True))
    return standalone(str(line_chart(lines, percent, limits=(0.0, 1.0))))


def standalone(svg: str) -> str:
    """A chart of the report as a file of its own: with the namespace, a style and a key, and
    without what appears on hover.
    """
    style = (
        "text{font:10px"
        " system-ui,sans-serif;fill:#626b75}.grid{stroke:#e3e5e8}"
        ".line{fill:none;stroke:var(--k);stroke-width:2}"
        ".thin{stroke-width:1;opacity:.35}.dot{fill:var(--k)}.c0{--k:#0072b2}.c1{--k:#d55e00}.strip{display:none}"
    )
    keys = "".join(
        f'<g class="c{i}"><circle class="dot" cx="{50 + 56 * i}" cy="10" r="4"/><text'
        f' x="{58 + 56 * i}" y="13.5">{label}</text></g>'
        for i, label in enumerate(LABELS.values())
    )
    caption = (
        f'<text x="{WIDTH - 10}" y="13.5" text-anchor="end">held-out accuracy by training'
        " samples</text>"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' role="img"><style>{style}</style>{keys}{caption}'
    )
    return head + svg.partition(">")[2] + "\n"


def write(found: Mapping[str, Any], path: Path) -> None:
    """The JSON file, one line a key and one a seed, and the SVG beside it."""
    seeds = ",\n".join("  " + json.dumps(seed) for seed in found["seeds"])
    lines = [
        f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items() if key != "seeds"
    ]
    path.write_text("{\n" + ",\n".join([*lines, f' "seeds": [\n{seeds}\n ]']) + "\n}\n")
    path.with_suffix(".svg").write_text(chart(found))


def main(path: str) -> None:
    """Print the tables of the file at `path`, and draw its curves anew."""
    found = json.loads(Path(path).read_text())
    print(markdown(found))
    Path(path).with_suffix(".svg").write_text(chart(found))


if __name__ == "__main__":
    main(sys.argv[1])
