"""The parts of `benchmarks/engine.py` that its figures stand on: FLOPs, lengths, what a side is
asked, and the check that ends the benchmark.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def qwen() -> ModuleType:
    return importlib.import_module("tiny_qwen")


@pytest.fixture(scope="module")
def job() -> ModuleType:
    return importlib.import_module("engine_job")


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_engine", BENCHMARKS / "engine.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    importlib.import_module("sys").modules["benchmark_engine"] = (
        module  # its dataclasses look their module up
    )
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(qwen: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    qwen.make_model(
        qwen.Shape(
            vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64
        ),
        path,
        10.0,
    )
    return path


def test_flops_of_a_forward_are_those_that_torch_counts(qwen: ModuleType, folder: Path) -> None:
    """torch counts the full square of attention, the formula its causal half."""
    shape = qwen.Shape(
        vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    n = 21
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(n)[None])
    unseen = 4 * shape.layers * shape.heads * shape.head_dim * (n * n - n * (n + 1) // 2)
    assert qwen.forward_flops(shape, 0, n, n) + unseen == counter.get_total_flops()
    assert qwen.forward_flops(shape, 0, 9, 2) + qwen.forward_flops(
        shape, 9, n, 3
    ) == qwen.forward_flops(shape, 0, n, 5)


@pytest.mark.parametrize("name", ["uniform", "long-tail", "shared-prefix", "multi-turn"])
def test_needed_flops_are_those_of_every_text_once(
    job: ModuleType, qwen: ModuleType, name: str
) -> None:
    """The slow version: every distinct beginning of a text that is fed forward costs its last
    token, and those that predict cost the head.
    """
    profile = replace(
        job.PROFILES[name],
        prompt=5,
        completion=7,
        mean=4 if job.PROFILES[name].mean else 0,
        shared=9 * bool(job.PROFILES[name].shared),
    )
    work = job.make_work(profile, 3, vocabulary=10**6)
    shape, rng = qwen.Shape(vocabulary=1360), random.Random(1)
    fed: set[tuple[int, ...]] = set()
    predictions: set[tuple[int, ...]] = set()
    drawn = 0
    for conversation in work:
        history: list[int] = []
        for turn, lengths in zip(conversation.turns, conversation.lengths, strict=True):
            prompt = history + turn
            for length in lengths:
                text = prompt + rng.choices(range(10**6), k=length)
                fed |= {tuple(text[:i]) for i in range(1, len(text))}
                predictions |= {tuple(text[:i]) for i in range(len(prompt), len(text))}
                drawn += length
                history = text
    slow = sum(
        qwen.forward_flops(shape, len(text) - 1, len(text), predictions=text in predictions)
        for text in fed
    )
    assert job.needed_flops(shape, work, profile.shared) == slow
    assert drawn == sum(n for c in work for lengths in c.lengths for n in lengths)


def test_every_side_reads_the_same_work(job: ModuleType, tmp_path: Path) -> None:
    """Lengths are drawn before anyone runs: a job file gives every side the same ones, and the
    arguments alone decide them.
    """
    profile = job.PROFILES["long-tail"]
    work = job.make_work(profile, 64, 1360)
    job.save_work(work, tmp_path / "work.json")
    for side in ("sixfold", "vllm"):
        assert (
            job.Job(side, "long-tail", "", str(tmp_path / "work.json"), 1, 2, {}).conversations()
            == work
        )
    assert job.make_work(profile, 64, 1360) == work
    lengths = [n for c in work for n in c.lengths[0]]
    assert len(lengths) == 512 and min(lengths) >= 1 and max(lengths) <= 512
    assert (
        abs(sum(lengths) / len(lengths) - 64) < 4 * 64 / 512**0.5
    )  # a geometric length deviates by about its mean


def test_prompts_are_what_the_profile_says(job: ModuleType) -> None:
    shared = job.make_work(job.PROFILES["shared-prefix"], 4, 1360)
    first, second = shared[0].turns[0], shared[1].turns[0]
    assert len(first) == 528 and first[:512] == second[:512] and first[512:] != second[512:]
    talk = job.make_work(job.PROFILES["multi-turn"], 4, 1360)
    assert [len(turn) for turn in talk[0].turns] == [32] * 4 and talk[0].lengths == [[64]] * 4


class Echo:
    """A side that answers with the numbers 1000, 1001, ... and keeps what it was asked."""

    def __init__(self, job: ModuleType) -> None:
        self.job = job
        self.asked: list[list[Any]] = []

    def begin(self, greedy: bool) -> None:
        self.asked.clear()

    def answer(self, asks: list[Any]) -> list[list[Any]]:
        self.asked.append(asks)
        return [
            [self.job.Answer(list(range(1000, 1000 + n)), None) for n in ask.lengths]
            for ask in asks
        ]


def test_a_turn_goes_on_from_all_that_was_said(job: ModuleType) -> None:
    work = [
        job.Conversation([[1, 2], [3]], [[2], [1]]),
        job.Conversation([[4], [5, 6]], [[1], [3]]),
    ]
    side = Echo(job)
    _, answers = job.play(side, work, greedy=False)
    assert [[ask.prompt for ask in turn] for turn in side.asked] == [
        [[1, 2], [4]],
        [[1, 2, 1000, 1001, 3], [4, 1000, 5, 6]],
    ]
    assert [[len(a.tokens) for (a,) in turn] for turn in answers] == [[2, 1], [1, 3]]
    assert len({ask.key for turn in side.asked for ask in turn}) == 4


def test_other_lengths_than_asked_end_the_benchmark(job: ModuleType, harness: ModuleType) -> None:
    work = [job.Conversation([[1]], [[2, 3]])]
    harness.check_lengths("cb", work, [{"event": "run", "lengths": [[[2, 3]]]}])
    with pytest.raises(SystemExit, match="cb gave other numbers"):
        harness.check_lengths("cb", work, [{"event": "run", "lengths": [[[3, 2]]]}])


def check(tokens: list[int], logps: list[float]) -> list[dict[str, Any]]:
    return [{"event": "check", "answers": [[[{"tokens": tokens, "logps": logps}]]]}]


def test_greedy_tokens_must_agree_in_float32_only(harness: ModuleType) -> None:
    ours = check([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
    other = check([5, 6, 9, 8], [-1.0, -2.00001, -9.0, -4.0])
    near = check([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.001])
    seen = harness.check_answers("uniform", {"sixfold": ours, "vllm-bf16": other})
    assert seen["vllm-bf16"]["equal_tokens"] == 0.75 and seen["vllm-bf16"][
        "logp_apart"
    ] == pytest.approx(1e-5)
    for side in (other, near):
        with pytest.raises(SystemExit, match="vllm and sixfold differ"):
            harness.check_answers("uniform", {"sixfold": ours, "vllm": side})


def test_ratios_take_the_faster_cache(harness: ModuleType) -> None:
    speeds = {"sixfold": 600.0, "hf-dynamic": 100.0, "hf-static": 200.0, "vllm": 400.0}
    rows = [
        {"profile": "uniform", "side": side, "tok_s_median": speed}
        for side, speed in speeds.items()
    ]
    assert (
        harness.ratios(rows).splitlines()[-1] == "| uniform | 3.00 x (hf-static) |  | 1.50 x |  |"
    )


@pytest.mark.parametrize("name", ["long-tail", "multi-turn"])
def test_our_side_and_generate_give_the_same_greedy_tokens(
    job: ModuleType, folder: Path, tmp_path: Path, name: str
) -> None:
    """Caches kept from turn to turn, rows cut into batches, requests split by length: all must
    leave the text alone.
    """
    profile = replace(
        job.PROFILES[name],
        prompt=6,
        completion=5,
        samples=min(2, job.PROFILES[name].samples),
        mean=3 * bool(job.PROFILES[name].mean),
    )
    work = job.make_work(profile, 3, 96)
    job.save_work(work, tmp_path / "work.json")
    asked = job.Job("", name, str(folder), str(tmp_path / "work.json"), 1, 1, {})
    ours, generate = (importlib.import_module(f"engine_{side}") for side in ("sixfold", "hf"))
    sides = [
        ours.Sixfold(asked, ours.SETTINGS),
        *(
            generate.Generate(asked, {"cache": c, "rows": r})
            for c, r in (("dynamic", 4), ("static", 2))
        ),
    ]
    found = [
        [job.play(side, work, greedy=True)[1] for _ in range(2)][-1] for side in sides
    ]  # nothing is left over from the first run
    wanted = [[c.lengths[turn] for c in work] for turn in range(profile.turns)]
    for answers in found:
        assert [
            [[len(a.tokens) for a in samples] for samples in turn] for turn in answers
        ] == wanted
        for mine, theirs in zip(
            (a for t in found[0] for s in t for a in s),
            (a for t in answers for s in t for a in s),
            strict=True,
        ):
            assert mine.tokens == theirs.tokens
            torch.testing.assert_close(
                torch.tensor(mine.logps), torch.tensor(theirs.logps), atol=2e-5, rtol=0
            )
