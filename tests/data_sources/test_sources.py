"""Tasks from every source: the right rows, a stable split without overlap, and one line for each thing that can be wrong."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from sixfold.config import ArithmeticConfig, DataConfig, GymConfig
from sixfold.data.sources import load_tasks
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError

GSM8K_FORM = Path(__file__).parents[1] / "data" / "gsm8k_form"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


def load(data: DataConfig, *rewards: str, seed: int = 0) -> TaskSet:
    return load_tasks(data, seed=seed, rewards=rewards or ("math",))


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def qa(question: Any = "1+1?", answer: Any = "2", **columns: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, **columns}


def test_arithmetic_halves_share_no_sum() -> None:
    data = DataConfig(heldout=20, limit=55, arithmetic=ArithmeticConfig(digits=1))
    tasks = load(data, "arithmetic")
    assert (len(tasks.train), len(tasks.heldout), tasks.notes) == (35, 20, [])
    sums = [{tuple(sorted(t.prompt_text.rstrip("=").split("+"))) for t in half} for half in (tasks.train, tasks.heldout)]
    assert not sums[0] & sums[1] and len(sums[0] | sums[1]) == 55
    assert load(data, "arithmetic") == tasks
    assert load(DataConfig(heldout=20, arithmetic=ArithmeticConfig(digits=1)), "arithmetic").train  # no more sums than exist
    with pytest.raises(UserError, match="heldout = 512 of 55 tasks leaves none"):
        load(DataConfig(arithmetic=ArithmeticConfig(digits=1)), "arithmetic")


def test_the_split_depends_on_seed_and_id_only(tmp_path: Path) -> None:
    rows = [qa(f"{n}?", n, id=f"r{n}") for n in range(40)]
    forward = load(DataConfig(source=write(tmp_path / "a.jsonl", *rows), heldout=10))
    backward = load(DataConfig(source=write(tmp_path / "b.jsonl", *reversed(rows)), heldout=10))
    assert [t.id for t in forward.heldout] == [t.id for t in backward.heldout]
    assert {t.id for t in forward.train} == {f"r{n}" for n in range(40)} - {t.id for t in forward.heldout}
    other = load(DataConfig(source=str(tmp_path / "a.jsonl"), heldout=10), seed=1)
    assert {t.id for t in other.heldout} != {t.id for t in forward.heldout}


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    data = DataConfig(source="reasoning_gym", heldout=6, reasoning_gym=GymConfig(tasks=("chain_sum", "gcd"), size=15))
    tasks = load(data, "reasoning_gym")
    assert len(tasks.heldout) == 6 and len(tasks.train) >= 20
    with pytest.raises(UserError, match=r"'reasoning_gym' scores tasks of data.source = 'reasoning_gym' only"):
        load(DataConfig(), "reasoning_gym")


def test_a_folder_of_the_form_of_gsm8k() -> None:
    data = DataConfig(
        source=str(GSM8K_FORM), heldout_split="test", answer_after="####", trace_field="answer", system_prompt="Think.", prompt_suffix=" Go."
    )
    tasks = load(data)
    assert (len(tasks.train), len(tasks.heldout)) == (20, 10)
    first = tasks.train[0]
    assert first.answer == "39" and (first.trace or "").endswith("#### 39") and first.columns["answer"] == first.trace
    assert [m["role"] for m in first.prompt] == ["system", "user"]  # type: ignore[index]
    assert first.prompt_text.startswith("Mara picks 4 baskets") and first.prompt_text.endswith("left? Go.")
    assert (first.id, tasks.heldout[0].id) == ("train-0", "test-0")
    with pytest.raises(UserError, match=r"no split 'tets'; it has train, test. Did you mean 'test'\?"):
        load(data.model_copy(update={"heldout_split": "tets"}))


def test_folders_written_by_save_to_disk(tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_list([qa(f"{n}?", n) for n in range(5)])
    split.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=split, test=datasets.Dataset.from_list([qa("9?", 9)])).save_to_disk(tmp_path / "two")
    assert [t.answer for t in load(DataConfig(source=str(tmp_path / "one"), heldout=0)).train] == [0, 1, 2, 3, 4]
    two = load(DataConfig(source=str(tmp_path / "two"), heldout_split="test", limit=3))
    assert ([t.answer for t in two.train], [t.answer for t in two.heldout]) == ([0, 1, 2], [9])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_files(tmp_path: Path, suffix: str) -> None:
    rows = [qa(f"{n}?", str(n), level=n) for n in range(6)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        write(path, *rows)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tasks = load(DataConfig(source=str(path), heldout=0, limit=5))
    assert [(t.prompt, t.answer, t.columns["level"]) for t in tasks.train] == [(f"{n}?", str(n), n) for n in range(5)]
    other = load(DataConfig(source=str(path), heldout_split=write(tmp_path / "other.jsonl", qa("9?", 9))))
    assert (len(other.train), other.heldout[0].prompt) == (6, "9?")


def test_messages_stay_messages(tmp_path: Path) -> None:
    turns = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "hello"), ("user", "1+1?"))]
    data = DataConfig(source=write(tmp_path / "a.jsonl", qa(turns)), heldout=0, system_prompt="S", prompt_suffix="!")
    (task,) = load(data).train
    assert [(m["role"], m["content"]) for m in task.prompt] == [("system", "S"), ("user", "hi"), ("assistant", "hello"), ("user", "1+1?!")]  # type: ignore[index]


def test_prompts_in_both_halves_leave_the_training_half(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", qa("a"), qa("b"), qa("b", "3"), qa("c"))
    tasks = load(DataConfig(source=train, heldout_split=write(tmp_path / "test.jsonl", qa("b"))))
    assert [t.prompt for t in tasks.train] == ["a", "c"]
    assert tasks.notes == ["2 training rows dropped: their prompts also occur in the held-out tasks"]
    with pytest.raises(UserError, match=r"0 usable rows \(1 read, 1 dropped"):
        load(DataConfig(source=write(tmp_path / "b.jsonl", qa("b")), heldout_split=str(tmp_path / "test.jsonl")))


PICKLE = base64.b64encode(zlib.compress(pickle.dumps("[1, 2]" * 50))).decode()
BAD_ROWS = {
    "missing answer": (
        [qa(), {"question": "q"}],
        r"a.jsonl:2: missing field 'answer', which reward 'math' checks against \(row keys: \['question'\]\)",
    ),
    "missing prompt": (
        [{"qestion": "q"}, {"qestion": "r"}],
        r"a.jsonl:1: missing field 'question'.*so have 1 more rows .*:2\).*Did you mean 'qestion'",
    ),
    "null answer": ([qa(), qa(), qa("q", None)], "a.jsonl:3: 'answer' must be text or a number, got null"),
    "list answer": ([qa("q", [1])], "'answer' must be text or a number, got list"),
    "empty answer": ([qa("q", " ")], "empty answer"),
    "truncated": ([qa(), '{"question": "q", "ans'], r"a.jsonl:2: invalid JSON at column 19"),
    "no object": (["[1]"], "a.jsonl:1: want an object, got list"),
    "nothing": ([], "has 0 rows in split 'train'"),
    "empty prompt": ([qa(), qa(" ")], "a.jsonl:2: empty prompt"),
    "no messages": ([qa([])], "a.jsonl:1: empty prompt"),
    "number prompt": ([qa(3)], "'question' must be text or a list of messages, got int"),
    "same id": ([qa(id=7), qa(), qa(id=7)], r"duplicate id '7' \(.*a.jsonl:1 and .*a.jsonl:3\)"),
    "unknown role": ([qa([{"role": "robot", "content": "x"}])], "unknown role 'robot'"),
    "two users": ([qa([{"role": "user", "content": "x"}] * 2)], "roles must alternate"),
    "last is assistant": ([qa([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])], "last message must be from user"),
    "late system": ([qa([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])], "system message comes first"),
    "no content": ([qa([{"role": "user"}])], "text in 'role' and 'content'"),
    "lone surrogate": (['{"question": "ab\\ud800", "answer": "1"}'], "'question' holds a lone surrogate at character 2"),
    "pickle": ([qa(private_test_cases=PICKLE)], "column 'private_test_cases' is a pickle"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(tmp_path: Path, name: str) -> None:
    rows, message = BAD_ROWS[name]
    with pytest.raises(UserError, match=message) as caught:
        load(DataConfig(source=write(tmp_path / "a.jsonl", *rows), heldout=0))
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_fit_the_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", qa("q", "no mark"))
    for update, rewards, message in (
        ({"answer_after": "####"}, ("math",), "a.jsonl:1: no '####' in 'answer'"),
        ({"trace_field": "solution"}, ("math",), "missing field 'solution'"),
        ({}, ("arithmetic",), "needs an integer in 'answer', got 'no mark'"),
        ({"heldout_split": "test"}, ("math",), "has no splits: data.heldout_split is another file"),
        ({"heldout": 1}, ("math",), "data.heldout = 1 of 1 tasks leaves none"),
    ):
        with pytest.raises(UserError, match=message):
            load(DataConfig(source=source, heldout=0).model_copy(update=update), *rewards)
    marked = write(tmp_path / "d.jsonl", qa("q", "#### 1 is wrong\n#### 1,200 "))
    assert load(DataConfig(source=marked, heldout=0, answer_after="####")).train[0].answer == "1,200"
    own = load(DataConfig(source=write(tmp_path / "b.jsonl", {"question": "q"}), heldout=0), "reward.py:f")
    assert own.train[0].answer is None  # a reward of the user's own may need none
    system = write(tmp_path / "c.jsonl", qa([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]))
    with pytest.raises(UserError, match=r"leave data.system_prompt empty"):
        load(DataConfig(source=system, heldout=0, system_prompt="S"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "q", "answer": "1"}\n{"q\xff')
    (tmp_path / "cut.json").write_text('[{"question":\n "q')
    (tmp_path / "truncated.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question": "q", "ans')
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not at all")
    for name, message in (
        ("missing.jsonl", "missing.jsonl: no such file .looked in"),
        ("bytes.jsonl", "bytes.jsonl:2: invalid UTF-8 at byte 3"),
        ("cut.json", "cut.json: invalid JSON at line 2, column 2"),
        ("truncated.jsonl", r"truncated.jsonl:2: invalid JSON at column 19 \(file truncated\?\)"),
        ("no.parquet", "no.parquet: not a readable parquet file"),
    ):
        with pytest.raises(UserError, match=message):
            load(DataConfig(source=str(tmp_path / name), heldout=0))


def test_pickles_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
    with pytest.raises(UserError, match="unpickling is disabled"):
        load(DataConfig(source=write(tmp_path / "a.jsonl", qa(tests=PICKLE)), heldout=0))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("Couldn't reach the hub\nretry"),
            r"'org/name': no such folder in .*, and the hub gave ConnectionError: Couldn't reach the hub\.$",
        ),
        (ValueError("BuilderConfig 'man' not found. Available: ['main']"), "Available: .'main'."),
        (RuntimeError("Dataset scripts are no longer supported, but found name.py"), "requires executing repository code; not supported"),
    ],
)
def test_a_hub_that_says_no(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
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


@pytest.mark.parametrize("source", ["x.csv", "./x", "data/foo.jsonl", "/no/such", "runs/nope", "a/b/c"])
def test_a_path_that_does_not_exist_is_never_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match=r"no such (file|folder) .looked in"):
        load(DataConfig(source=source))
