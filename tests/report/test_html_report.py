"""The report: right figures, no way out for untrusted text, and never a crash for what is
missing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.report.html import write_report
from sixfold.report.marks import mark
from sixfold.report.notes import Notes
from sixfold.report.rollouts import read_rollouts, write_rollouts
from sixfold.report.run_record import read_run
from sixfold.report.samples import Sample, write_samples
from sixfold.report.token_view import trajectories
from sixfold.report.untrusted import visible
from sixfold.run.folder import RunFolder
from sixfold.types import Group, Reward, Task, Trajectory

PAYLOADS = [
    "<script>window.__pwned=1</script>",
    "<img src=x onerror=window.__pwned=1>",
    '"><svg onload=window.__pwned=1>',
    "' onmouseover='window.__pwned=1",
    '" style="background:url(https://evil.example/x)" data-x="',
    "</style><script>window.__pwned=1</script>",
    "</pre></td></table><iframe srcdoc='<script>window.__pwned=1</script>'></iframe>",
    "<!--<script>--><meta http-equiv=refresh content='0;url=javascript:window.__pwned=1'>",
    "<a href='javascript:window.__pwned=1'>x</a><base href=//evil.example>",
    "&lt;script&gt;window.__pwned=1&#60;/script&#62;",
    "</title></head><body onload=window.__pwned=1><link rel=stylesheet href=//evil.example>",
    (
        "\u202e<scr\x00ipt>\x1b]0;x\x07\ud800<math><mtext></form><form><mglyph><style></math><img"
        " src onerror=window.__pwned=1>"
    ),
]


class Page(HTMLParser):
    """Collects a page's tags with their attribute names, its attribute values and its text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shape: list[tuple[str, ...]] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shape.append((tag, *(name for name, _ in attrs)))
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_run(folder: Path, text: str) -> Path:
    """A run with `text` wherever somebody else's words can stand: completion, prompt,
    configuration, metric names, errors, data.
    """
    name = re.sub("[/\x00\ud800]", "", text)
    run = RunFolder(folder / name)
    run.rollouts.mkdir(parents=True)
    quoted = "".join(f"\\U{ord(c):08x}" for c in text.replace("\ud800", ""))
    comment = re.sub("[\x00-\x1f]", "", name)
    run.recipe.write_text(f'# {comment}\n[run]\nsteps = 2\nname = "{quoted}"\n', encoding="utf-8")
    lines = [
        {
            "step": s,
            text: 1.0,
            f"reward/part/{text}": 0.5 * s,
            "reward/ema": 0.5,
            "train/loss": text,
        }
        for s in (1, 2)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.summary.write_text(json.dumps({"error": text, text: text, "heldout_after": text}))
    run.environment.write_text(json.dumps({text: {"nested": [text]}}))
    write_samples(run.samples, [Sample(text, text, text, 0.0)], [Sample(text, text, text, None)])
    task = Task(id=text, prompt=text, answer=text, source=text)
    reward = Reward(None, {text: 1.0}, error=text)
    trajectory = Trajectory(
        text,
        0,
        [1, 2, 3],
        1,
        [False, True, False],
        [0.0, -1.0, 0.0],
        [-1, 0, -1],
        "stop",
        text,
        reward=reward,
    )
    write_rollouts(run.rollout_file(1), [Group(task, [trajectory])], [[0.5]], decode=lambda _: text)
    return run.path


@pytest.mark.parametrize("payload", PAYLOADS)
def test_untrusted_text_makes_no_element_and_no_attribute(tmp_path: Path, payload: str) -> None:
    """The page of a hostile run has, tag for tag and attribute for attribute, the shape of a
    harmless one.
    """
    harmless = "h" + "a" * (len(re.sub("[/\x00\ud800]", "", payload)) - 1)
    page = Page(write_report(hostile_run(tmp_path / "1", payload)).read_text(encoding="utf-8"))
    reference = Page(
        write_report(hostile_run(tmp_path / "2", harmless)).read_text(encoding="utf-8")
    )
    assert page.shape == reference.shape
    assert {shape[0] for shape in page.shape}.isdisjoint(
        {"script", "img", "iframe", "link", "base", "form", "object", "embed", "a href"}
    )
    assert not [
        value for value in page.values if value.startswith(("http", "//", "javascript:", "data:"))
    ]
    assert page.text.count(visible(payload)) >= 10, "the text is there to read"


def test_the_page_may_load_nothing(run_folder: Path) -> None:
    source = write_report(run_folder).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)
    assert policy and policy.group(1).split("; ")[:2] == [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
    ]
    assert source.index("Content-Security-Policy") < source.index("<style")
    assert (
        "<script" not in source
        and "url(" not in source
        and "http://" not in source
        and "https://" not in source
    )


def test_the_headline_is_the_runs(run_folder: Path) -> None:
    text = Page(write_report(run_folder).read_text(encoding="utf-8")).text
    figures = ("32.0% → 95.1%", "29.0% to 36.0% → 93.0% to 96.7%", "40of 40 planned", "96k")
    for expected in (*figures, '[algorithm]\nname = "grpo"', "2.13.0"):
        assert expected in text
    assert "missing or unreadable" not in text
    assert "step 8: loss 0.375" in text, "the SFT curve"


def test_the_page_begins_with_what_is_wrong_and_why_it_ended(run_folder: Path) -> None:
    summary = json.loads((run_folder / "summary.json").read_text())
    summary |= {
        "ended": "the reward reached run.target_reward = 0.9",
        "heldout_metric": "math >= 1",
        "steps": 40,
    }
    summary |= {
        "heldout_after_sft_version": 0,
        "heldout_after_version": 39,
        "preflight": {"warning": "the verifier pays for <b>nothing</b>"},
    }
    (run_folder / "summary.json").write_text(json.dumps(summary))
    notes = Notes(run_folder, lambda line: None)
    notes.add(0, "pre-flight: 40% of 64 rollouts solved")
    notes.add(31, "the policy collects partial credit", warning=True)
    for step in (33, 35, 38):
        notes.add(
            step, f"a step takes {step / 3:.3g} s, 1e-3 s at the start of the run", warning=True
        )
    with (run_folder / "notes.jsonl").open("a") as file:
        file.write('{"step": 40, "te')
    text = Page(write_report(run_folder).read_text(encoding="utf-8")).text
    top = text[: text.index("Curves", text.index("Look at this first"))]
    assert "before step 1 pre-flight: the verifier pays for <b>nothing</b>" in top
    assert "step 31 the policy collects partial credit" in top and "64 rollouts" not in top
    assert "step 33, then 2 more a step takes 11 s" in top and top.count("a step takes") == 1
    assert "ended: the reward reached run.target_reward = 0.9" in top
    assert "held-out tasks solved (math >= 1)" in top and "version 0 → version 39" in top


def test_the_chart_has_the_first_and_the_last_evaluation(run_folder: Path) -> None:
    record = read_run(run_folder)
    found = dict(record.evaluations())
    assert (found[0].value, found[0].low, found[40].value, found[40].high) == (
        0.32,
        0.29,
        0.951,
        0.967,
    )
    assert found[6].value == next(m["heldout/accuracy"] for m in record.metrics if m["step"] == 6)
    text = Page(write_report(run_folder).read_text(encoding="utf-8")).text
    assert "step 0: held-out 32.0%" in text and "step 40:" in text


def test_only_what_is_solved_has_the_full_dot(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    marks = {
        "good": {"value": 2.0, "solved": True},
        "part": {"value": 0.9, "solved": False},
        "bad": {"value": 0.0, "solved": False},
        "unknown": {"value": None, "solved": None},
    }
    old = {"good": {"value": 1.0}, "part": {"value": 0.5}}
    for name, reward in [*marks.items(), *old.items()]:
        page = trajectories(20, [{**record, "reward": reward}])
        assert set(re.findall(r'class="dot-(\w+)"', page)) == {name}
    assert [mark(r["value"], r.get("solved")) for r in marks.values()] == list(marks)
    partial = Sample("1+1=", "2", "20", 0.4, solved=False)
    write_samples(
        RunFolder(run_folder).samples, [partial], [Sample("1+1=", "2", "2", 0.6, solved=True)]
    )
    page = write_report(run_folder).read_text(encoding="utf-8")
    section = page[page.index('id="samples"') : page.index('id="trajectories"')]
    assert re.findall(r'class="dot-(\w+)"', section) == ["part", "good"]


def test_held_out_figures_fall_back_to_the_metrics(run_folder: Path) -> None:
    (run_folder / "summary.json").unlink()
    record = read_run(run_folder)
    first, last = record.heldout(0, "heldout_after_sft"), record.heldout(-1, "heldout_after")
    assert first and last
    assert (first.value, last.value) == (
        record.metrics[0]["heldout/accuracy"],
        record.metrics[-1]["heldout/accuracy"],
    )


def test_time_shares_are_of_the_whole_run(build_run: Callable[[str, int], Path]) -> None:
    run = build_run("timed", 0)
    steps = [
        {"step": s, "time/total_s": 10.0, "time/rollout_s": 6.0, "time/trainer_s": 3.0}
        for s in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "rollout60.0%12.0 s6.000 s" in text
    assert "trainer30.0%6.0 s3.000 s" in text
    assert "other10.0%2.0 s1.000 s" in text
    assert "Rollout takes 60% of a step, within the 60–75%" in text


def test_the_token_view_says_every_number(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    record |= {
        "tokens": [55, 56, 57],
        "pieces": ["7", "8\n", ""],
        "prompt_length": 1,
        "mask": [False, True, True],
    }
    record |= {
        "logp": [0.0, math.log(0.4), math.log(0.005)],
        "version": [-1, 4, 4],
        "advantage": [0.0, 0.25, -1.0],
    }
    page = trajectories(20, [record])
    assert '<span class="grey" data-t="id 55 · not sampled">7</span>' in page
    newline = '<span class="nl">⏎</span>\n'
    assert (
        '<span class="a1 p2" data-t="id 56 · log-prob -0.9163 (p 0.4) · version 4 · advantage'
        f' 0.25">8{newline}</span>' in page
    )
    assert (
        '<span class="n4 p4" data-t="id 57 · log-prob -5.2983 (p 0.005) · version 4 · advantage'
        ' -1">⟨57⟩</span>' in page
    )


def test_without_pieces_the_ids_are_shown(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    del record["pieces"]
    text = Page(trajectories(20, [record])).text
    assert " ".join(str(token) for token in record["tokens"][record["prompt_length"] :]) in text


def test_groups_with_spread_come_first(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    rewards = {
        "dull": (1.0, 1.0),
        "wide": (0.0, 1.0),
        "flat": (0.0, 0.0),
        "half": (0.5, 1.0),
        "broken": (None, None),
    }
    records = [
        {**record, "task_id": task, "reward": {"value": value}}
        for task, values in rewards.items()
        for value in values
    ]
    shown = re.findall(r"task (\w+) ", Page(trajectories(20, records)).text)
    assert shown == ["wide", "half", "dull"]


def test_a_run_of_no_steps_is_a_page(build_run: Callable[[str, int], Path]) -> None:
    run = build_run("fresh", 0)
    for name in ("summary.json", "samples.json", "environment.json", "metrics.jsonl"):
        (run / name).unlink()
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "0of 0 planned" in text and "5 missing or unreadable" in text
    for name in (
        "metrics.jsonl: missing",
        "samples.json: missing",
        "summary.json: missing",
        "rollouts/: no dumps",
    ):
        assert name in text


def test_a_run_of_nothing_but_nan_is_a_page(build_run: Callable[[str, int], Path]) -> None:
    run = build_run("diverged", 0)
    keys = (
        "reward/mean",
        "reward/ema",
        "train/loss",
        "train/kl",
        "mismatch/max_abs_logp",
        "heldout/accuracy",
        "heldout/low",
    )
    lines = [
        json.dumps({"step": s} | dict.fromkeys(keys, None if s == 1 else math.nan)) + "\n"
        for s in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "summary.json").unlink()
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "— → —" in text and "not measured" in text and "nan" not in text


BREAKABLE = [
    "recipe.toml",
    "metrics.jsonl",
    "sft.jsonl",
    "samples.json",
    "summary.json",
    "environment.json",
    "rollouts/step-000040.jsonl.zst",
]


@pytest.mark.mostly_slow(8)
@pytest.mark.parametrize("name", BREAKABLE)
@pytest.mark.parametrize(
    "rubbish", [b"\xff\xfe\x00\n", b"[[[\n", b'"text"\n', b"[" * 100_000 + b"\n"]
)
def test_a_broken_file_is_named_and_the_rest_shown(
    run_folder: Path, name: str, rubbish: bytes
) -> None:
    (run_folder / name).write_bytes(rubbish)
    text = Page(write_report(run_folder).read_text(encoding="utf-8")).text
    assert "1 missing or unreadable" in text and f"{name}: " in text
    assert "Curves" in text and "Trajectories" in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run at"):
        write_report(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="is not a run"):
        write_report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_writing_twice_gives_the_same_page(run_folder: Path) -> None:
    first = write_report(run_folder).read_bytes()
    assert write_report(run_folder).read_bytes() == first
