"""Verdicts per second of the verifiers, beside math-verify: `python benchmarks/verifiers.py maths`.

Both sides get the ordinary mix: the cases of a file without its attacks, each gold with several
completions, in random order. Sixfold runs its reward in `workers` processes, as a run does.
math-verify runs in the main process, as its README shows; it gets answers in a box only.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sixfold.checks.environment import Environment
from sixfold.types import Group, Task, Trajectory
from sixfold_environments.text.cases import text_case

ORDINARY = 300
"""Characters of the longest completion of the mix: the peer hangs on the long ones."""

CASES = Path(__file__).parents[1] / "tests" / "data" / "verifier_math.json"


def ordinary(path: Path) -> list[tuple[Task, str, float]]:
    """(task, completion, expected reward) of the cases of a file that are no attacks."""
    read = json.loads(path.read_text())
    found = []
    for case in read if isinstance(read, list) else read["cases"]:
        checked = text_case({"kind": "math", **case})
        if checked is None or checked.reward != "math_boxed":
            continue
        attack = str(case.get("policy")).startswith("must return")
        if not attack and len(checked.completions[0]) <= ORDINARY:
            found.append((checked.task, checked.completions[0], case["expected_reward"]))
    return found


def sixfold_side(jobs: Sequence[tuple[Task, str, float]], workers: int) -> list[float | None]:
    """Verdicts of the reward `math_boxed`."""
    groups = [
        Group(task, [Trajectory.one_turn(task.id, 0, [1], [2], [-1.0], [0], "stop", text=text)])
        for task, text, _ in jobs
    ]
    with Environment(["math_boxed"], workers=workers, timeout_s=30.0) as environment:
        environment.score(groups[:workers])  # starts the processes
        start = time.perf_counter()
        environment.score(groups[workers:])
        _report("sixfold", len(groups) - workers, time.perf_counter() - start)
    return [group.rewards[0] for group in groups]


def peer_side(jobs: Sequence[tuple[Task, str, float]]) -> list[float | None]:
    """Verdicts of math-verify with its defaults."""
    from math_verify import parse, verify

    logging.disable()  # it logs whole completions
    verify(parse("$x+y=3$"), parse("$3=y+x$"))
    start = time.perf_counter()
    found: list[float | None] = [
        float(verify(parse(f"${task.answer}$"), parse(text))) for task, text, _ in jobs
    ]
    _report("math-verify", len(jobs), time.perf_counter() - start)
    return found


def _report(name: str, count: int, seconds: float) -> None:
    print(f"{name}: {count} verdicts in {seconds:.2f} s, {count / seconds:.0f} per second")


def main() -> None:
    """Measure the sides, and print how many verdicts are as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["maths"])
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--repeat", type=int, default=20, help="completions per case")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=["sixfold", "math-verify"],
                        default=["sixfold", "math-verify"])  # fmt: skip
    given = parser.parse_args()
    jobs = ordinary(given.cases) * given.repeat
    random.Random(0).shuffle(jobs)
    sides: dict[str, Callable[[], list[Any]]] = {
        "sixfold": lambda: sixfold_side(jobs, given.workers),
        "math-verify": lambda: peer_side(jobs),
    }
    for name in given.sides:
        verdicts = sides[name]()
        right = sum(made == expected for made, (_, _, expected) in zip(verdicts, jobs, strict=True))
        print(f"{name}: {right / len(jobs):.1%} of the verdicts as expected")


if __name__ == "__main__":
    main()
