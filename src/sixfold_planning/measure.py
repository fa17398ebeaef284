"""`sixfold plan --measure`: time this machine, and write the hardware file of `--gpus here`."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean as mean

import torch

from sixfold.files.durable import write_text_atomic
from sixfold.model.device import prepare_device, resolve_device
from sixfold.processes.child import Child, ChildError

from .calibration import Timing, fitted_table, repeated
from .hardware import Accelerator, Cluster
from .hardware_file import hardware_text, measured_path
from .measure_cases import (
    BASE,
    MODELS,
    PROMPT,
    SAMPLES,
    STEPS,
    WIDE,
    Case,
    EngineCases,
    EpisodeCase,
    ProbeModel,
    TrainerCases,
    copying,
    matmul,
    trained_groups,
)
from .measured_rates import DECODE_STEP, CallSize, CostTable, MeasuredRates, call_counts
from .page.layout import print_table
from .train_time import FORWARD, Pass, training_pass

BUDGET_S, LEAST, MOST = 25.0, 2, 8
"""No round starts after this many seconds; rounds at least and at most, after one to warm up."""

SEQUENCES = (1, 16, 64, 256, 1024)
"""Sequences of the timed decode steps."""

TOKENS = (64, 512, 2048)
"""Tokens of the timed prefills and micro-batches."""

SHORT, LONG, CACHED = 16, 960, 64
"""Prompts of the timed decode steps, and the number of sequences with long ones. Their keys and
values take as long to read as the rest of the step, and do not fit in the caches of a processor."""

CROWDED = (f"decode {WIDE.name} {CACHED}", f"train {WIDE.name} {TOKENS[-1]}")
"""Calls that are timed again while the other cores compute."""
BUSY, STARTS_S, MOST_BUSY = "sixfold_planning.measure_cases", 60.0, 8
"""Program of the processes that then train, the longest time until they do, in seconds, and their
largest number: each needs memory."""

DECODED = (MOST + 2) * STEPS + 2
"""Tokens by which a timed sequence may grow: enough for all rounds of one call of `repeated`."""

CPU_MATMUL = {"fp32": (512, 1024), "bf16": (256,)}
"""Widths of the timed matrix products. Without bfloat16 units, wider ones take a CPU seconds."""

GPU_MATMUL = {"fp32": (1024, 2048), "bf16": (2048, 4096, 8192)}

COPY = 1 << 25
"""Numbers of the timed copy, in float32."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Probe:
    """What is measured on.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of matrix products in training and sampling: what a run uses there by default.
    """

    device: str
    dtype: str

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.dtype == "fp32" else DTYPES[self.dtype]

    @property
    def widths(self) -> Mapping[str, Sequence[int]]:
        """Widths of the timed matrix products, by dtype."""
        return CPU_MATMUL if self.device == "cpu" else GPU_MATMUL


def measure(out: Path | None) -> int:
    """Measure this machine, print a table, and write a hardware file.

    Args:
        out: the file. None: where `--gpus here` looks for it.
    """
    device = resolve_device("auto", "plan --measure")
    probe = Probe(device, "bf16" if device.startswith("cuda") else "fp32")
    prepare_device(device, "bfloat16" if probe.autocast else "float32")
    print("Measuring. Let nothing else run meanwhile.", flush=True)
    with ExitStack() as ending:
        cases = cases_of(probe, ending)
        timings = repeated(cases, time.perf_counter, budget_s=BUDGET_S, least=LEAST, most=MOST)
        crowded = crowding(probe, cases, timings)
    cluster = Cluster(measured_device(probe, timings, crowded), 1)
    path = measured_path() if out is None else out.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, hardware_text(cluster))
    _print(probe, cluster.device, timings)
    use = "--gpus here" if out is None else f"--hardware {shlex.quote(str(path))}"
    print(f"beside busy cores, calls take {crowded:.2f} x as long")
    print(f"\nwrote {path}. Plan for this machine: sixfold plan demo {use}")
    return 0


def crowding(probe: Probe, cases: Mapping[str, Case], alone: Mapping[str, Timing]) -> float:
    """Time of calls while all other cores compute, divided by that while they rest. At least 1.

    With more than `MOST_BUSY` others, the loss grows in proportion. 1 if they do not start.

    Args:
        cases: the timed cases by name, those of `CROWDED` among them.
        alone: their timings while the others rest.
    """
    threads = torch.get_num_threads()
    idle = cores() - threads
    others = min(MOST_BUSY, idle // threads)
    if probe.device != "cpu" or others < 1:
        return 1.0
    decode, train = CROWDED
    # New sequences: those of the first timing have no room left to grow.
    engine = EngineCases(WIDE.build("cpu"), "cpu", probe.autocast)
    chosen = {decode: engine.decode(CACHED, SHORT, DECODED), train: cases[train]}
    try:
        beside = _beside(others, threads, chosen)
    except ChildError as error:
        print(f"not timed beside busy cores: {error}")
        return 1.0
    slower = mean(beside[name].median / alone[name].median for name in CROWDED)
    return 1 + max(0.0, slower - 1) * idle / (others * threads)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _beside(others: int, threads: int, cases: Mapping[str, Case]) -> dict[str, Timing]:
    """Timings of cases while so many other processes compute."""
    with ExitStack() as ending:
        started = []
        for _ in range(others):
            busy = Child(BUSY, environment={"OMP_NUM_THREADS": str(threads)})
            ending.callback(busy.close, grace_s=0.0)
            busy.send(b"")
            started.append(busy)
        for busy in started:
            busy.receive(STARTS_S)  # it computes from now on
        return repeated(cases, time.perf_counter, budget_s=BUDGET_S / 5, least=LEAST, most=MOST)


def cases_of(probe: Probe, ending: ExitStack) -> dict[str, Case]:
    """Everything that is timed, by name. `ending` closes what must be closed."""
    device, cases = probe.device, dict[str, Case]()
    for model in (model.on(device) for model in MODELS):
        engine = EngineCases(model.build(device), device, probe.autocast)
        for sequences in SEQUENCES:
            cases[f"decode {model.name} {sequences}"] = engine.decode(sequences, SHORT, DECODED)
        trainer = TrainerCases(model.build(device), device, probe.autocast)
        for tokens in TOKENS:
            cases[f"prefill {model.name} {tokens}"] = engine.prefill(tokens)
            cases[f"score {model.name} {tokens}"] = trainer.score(tokens)
            cases[f"train {model.name} {tokens}"] = trainer.train(tokens)
        if model.name == BASE.name:
            cases["episode"] = episode = EpisodeCase(model.build(device), probe.autocast)
            ending.callback(episode.close)
        if model.name == WIDE.name:
            cases["long"] = engine.decode(CACHED, LONG, DECODED)
            cases["shared"] = engine.decode(CACHED, LONG, DECODED, SAMPLES)
            cases["update"], cases["sync"] = trainer.update(), engine.sync()
            cases["file"] = engine.file()
    for name, dtype in DTYPES.items():
        widths = probe.widths[name]
        cases |= {f"matmul {name} {width}": matmul(device, dtype, width) for width in widths}
    cases["copy"], cases["link"] = copying(device, device, COPY), copying(device, "cpu", COPY)
    return cases


def measured_device(
    probe: Probe, timings: Mapping[str, Timing], crowded: float = 1.0
) -> Accelerator:
    """The machine that the timings describe. Peaks and bandwidths are medians.

    `crowded` is as in `MeasuredRates`.

    Nothing joins one device to others, so copies to the host stand for link and network.
    """
    peaks = {
        dtype: max(2 * n**3 / timings[f"matmul {dtype} {n}"].median for n in widths) / 1e12
        for dtype, widths in probe.widths.items()
    }
    link = 4 * COPY / timings["link"].median / 1e9
    if probe.device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    else:
        found = torch.cuda.get_device_properties(torch.device(probe.device))
        memory, name = found.total_memory, found.name
    return Accelerator(
        name=f"this machine ({name})",
        memory_gb=memory / 1e9,
        bandwidth_gb_s=2 * 4 * COPY / timings["copy"].median / 1e9,
        peak_tflops=peaks,
        link_gb_s=link,
        network_gb_s=link,
        measured=measured_rates(probe, timings, crowded),
    )


def measured_rates(probe: Probe, timings: Mapping[str, Timing], crowded: float) -> MeasuredRates:
    """Costs that the timed calls of all models give."""
    models = [model.on(probe.device) for model in MODELS]
    wide = WIDE.on(probe.device).architecture
    width = 2 if probe.dtype == "fp32" else 1
    short = timings[f"decode {WIDE.name} {CACHED}"].median
    longer = timings["long"].median - short
    read = (timings["shared"].median - short) / longer if longer > 0 else 1.0
    # The first of the samples reads a prompt at the full cost.
    shared_read = min(1.0, max(0.0, (SAMPLES * read - 1) / (SAMPLES - 1)))
    kv_byte_s = max(0.0, longer / (CACHED * (LONG - SHORT) * wide.kv_bytes() * width))
    # The prompts of all episodes are computed as those of the timed prefills.
    prompts = timings[f"prefill {BASE.name} {TOKENS[-1]}"].median * PROMPT / SAMPLES / TOKENS[-1]
    # Every round decodes further, after a warm-up round.
    short_context = SHORT + STEPS * (1 + len(timings["long"].seconds) / 2)
    update_s = timings["update"].median / (wide.params_b * 1e9)

    def decode(model: ProbeModel, sequences: int) -> Measured:
        arch, seconds = model.architecture, timings[f"decode {model.name} {sequences}"].median
        seconds -= kv_byte_s * sequences * short_context * arch.kv_bytes() * width
        return call_counts(arch, CallSize(sequences, sequences, 0), DECODE_STEP), seconds

    def learn(kind: str, work: Pass, model: ProbeModel, tokens: int) -> Measured:
        arch, seconds = model.architecture, timings[f"{kind} {model.name} {tokens}"].median
        if kind == "train":
            seconds -= update_s * arch.params_b * 1e9
        return call_counts(arch, trained_size(tokens), work), seconds

    def prefill(model: ProbeModel, tokens: int) -> Measured:
        size = CallSize(tokens, tokens / PROMPT, PROMPT / 2)
        seconds = timings[f"prefill {model.name} {tokens}"].median
        return call_counts(model.architecture, size, FORWARD), seconds

    training = training_pass("none", adapters=False)
    return MeasuredRates(
        dtype=probe.dtype,
        decode=_table(decode, models, SEQUENCES),
        prefill=_table(prefill, models, TOKENS),
        score=_table(partial(learn, "score", FORWARD), models, TOKENS),
        train=_table(partial(learn, "train", training), models, TOKENS),
        kv_byte_s=kv_byte_s,
        shared_read=shared_read,
        episode_s=max(0.0, timings["episode"].median - prompts),
        update_s=update_s,
        sync_byte_s=timings["sync"].median / (4e9 * wide.params_b),
        file_byte_s=timings["file"].median / (4e9 * wide.params_b),
        crowded=crowded,
        threads=torch.get_num_threads() if probe.device == "cpu" else 0,
        cores=cores(),
    )


Measured = tuple[tuple[float, ...], float]
"""Counts of a timed call, and its seconds."""


def _table(
    measured: Callable[[ProbeModel, int], Measured],
    models: Sequence[ProbeModel],
    sizes: Sequence[int],
) -> CostTable:
    return fitted_table({n: [measured(model, n) for model in models] for n in sizes})


def trained_size(tokens: int) -> CallSize:
    """Size of a micro-batch of the timed cases. Rounding makes it differ from `tokens`."""
    groups, length = trained_groups(tokens)
    prompted, sampled = groups * length, groups * length * SAMPLES
    attended = (prompted * length / 2 + sampled * 1.5 * length) / (prompted + sampled)
    return CallSize(prompted + sampled, sampled, attended)


def _print(probe: Probe, device: Accelerator, timings: Mapping[str, Timing]) -> None:
    rows = [
        (f"matmul {dtype}", rate * 1e3, "GFLOP/s", f"matmul {dtype} {probe.widths[dtype][-1]}")
        for dtype, rate in device.peak_tflops.items()
    ]
    rows += [
        ("memory, copy", device.bandwidth_gb_s, "GB/s", "copy"),
        ("memory, to the host", device.link_gb_s, "GB/s", "link"),
    ]
    name = WIDE.name
    for n in SEQUENCES:
        rows.append(_milliseconds(timings, f"decode step, {n} sequences", f"decode {name} {n}"))
    for kind in ("prefill", "score", "train"):
        for n in (TOKENS[0], TOKENS[-1]):
            rows.append(_milliseconds(timings, f"{kind}, {n:,} tokens", f"{kind} {name} {n}"))
    rows.append(_milliseconds(timings, "an episode of one token", "episode"))
    rows.append(_milliseconds(timings, "optimizer step", "update"))
    rows.append(_milliseconds(timings, "weight sync", "sync"))
    rows.append(_milliseconds(timings, "weights through a file", "file"))
    arch = WIDE.on(probe.device).architecture
    print_table(
        f"Medians of {len(timings['sync'].seconds)} rounds, {probe.dtype}. Model:"
        f" {arch.params_b * 1e3:.1f} million parameters, {arch.layers} layers, random",
        [("", ["", "spread"])]
        + [
            (label, [f"{value:,.2f} {unit}", f"{timings[key].spread:.0%}"])
            for label, value, unit, key in rows
        ],
    )


def _milliseconds(timings: Mapping[str, Timing], label: str, key: str) -> Row:
    return label, timings[key].median * 1e3, "ms", key


Row = tuple[str, float, str, str]
"""Label, value, unit, and the name of the timing."""
