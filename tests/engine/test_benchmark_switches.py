"""`benchmarks/switches.py` at a small size: every switch changes what it says it changes, by its
counts, and nothing that comes out.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sixfold.kernels.cpu.engine_kernels import cpu_kernels
from sixfold.trainer.packing import microbatches

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Rows = dict[tuple[str, str], tuple[dict[str, float], dict[str, float]]]


@pytest.fixture(scope="module")
def switches() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("switches")
        patch.setattr(module, "THREADS", 1)
        yield module


@pytest.fixture(scope="module")
def rows(switches: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Counters of each form of each switch: with it and without. All in this process, which is
    quicker.
    """
    folder, threads = tmp_path_factory.mktemp("switches"), torch.get_num_threads()
    sides = {kind: importlib.import_module(f"switches_{kind}") for kind in ("engine", "trainer")}
    job = importlib.import_module("switches_job").Job

    def start(asked: Any, environment: dict[str, str]) -> list[dict[str, Any]]:
        asked.save(folder / "job.json")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            cpu_kernels.cache_clear()
            found = list(sides[asked.kind].lines(job.load(str(folder / "job.json"))))
        cpu_kernels.cache_clear()
        return found

    names = [
        name
        for name in switches.SWITCHES
        if name != "kernels" or any(map(shutil.which, ("cc", "gcc", "clang")))
    ]
    switches.main(
        [
            "--small",
            "--repeats",
            "1",
            "--only",
            ",".join(names),
            "--json",
            str(folder / "out.json"),
        ],
        start,
    )
    torch.set_num_threads(threads)
    found = json.loads((folder / "out.json").read_text())["rows"]
    assert {row["switch"] for row in found} == set(names)
    assert all(
        row["ratio"] == pytest.approx(row["without"]["median"] / row["with"]["median"])
        for row in found
    )
    return {
        (row["switch"], row["side"]): (row["with"]["counters"], row["without"]["counters"])
        for row in found
    }


def test_a_shared_beginning_is_computed_once(rows: Rows) -> None:
    """8 prompts, 62 tokens shared and 2 of their own, 4 at a time. Within a step the others share
    three blocks of 16, but may not copy half of one that the step writes; a step later radix finds
    all 62, where it does not come upon one of those again.
    """
    (radix, none), (hashed, _) = rows["prefix-cache", "radix"], rows["prefix-cache", "hash"]
    assert none["prefill_tokens"] == 8 * 64
    assert hashed["prefill_tokens"] == 64 + 3 * 16 + 4 * 16
    assert radix["prefill_tokens"] in [64 + 3 * 16 + n * 2 + (4 - n) * 16 for n in (1, 2, 3, 4)]
    for counters in (radix, hashed, none):
        assert counters["prefill_tokens"] + counters["reused_tokens"] == 8 * 4 * 64


def test_samples_share_their_prompt(rows: Rows) -> None:
    shared, apart = rows["shared-prompt", "on"]
    assert (shared["prefill_tokens"], apart["prefill_tokens"]) == (8 * 32, 4 * 8 * 32)
    assert (shared["peak_blocks"], apart["peak_blocks"]) == (
        8 * (2 + 4),
        8 * 4 * 3,
    )  # 32 + 12 tokens: two blocks of the prompt, and one


def test_a_static_batch_pads(rows: Rows) -> None:
    continuous, static = rows["continuous", "on"]
    assert continuous["padding_waste"] == 0 and static["padding_waste"] > 0.2
    assert continuous["steps"] < static["steps"]
    assert (
        continuous["decode_rows"] == static["decode_rows"] == static["tokens"] - 32
    )  # the first token of each comes from its prompt


def test_slabs_are_held_empty(rows: Rows) -> None:
    pages, slabs = rows["paging", "on"]
    assert slabs["empty_slots"] > 2 * pages["empty_slots"]
    assert pages["most_running"] > slabs["most_running"] == slabs["cache_tokens"] / 72
    assert abs(pages["cache_tokens"] - slabs["cache_tokens"]) < 72


def test_preemption_runs_more_at_once(rows: Rows) -> None:
    (recompute, none), (swap, _) = rows["preemption", "recompute"], rows["preemption", "swap"]
    assert none["preemptions"] == none["recomputed_tokens"] == none["brought_back_bytes"] == 0
    assert min(recompute["most_running"], swap["most_running"]) > none["most_running"]
    assert (
        recompute["preemptions"] > 0
        and recompute["recomputed_tokens"] > 0 == recompute["brought_back_bytes"]
    )
    assert swap["preemptions"] > 0 and swap["brought_back_bytes"] > 0 == swap["recomputed_tokens"]


def test_pieces_of_prompts_keep_the_wait_within_the_budget(rows: Rows) -> None:
    chunked, whole = rows["chunked-prefill", "on"]
    assert chunked["waited_tokens"] <= 32 < 96 <= whole["waited_tokens"]
    assert chunked["prefill_tokens"] == whole["prefill_tokens"]


def test_guesses_stand_where_text_repeats(rows: Rows) -> None:
    (on, off), (sampled, _) = rows["ngrams-greedy", "on"], rows["ngrams-sampled", "on"]
    assert off["tokens_per_pass"] == 1 and off["proposed_tokens"] == 0
    assert on["tokens_per_pass"] > 1.5 and on["target_passes"] * on[
        "tokens_per_pass"
    ] == pytest.approx(on["pass_tokens"])
    assert on["steps"] < off["steps"]
    assert sampled["tokens"] == 8 * 16


def test_int8_takes_a_byte_and_a_share_of_a_scale(rows: Rows) -> None:
    """Heads of 16 numbers: 16 bytes and a scale of 4, instead of 64."""
    int8, exact = rows["int8-kv", "on"]
    assert int8["kv_bytes"] / exact["kv_bytes"] == 20 / 64


def test_kernels_are_compiled_on_one_side_only(rows: Rows) -> None:
    if ("kernels", "C") in rows:
        compiled, torch_alone = rows["kernels", "C"]
        assert (compiled["kernels"], torch_alone["kernels"]) == (1, 0)
        assert compiled["equal"] >= 0.98


def test_packed_rows_have_no_padding_and_shared_prompts_fewer_positions(
    rows: Rows, switches: ModuleType
) -> None:
    trainer = importlib.import_module("switches_trainer")
    work = switches.SWITCHES["packing"].small().work
    batch = trainer.make_batch(work)
    texts = [int(n) for n in batch.lengths]
    parts = microbatches(batch, range(len(texts)), work.budget, False)
    packed, padded = rows["packing", "on"]
    assert packed["positions"] == sum(texts) and packed["padding"] == 0
    assert padded["positions"] == sum(len(part) * max(texts[b] for b in part) for part in parts)
    assert (
        padded["padding"] == pytest.approx(1 - sum(texts) / padded["positions"])
        and padded["padding"] > 0.2
    )
    shared, apart = rows["shared-prompt-trained", "on"]
    assert apart["positions"] == packed["positions"]
    assert (
        shared["positions"] == sum(texts) - (len(texts) - 2) * 16
    )  # two prompts of 16 tokens, in one micro-batch


def test_logits_exist_for_one_chunk(rows: Rows) -> None:
    chunked, whole = rows["chunked-logprobs", "on"]
    assert chunked["logits"] == 256 * 32768 < whole["logits"]
    assert {side for name, side in rows if name == "checkpointing"} == {"selective", "full"}


def test_a_side_is_a_process_with_an_environment_of_its_own(
    switches: ModuleType, tmp_path: Path
) -> None:
    switch = switches.SWITCHES["kernels"].small()
    asked = importlib.import_module("switches_job").Job
    job = asked(
        "kernels",
        "without",
        "engine",
        switches.model_of(switch, True, tmp_path),
        switch.work,
        {},
        1,
        1,
    )
    check, run, end = switches.launch(job, switch.without.environment)
    assert (
        check["counters"]["kernels"] == 0
        and check["counters"]["tokens"] == sum(map(len, check["tokens"])) == 8 * 4 * 16
    )
    assert 0 < run["pause"] <= run["seconds"] and end["peak_mb"] > 100


def engine_lines(tokens: list[int], logps: list[float]) -> list[dict[str, Any]]:
    return [{"event": "check", "tokens": [tokens], "logps": [logps]}]


@pytest.mark.parametrize(
    ("same", "tokens", "logps", "passes"),
    [
        ("bits", [5] * 100, [-1.0] * 100, True),
        ("bits", [5] * 99 + [6], [-1.0] * 100, False),
        ("bits", [5] * 100, [-1.0] * 99 + [-1.000001], False),
        ("rounding", [5] * 99 + [6], [-1.00001] * 99 + [-7.0], True),
        ("rounding", [5] * 99 + [6], [-1.001] * 100, False),
        ("rounding", [5] * 97 + [6] * 3, [-1.0] * 100, False),
        ("other", [6] * 100, [-7.0] * 100, True),
    ],
)
def test_other_tokens_end_the_benchmark(
    switches: ModuleType, same: str, tokens: list[int], logps: list[float], passes: bool
) -> None:
    switch = switches.Switch(
        "", switches.SWITCHES["kernels"].work, switches.Side(), {"on": switches.Side(same=same)}, {}
    )
    lines = {"without": engine_lines([5] * 100, [-1.0] * 100), "on": engine_lines(tokens, logps)}
    if passes:
        assert switches.check("it", switch, lines)["on"] == sum(t == 5 for t in tokens) / 100
    else:
        with pytest.raises(SystemExit, match="it: on and without differ"):
            switches.check("it", switch, lines)


@pytest.mark.parametrize("key", ["loss", "norm"])
def test_another_gradient_ends_the_benchmark(switches: ModuleType, key: str) -> None:
    line = {"event": "check", "loss": 2.0, "norm": 3.0}
    assert (
        switches.check(
            "it",
            switches.SWITCHES["packing"],
            {"without": [line], "on": [line | {key: line[key] * 1.00001}]},
        )
        == {}
    )
    with pytest.raises(SystemExit, match=f"on and without differ: {key}"):
        switches.check(
            "it",
            switches.SWITCHES["packing"],
            {"without": [line], "on": [line | {key: line[key] * 1.001}]},
        )


def test_nothing_is_timed_before_all_sides_agree(switches: ModuleType) -> None:
    """The first turn of every side is a check without repeats; one that differs ends it there. Then
    they take turns.
    """
    asked: list[tuple[str, int]] = []

    def start(job: Any, environment: dict[str, str]) -> list[dict[str, Any]]:
        asked.append((job.side, job.repeats))
        return [{"event": "check", "loss": 1.0, "norm": 1.0 + wrong * (job.side == "full")}]

    wrong, switch = 0, switches.SWITCHES["checkpointing"]
    switches.measure("it", switch, "", 3, 2, start)
    sides = ["without", "selective", "full"]
    assert asked == [(side, 0) for side in sides] + [(side, 3) for side in sides] * 2
    asked.clear()
    wrong = 1
    with pytest.raises(SystemExit):
        switches.measure("it", switch, "", 3, 2, start)
    assert asked == [(side, 0) for side in sides]


def test_waits_are_counted_between_two_tokens(switches: ModuleType) -> None:
    """Three steps of others' prompts and then a token; what is computed while nothing runs keeps
    nobody waiting.
    """
    waits = importlib.import_module("switches_engine").Waits()
    for running, tokens, decoded in (
        (False, 500, False),
        (True, 10, False),
        (True, 20, False),
        (True, 5, True),
        (True, 30, True),
        (False, 900, False),
    ):
        waits.step(running, tokens, tokens / 1000, decoded)
    assert waits.tokens == 35 and waits.seconds == pytest.approx(0.035)


def test_the_table_says_speed_ratio_and_why(switches: ModuleType) -> None:
    figures = {"median": 2.0, "counters": {"tokens": 4000, "padding_waste": 0.25, "steps": 1234}}
    row = {
        "switch": "continuous",
        "side": "on",
        "kind": "engine",
        "work": "w",
        "explain": {"padding_waste": "padding", "steps": "steps"},
    }
    made = switches.table_line(
        row | {"with": figures | {"median": 1.0}, "without": figures, "ratio": 2.0}
    )
    assert (
        made
        == "| continuous | 4,000 tokens/s | 2,000 tokens/s | 2.00 | padding 25.0% / 25.0%; steps"
        " 1,234 / 1,234 | w |"
    )


def test_what_is_done_is_kept_when_a_later_switch_fails(
    switches: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(job: Any, _: dict[str, str]) -> list[dict[str, Any]]:
        if job.switch == "ngrams-sampled":
            raise SystemExit("no more")
        counters = {"tokens": 100, "acceptance_rate": 0.5, "tokens_per_pass": 2.0}
        lines: list[dict[str, Any]] = [
            {"event": "check", "tokens": [[1]], "logps": [[0.0]], "counters": counters}
        ]
        runs = [
            {"event": "run", "seconds": 2.0 if job.side == "without" else 1.0, "pause": 0.0}
        ] * job.repeats
        return [*lines, *runs, {"event": "end", "peak_mb": 1}]

    with pytest.raises(SystemExit, match="no more"):
        switches.main(
            [
                "--small",
                "--only",
                "ngrams-greedy,ngrams-sampled",
                "--json",
                str(tmp_path / "out.json"),
            ],
            start,
        )
    assert [
        (row["switch"], row["ratio"])
        for row in json.loads((tmp_path / "out.json").read_text())["rows"]
    ] == [("ngrams-greedy", 2.0)]
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| switch |") and table[-1].startswith(
        "| ngrams-greedy | 100 tokens/s | 50 tokens/s | 2.00 |"
    )


def test_names_are_checked(switches: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        switches.parse(["--only", "packing,packed"])
    assert "unknown packed: choose from prefix-cache, " in capsys.readouterr().err
