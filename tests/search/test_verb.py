"""`sixfold search`: files, table, resume, and bad input."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from tests.reward_model.comparisons import policy, random_reward_model, saved
from transformers import AutoModelForSequenceClassification

from sixfold.cli import main
from sixfold.data.comparisons import load_comparisons
from sixfold.data.profile import Measurement, ProfileFile, ProfileKey
from sixfold.data.sources import load_tasks
from sixfold.errors import UserError
from sixfold.model.scalar_head import scalar_head
from sixfold.recipe.schema import (
    ComparisonsConfig,
    DataConfig,
    ProcessScoringConfig,
    RewardScoringConfig,
)
from sixfold.recipe.stages import dataset_settings
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.reward import load_scorers
from sixfold.reward_model.step_model import step_model_of
from sixfold.reward_model.step_reward import load_process_scorer
from sixfold.types import Task
from sixfold_search import Stepping, compare, verb
from sixfold_search.aggregate import AGGREGATES
from sixfold_search.difficulty import SEARCHES
from sixfold_search.methods import METHODS as ALL
from sixfold_search.scorers import OutcomeScorer
from sixfold_search.searcher import Searcher

METHODS = ("greedy", "majority", "best_of_n", "beam", "mcts")
BUDGET = 900
LONG = "1+2+3+4+5+6+7+8+9+"
"""Begins all prompts, and is longer than a block of the cache."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reward model, tasks, and a verifier that accepts even lengths."""
    place, own = tmp_path_factory.mktemp("search"), policy()
    saved(random_reward_model(own=own), own, place / "rm")
    steps = step_model_of(own, own.model, "newline")
    torch.manual_seed(1)
    torch.nn.init.normal_(scalar_head(steps).weight, std=0.5)
    saved(steps, own, place / "prm")
    own.save(place / "policy")
    rows = [{"id": f"t{n}", "prompt": f"{LONG}{n}=", "answer": f"{2 * n}"} for n in range(8)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "even.py").write_text(
        "def even(completion, task):\n    return float(len(completion) % 2 == 0)\n"
    )
    lines = [
        f'run = {{name = "s", dir = "{place}/runs", threads = 1}}',
        f'model.path = "{place}/policy"',
        f'data = {{source = "{place}/rows.jsonl", prompt_field = "prompt", heldout = 3}}',
        f'environment.rewards = ["{place}/even.py:even"]',
        "rollout.max_new_tokens = 12",
        "rollout.temperature = 1.5",
    ]
    (place / "s.toml").write_text("\n".join([*lines, ""]))
    return place


def words(place: Path, out: Path, *more: str) -> list[str]:
    given = [str(place / "s.toml"), str(place / "policy"), "--out", str(out)]
    settings = ["--scorer", str(place / "rm"), "--budget", str(BUDGET), "--steps", "every:4"]
    return ["search", *given, *settings, "--n", "8", "--methods", *METHODS, *more]


@pytest.fixture(scope="module")
def out(place: Path) -> Path:
    assert main(words(place, place / "out")) == 0
    return place / "out"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
def test_figures_are_those_of_the_completions(out: Path) -> None:
    rows, results = lines(out / "searches.jsonl"), json.loads((out / "results.json").read_bytes())
    assert results["tasks"] == len(rows) == 3
    for name in METHODS:
        found = [row["found"][name] for row in rows]
        for one in found:
            even = [len(c["completion"]) % 2 == 0 for c in one["candidates"]]
            assert [c["solved"] for c in one["candidates"]] == even
            assert one["solved"] == (len(one["completion"]) % 2 == 0)
            assert one["covered"] == any(even)
            assert one["prefilled"] + one["sampled"] + one["scored"] <= BUDGET
            assert (one["scored"] > 0) == (name not in ("greedy", "majority"))
        figures = results["methods"][name]
        assert figures["solved"] == sum(one["solved"] for one in found) / 3
        assert figures["tokens_sampled"] == sum(one["sampled"] for one in found) / 3
    assert [c["method"] for c in results["comparisons"]] == [*METHODS[1:]]


def test_shares_of_each_source_are_shown_if_there_are_several() -> None:
    counts = {key: 0 for key in ("prefilled", "sampled", "scored", "unchecked", "refused")}
    rows = [
        {
            "source": source,
            "found": {"greedy": {"solved": right, "covered": right, "candidates": [], **counts}},
        }
        for source, right in (("easy", True), ("hard", False), ("easy", False), ("hard", False))
    ]
    figures = verb._figures(rows, ["greedy"])
    assert figures["greedy"]["solved_by_source"] == {"easy": 0.5, "hard": 0.0}
    assert figures["greedy"]["solved"] == 0.25


def test_chosen_right_completions_load_for_sft_and_pairs_for_preferences(out: Path) -> None:
    rows = lines(out / "searches.jsonl")
    source = str(out / "solutions.jsonl")
    loaded = load_tasks(
        DataConfig(**dataset_settings(source, "messages"), heldout=0), seed=0, rewards=()
    )
    expected = {
        (row["task"], one["completion"])
        for row in rows
        for one in row["found"].values()
        if one["solved"] and one["finish"] == "stop" and one["completion"].strip()
        if "<|" not in one["completion"]  # a special token cannot be written as text
    }
    assert {(t.id.split("/")[0], t.trace) for t in loaded.train} == expected
    assert expected
    data = DataConfig(source=str(out / "pairs.jsonl"), heldout=0)
    pairs = load_comparisons(data, ComparisonsConfig(), seed=0, chat=True).train
    written = lines(out / "pairs.jsonl")
    assert len(pairs) == len(written) > 0
    for row in written:
        assert len(row["chosen"]) % 2 == 0 and len(row["rejected"]) % 2 == 1


@pytest.mark.nightly
@pytest.mark.parametrize("kv_tokens", [0, 700])
def test_tasks_at_once_change_no_file(
    place: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kv_tokens: int
) -> None:
    """With little room in the cache, tasks are searched again."""
    for count in (1, 3) if kv_tokens else (1,):
        more = ("--engine.kv_tokens", str(kv_tokens), "--tasks-at-once", str(count))
        assert main([*words(place, tmp_path / f"at-{count}"), *more]) == 0
        assert ("are searched again" in capsys.readouterr().out) == (count == 3)
    beside = tmp_path / "at-3" if kv_tokens else out
    for name in ("searches.jsonl", "solutions.jsonl", "pairs.jsonl", "results.json"):
        assert (tmp_path / "at-1" / name).read_bytes() == (beside / name).read_bytes(), name


def test_a_method_pays_the_same_alone(place: Path, out: Path, tmp_path: Path) -> None:
    """What others leave in the prefix cache makes it no cheaper."""
    assert main(words(place, tmp_path / "alone", "--methods", "beam", "--tasks", "1")) == 0
    (alone,) = lines(tmp_path / "alone" / "searches.jsonl")
    (beside,) = [r for r in lines(out / "searches.jsonl") if r["task"] == alone["task"]]
    assert alone["found"]["beam"] == beside["found"]["beam"]


@pytest.mark.nightly
def test_the_method_of_a_difficulty_finds_what_it_finds_alone(
    place: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a choice from a search of the training tasks, with the same settings as `out`."""
    earlier, profile = tmp_path / "earlier", tmp_path / "profile.jsonl"
    methods = ["majority", "beam"]
    assert main([*words(place, earlier)[: -len(METHODS)], *methods, "--train"]) == 0
    model = json.loads((out / "search.json").read_text())["model"]
    file = ProfileFile(profile, ProfileKey(model, "", {}, {}))
    for number, row in enumerate([*lines(earlier / SEARCHES), *lines(out / SEARCHES)]):
        file.add(Measurement(row["key"], "", 1, number % 3, (0.0, 0.0)))
    file.close()
    given = [*words(place, tmp_path / "chosen")[: -len(METHODS)], *methods, "--buckets", "2"]
    given += ["--profile", str(profile)]
    capsys.readouterr()
    assert main([*given, "--choose-from", str(earlier)]) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "chosen" / "results.json").read_text())
    choice = results["plan"]["choice"]
    (edge,), ways = choice["buckets"]["edges"], choice["ways"]
    rows = lines(tmp_path / "chosen" / SEARCHES)
    for row, alone in zip(rows, lines(out / SEARCHES), strict=True):
        way = ways[row["pass_rate"] >= edge]
        assert row["found"]["by_difficulty"] == alone["found"][way["method"]]
    assert len({row["pass_rate"] >= edge for row in rows}) == 2
    for name, figures in results["methods"].items():
        for number, (label, part) in enumerate(figures["by_difficulty"].items()):
            mine = [r["found"][name] for r in rows if (r["pass_rate"] >= edge) == number]
            assert part["solved"] == fmean(one["solved"] for one in mine)
            sums = [one["prefilled"] + one["sampled"] + one["scored"] for one in mine]
            assert (part["tokens"], part["tasks"]) == (fmean(sums), len(mine))
            assert label in shown
    for more, said in (
        ([], "needs --profile"),
        (["--profile", str(profile)], "3 of its tasks are searched again"),
    ):
        given = [*words(place, tmp_path / "bad"), "--choose-from", str(out), *more]
        assert main(given) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_an_interrupted_search_goes_on(
    place: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = compare.write_block

    def interrupted(folder: Path, number: int, *rows: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt
        write(folder, number, *rows)

    monkeypatch.setattr(compare, "write_block", interrupted)
    assert main(words(place, tmp_path / "again")) == 130
    monkeypatch.setattr(compare, "write_block", write)
    assert main(words(place, tmp_path / "again", "--rollout.temperature", "1")) == 2
    assert main(words(place, tmp_path / "again")) == 0
    for name in ("searches.jsonl", "solutions.jsonl", "pairs.jsonl", "results.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes(), name
    assert main(words(place, tmp_path / "again")) == 2


def test_the_oracle_is_named_and_chooses_what_is_right(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(place / "s.toml"), "--out", str(tmp_path / "o"), "--tasks", "2", "--train"]
    assert main(["search", *given, "--scorer", "verifier", "--methods", "best_of_n"]) == 0
    assert "oracle" in capsys.readouterr().out
    for row in lines(tmp_path / "o" / "searches.jsonl"):
        assert row["found"]["best_of_n"]["solved"] == row["found"]["best_of_n"]["covered"] is True


@pytest.mark.nightly
def test_a_process_reward_model_scores_steps(place: Path, tmp_path: Path) -> None:
    methods = ("best_of_n", "regenerate", "mcts")
    given = [str(place / "s.toml"), "--out", str(tmp_path / "o"), "--scorer", str(place / "prm")]
    more = ["--steps", "every:3", "--aggregate", "mean", "--budget", "800", "--n", "6"]
    assert main(["search", *given, *more, "--methods", *methods]) == 0
    scorer = load_process_scorer(
        [str(place / "prm")], ProcessScoringConfig(), RewardScoringConfig(), "prm"
    )
    steps = Stepping("every:3").steps(scorer.renderer)

    def value(prompt: str, text: str) -> float:
        try:
            return (
                fmean(scorer.score(Task("t", prompt), [text], [steps.ends(text)])[0])
                if text
                else 0.0
            )
        except UserError:  # it has special tokens
            return 0.0

    for row in lines(tmp_path / "o" / "searches.jsonl"):
        prompt = f"{LONG}{row['task'][1:]}="
        for name in methods:
            found = row["found"][name]
            assert found["scored"] > 0
            assert found["prefilled"] + found["sampled"] + found["scored"] <= 800
            texts = [c["completion"] for c in found["candidates"] if c["finish"] == "stop"]
            texts = texts or [c["completion"] for c in found["candidates"]]
            values = [value(prompt, text) for text in texts]
            assert found["value"] == pytest.approx(max(values), abs=1e-5)


def test_a_policy_and_its_reference_score_steps(place: Path, tmp_path: Path) -> None:
    one = str(place / "policy")
    given = [str(place / "s.toml"), "--out", str(tmp_path / "o"), "--scorer", f"{one},{one}"]
    assert main(["search", *given, "--methods", "best_of_n", "regenerate", "--n", "2"]) == 0
    for row in lines(tmp_path / "o" / "searches.jsonl"):
        for found in row["found"].values():  # equal models: their log-ratio is 0
            assert found["refused"] or found["value"] == pytest.approx(0.5)
            assert found["scored"] % 2 == 0
    assert main(["search", *given[:-1], f"{one},{place / 'nowhere'}", "--methods", "beam"]) == 2


def test_scores_are_those_of_transformers_and_tokens_are_counted(place: Path) -> None:
    (loaded,) = load_scorers([str(place / "rm")], RewardScoringConfig(), "rm")
    scorer, texts = OutcomeScorer(loaded), ["2", "a b c", "1-1"]
    found = scorer.score(Task("t", "1+1="), texts, [[1], [5], [3]])
    model = AutoModelForSequenceClassification.from_pretrained(place / "rm")
    tokenizer = policy().tokenizer
    rows = [tokenizer(f"<|user|>1+1=<|assistant|>{text}<|end|>")["input_ids"] for text in texts]
    with torch.no_grad():
        logits = [float(model(torch.tensor([ids])).logits) for ids in rows]
    assert [score for (score,) in found] == pytest.approx(
        torch.sigmoid(torch.tensor(logits)).tolist(), abs=1e-5
    )
    prompt = len(tokenizer("<|user|>1+1=<|assistant|>")["input_ids"])
    # The prompt once. A closing token follows each completion, where its score is read.
    assert scorer.tokens == prompt + sum(len(ids) - prompt + 1 for ids in rows)


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("changed", ["rows.jsonl", "even.py", "rm", "ends.py"])
def test_other_data_do_not_continue_a_search(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: str,
) -> None:
    (tmp_path / "ends.py").write_text("def ends(text):\n    return range(3, len(text), 3)\n")
    for name in ("rows.jsonl", "even.py", "rm"):
        copy = shutil.copytree if (place / name).is_dir() else shutil.copy
        copy(place / name, tmp_path / name)
    (tmp_path / "s.toml").write_text(
        (place / "s.toml").read_text().replace(f"{place}/rows", f"{tmp_path}/rows")
        .replace(f"{place}/even", f"{tmp_path}/even")
    )  # fmt: skip
    given = [str(tmp_path / "s.toml"), str(place / "policy"), "--out", str(tmp_path / "out")]
    more = ["--scorer", str(tmp_path / "rm"), "--methods", "beam", "--n", "2", "--expand", "2"]
    more += ["--steps", f"{tmp_path}/ends.py:ends"]

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "write_block", interrupted)
    assert main(["search", *given, *more]) == 130
    if changed == "rm":
        other = random_reward_model()
        torch.nn.init.zeros_(scalar_head(other).weight)
        saved(other, policy(), tmp_path / "rm")
    else:
        text = (tmp_path / changed).read_text()
        (tmp_path / changed).write_text(text.replace('"answer": "', '"answer": "9') + "\n")
    capsys.readouterr()
    code = main(["search", *given, *more])
    said = {"rows.jsonl": "data.answers", "even.py": "code of env", "rm": "weights of --scorer"}
    said["ends.py"] = "code of --steps"
    assert (code, said[changed] in capsys.readouterr().err) == (2, True)


def test_after_a_failure_no_scoring_begins_and_none_runs_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, failing, cancelled, returned = (threading.Event() for _ in range(4))
    calls, ended, real = [], [], Searcher.row

    def slow(self: OutcomeScorer, task: Task, texts: Any, ends: Any) -> list[list[float]]:
        calls.append(task.id)
        begun.set()
        cancelled.wait(60)
        returned.wait(0.3)  # the command does not return before this ends
        ended.append(task.id)
        return [[0.0] for _ in texts]

    async def row(self: Searcher, task: Task, *given: Any) -> Any:
        if first := not failing.is_set():
            failing.set()
        try:
            if first:
                await asyncio.get_running_loop().run_in_executor(None, begun.wait)
                raise UserError("this task fails")
            return await real(self, task, *given)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(OutcomeScorer, "score", slow)
    monkeypatch.setattr(Searcher, "row", row)
    assert main([*words(place, tmp_path / "out"), "--tasks-at-once", "3"]) == 2
    returned.set()
    assert len(calls) == 1
    assert ended == calls


def test_an_engine_elsewhere_searches_one_task_at_a_time() -> None:
    world: Any = SimpleNamespace(engine=object(), longest=10)
    given = verb.Options(recipe="", out=Path("out"))
    assert compare.room(world, verb._plan(given, ("majority",), "")) == 1


def test_failed_checks_are_counted_over_all_tasks() -> None:
    one = {"failed": 1, "completions": 4}
    compare._check_failures([one], 3, 0.1)  # 1 of 12
    with pytest.raises(UserError, match="of 2 completions of 2 tasks failed"):
        compare._check_failures([one, one], 3, 0.1)


def test_a_rendered_prompt_needs_a_scorer_with_the_same_tokens(place: Path) -> None:
    (loaded,) = load_scorers([str(place / "rm")], RewardScoringConfig(), "rm")
    scorer, own = OutcomeScorer(loaded), Renderer(policy().tokenizer, policy().stop_token_ids)
    task = Task("t", "1+1=", form="rendered")
    compare.check_rendered([task], own, scorer)
    own.encode = lambda task: [0]  # type: ignore[method-assign]
    with pytest.raises(UserError, match="--scorer: task t"):
        compare.check_rendered([task], own, scorer)
    compare.check_rendered([replace(task, form="messages")], own, scorer)


def test_the_options_list_all_methods_and_aggregates() -> None:
    given = get_args(get_args(get_type_hints(verb.Options)["aggregate"])[0])
    assert given == tuple(AGGREGATES)
    table = verb.TEXT.partition("METHODS\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table if line[2] != " "] == list(ALL)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--methods beem", "Did you mean 'beam'"),
        ("--methods beam beam", "named twice"),
        ("--methods beam", "needs --scorer MODEL"),
        ("--methods greedy --scorer RM", "--scorer has no effect"),
        ("--methods greedy --n 4", "--n has no effect on greedy"),
        ("--methods majority --expand 4", "--expand has no effect"),
        ("--methods best_of_n --scorer RM --steps newline", "--steps has no effect"),
        ("--methods beam --scorer RM --steps every:4 --step-tokens 9", "--step-tokens has no"),
        ("--methods beam --scorer RM --steps line", "unknown way to end steps 'line'"),
        ("--methods beam --scorer RM --steps EVENS", "has no function"),
        ("--methods beam --scorer RM --n 6", "Use n = 4"),
        ("--methods regenerate --scorer RM", "no process reward model"),
        ("--methods beam --scorer RM --aggregate mean", "no process reward model"),
        ("--methods budget_forcing", "less than the longest completion, 12 tokens"),
        ("--methods greedy --budget 5", "--budget 5: the longest prompt alone has"),
        ("--methods greedy --tasks 9", "there are 3 held-out tasks"),
        ("--methods greedy --data.heldout 0", "or search training tasks with --train"),
        ("--methods beam --scorer POLICY", "is no process reward model"),
        ("--methods beam --scorer PRM --threshold 0.5", "--threshold has no effect"),
        ("--methods regenerate --scorer PRM --threshold 2", "between 0 and 1"),
        ("--methods beam --scorer nothere", "--scorer"),
        ("--methods greedy --out RM", "holds no search"),
        ("--methods greedy --environment.episode calculator", "completes one"),
        ("--budget 0", "--budget"),
        ("--methods budget_forcing --think 5 --think-end ☃", "think_end = '☃'"),
        (
            "--methods budget_forcing --think 5 --think-min 2 --think-end 1 --think-more ☃",
            "think_more = '☃'",
        ),
        ("--methods mcts --scorer RM --budget 900 --n 4", "--n has no effect on mcts"),
        (
            "--methods beam --scorer PRM --environment.prm.ends every:3 --step-tokens 9",
            "--step-tokens has no effect",
        ),
    ],
)
def test_bad_input_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    for name, path in (
        ("PRM", "prm"),
        ("RM", "rm"),
        ("POLICY", "policy"),
        ("EVEN", "even.py:even"),
    ):
        given = given.replace(name, str(place / path))
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert main(["search", str(place / "s.toml"), *out, *given.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not (tmp_path / "out").exists()
