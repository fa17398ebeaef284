"""Tasks from every source: the right rows, a stable split without overlap, and one line for each
thing that can be wrong.
"""

import base64
import csv
import json
import pickle
import tracemalloc
import zlib
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from sixfold.data.files import draw, read_file
from sixfold.data.sources import load_tasks
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.recipe.schema import ArithmeticConfig, DataConfig, GymConfig
from sixfold.types import Message

GSM8K_FORM = Path(__file__).parents[1] / "data" / "gsm8k_form"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


def load(data: DataConfig, *rewards: str, seed: int = 0) -> TaskSet:
    return load_tasks(data, seed=seed, rewards=rewards or ("math",))


def write(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def qa(question: Any = "1+1?", answer: Any = "2", **columns: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, **columns}


def test_arithmetic_halves_share_no_sum() -> None:
    data = DataConfig(heldout=20, limit=55, arithmetic=ArithmeticConfig(digits=1))
    tasks = load(data, "arithmetic")
    assert (len(tasks.train), len(tasks.heldout), tasks.notes) == (35, 20, [])
    sums = [
        {tuple(sorted(t.prompt_text.rstrip("=").split("+"))) for t in half}
        for half in (tasks.train, tasks.heldout)
    ]
    assert not sums[0] & sums[1] and len(sums[0] | sums[1]) == 55
    assert load(data, "arithmetic") == tasks
    assert load(
        DataConfig(heldout=20, arithmetic=ArithmeticConfig(digits=1)), "arithmetic"
    ).train  # no more sums than exist
    with pytest.raises(UserError, match="heldout = 512 of 55 tasks leaves none"):
        load(DataConfig(arithmetic=ArithmeticConfig(digits=1)), "arithmetic")


def test_the_split_depends_on_seed_and_id_only(tmp_path: Path) -> None:
    rows = [qa(f"{n}?", n, id=f"r{n}") for n in range(40)]
    forward = load(DataConfig(source=write(tmp_path / "a.jsonl", *rows), heldout=10))
    backward = load(DataConfig(source=write(tmp_path / "b.jsonl", *reversed(rows)), heldout=10))
    assert [t.id for t in forward.heldout] == [t.id for t in backward.heldout]
    assert {t.id for t in forward.train} == {f"r{n}" for n in range(40)} - {
        t.id for t in forward.heldout
    }
    other = load(DataConfig(source=str(tmp_path / "a.jsonl"), heldout=10), seed=1)
    assert {t.id for t in other.heldout} != {t.id for t in forward.heldout}


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    data = DataConfig(
        source="reasoning_gym",
        heldout=6,
        reasoning_gym=GymConfig(tasks=("chain_sum", "gcd"), size=15),
    )
    tasks = load(data, "reasoning_gym")
    assert len(tasks.heldout) == 6 and len(tasks.train) >= 20
    with pytest.raises(
        UserError, match=r"'reasoning_gym' scores tasks of data.source = 'reasoning_gym' only"
    ):
        load(DataConfig(), "reasoning_gym")


def test_a_folder_of_the_form_of_gsm8k() -> None:
    data = DataConfig(
        source=str(GSM8K_FORM),
        heldout_split="test",
        answer_after="####",
        trace_field="answer",
        system_prompt="Think.",
        prompt_suffix=" Go.",
    )
    tasks = load(data)
    assert (len(tasks.train), len(tasks.heldout)) == (20, 10)
    first = tasks.train[0]
    assert (
        first.answer == "39"
        and str(first.trace).endswith("#### 39")
        and first.columns["answer"] == "39"
    )
    assert [m["role"] for m in first.prompt] == ["system", "user"]  # type: ignore[index]
    assert first.prompt_text.startswith("Mara picks 4 baskets") and first.prompt_text.endswith(
        "left? Go."
    )
    assert (first.id, tasks.heldout[0].id) == ("train-0", "test-0")
    with pytest.raises(
        UserError, match=r"no split 'tets'; it has train, test. Did you mean 'test'\?"
    ):
        load(data.model_copy(update={"heldout_split": "tets"}))


def test_folders_written_by_save_to_disk(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([qa(f"{n}?", n) for n in range(5)])
    split.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=split, test=datasets.Dataset.from_list([qa("9?", 9)])).save_to_disk(
        tmp_path / "two"
    )
    assert [t.answer for t in load(DataConfig(source=str(tmp_path / "one"), heldout=0)).train] == [
        0,
        1,
        2,
        3,
        4,
    ]
    two = load(DataConfig(source=str(tmp_path / "two"), heldout_split="test", limit=3))
    assert (len(two.train), [t.answer for t in two.heldout]) == (3, [9])


SUFFIXES = [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".JSONL"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """A file of the form that its suffix names."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return write(path, *rows)
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    elif suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return str(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files(tmp_path: Path, suffix: str) -> None:
    rows = [qa(f'{n}, "or"\n\t{n}?', str(n), level=f"L{n}") for n in range(6)]
    source = write_rows(tmp_path / f"rows{suffix}", rows)
    tasks = load(DataConfig(source=source, heldout=0))
    assert [(t.id, t.prompt, t.answer, t.columns["level"]) for t in tasks.train] == [
        (f"train-{n}", f'{n}, "or"\n\t{n}?', str(n), f"L{n}") for n in range(6)
    ]
    other = load(
        DataConfig(source=source, heldout_split=write(tmp_path / "other.jsonl", qa("9?", 9)))
    )
    assert (len(other.train), other.heldout[0].prompt) == (6, "9?")


@pytest.mark.parametrize("suffix", [*SUFFIXES, "folder"])
def test_a_limit_draws_from_the_whole_file_by_seed(tmp_path: Path, suffix: str) -> None:
    rows = [qa(f"{n}?", str(n)) for n in range(200)]
    if suffix == "folder":
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
        source = str(tmp_path / "rows")
    else:
        source = write_rows(tmp_path / f"rows{suffix}", rows)

    def numbers(limit: int, seed: int) -> list[int]:
        found = load(DataConfig(source=source, heldout=0, limit=limit), seed=seed).train
        assert [t.id for t in found] == [
            f"train-{t.answer}" for t in found
        ]  # an id is the row's place in the file
        return [int(t.answer) for t in found]

    drawn = numbers(50, seed=0)
    assert drawn == sorted(drawn) and len(set(drawn)) == 50
    assert drawn == numbers(50, seed=0) != numbers(50, seed=1)
    assert (
        60 < sum(drawn) / 50 < 140 and min(drawn) < 20 and max(drawn) > 180
    )  # over the file, not its beginning
    assert set(drawn) < set(numbers(80, seed=0))
    assert numbers(500, seed=0) == list(range(200))


def test_messages_stay_messages(tmp_path: Path) -> None:
    turns = [
        {"role": r, "content": c}
        for r, c in (("user", "hi"), ("assistant", "hello"), ("user", "1+1?"))
    ]
    data = DataConfig(
        source=write(tmp_path / "a.jsonl", qa(turns)),
        heldout=0,
        system_prompt="S",
        prompt_suffix="!",
    )
    (task,) = load(data).train
    assert [(m["role"], m["content"]) for m in task.prompt] == [
        ("system", "S"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "1+1?!"),
    ]  # type: ignore[index]


def test_prompts_in_both_halves_leave_the_training_half(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", qa("a"), qa("b"), qa("b", "3"), qa("c"))
    tasks = load(DataConfig(source=train, heldout_split=write(tmp_path / "test.jsonl", qa("b"))))
    assert [t.prompt for t in tasks.train] == ["a", "c"]
    assert tasks.notes == [
        "2 training rows dropped: their prompts also occur in the held-out tasks"
    ]
    with pytest.raises(UserError, match=r"0 usable rows \(1 read, 1 dropped"):
        load(
            DataConfig(
                source=write(tmp_path / "b.jsonl", qa("b")),
                heldout_split=str(tmp_path / "test.jsonl"),
            )
        )


PICKLE = base64.b64encode(zlib.compress(pickle.dumps("[1, 2]" * 50))).decode()
BAD_ROWS = {
    "missing answer": (
        [qa(), {"question": "q"}],
        (
            r"a.jsonl:2: missing field 'answer', which reward 'math' checks against \(row keys:"
            r" \['question'\]\)"
        ),
    ),
    "missing prompt": (
        [{"qestion": "q"}, {"qestion": "r"}],
        r"a.jsonl:1: missing field 'question'.*1 more rows lack it .*:2\).*Did you mean 'qestion'",
    ),
    "null answer": (
        [qa(), qa(), qa("q", None)],
        r"a.jsonl:3: empty answer in 'answer'.*data.unanswered = 'drop'",
    ),
    "list answer": ([qa("q", [1])], "'answer' must be text or a number, got list"),
    "empty answer": ([qa("q", " ")], "empty answer"),
    "truncated": ([qa(), '{"question": "q", "ans'], r"a.jsonl:2: invalid JSON at column 19"),
    "no object": (["[1]"], "a.jsonl:1: expected an object, got list"),
    "nothing": ([], "has 0 rows in split 'train'"),
    "empty prompt": ([qa(), qa(" ")], "a.jsonl:2: empty prompt"),
    "no messages": ([qa([])], "a.jsonl:1: empty prompt"),
    "number prompt": ([qa(3)], "'question' must be text or a list of messages, got int"),
    "same id": ([qa(id=7), qa(), qa(id=7)], r"duplicate id '7' \(.*a.jsonl:1 and .*a.jsonl:3\)"),
    "unknown role": ([qa([{"role": "robot", "content": "x"}])], "unknown role 'robot'"),
    "two users": ([qa([{"role": "user", "content": "x"}] * 2)], "roles must alternate"),
    "only a reply": (
        [qa([{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}])],
        "last message must be from user",
    ),
    "late system": (
        [qa([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])],
        "system message comes first",
    ),
    "no content": ([qa([{"role": "user"}])], "text in 'role' and 'content'"),
    "lone surrogate": (
        ['{"question": "ab\\ud800", "answer": "1"}'],
        "'question' holds a lone surrogate at character 2",
    ),
    "pickle": ([qa(private_test_cases=PICKLE)], "column 'private_test_cases' is a pickle"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(tmp_path: Path, name: str) -> None:
    rows, message = BAD_ROWS[name]
    with pytest.raises(UserError, match=message) as caught:
        load(DataConfig(source=write(tmp_path / "a.jsonl", *rows), heldout=0))
    assert "\n" not in str(caught.value)


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = (qa("a", ""), qa("b", 0), qa("c", None), {"question": "d"}, qa("e", " x "))
    data = DataConfig(source=write(tmp_path / "a.jsonl", *rows), heldout=0, unanswered="drop")
    found = load(data)
    assert [(t.id, t.answer) for t in found.train] == [("train-1", 0), ("train-4", " x ")]
    (note,) = found.notes
    assert "3 of 5" in note and "data.unanswered" in note
    assert len(load(data, "reward.py:f").train) == 5, "a user's reward may need no answer"
    none = write(tmp_path / "b.jsonl", qa("a", ""), qa("b", ""))
    with pytest.raises(UserError, match="empty answer"):
        load(data.model_copy(update={"source": none}))


def test_a_list_of_replies_is_a_worked_solution_of_an_episode(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", qa(said=["c(1+1)", "2"]))
    (task,) = load(DataConfig(source=source, heldout=0, trace_field="said")).train
    assert task.trace == ("c(1+1)", "2")
    for wrong in ([], ["c(1+1)", 2], [""]):
        source = write(tmp_path / "a.jsonl", qa(said=wrong))
        with pytest.raises(UserError, match="'said' must be text, or a list of texts"):
            load(DataConfig(source=source, heldout=0, trace_field="said"))


def test_settings_that_do_not_fit_the_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", qa("q", "no mark"))
    for update, rewards, message in (
        ({"answer_after": "####"}, ("math",), "a.jsonl:1: no '####' in 'answer'"),
        ({"trace_field": "solution"}, ("math",), "missing field 'solution'"),
        ({}, ("arithmetic",), "needs an integer in 'answer', got 'no mark'"),
        ({}, ("worked_sum",), "reward 'worked_sum' needs an integer in 'answer', got 'no mark'"),
        ({"heldout_split": "test"}, ("math",), "has no splits: data.heldout_split is another file"),
        ({"heldout": 1}, ("math",), "data.heldout = 1 of 1 tasks leaves none"),
    ):
        with pytest.raises(UserError, match=message):
            load(DataConfig(source=source, heldout=0).model_copy(update=update), *rewards)
    marked = write(tmp_path / "d.jsonl", qa("q", "#### 1 is wrong\n#### 1,200 "))
    assert (
        load(DataConfig(source=marked, heldout=0, answer_after="####")).train[0].answer == "1,200"
    )
    own = load(
        DataConfig(source=write(tmp_path / "b.jsonl", {"question": "q"}), heldout=0), "reward.py:f"
    )
    assert own.train[0].answer is None  # a reward of the user's own may need none
    system = write(
        tmp_path / "c.jsonl",
        qa([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]),
    )
    with pytest.raises(UserError, match=r"leave data.system_prompt empty"):
        load(DataConfig(source=system, heldout=0, system_prompt="S"))


LONG = "9" * 5000
DEEP = "[" * 500 + "]" * 500
GOOD = b'{"question": "q", "answer": "1"}\n'
BAD_FILES = {
    "bytes.jsonl": (GOOD + b'{"q\xff', r"bytes.jsonl:2: invalid UTF-8 at byte 3"),
    "cut.json": (b'[{"question":\n "q', "cut.json: invalid JSON at line 2, column 2"),
    "truncated.jsonl": (
        GOOD + b'{"question": "q", "ans',
        r"truncated.jsonl:2: invalid JSON at column 19 \(file truncated\?\)",
    ),
    "no.parquet": (b"PAR1 not at all", "no.parquet: not a readable parquet file"),
    "long.jsonl": (
        GOOD + f'{{"question": "q", "answer": {LONG}}}\n'.encode(),
        r"long.jsonl:2: an integer of 5,000 digits.*write it as text",
    ),
    "long.json": (
        f'[{{"question": "q", "answer": -{LONG}}}]'.encode(),
        r"long.json: an integer of 5,001 digits",
    ),
    "nan.jsonl": (
        GOOD + b'{"question": "q", "answer": NaN}\n',
        r"nan.jsonl:2: NaN is not valid JSON; write null",
    ),
    "inf.jsonl": (
        GOOD + b'{"question": "q", "answer": -Infinity}\n',
        r"inf.jsonl:2: -Infinity is not valid JSON",
    ),
    "huge.jsonl": (
        GOOD + b'{"question": "q", "answer": 1e999}\n',
        r"huge.jsonl:2: the number 1e999 is too large",
    ),
    "keys.jsonl": (
        GOOD + b'{"question": "q", "answer": "1", "answer": "2"}\n',
        r"keys.jsonl:2: duplicate key 'answer'",
    ),
    "inner.jsonl": (
        GOOD + b'{"question": "q", "answer": "1", "x": [{"a": 1, "a": 1}]}\n',
        r"inner.jsonl:2: duplicate key 'a'",
    ),
    "deep.jsonl": (
        GOOD + f'{{"question": "q", "answer": "1", "x": {DEEP}}}\n'.encode(),
        r"deep.jsonl:2: 'x' is nested more than 100 levels",
    ),
    "deeper.jsonl": (
        GOOD + b'{"question": "q", "x": ' + b"[" * 100_000 + b"\n",
        r"deeper.jsonl:2: invalid JSON: nested too deeply",
    ),
    "lines.json": (
        GOOD + GOOD,
        (
            r"lines.json: invalid JSON at line 2, column 1 \(one object per line\? then name the"
            r" file .jsonl\)"
        ),
    ),
    "empty.json": (b" \n", "empty.json: the file is empty"),
    "empty.jsonl": (b"", "has 0 rows in split 'train'"),
    "empty.csv": (b"", "empty.csv: the file is empty"),
    "header.csv": (b"question,answer\n", "has 0 rows in split 'train'"),
    "utf16.csv": (
        "question,answer\nq,1\n".encode("utf-16"),
        "utf16.csv:1: invalid UTF-8 at byte 0; the file is UTF-16",
    ),
    "bytes.csv": (b'question,answer\n"a\nb\xff",1\n', "bytes.csv:3: invalid UTF-8 at byte 1"),
    "twice.csv": (b"question,answer,question\nq,1,r\n", "twice.csv:1: duplicate column 'question'"),
    "commas.csv": (
        b'question,answer\n"a\nb",1\n1,2,3\n',
        r"commas.csv:4: 3 values for 2 columns \(question, answer\)",
    ),
    "quote.csv": (b'question,answer\n"q" x,1\n', "quote.csv:2: invalid CSV"),
    "open.csv": (b'question,answer\nq,1\n"q', "open.csv:3: invalid CSV: unexpected end of data"),
    "columns.csv": (
        b"question;answer\nq;1\n",
        r"columns.csv:2: missing field 'question'.*row keys: \['question;answer'\]",
    ),
    "rows.txt": (b"q", "rows.txt: cannot read .txt; expected .jsonl"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(DataConfig(source=str(tmp_path / name), heldout=0))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(
        UserError, match=r"trian.jsonl: no such file .looked in .*Did you mean 'train.jsonl'\?"
    ):
        load(DataConfig(source=str(tmp_path / "trian.jsonl")))
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match=r"folder\.json is a folder"):
        load(DataConfig(source=str(tmp_path / "folder.json")))


def test_csv_forms(tmp_path: Path) -> None:
    """A byte order mark, blank lines, Windows line ends, and a value longer than the csv module's
    own limit.
    """
    long = "x" * 200_000
    (tmp_path / "a.csv").write_bytes(f"\ufeffquestion,answer\r\n\r\nq,1\r\n{long},2\r\n".encode())
    limit = csv.field_size_limit()
    assert [(t.id, t.prompt,
    t.answer) for t in load(DataConfig(source=str(tmp_path / "a.csv"), heldout=0)).train] == [
        ("train-0", "q", "1"), ("train-1", long, "2")
    ]  # fmt: skip
    assert csv.field_size_limit() == limit


def test_parquet_types(tmp_path: Path) -> None:
    """Decimals become text; a date is no answer; NaN is no answer; bytes are no prompt."""
    path = tmp_path / "a.parquet"

    def table(**columns: Any) -> DataConfig:
        parquet.write_table(pyarrow.table(columns), path)
        return DataConfig(source=str(path), heldout=0)

    made = load(
        table(question=["q"], answer=[Decimal("2.50")], at=[datetime(2026, 1, 1)], raw=[b"\xff"])
    ).train
    assert made[0].answer == "2.50" and made[0].columns["raw"] == b"\xff"
    for columns, message in (
        (
            dict(question=["q"], answer=[datetime(2026, 1, 1)]),
            "row 1: 'answer' must be text or a number, got datetime",
        ),
        (
            dict(question=["q", "r"], answer=[1.0, float("nan")]),
            "row 2: 'answer' must be text or a finite number, got nan",
        ),
        (
            dict(question=[b"q"], answer=["1"]),
            "row 1: 'question' must be text or a list of messages, got bytes",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(table(**columns))
    parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array(["q"])] * 2, names=["question", "question"]), path
    )
    with pytest.raises(UserError, match="duplicate column 'question'"):
        load(DataConfig(source=str(path), heldout=0))


def test_pickles_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
    with pytest.raises(UserError, match="unpickling is disabled"):
        load(DataConfig(source=write(tmp_path / "a.jsonl", qa(tests=PICKLE)), heldout=0))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("Couldn't reach the hub\nretry"),
            (
                r"'org/name': no such folder in .*, and the hub gave ConnectionError: Couldn't"
                r" reach the hub\.$"
            ),
        ),
        (ValueError("BuilderConfig 'man' not found. Available: ['main']"), "Available: .'main'."),
        (
            RuntimeError("Dataset scripts are no longer supported, but found name.py"),
            "requires executing repository code; not supported",
        ),
    ],
)
def test_hub_refuses_the_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(UserError, match=message):
        load(DataConfig(source="org/name"))


def test_a_misspelt_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError("not found")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(UserError, match=r"Did you mean 'arithmetic'\?"):
        load(DataConfig(source="arithmatic"), "arithmetic")


@pytest.mark.parametrize(
    "source", ["x.csv", "./x", "data/foo.jsonl", "/no/such", "runs/nope", "a/b/c"]
)
def test_a_path_that_does_not_exist_is_never_asked_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *arguments, **options: pytest.fail("asked the hub")
    )
    with pytest.raises(UserError, match=r"no such (file|folder) .looked in"):
        load(DataConfig(source=source))


@pytest.mark.parametrize("source", ["arithmetic", "calculator"])
def test_generated_prompts_get_the_system_message_and_the_suffix(source: str) -> None:
    plain = load(DataConfig(source=source, limit=4, heldout=1)).train
    told = load(
        DataConfig(source=source, limit=4, heldout=1, system_prompt="S", prompt_suffix="!")
    ).train
    assert [t.prompt for t in told] == [
        (
            Message(role="system", content="S"),
            Message(role="user", content=f"{t.prompt}!"),
        )
        for t in plain
    ]


def test_a_limit_of_a_parquet_file_holds_only_the_drawn_rows(tmp_path: Path) -> None:
    """20,000 rows of 2,000 characters: 40 MB as text, of which 20 rows and a batch are in memory.

    They are those that `draw` takes from all.
    """
    path = tmp_path / "rows.parquet"
    texts = [f"{number:06d}" + "x" * 2000 for number in range(20_000)]
    parquet.write_table(pyarrow.table({"prompt": texts}), path, row_group_size=1000)
    expected = draw(range(20_000), 20, 3)
    del texts
    tracemalloc.start()
    try:
        rows = read_file(path, 20, 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row.number for row in rows] == expected
    assert [int(row.fields["prompt"][:6]) for row in rows] == expected
    assert peak < 12e6
