"""The report: its figures, untrusted text, and runs with missing or damaged files."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from jinja2 import UndefinedError
from safetensors.numpy import save_file

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.dump import dump_recipe
from sixfold.recipe.toml import load_recipe
from sixfold.report.charts import reward_model_figures
from sixfold.report.html import write_report
from sixfold.report.loggers import JsonlLogger
from sixfold.report.marks import mark
from sixfold.report.metric import Value
from sixfold.report.notes import Notes
from sixfold.report.page import environment, render_page
from sixfold.report.rollouts import read_rollouts, write_rollouts
from sixfold.report.run_record import read_run
from sixfold.report.samples import Sample, write_samples
from sixfold.report.token_view import Record, trajectories
from sixfold.report.untrusted import visible
from sixfold.types import Group, Reward, Task, Trajectory, Turn

SOURCE = Path(__file__).parents[2] / "src" / "sixfold"

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
    """Collects a page's tags with their attribute names, its attribute values and its text.

    `text` is as written, `plain` has single spaces and no style sheet.
    """

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


def shown(run: Path) -> str:
    """Text of a run's report in reading order: no style sheet, one space between elements."""
    source = write_report(run).read_text(encoding="utf-8")
    source = re.sub(r"<style>.*?</style>", "", source, flags=re.S).replace("<", " <")
    return " ".join(Page(source).text.split())


def tokens(records: list[Record]) -> str:
    """HTML of the trajectories of one step."""
    return render_page("trajectories.html", steps=[trajectories(20, records)])


def hostile_run(folder: Path, text: str) -> Path:
    """A run with `text` in every place of untrusted text: completion, prompt, configuration, metric
    names, errors, data.
    """
    name = re.sub("[/\x00\ud800]", "", text)
    run = RunFolder(folder / name)
    run.rollouts.mkdir(parents=True)
    quoted = "".join(f"\\U{ord(c):08x}" for c in text.replace("\ud800", ""))
    comment = re.sub("[\x00-\x1f]", "", name)
    sections = f'[model]\npath = "{quoted}"\n[data]\nsource = "{quoted}"\n'
    sections += f'[algorithm]\nname = "{quoted}"\n[run]\nsteps = 2\nname = "{quoted}"\n'
    run.recipe.write_text(f"# {comment}\n{sections}", encoding="utf-8")
    for warning in (False, True):
        Notes(run.path, lambda line: None).add(1, text, warning=warning)
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
    decision = {"step": 1, "moved": [[text, text, text, 0.5]], "seen": {text: [1, 2]}}
    run.curriculum.write_text(json.dumps(decision) + "\n")
    summary = {"error": text, text: text, "heldout_after": text, "heldout_metric": text}
    summary |= {"ended": {"text": text}, "preflight": {"warning": text}}
    run.summary.write_text(json.dumps(summary))
    facts = {text: {"nested": [text]}, "started": text, "git_revision": text}
    run.environment.write_text(json.dumps(facts | {"packages": {"sixfold": text}}))
    write_samples(run.samples, [Sample(text, text, text, 0.0)], [Sample(text, text, text, None)])
    task = Task(id=text, prompt=text, answer=text, source=text)
    reward = Reward(None, {text: 1.0}, error=text)
    trajectory = Trajectory(
        text,
        0,
        [1, 2, 3],
        "pso",
        [0.0, -1.0, 0.0],
        [-1, 0, -1],
        (Turn(1, 2),),
        text=text,
        reward=reward,
        environment=text,
        events=({"kind": "tool_call", text: text},),
    )
    write_rollouts(run.rollout_file(1), [Group(task, [trajectory])], [[0.5]], decode=lambda _: text)
    return run.path


@pytest.mark.mostly_slow(2)
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
    assert page.text.count(visible(payload)) >= 20, "the text is there to read"


def test_only_the_drawing_code_makes_markup() -> None:
    """A template that marks text as safe, or code that makes `Markup`, would not escape it."""
    makers = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "Markup(" in path.read_text(encoding="utf-8")
    ]
    assert sorted(makers) == ["pages/page.py", "report/svg.py"]
    templates = sorted((SOURCE / "report" / "templates").glob("*.html"))
    assert len(templates) >= 4
    for path in templates:
        text = path.read_text(encoding="utf-8")
        # `~`, join and replace join text to Markup and skip the spelling out of hidden characters.
        unsafe = (
            r"\|\s*(safe|e|escape|forceescape|join|replace|format|xmlattr|tojson)\b|autoescape|~"
        )
        assert not re.search(unsafe, text), path.name
    assert environment().autoescape is True


def test_a_template_escapes_and_spells_out() -> None:
    page = environment().from_string('<a title="{{ x }}">{{ x }}</a>').render(x="\u202e\"<b>&'")
    text = "⟨U+202E⟩&#34;&lt;b&gt;&amp;&#39;"
    assert page == f'<a title="{text}">{text}</a>'


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="absent"):
        environment().from_string("{{ absent }}").render()


def test_the_templates_are_in_the_package() -> None:
    """Besides Python files, a wheel contains only the files that package-data names."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["sixfold"]
    packed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    assert {path for path in (SOURCE / "report" / "templates").iterdir()} <= packed
    assert any(line.startswith("jinja2") for line in project["project"]["dependencies"])


@pytest.mark.slow
def test_report_loads_no_external_resource(run_folder: Path) -> None:
    source = write_report(run_folder).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', source)
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


@pytest.mark.slow
def test_the_final_figures_come_first(run_folder: Path) -> None:
    (run_folder / "recipe.toml").write_text(dump_recipe(load_recipe("demo")), encoding="utf-8")
    summary = json.loads((run_folder / "summary.json").read_text())
    difference = {"mean": 0.631, "interval": [0.58, 0.672], "p_value": 1e-9, "test": "McNemar"}
    summary |= {
        "heldout_after_sft_version": 0,
        "heldout_after_version": 39,
        "heldout_metric": "math >= 1",
        "heldout_tasks": 512,
        "heldout_difference": difference,
        "ended": {"reason": "steps", "text": "40 of 40 steps", "step": 40},
        "sft_steps": 8,
        "seconds": 372.0,
    }
    (run_folder / "summary.json").write_text(json.dumps(summary))
    environment = {"started": "2026-11-22T19:38:36+00:00", "packages": {"sixfold": "0.1.0"}}
    environment |= {"git_revision": "dd0301ed2ccee70f8c77b7153053e84a37cbd9d4"}
    (run_folder / "environment.json").write_text(json.dumps(environment))
    text = shown(run_folder)
    top = text[: text.index("Tasks solved, held-out")]
    record = read_run(run_folder)
    first, last = (record.metrics[i]["reward/ema"] for i in (0, -1))
    speed = 40 * 2400 / sum(m["time/rollout_s"] for m in record.metrics)
    for expected in (
        "model from scratch (4 layers, hidden size 128)",
        "task arithmetic",
        "algorithm grpo",
        "started 2026-11-22 19:38",
        "ended 40 of 40 steps",
        "held-out tasks solved (math >= 1) 32.0% → 95.1%",
        "29.0% to 36.0% → 93.0% to 96.7%",
        "version 0 → version 39, 512 tasks",
        "+63.1 points 95% interval +58.0 to +67.2, p < 1e-6",
        f"reward {first:.3g} → {last:.3g}",
        "steps 40 of 300 planned, after 8 steps of SFT",
        "time 6:12",
        f"tokens per second {speed:.4g} 96k tokens sampled",
        "sixfold 0.1.0 revision dd0301ed2",
    ):
        assert expected in top, expected
    assert "missing or unreadable" not in text
    assert "step 8: loss 0.375" in text, "the SFT curve"


def test_the_sections_are_in_the_order_in_which_they_are_looked_for(run_folder: Path) -> None:
    source = write_report(run_folder).read_text(encoding="utf-8")
    order = ["tiles", "curves", "samples", "time", "rollouts", "numerics", "metrics", "settings"]
    places = [source.index(f'="{name}"') for name in order]
    assert places == sorted(places)
    curves = source[source.index('id="curves"') : source.index('id="samples"')]
    assert 'class="band' in curves, "the held-out curve has its intervals"


@pytest.mark.slow
def test_warnings_come_before_the_curves(run_folder: Path) -> None:
    summary = json.loads((run_folder / "summary.json").read_text())
    summary |= {"preflight": {"warning": "the answer '1' earns <b>0.25</b>"}}
    (run_folder / "summary.json").write_text(json.dumps(summary))
    notes = Notes(run_folder, lambda line: None)
    notes.add(0, "pre-flight: 40% of 64 rollouts solved")
    notes.add(31, "the policy collects partial credit", warning=True)
    for step in (33, 35, 38):
        notes.add(step, f"a step has grown from 1e-3 to {step / 3:.3g} s", warning=True)
    with (run_folder / "notes.jsonl").open("a") as file:
        file.write('{"step": 40, "te')
    text = shown(run_folder)
    top = text[text.index("Look at this first") : text.index("Tasks solved, held-out")]
    warned, other = top.split("Notes (1)")
    assert "before step 1 pre-flight: the answer '1' earns <b>0.25</b>" in warned
    assert "step 31 the policy collects partial credit" in warned
    assert "step 33, then 2 more a step has grown" in warned and warned.count("has grown") == 1
    assert "64 rollouts" in other and "64 rollouts" not in warned


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["the reward is high", {"text": "the reward is high"}])
def test_the_reason_for_the_end_is_shown(run_folder: Path, ended: object) -> None:
    (run_folder / "summary.json").write_text(json.dumps({"ended": ended}))
    assert "ended the reward is high" in shown(run_folder)
    (run_folder / "summary.json").unlink()
    assert "ended not finished: step 40 of 40" in shown(run_folder)


@pytest.mark.slow
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


def test_a_reward_model_has_its_figures(tmp_path: Path) -> None:
    heldout: dict[str, Value] = {
        "reward_model/heldout_accuracy": 0.75,
        "reward_model/heldout_accuracy_low": 0.5,
        "reward_model/heldout_accuracy_high": 0.9,
        "reward_model/heldout_delta_hist": [0, 3, 0, 1, 0, 0],
        "reward_model/heldout_healthy_frac": 1.0,
        "reward_model/heldout_calibration_error": 0.125,
        "reward_model/heldout_length_correlation": -0.25,
    }
    recipe = "[run]\nname = 'p'\n[algorithm]\nname = 'grpo'\n"  # a run records every section
    (tmp_path / "recipe.toml").write_text(recipe)
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        logger.log(step, {"reward_model/accuracy": 0.5, **heldout})
    logger.close()
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    shown_text = " ".join(page.text.split())
    for words in (
        "Pairs in the right order",
        "0.5 to 1: 3 pairs (75.0%)",
        "2 to 4: 1 pairs",
        "Calibration error, held-out",
        "Correlation of score and length, held-out",
    ):
        assert words in shown_text, words
    assert "grpo" not in page.text.partition("Pairs in")[0]
    figure = reward_model_figures(read_run(tmp_path))[0]
    assert figure.legend[1].band == [(1, 0.5, 0.9), (2, 0.5, 0.9)]


@pytest.mark.slow
def test_only_solved_samples_have_a_full_dot(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    marks = {
        "good": {"value": 2.0, "solved": True},
        "part": {"value": 0.9, "solved": False},
        "bad": {"value": 0.0, "solved": False},
        "unknown": {"value": None, "solved": None},
    }
    old = {"good": {"value": 1.0}, "part": {"value": 0.5}}
    for name, reward in [*marks.items(), *old.items()]:
        page = tokens([{**record, "reward": reward}])
        assert set(re.findall(r'class="dot-(\w+)"', page)) == {name}
    assert [mark(r["value"], r.get("solved")) for r in marks.values()] == list(marks)
    partial = Sample("1+1=", "2", "20", 0.4, solved=False)
    write_samples(
        RunFolder(run_folder).samples, [partial], [Sample("1+1=", "2", "2", 0.6, solved=True)]
    )
    page = write_report(run_folder).read_text(encoding="utf-8")
    section = page[page.index('id="samples"') : page.index('id="time"')]
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
    text = shown(run)
    for expected in (
        "rollout 60.0% 12.0 s 6.000 s",
        "trainer 30.0% 6.0 s 3.000 s",
        "other 10.0% 2.0 s 1.000 s",
    ):
        assert expected in text


def test_the_token_view_says_every_number(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    record |= {
        "tokens": [55, 56, 57],
        "pieces": ["7", "8\n", ""],
        "prompt_length": 1,
        "provenance": "pss",
    }
    record |= {
        "logp": [0.0, math.log(0.4), math.log(0.005)],
        "version": [-1, 4, 4],
        "advantage": [0.0, 0.25, -1.0],
    }
    page = tokens([record])
    spans = re.findall(
        r'<span class="([^"]*)" data-t="([^"]*)">(.*?)</span>(?=<span|</div>)', page, re.S
    )
    newline = '<span class="nl">⏎</span>\n'
    assert spans == [
        ("grey", "id 55 · not sampled: prompt", "7"),
        ("a1 p2", "id 56 · log-prob -0.9163 (p 0.4) · version 4 · advantage 0.25", f"8{newline}"),
        ("n4 p4", "id 57 · log-prob -5.2983 (p 0.005) · version 4 · advantage -1", "⟨57⟩"),
    ]


def test_without_pieces_the_ids_are_shown(run_folder: Path) -> None:
    record = read_rollouts(RunFolder(run_folder).rollout_file(20))[0]
    del record["pieces"]
    text = Page(tokens([record])).text
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
    shown = re.findall(r"task (\w+) ", Page(tokens(records)).text)
    assert shown == ["wide", "half", "dull"]


def test_a_run_of_no_steps_is_a_page(build_run: Callable[[str, int], Path]) -> None:
    run = build_run("fresh", 0)
    for name in ("summary.json", "samples.json", "environment.json", "metrics.jsonl"):
        (run / name).unlink()
    text = shown(run)
    assert "steps 0 of 0 planned" in text and "5 missing or unreadable" in text
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


@pytest.mark.mostly_nightly(8)
@pytest.mark.slow
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
    assert "Tasks solved, held-out" in text or name == "metrics.jsonl"
    assert (
        "hover or tap a token" in text and "Seconds per step" in text
    ) or name == "metrics.jsonl"


def test_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run at"):
        write_report(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="is not a run"):
        write_report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_writing_twice_gives_the_same_page(run_folder: Path) -> None:
    first = write_report(run_folder).read_bytes()
    assert write_report(run_folder).read_bytes() == first


LORA = '[model.lora]\nrank = 4\nalpha = 8.0\ntargets = ["q_proj", "<b>"]\nbase = "nf4"\n'


def save_adapter(run: Path) -> None:
    """Save 96 numbers as the adapter of step 3, beside an older one, on a base of 1,000."""
    for step, rows in ((1, 1), (3, 4)):
        folder = run / "checkpoints" / f"step-{step:06d}" / "model"
        folder.mkdir(parents=True)
        weights = {"a": np.zeros((rows, 16), np.float32), "b": np.zeros((8, rows), np.float32)}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere"}')
        (folder / "base.json").write_text('{"path": "../../../base"}')
    (run / "base").mkdir()
    save_file({"w": np.zeros((10, 100), np.float32)}, run / "base" / "model.safetensors")


def test_the_report_of_a_run_with_an_adapter_names_it(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (run_folder / "recipe.toml").read_text()
    assert "LoRA" not in shown(run_folder)
    (run_folder / "recipe.toml").write_text(recipe + LORA)
    words = "adapter LoRA, rank 4, alpha 8, on q_proj, <b>; frozen base in nf4"
    assert words in shown(run_folder)
    save_adapter(run_folder)
    size = "96 trained parameters (9.60% of 1,000 in the base)"
    assert f"{words}; {size}" in shown(run_folder)
    assert main(["report", str(run_folder)]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(run_folder / "report.html")
    assert said.err.startswith("adapter: LoRA, rank 4") and size in said.err
    newest = run_folder / "checkpoints" / "step-000003" / "model" / "adapter_model.safetensors"
    newest.write_bytes(b"\xff" * 20)
    assert "trained parameters" not in shown(run_folder) and words in shown(run_folder)
    (run_folder / "recipe.toml").write_text(recipe + '[model.lora]\nrank = "4"\nalpha = []\n')
    assert "LoRA" not in shown(run_folder).split("Recipe")[0]
