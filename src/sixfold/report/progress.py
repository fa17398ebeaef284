"""Live display of a run.

It shows step, reward, held-out accuracy, speed, time by role, time left and mismatch. On a terminal
it is a panel that redraws in place. In a pipe or in CI it is one plain line every few seconds.
Model text reaches either only through `untrusted.visible`, as plain `Text`: no markup, no escape
sequences.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .marks import LEGEND, TICKS, mark
from .metric import Value
from .numbers import clock, percent, percent_range
from .samples import Sample, pair
from .schema import ROLES, role_seconds
from .untrusted import one_line, visible
from .verdicts import PREFIX

EVERY_S = 5.0
"""Seconds between plain lines if the console is not a terminal."""
_TIME_WIDTH = 48
"""Characters of the bar of times."""
_SPARKS = "▁▂▃▄▅▆▇█"
_SHADES = (
    "blue",
    "green",
    "bright_green",
    "cyan",
    "bright_cyan",
    "yellow",
    "magenta",
    "red",
    "white",
    "bright_blue",
    "bright_black",
)
_COLOURS = dict(zip((*ROLES, "other"), _SHADES, strict=True))


class Progress:
    """Context manager that shows one stage at a time. Leaving it restores the terminal.

    Args:
        console: where to draw. Default: standard error, so that piped output stays clean. The
            tables at the end then go to standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._results = console or Console(file=sys.stdout)
        # Rich's refresh thread draws the panel while `update` changes the state.
        self._lock = threading.Lock()
        self._begin("", 0)
        self._live = Live(
            console=self._console, get_renderable=self._panel, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_stage()
        self._live.stop()

    def stage(self, name: str, total: int, seconds: float = math.inf) -> None:
        """Begin a stage. The last state of the previous stage stays on the screen as a line.

        Args:
            name: name of the stage, such as SFT or RL.
            total: number of steps.
            seconds: time until the stage ends, even if steps are left.
        """
        self._close_stage()
        with self._lock:
            self._begin(name, total, seconds)

    def update(self, metrics: Mapping[str, Value]) -> None:
        """Show the metrics of a finished step, including `step`.

        Missing keys keep their last value.
        """
        with self._lock:
            self._latest.update(
                {
                    key: float(value)
                    for key, value in metrics.items()
                    if isinstance(value, float | int)
                }
            )
            if "heldout/accuracy" in metrics:
                self._heldout_step = self._latest.get("step", 0.0)
            for role, seconds in role_seconds(metrics).items():
                self._seconds[role] = self._seconds.get(role, 0.0) + seconds
            self._rewards.append(self._latest.get("reward/ema", math.nan))
            self._pace.append((time.monotonic(), self._latest.get("step", 0.0)))
        if not self._console.is_terminal:
            self._plain_line(always="heldout/accuracy" in metrics)

    def phase(self, name: str) -> None:
        """Show what the loop is doing now (`rollout`, `trainer`, ...) beside the stage."""
        self._phase = name

    @property
    def phase_name(self) -> str:
        """The current phase; empty before the first call of `phase`."""
        return self._phase

    def note(self, text: str) -> None:
        """Print a line that stays on the screen. `text` may contain model text."""
        self._print(Text(visible(text)))

    def before_after(self, stage: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Show figures before and after training as rows (name, before, after). Ends the stage.

        Args:
            stage: name of the stage, as in `stage`.
        """
        title = f"Before and after {stage}"
        table = Table("", "before", "after", title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        self._print_result(table)

    def samples(self, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """Show completions of the same prompts before and after training, with marks.

        Ends the stage.
        """
        table = Table(
            "prompt",
            "answer",
            "before",
            "after",
            title=f"Held-out samples: {LEGEND}",
            title_justify="left",
            show_lines=True,
        )
        for old, new in pair(before, after):
            known = new or old
            if known:
                table.add_row(
                    Text(one_line(known.prompt)),
                    Text(one_line(known.answer, 40)),
                    _completion(old),
                    _completion(new),
                )
        self._print_result(table)

    def _print_result(self, table: Table) -> None:
        self._close_stage()
        self._live.stop()  # it does not know what another console prints
        with suppress(BrokenPipeError):  # the run itself must end as planned
            self._results.print(table)

    def _begin(self, name: str, total: int, seconds: float = math.inf) -> None:
        self._stage, self._total, self._phase = name, total, ""
        self._ends_at = time.monotonic() + seconds
        self._latest: dict[str, float] = {}
        self._heldout_step = math.nan
        self._seconds: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=40)
        self._pace: deque[tuple[float, float]] = deque([(time.monotonic(), math.nan)], maxlen=21)
        self._printed_at, self._printed_step = -math.inf, math.nan

    def _close_stage(self) -> None:
        if self._latest and self._console.is_terminal:
            self._print(Text(self._line()))
        elif self._latest:
            self._plain_line(always=True)
        with self._lock:
            self._begin("", 0)

    def _plain_line(self, always: bool) -> None:
        step = self._latest.get("step", 0.0)
        last = step >= self._total
        due = time.monotonic() - self._printed_at >= EVERY_S
        if step != self._printed_step and (due or always or last):
            self._print(Text(self._line()))
            self._printed_at, self._printed_step = time.monotonic(), step

    def _print(self, renderable: RenderableType) -> None:
        self._console.print(renderable, soft_wrap=not self._console.is_terminal)

    def _line(self) -> str:
        parts = [f"{self._stage} {self._latest.get('step', 0.0):.0f}/{self._total}"]
        parts += [f"{name} {text}" for name, text in self._figures()]
        shares = sorted(self._shares().items(), key=lambda item: -item[1])[:3]
        if shares:
            parts.append("time: " + " ".join(f"{name} {percent(s, 0)}" for name, s in shares))
        parts.append(self._time_left())
        return visible("  ".join(part for part in parts if part))

    def _figures(self) -> list[tuple[str, str]]:
        """(name, value) of the known figures, in display order."""
        m = self._latest
        figures = []
        if "reward/ema" in m:
            now = f"  (this step {m['reward/mean']:.3f})" if "reward/mean" in m else ""
            figures.append(("reward", f"{m['reward/ema']:.3f}{now}"))
        elif "train/loss" in m:
            figures.append(("loss", f"{m['train/loss']:.4f}"))
        if "preference/accuracy" in m:
            margin = f"  (margin {m['preference/margin']:.3f})"
            figures.append(("pairs right", f"{percent(m['preference/accuracy'])}{margin}"))
        if faults := _faults(m):
            figures.append(("verdicts", faults))
        if "heldout/accuracy" in m:
            ends = (
                f" ({percent_range(m['heldout/low'], m['heldout/high'])})"
                if {"heldout/low", "heldout/high"} <= m.keys()
                else ""
            )
            # Later lines repeat the value until the next evaluation.
            when = "" if self._heldout_step == m.get("step") else f" at step {self._heldout_step:g}"
            figures.append(("held-out", f"{percent(m['heldout/accuracy'])}{ends}{when}"))
        speed = m.get("rollout/tok_s", m.get("train/tok_s"))
        if speed is not None:
            figures.append(("tokens/s", f"{speed:,.0f}".replace(",", " ")))
        if "sync/pause_s" in m:  # trainer and samplers can be busy at the same time
            figures.append(("busy", _busy(m)))
        if "mismatch/max_abs_logp" in m:
            figures.append(("mismatch", f"{m['mismatch/max_abs_logp']:.1e}"))
        if m.get("train/skipped_total"):
            figures.append(("skipped", f"{m['train/skipped_total']:.0f}"))
        return figures

    def _shares(self) -> dict[str, float]:
        total = sum(self._seconds.values())
        return {role: seconds / total for role, seconds in self._seconds.items() if total > 0}

    def _time_left(self) -> str:
        """Time left at the pace of the last 20 steps, or until the time limit of the stage.

        Empty if the pace is not known yet.
        """
        (start, first), (end, last) = (self._pace[0], self._pace[-1])
        if math.isnan(first):
            first = self._pace[1][1] - 1 if len(self._pace) > 1 else math.nan
        if not last > first or last >= self._total:
            return ""
        left = (self._total - last) * (end - start) / (last - first)
        return f"{clock(max(0.0, min(left, self._ends_at - end)))} left"

    def _panel(self) -> RenderableType:
        with self._lock:
            return self._draw()

    def _draw(self) -> RenderableType:
        if not self._stage:
            return Text()
        step = self._latest.get("step", 0.0)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column(ratio=1)
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right")
        head.add_row(
            Bar(max(self._total, 1), 0, step, color="cyan"),
            f"{step:.0f} of {self._total}  {self._time_left()}",
        )
        grid.add_row("step", head)
        for name, text in self._figures():
            spark = f"  {sparkline(self._rewards)}" if name == "reward" else ""
            grid.add_row(name, Text(text + spark))
        if self._seconds:
            grid.add_row("time", self._time_bar())
        doing = ": ".join(filter(None, (self._stage, self._phase)))
        return Panel(
            grid, title=Text(visible(f" {doing} ")), title_align="left", border_style="dim"
        )

    def _time_bar(self) -> RenderableType:
        bar, legend = Text(), Text()
        for role, share in self._shares().items():
            bar.append("█" * round(share * _TIME_WIDTH), style=_COLOURS[role])
            if share >= 0.005:
                legend.append("■ ", style=_COLOURS[role]).append(f"{role} {percent(share, 0)}  ")
        return Group(bar, legend)


def _faults(metrics: Mapping[str, float]) -> str:
    """The three most frequent verdicts besides "passed" and "wrong_answer", with their shares."""
    shares = {
        key.removeprefix(PREFIX): share
        for key, share in metrics.items()
        if key.startswith(PREFIX) and share
    }
    named = [(n, s) for n, s in shares.items() if n not in ("passed", "wrong_answer")]
    most = sorted(named, key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {percent(share, 0)}" for name, share in most)


def _busy(metrics: Mapping[str, float]) -> str:
    """Busy shares of the trainer, of the samplers on average, and of the environment."""
    samplers = [s for key, s in metrics.items() if key.startswith("busy/sampler_frac/")]
    shares = {
        "trainer": metrics.get("busy/trainer_frac"),
        "samplers": fmean(samplers) if samplers else None,
        "environment": metrics.get("busy/environment_frac"),
    }
    return ", ".join(f"{name} {percent(s, 0)}" for name, s in shares.items() if s is not None)


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """One block character per value, from the minimum (▁) to the maximum (█).

    A value that is not finite is a blank.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _SPARKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def _completion(sample: Sample | None) -> Text:
    if sample is None:
        return Text("—", style="dim")
    found = mark(sample.reward, sample.solved)
    return Text(
        f"{TICKS[found]} {one_line(sample.completion, 160)}",
        style="green" if found == "good" else "",
    )
