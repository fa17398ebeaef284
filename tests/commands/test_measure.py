"""`sixfold plan --measure`: costs from made-up timings, the models it times, and its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from sixfold.cli import main
from sixfold.processes.child import Child, ChildError
from sixfold_planning import measure
from sixfold_planning.calibration import Timing
from sixfold_planning.hardware_file import measured_hardware, read_hardware
from sixfold_planning.measure_cases import (
    BASE,
    DEEP,
    EPISODES,
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
    trained_groups,
)
from sixfold_planning.measured_rates import CallSize, CostTable, MeasuredRates

CPU = measure.Probe("cpu", "fp32")
SHORT = measure.SHORT + 2.5 * STEPS
"""Mean context of short sequences: a round to warm up, and half of three timed ones."""


def _table(sizes: tuple[int, ...], scale: float) -> CostTable:
    """Made-up costs, of the size of real ones, that grow with the tokens."""
    columns = zip(
        *((1e-4 * n, 2e-5 * n, 1e-11 * n, 3e-10 * n) for n in range(1, len(sizes) + 1)),
        strict=True,
    )
    return CostTable(sizes, *(tuple(scale * cost for cost in column) for column in columns))


RATES = MeasuredRates(
    dtype="fp32",
    decode=_table(measure.SEQUENCES, 1.0),
    prefill=_table(measure.TOKENS, 2.0),
    score=_table(measure.TOKENS, 3.0),
    train=_table(measure.TOKENS, 4.0),
    kv_byte_s=1e-10,
    shared_read=0.25,
    episode_s=4e-4,
    update_s=5e-9,
    sync_byte_s=2e-10,
    file_byte_s=3e-9,
    crowded=1.25,
    threads=1,
    cores=2,
)


def made_up_timings() -> Mapping[str, Timing]:
    """Timings of a machine with exactly these costs: 0.1 TFLOP/s, 20 GB/s, link 5 GB/s."""
    seconds = {
        "matmul fp32 512": 2 * 512**3 / 0.05e12,
        "matmul fp32 1024": 2 * 1024**3 / 0.1e12,
        "matmul bf16 256": 2 * 256**3 / 0.02e12,
        "copy": 8 * measure.COPY / 20e9,
        "link": 4 * measure.COPY / 5e9,
        "update": 5e-9 * WIDE.architecture.params_b * 1e9,
        "sync": 2e-10 * 4 * WIDE.architecture.params_b * 1e9,
        "file": 3e-9 * 4 * WIDE.architecture.params_b * 1e9,
        "long": RATES.decode_seconds(
            WIDE.architecture, measure.CACHED, SHORT + measure.LONG - measure.SHORT
        ),
    }
    for model in MODELS:
        arch = model.architecture
        for n in measure.SEQUENCES:
            seconds[f"decode {model.name} {n}"] = RATES.decode_seconds(arch, n, SHORT)
        for n in measure.TOKENS:
            prompts = CallSize(n, n / PROMPT, PROMPT / 2)
            size = measure.trained_size(n)
            trained = _at(RATES.train, n, size, model, 3) + 5e-9 * arch.params_b * 1e9
            seconds[f"prefill {model.name} {n}"] = _at(RATES.prefill, n, prompts, model, 1)
            seconds[f"score {model.name} {n}"] = _at(RATES.score, n, size, model, 1)
            seconds[f"train {model.name} {n}"] = trained
    # One of 8 samples reads 944 tokens at the full cost, 7 at a quarter of it.
    short = seconds["decode wide 64"]
    seconds["shared"] = short + (seconds["long"] - short) * (1 + 7 * 0.25) / 8
    # 8 tokens of a prompt per episode, of calls with 2,048 tokens.
    seconds["episode"] = 4e-4 + seconds[f"prefill {BASE.name} 2048"] * 8 / 2048
    return MappingProxyType({key: Timing((value,) * 3) for key, value in seconds.items()})


def _at(table: CostTable, tokens: int, size: CallSize, model: ProbeModel, passes: int) -> float:
    """Seconds of a call, written out: 2 FLOPs per weight, 4 per query number and position."""
    i, d, layers = table.tokens.index(tokens), model.hidden, model.layers
    queries = 32 * model.heads
    weights = layers * (d * 3 * queries + 9 * d * d)  # queries and output; keys and values: half
    flops = 2 * (weights * size.tokens + d * model.vocabulary * size.predicted) * passes
    flops += 4 * queries * layers * size.attended * size.tokens * (3.5 if passes == 3 else 1)
    numbers = layers * (4 * d + 2 * 2 * queries + 3 * 3 * d) * size.tokens
    numbers += model.vocabulary * size.predicted
    return (
        table.call_s[i]
        + passes * (layers * table.layer_s[i] + numbers * table.number_s[i])
        + flops * table.flop_s[i]
    )


def test_costs_are_recovered_from_timings() -> None:
    found = measure.measured_rates(CPU, made_up_timings(), 1.25)
    assert (found.threads, found.crowded) == (torch.get_num_threads(), 1.25)
    for name in ("kv_byte_s", "shared_read", "episode_s", "update_s", "sync_byte_s", "file_byte_s"):
        assert getattr(found, name) == pytest.approx(getattr(RATES, name))
    for name in ("decode", "prefill", "score", "train"):
        table, expected = getattr(found, name), getattr(RATES, name)
        assert table.tokens == expected.tokens
        for cost in ("call_s", "layer_s", "flop_s", "number_s"):
            assert getattr(table, cost) == pytest.approx(getattr(expected, cost), rel=1e-4), cost


@pytest.mark.parametrize(
    ("cores", "others", "crowded"), [(1, 0, 1.0), (2, 1, 1.3), (4, 3, 1.3), (17, 8, 1.6)]
)
def test_crowding_is_timed_while_all_other_cores_compute(
    monkeypatch: pytest.MonkeyPatch, cores: int, others: int, crowded: float
) -> None:
    """Decode steps take 1.2 times as long beside them, and updates 1.4 times.

    8 of 16 cores stand for all: what they cost is half.
    """
    running, most = 0, 0

    class Busy:
        def __init__(self, target: str, **_: object) -> None:
            nonlocal running
            assert target == measure.BUSY
            running += 1

        def send(self, body: bytes) -> None:
            assert body == b""

        def receive(self, timeout_s: float) -> None:
            assert running == others  # all start together

        def close(self, grace_s: float) -> None:
            nonlocal running
            running -= 1

    def repeated(cases: Mapping[str, Case], *_: object, **__: object) -> dict[str, Timing]:
        nonlocal most
        most = running
        for _ in range(measure.MOST + 1):
            assert cases[measure.CROWDED[0]]() == STEPS  # no sequence has ended
        factors = dict(zip(measure.CROWDED, (1.2, 1.4), strict=True))
        return {name: Timing((factors[name] * alone[name].median,)) for name in cases}

    alone = made_up_timings()
    monkeypatch.setattr(measure, "Child", Busy)
    monkeypatch.setattr(measure, "repeated", repeated)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = measure.crowding(CPU, dict.fromkeys(alone, lambda: 1), alone)
    assert found == pytest.approx(crowded)
    assert (most, running) == (others, 0)
    assert measure.measured_rates(CPU, alone, found).cores == cores


def test_without_busy_processes_the_rest_is_still_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(SimpleNamespace):
        def receive(self, timeout_s: float) -> None:
            raise ChildError("no answer in 60 s")

    busy = Silent(send=lambda body: None, close=lambda grace_s: None)
    alone = made_up_timings()
    monkeypatch.setattr(measure, "Child", lambda *_, **__: busy)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert measure.crowding(CPU, dict.fromkeys(alone, lambda: 1), alone) == 1.0
    assert "not timed beside busy cores: no answer" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_busy_process_computes_until_it_is_closed() -> None:
    busy = Child(measure.BUSY)
    try:
        busy.send(b"")
        busy.receive(measure.STARTS_S)
        assert busy.process.poll() is None
    finally:
        busy.close(grace_s=0.0)
    assert busy.process.poll() is not None


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_sizes_of_the_models_are_those_of_the_modules(model: ProbeModel) -> None:
    module, arch = model.build("cpu"), model.architecture
    matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    assert round(arch.params_b * 1e9) == matrices
    assert arch.mlp_width == pytest.approx(module.config.intermediate_size)
    assert arch.kv_heads == module.config.num_key_value_heads


def test_trained_tokens_are_about_as_many_as_asked() -> None:
    for tokens in measure.TOKENS:
        groups, length = trained_groups(tokens)
        assert measure.trained_size(tokens).tokens == groups * length * 9
        assert measure.trained_size(tokens).tokens == pytest.approx(tokens, rel=0.02)
        assert length <= PROMPT


def test_every_case_does_the_work_that_it_is_timed_for() -> None:
    model = DEEP.build("cpu")
    engine, trainer = EngineCases(model, "cpu", None), TrainerCases(model, "cpu", None)
    before = model.lm_head.weight.detach().clone()
    assert engine.decode(8, 4, 8)() == engine.decode(16, 4, 8, SAMPLES)() == STEPS
    with pytest.raises(RuntimeError, match="sequences have ended"):
        engine.decode(8, 4, STEPS)()
    episode = EpisodeCase(model, None)
    assert episode() == episode() == EPISODES
    episode.close()
    assert engine.prefill(2 * PROMPT)() == trainer.score(64)() == 1
    assert engine.sync()() == engine.file()() == 1
    assert model.lm_head.weight.equal(before)
    assert trainer.train(64)() == 1
    assert not model.lm_head.weight.equal(before)


def test_the_file_is_written_and_plans_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "cases_of", lambda probe, ending: {})
    monkeypatch.setattr(measure, "repeated", lambda *args, **kwargs: made_up_timings())
    monkeypatch.setattr(measure, "crowding", lambda *_: 1.25)
    monkeypatch.setattr(measure, "resolve_device", lambda asked, setting: "cpu")
    assert main(["plan", "demo", "--gpus", "here"]) == 2
    assert "sixfold plan --measure" in capsys.readouterr().err

    assert main(["plan", "--measure"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"matmul fp32 +100\.00 GFLOP/s +0%", text)
    assert re.search(r"memory, copy +20\.00 GB/s +0%", text)
    found = measured_hardware()
    assert found is not None and found.device.measured is not None
    assert found.device.peak("bf16") == pytest.approx(0.1e12)
    assert found.device.link_gb_s == pytest.approx(5)

    assert main(["plan", "demo", "--gpus", "here"]) == 0
    here = capsys.readouterr().out
    other = tmp_path / "other.toml"
    assert main(["plan", "--measure", "--out", str(other)]) == 0
    assert read_hardware(other).device.measured == found.device.measured
    capsys.readouterr()
    assert main(["plan", "demo", "--hardware", str(other)]) == 0
    assert capsys.readouterr().out == here
    assert "this machine" in here


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--out", "file.toml"], "add --measure"),
        (["--measure", "demo"], "leave out target"),
        (["--measure", "--gpus", "8xH100"], "leave out gpus"),
        (["--measure", "--run.steps", "3"], "leave out run.steps"),
        (["--measure", "--pass-rate", "0.2"], "leave out pass-rate"),
    ],
)
def test_options_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
