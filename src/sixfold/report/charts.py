"""The report's charts: the metrics and the title of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..types import DELTA_EDGES, LOG_RATIO_EDGES
from .numbers import number, percent
from .run_record import RunRecord, series
from .schema import ROLES, role_seconds
from .svg import Line, area_chart, histogram, line_chart


@dataclass(frozen=True)
class Figure:
    """A chart with its title and the lines of its legend."""

    title: str
    chart: Markup
    legend: Sequence[Line] = ()


@dataclass(frozen=True)
class RoleTime:
    """Time of one role over the whole run, in words; `weight` is its share as a CSS number."""

    name: str
    colour: int
    weight: str
    share: str
    total: str
    per_step: str


@dataclass(frozen=True)
class TimeView:
    """Time per role: table, remark and chart."""

    roles: Sequence[RoleTime]
    remark: str
    chart: Figure


def learning_figures(run: RunRecord) -> list[Figure]:
    """Held-out tasks with their intervals, the reward, held-out by source, parts of the reward.

    Without rewards, the loss stands in place of the reward. A single part is not drawn: it is the
    reward, up to its weight.
    """
    if not run.metrics:
        return []
    trained = "dynamic/solved_frac" if run.series("dynamic/solved_frac") else "reward/solved_frac"
    solved = [_line(run, trained, "training samples", 6, thin=True), _heldout_line(run)]
    solved += _diverged_line(run)
    figures = [
        _shares("Tasks solved, held-out with 95% intervals", solved),
        _lines(
            "Reward",
            _line(run, "reward/mean", "mean", 6, thin=True),
            _line(run, "reward/ema", "moving average"),
        )
        if run.series("reward/mean")
        else _lines(
            "Loss, nats per token",
            _line(run, "train/loss", "training", 6, thin=True),
            _line(run, "heldout/loss", "held-out"),
        ),
    ]
    sources = [
        Line(name, points, index % 9, dots=True)
        for index, (name, points) in enumerate(run.sources().items())
    ]
    keys = sorted({key for record in run.metrics for key in record if _is_part(key)})
    weights = run.part_weights()
    parts = [_line(run, key, _part_label(key, weights), i % 9) for i, key in enumerate(keys)]
    figures += [_shares("Held-out tasks solved, by source", sources)] if sources else []
    figures += [_lines("Parts of the reward", *parts)] if len(parts) > 1 else []
    return figures


def rollout_figures(run: RunRecord) -> list[Figure]:
    """Completion length, samples that do not train, speed."""
    if not run.metrics:
        return []
    return [
        _lines(
            "Completion length, tokens",
            _line(run, "rollout/length_mean", "mean"),
            _line(run, "rollout/length_max", "longest", 1, thin=True),
        ),
        _shares(
            "Samples without a gradient, or cut",
            [
                _line(run, "group/degenerate_frac", "groups with equal rewards"),
                _line(run, "rollout/truncated_frac", "length limit reached", 1),
                _line(run, "reward/error_frac", "check failed", 3),
            ],
            limits=None,
        ),
        _lines(
            "Tokens per second",
            _line(run, "rollout/tok_s", "rollout"),
            _line(run, "train/tok_s", "trainer", 1),
        ),
    ]


def curriculum_figures(run: RunRecord) -> list[Figure]:
    """Share of the tasks in each bucket, and number of tasks that are drawn. Empty without them."""
    if not run.series("data/easy_frac"):
        return []
    names = {"hard": 3, "new": 8, "train": 0, "easy": 2}
    shares = [_line(run, f"data/{name}_frac", name, colour) for name, colour in names.items()]
    return [
        _shares("Tasks by bucket", shares),
        _lines(
            "Tasks that are drawn",
            _line(run, "data/pool", "all"),
            _line(run, "data/spared", "of these easy or hard", 1),
        ),
    ]


def judge_figures(run: RunRecord) -> list[Figure]:
    """Cost and biases of the judging model. Empty for a run without one."""
    if not run.series("judge/calls"):
        return []
    return [
        _lines(
            "Judge: tokens per step",
            _line(run, "judge/prompt_tokens", "prompts"),
            _line(run, "judge/completion_tokens", "replies", 1),
        ),
        _single("Judge: cost of the run, US dollars", run, "judge/cost_total_usd", 2),
        _shares(
            "Judge: cached, refused, failed",
            [
                _line(run, "judge/cached_frac", "questions from the cache"),
                _line(run, "judge/refused_frac", "completions refused unasked", 1),
                _line(run, "judge/failed_frac", "questions without a verdict", 3),
            ],
            limits=None,
        ),
        _lines(
            "Judge: bias",
            _line(run, "judge/position_bias", "for the first position"),
            _line(run, "judge/length_corr", "correlation with length", 1),
        ),
    ]


def preference_figures(run: RunRecord) -> list[Figure]:
    """Order, margin and log-probs of better and worse completions. Empty without preferences."""
    if not (run.series("preference/margin") or run.series("preference/liked_reward")):
        return []
    pairs = [
        _pairs_in_order(run, "preference"),
        _lines(
            "Margin",
            _line(run, "preference/margin", "training", 6, thin=True),
            _line(run, "preference/heldout_margin", "held-out"),
        ),
        _lines(
            "Log-prob, nats per token",
            _line(run, "preference/logp_chosen", "better"),
            _line(run, "preference/logp_rejected", "worse", 1),
        ),
        _lines(
            "Gain on the reference, nats per token",
            _line(run, "preference/chosen_shift", "better"),
            _line(run, "preference/rejected_shift", "worse", 1),
        ),
        _single("Correlation of margin and length", run, "preference/length_corr", 3),
    ]
    single = _lines(
        "Implicit reward",
        _line(run, "preference/liked_reward", "liked"),
        _line(run, "preference/disliked_reward", "disliked", 1),
    )
    return pairs if run.series("preference/margin") else [single]


def reward_model_figures(run: RunRecord) -> list[Figure]:
    """How well a reward model orders pairs, and how sure it is. Empty for other runs."""
    if not run.series("reward_model/accuracy"):
        return []
    healthy = "reward_model/heldout_healthy_frac"
    figures = [
        _pairs_in_order(run, "reward_model"),
        Figure(
            "Score differences of the last evaluation, held-out pairs (healthy: 0.5 to 4)",
            _last_histogram(run, "reward_model/heldout_delta_hist", DELTA_EDGES, "pairs"),
        ),
        _shares("Pairs with a healthy difference", [_line(run, healthy, "held-out")]),
        _single("Calibration error, held-out", run, "reward_model/heldout_calibration_error", 2),
        _single(
            "Correlation of score and length, held-out",
            run,
            "reward_model/heldout_length_correlation",
            3,
        ),
    ]
    return figures if run.series(healthy) else figures[:1]


def numerics_figures(run: RunRecord) -> list[Figure]:
    """Mismatch of engine and trainer, policy ratio, KL, entropy, gradients and losses."""
    if not run.metrics:
        return []
    mismatch = [
        _line(run, "mismatch/max_abs_logp", "max"),
        _line(run, "mismatch/mean_abs_logp", "mean", 1),
    ]
    clip = [
        _line(run, "train/clipped_frac", "outside the clip range"),
        _line(run, "train/clip_active_frac", "gradient removed", 1),
    ]
    figures = [
        Figure(
            "Engine against trainer, |Δ log-prob|, nats", line_chart(mismatch, log=True), mismatch
        ),
        Figure(
            "Log-ratio of the last step, tokens",
            _last_histogram(run, "train/ratio_hist", LOG_RATIO_EDGES, "tokens"),
        ),
        _single("Mean importance ratio", run, "train/ratio_mean", 3),
        _shares("Clipped tokens", clip, limits=None),
        _single("KL to the reference, nats", run, "train/kl"),
        _single("Entropy, nats", run, "train/entropy", 2),
        _single("Gradient norm before clipping", run, "train/grad_norm", 3),
        _lines(
            "Loss",
            _line(run, "train/loss", "loss"),
            _line(run, "train/pg_loss", "policy gradient", 1),
        ),
        _single("Learning rate", run, "train/learning_rate", 6),
    ]
    if run.warm_up:
        loss = Line("loss", series(run.warm_up, "train/loss"), 4)
        figures.append(Figure("SFT warm-up, loss", line_chart([loss])))
    return figures


def time_view(run: RunRecord) -> TimeView | None:
    """Time by role: shares over the whole run, and seconds per step. None if not recorded."""
    per_step = [
        (step, role_seconds(record)) for step, record in zip(run.steps, run.metrics, strict=True)
    ]
    every = (*ROLES, "other")
    roles = [role for role in every if any(role in seconds for _, seconds in per_step)]
    totals = {role: sum(seconds.get(role, 0.0) for _, seconds in per_step) for role in roles}
    whole = sum(totals.values())
    if not whole:
        return None
    colours = {role: index for index, role in enumerate(every)}
    layers = [
        Line(role, [(step, seconds.get(role, 0.0)) for step, seconds in per_step], colours[role])
        for role in roles
    ]
    rows = [
        RoleTime(
            role,
            colours[role],
            f"{totals[role] / whole:.5f}",
            percent(totals[role] / whole),
            f"{totals[role]:.1f} s",
            f"{totals[role] / len(per_step):.3f} s",
        )
        for role in roles
    ]
    chart = Figure("Seconds per step", area_chart(layers), layers)
    return TimeView(rows, _rollout_remark(totals.get("rollout", 0.0) / whole), chart)


def busy_figures(run: RunRecord) -> list[Figure]:
    """Busy share of each role, speed of each sampler, and groups and ages of a run ahead."""
    if not run.series("busy/trainer_frac"):
        return []
    roles = {"trainer": 0, "environment": 1, "sync": 2}
    shares = [_line(run, f"busy/{role}_frac", role, colour) for role, colour in roles.items()]
    shares += _family(run, "busy/sampler_frac/")
    figures = [_shares("Busy share of each role, from sync to sync", shares)]
    if speeds := _family(run, "sampler/tok_s/"):
        figures.append(_lines("Tokens per second of each sampler", *speeds))
    if run.series("async/running"):
        running = _line(run, "async/running", "running")
        buffered = _line(run, "async/buffered", "finished, waiting", 1)
        figures.append(_lines("Groups ahead of the trainer", running, buffered))
    if ages := _age_layers(run):
        figures.append(Figure("Trained tokens by age in updates", area_chart(ages), ages))
    return figures


def _family(run: RunRecord, prefix: str) -> list[Line]:
    """One line for each sampler."""
    numbers = {key.removeprefix(prefix) for record in run.metrics for key in record}
    found = sorted(int(n) for n in numbers if n.isdecimal())
    return [_line(run, f"{prefix}{n}", f"sampler {n}", (3 + n) % 9, thin=n > 0) for n in found]


def _age_layers(run: RunRecord) -> list[Line]:
    """Histogram of every step: one layer per age, the freshest at the bottom."""
    found = {
        step: counts
        for step, record in zip(run.steps, run.metrics, strict=True)
        if isinstance(counts := record.get("async/age_hist"), list)
    }
    return [
        Line(f"{age}", [(s, c[age] if age < len(c) else 0.0) for s, c in found.items()], age % 9)
        for age in range(max(map(len, found.values()), default=0))
    ]


_PART = "reward/part/"


def _part_label(key: str, weights: Mapping[str, float]) -> str:
    name = key.removeprefix(_PART)
    return f"{name} (weight {number(weights[name])})" if name in weights else name


def _is_part(key: str) -> bool:
    return key.startswith(_PART)


def _line(run: RunRecord, key: str, label: str, colour: int = 0, thin: bool = False) -> Line:
    return Line(label, run.series(key), colour, thin)


def _pairs_in_order(run: RunRecord, section: str) -> Figure:
    training = _line(run, f"{section}/accuracy", "training", 6, thin=True)
    heldout = _line_with_band(run, f"{section}/heldout_accuracy", "held-out")
    return _shares("Pairs in the right order", [training, heldout])


def _line_with_band(run: RunRecord, key: str, label: str) -> Line:
    """A curve with the band between the metrics KEY_low and KEY_high."""
    low, high = dict(run.series(f"{key}_low")), dict(run.series(f"{key}_high"))
    ends = [(step, low.get(step), high.get(step)) for step, _ in run.series(key)]
    band = [(step, a, b) for step, a, b in ends if a is not None and b is not None]
    return Line(label, run.series(key), band=band)


def _lines(title: str, *lines: Line) -> Figure:
    return Figure(title, line_chart(lines), lines)


def _shares(
    title: str, lines: Sequence[Line], limits: tuple[float, float] | None = (0.0, 1.0)
) -> Figure:
    return Figure(title, line_chart(lines, percent, limits=limits), lines)


def _single(title: str, run: RunRecord, key: str, colour: int = 0) -> Figure:
    return Figure(title, line_chart([_line(run, key, title.split(",")[0].lower(), colour)]))


def _heldout_line(run: RunRecord) -> Line:
    """Curve of all evaluations, including the first (step 0) and the last."""
    found = run.evaluations()
    band = [(step, e.low, e.high) for step, e in found if e.low is not None and e.high is not None]
    return Line("held-out", [(step, e.value) for step, e in found], 2, dots=True, band=band)


def _diverged_line(run: RunRecord) -> list[Line]:
    """A dot at each evaluation that has fallen while the training reward rose. Empty without one.

    Evaluations in between are gaps.
    """
    marked = [record for record in run.metrics if "heldout/diverged" in record]
    values = [
        (
            int(record["step"]),
            record.get("heldout/accuracy") if record["heldout/diverged"] else None,
        )
        for record in marked
    ]
    shown = any(value is not None for _, value in values)
    return [Line("fell while the reward rose", values, 3, dots=True)] if shown else []


def _last_histogram(run: RunRecord, key: str, edges: Sequence[float], what: str) -> Markup:
    """The newest value of a list metric, which counts something in bins with these edges."""
    lists = [record[key] for record in run.metrics if isinstance(record.get(key), list)]
    counts = [float(n) if isinstance(n, float | int) else 0.0 for n in (lists or [[]])[-1]]
    return histogram(counts, edges, what)


def _rollout_remark(share: float) -> str:
    verdict = "within" if 0.60 <= share <= 0.75 else "outside"
    return (
        f"The rollout takes {percent(share, 0)} of a step, {verdict} the 60% to 75% that are usual"
        " for large models on GPUs."
    )
