"""`sixfold show`: the trajectories that it chooses, and its output with and without colour."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sixfold.cli import main
from sixfold.files.folder import RunFolder
from sixfold.report.rollouts import read_rollouts, write_rollouts
from sixfold.report.trajectory import parts
from sixfold.types import Group, Reward, Task, Trajectory, Turn

ESCAPE = "\x1b["
PIECES = {1: "<|user|>", 2: "2+2", 3: "c(", 4: "2+2)", 5: "\n<tool>", 6: "=4", 7: "4", 8: "<end>"}
CALL = {"kind": "tool_call", "tool": "add", "arguments": {"a": 2}, "result": "4", "seconds": 0.25}


def episode(sample: int, reward: Reward | None, **fields: Any) -> Trajectory:
    """Prompt, a reply with a call, template, observation, a second reply."""
    given: dict[str, Any] = {
        "turns": (Turn(2, 4, 0.5, events=1), Turn(6, 8, finish_reason="length", seconds=0.5)),
        "events": ({"kind": "reset"}, CALL),
        "reward": reward,
        "environment": "sums",
    }
    return Trajectory(
        f"t{sample // 4}",
        sample,
        [1, 2, 3, 4, 5, 6, 7, 8],
        "ppsstoss",
        [0, 0, math.log(0.95), math.log(0.4), 0, 0, math.log(0.05), math.log(0.001)],
        [-1, -1, 3, 3, -1, -1, 3, 3],
        **(given | fields),
    )


def dump(run: Path, trajectories: list[Trajectory], step: int = 4, pieces: Any = None) -> None:
    known = pieces or PIECES
    groups = [Group(Task(t.task_id, "2+2", "4"), [t]) for t in trajectories]
    advantages = [[0.25 * t.sample - 0.5] for t in trajectories]
    write_rollouts(RunFolder(run).rollout_file(step), groups, advantages, known.__getitem__)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.toml").write_text("[log]\nrollouts_every = 2\n")
    (folder / "metrics.jsonl").write_text('{"step": 5}\n')
    rewards = [Reward(0.0), Reward(1.0, {"c": 1.0}), Reward(0.5), Reward(-1.0)]
    rows = [episode(k, reward) for k, reward in enumerate(rewards)]
    failed = Reward.failed("exit code 3")
    dump(folder, [*rows, episode(4, failed), episode(5, Reward(0.0), outcome="timeout")])
    dump(folder, [episode(0, Reward(0.0))], step=2)
    return folder


Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def shown(*arguments: object) -> str:
        assert main(["show", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return shown


def rows(text: str) -> list[str]:
    """The rows of the first trajectory."""
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("task "))
    return [re.sub(" +", " ", line).strip() for line in lines[first : lines.index("", first)]]


def test_a_trajectory_is_shown_by_origin_turn_and_call(run: Path, show: Show) -> None:
    assert rows(show(run, "--task", "t0", "--sample", "1")) == [
        "task t0 · sample 1",
        "reward 1.5 · advantage -0.25 · 4 tokens · length · 2 turns · 1 tool calls"
        " · environment sums · c 1",
        "reference answer 4",
        "prompt <|user|>2+2",
        "turn 1 c(2+2)",
        "reward +0.5 · 2 tokens · stop",
        'tool call add({"a": 2}) in 0.25 s',
        "template ⏎<tool>",
        "observation =4",
        "turn 2 4<end>",
        "2 tokens · length · 0.5 s",
        "reset",
    ]


def test_the_best_the_worst_and_one_that_failed_come_first(run: Path, show: Show) -> None:
    text = show(run)
    assert text.startswith(f"{run}, step 4: 6 trajectories of 2 tasks, mean reward 0.6,")
    named = [line for line in text.split("\n") if line.startswith("task ")]
    assert named == [
        "task t0 · sample 1 · best reward",
        "task t0 · sample 3 · worst reward",
        "task t1 · sample 5 · the environment failed",
    ]
    assert "3 more trajectories" in text
    assert len(re.findall("^task ", show(run, "--limit", "5"), re.M)) == 5
    assert re.findall(r"sample (\d)", show(run, "--task", "t1")) == ["4", "5"]
    assert "exit code 3" in show(run, "--sample", "4")


def test_only_trajectories_with_a_reason_are_shown(run: Path, show: Show) -> None:
    """No trajectory of the step failed, so there are two. --limit adds others without a reason."""
    values = (0.0, 1.0, 0.5, 0.25)
    dump(run, [episode(k, Reward(v)) for k, v in enumerate(values)], step=6)
    named = "task t0 · sample "
    best, worst = f"{named}1 · best reward", f"{named}0 · worst reward"
    for limit, expected in (
        ((), [best, worst]),
        (("--limit", 1), [best]),
        (("--limit", 3), [best, worst, f"{named}2"]),
    ):
        text = show(run, "--step", 6, *limit)
        assert [line for line in text.split("\n") if line.startswith("task ")] == expected
        assert f"{4 - len(expected)} more trajectories" in text
    dump(run, [episode(k, None) for k in range(2)], step=8)
    assert named + "0" in show(run, "--step", 8), "without rewards, the first one is shown"


@pytest.mark.parametrize(
    ("result", "pieces", "repeated"),
    [
        ("4", {6: "=4"}, False),
        ("4", {6: "It is 4."}, False),
        ("4", {6: "=404"}, True),
        ("4", {6: "=4.5 -0.4"}, True),
        ("  4\n", {6: "[4]"}, False),
        ("4", {6: "cut", 5: "4"}, True),
        ({"a": [4]}, {6: '{"a": [4]}'}, False),
        ("", {6: "="}, True),
    ],
)
def test_a_result_that_the_observation_shows_is_not_repeated(
    run: Path, show: Show, result: Any, pieces: dict[int, str], repeated: bool
) -> None:
    """It is repeated if the policy did not read it: the text was cut, or is in the template."""
    events = ({**CALL, "result": result},)
    dump(run, [episode(0, Reward(0.0), events=events)], step=6, pieces={**PIECES, **pieces})
    (call,) = [line for line in rows(show(run, "--step", "6")) if line.startswith("tool call")]
    assert call.startswith('tool call add({"a": 2}) in 0.25 s') and ("→" in call) == repeated


def test_colours_depend_on_the_terminal_and_the_environment(
    run: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = show(run)
    assert ESCAPE not in plain and plain == show(run, "--color", "never")
    assert not any(line != line.rstrip() for line in plain.split("\n"))
    coloured = show(run, "--color", "always")
    assert ESCAPE in coloured
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert ESCAPE in show(run)
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE not in show(run) and ESCAPE in show(run, "--color", "always")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert ESCAPE not in show(run)


def test_colour_tells_origin_and_probability(run: Path, show: Show) -> None:
    """Four origins and, of the sampled tokens, four levels: 0.95, 0.4, 0.05 and 0.001."""
    text = show(run, "--color", "always", "--sample", "1", "--task", "t0")
    styles = {
        piece: next(
            m[1]
            for m in re.finditer(r"\x1b\[([\d;]*)m([^\x1b]*)", text)
            if m[2].strip("⏎") == piece
        )
        for piece in ("<|user|>", "c(", "2+2)", "<tool>", "=4", "4", "<end>")
    }
    colours = {piece: re.sub(r"^(?:[34];)*", "", style) for piece, style in styles.items()}
    assert len(set(colours.values())) == len(colours)
    # Every second token of a part is underlined.
    assert [";4;" in f";{styles[p]};" for p in ("c(", "2+2)", "4", "<end>")] == [0, 1, 0, 1]


def test_tokens_are_listed_with_their_numbers(run: Path, show: Show) -> None:
    found = rows(show(run, "--tokens", "--task", "t0", "--sample", "1"))
    header = found.index("index origin id text log-prob p advantage version")
    assert found[header + 3 : header + 7] == [
        "2 turn 1 3 “c(” -0.0513 0.95 -0.25 3",
        "3 turn 1 4 “2+2)” -0.9163 0.4 -0.25 3",
        "4 template 5 “⏎<tool>”",
        "5 observation 6 “=4”",
    ]


def test_json_has_the_records_of_the_dump(run: Path, show: Show) -> None:
    shown = json.loads(show(run, "--json", "--step", "4", "--limit", "1"))
    assert (shown["step"], shown["recorded_steps"]) == (4, [2, 4])
    (record,) = shown["trajectories"]
    assert record.pop("shown_because") == "best reward"
    assert record == read_rollouts(RunFolder(run).rollout_file(4))[1]
    assert show(run, "--json").isascii()


HOSTILE = "a\x1b[31mb\x07\r\u202ec\u200bd\ud800"


def test_control_characters_of_a_dump_do_not_reach_the_terminal(run: Path, show: Show) -> None:
    event = {"kind": HOSTILE, "tool": HOSTILE}
    call = {**CALL, "tool": HOSTILE, "arguments": HOSTILE, "result": HOSTILE}
    bad = episode(
        0, Reward(0.0, {HOSTILE: 1.0}, error=HOSTILE), events=(event, call), environment=HOSTILE
    )
    bad.task_id = HOSTILE
    dump(run, [bad], step=6, pieces=dict.fromkeys(PIECES, HOSTILE))
    for arguments in ((), ("--tokens",), ("--color", "always")):
        text = re.sub(r"\x1b\[[\d;]*m(?!b)", "", show(run, "--step", "6", *arguments))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u200b\ud800-\udfff]", text)
        assert "a␛[31mb␇␍⟨U+202E⟩c⟨U+200B⟩d⟨U+D800⟩" in text
    assert main(["show", str(run), "--step", "6", "--task", "none"]) == 2


@pytest.mark.parametrize("width", [40, 61])
def test_long_and_wide_texts_are_wrapped_at_the_width(
    run: Path, show: Show, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    dump(run, [episode(0, Reward(0.0))], step=6, pieces=dict.fromkeys(PIECES, "漢字かな" * 20))
    lines = show(run, "--step", "6").split("\n")
    wide = [line for line in lines if "漢" in line or "か" in line]
    cells = [sum(2 if ord(c) > 0x2E80 else 1 for c in line) for line in wide]
    assert len(wide) > 20 and width - 2 <= max(cells) <= width
    assert "".join(re.findall("[漢字かな]", "".join(wide))) == "漢字かな" * 20 * 8


def test_a_terminal_that_is_not_utf_8_gets_escapes(run: Path) -> None:
    command = [sys.executable, "-m", "sixfold", "show", str(run)]
    done = subprocess.run(
        command, capture_output=True, env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": "src"}
    )
    assert done.returncode == 0, done.stderr
    assert rb"\xb7 sample 1" in done.stdout and b"torch" not in done.stderr


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_the_error_explains_why_a_step_or_trajectory_is_not_recorded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no run at" in refusal(capsys, tmp_path / "none")
    assert "is not a run" in refusal(capsys, tmp_path)
    left_out = refusal(capsys, run, "--step", "3")
    assert "log.rollouts_every = 2" in left_out and "Recorded steps: 2, 4" in left_out
    later = refusal(capsys, run, "--step", "9")
    assert "finished 5 steps" in later and "Recorded steps: 2, 4" in later
    assert "such as t0, t1" in refusal(capsys, run, "--task", "t9")
    assert "0 to 5" in refusal(capsys, run, "--sample", "9")
    assert "--step" in refusal(capsys, run, "--step", "0")
    for file in (run / "rollouts").iterdir():
        file.unlink()
    assert "no step of RL has ended" in refusal(capsys, run)
    (run / "summary.json").write_text("{}")
    assert "it has ended, and recorded none" in refusal(capsys, run)
    (run / "recipe.toml").write_text("[log]\nrollouts_every = 0\n")
    never = refusal(capsys, run)
    assert "log.rollouts_every = 0" in never and "log.rollouts_every = 1" in never


def test_dumps_of_other_compressors_are_read_and_cut_ones_refused(
    run: Path, show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream has no size in its header; files may be joined."""
    file = RunFolder(run).rollout_file(4)
    raw = zstandard.ZstdDecompressor().decompress(file.read_bytes())
    expected = show(run)
    first, second = zstandard.ZstdCompressor().compressobj(), raw.index(b"\n") + 1
    streamed = first.compress(raw[:second]) + first.flush()
    file.write_bytes(streamed + zstandard.ZstdCompressor().compress(raw[second:]))
    assert show(run) == expected
    for damaged in (streamed[:-4], b"", streamed + b"x"):
        file.write_bytes(damaged)
        assert "not a readable rollout dump" in refusal(capsys, run)


def test_the_parts_have_every_token_once(run: Path) -> None:
    for record in read_rollouts(RunFolder(run).rollout_file(4)):
        tokens = [token for part in parts(record) for token in part.tokens]
        assert [token.id for token in tokens] == record["tokens"]
        assert "".join(token.origin for token in tokens) == record["provenance"]
    record = {**record, "turns": [*record["turns"], {**record["turns"][1], "start": 8}]}
    assert [len(part.tokens) for part in parts(record)] == [2, 2, 1, 1, 2, 0], "an empty reply"


def test_advantages_of_turns_are_shown_with_their_turn(run: Path, show: Show) -> None:
    row = episode(0, Reward(0.0))
    groups = [Group(Task("t0", "2+2", "4"), [row])]
    values = [0, 0, 0.25, 0.25, 0, 0, -0.5, 1.0]
    write_rollouts(RunFolder(run).rollout_file(6), groups, [[values]], PIECES.__getitem__)
    shown = rows(show(run, "--step", "6"))
    assert "advantage" not in shown[1]
    assert "reward +0.5 · 2 tokens · stop · advantage +0.25" in shown
    assert "2 tokens · length · 0.5 s" in shown, "its tokens differ"
