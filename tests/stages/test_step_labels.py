"""Monte Carlo labels of steps: against exact values, and by bisection."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sixfold.errors import UserError
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, SampleConfig
from sixfold.recipe.toml import parse_staged
from sixfold.renderer.renderer import Renderer
from sixfold.stages.driver import train_stages
from sixfold.stages.keepers import Keeper
from sixfold.stages.step_labels import StepLabeller
from sixfold.types import Group, Reward, Task, Trajectory
from tests.stages.staged_runs import flags, result

CONTINUATIONS = 100
TEXT = f"""\
run.name = "p"
environment.rewards = ["RULE:rule"]
model.scratch.alphabet = "0123456789+-*="

[[stages]]
kind = "sft"
name = "first"
sft.steps = 2

[[stages]]
kind = "sample"
sample.samples = 96
sample.tasks = 3
sample.keep = "all"
sample.label_steps = {CONTINUATIONS}
sample.label_ends = "every:1"

[[stages]]
kind = "prm"
data.source = "stage:sample"
prm.steps = 2
prm.ends = "every:1"
"""
RULE = """\
def rule(completions, **columns):
    return [float(c[0] in "02468+" or c[-1] in "13579") if c else 0.0 for c in completions]
"""


BY_OUTCOME = TEXT.replace("tasks = 3", "tasks = 8").replace(
    f"sample.label_steps = {CONTINUATIONS}", 'sample.labels = "outcome"\nsample.deduplicate = false'
)


def recipe(place: Path, text: str = TEXT) -> Any:
    (place / "rule.py").write_text(RULE)
    text = text.replace("RULE", str(place / "rule.py"))
    return parse_staged(text, "p.toml", flags(place, rollout__max_new_tokens=3))


def rule(completion: str) -> bool:
    """That of `RULE`. It reads the start of a solution, which is not sampled again, and its end."""
    return completion[0] in "02468+" or completion[-1] in "13579"


class Chain:
    """Exact chances of a text's continuations, by all of them."""

    def __init__(self, model: Path) -> None:
        policy = load_policy(ModelConfig(path=str(model)), seed=0, device="cpu")
        self.renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
        self._ends = policy.stop_token_ids
        self._pieces = [self.renderer.decode([n]) for n in range(len(policy.tokenizer))]
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()

    def continuations(
        self, context: list[int], start: str, new: int = 3
    ) -> list[tuple[float, str, bool]]:
        """Chance, text, and whether it ends by itself, of each completion of at most `new` tokens.

        Args:
            context: token ids of the prompt and of the start.
            start: text of the completion so far.
            new: most tokens after it.
        """
        found, live = [], [(1.0, context, start)]
        for _ in range(new):
            with torch.no_grad():
                logits = self._model(torch.tensor([ids for _, ids, _ in live])).logits[:, -1]
            longer = []
            for (chance, ids, text), row in zip(
                live, logits.double().softmax(-1).tolist(), strict=True
            ):
                for token, p in enumerate(row):
                    one = (chance * p, [*ids, token], text + self._pieces[token])
                    if token in self._ends:
                        found.append((one[0], text, True))
                    else:
                        longer.append(one)
            live = longer
        return found + [(chance, text, False) for chance, _, text in live]

    def solved(self, context: list[int], start: str) -> float:
        """Chance that a continuation is solved, cut ones included."""
        return sum(chance * rule(text) for chance, text, _ in self.continuations(context, start))


def tails(successes: int, count: int, p: float) -> float:
    """Smaller of P(X <= successes) and P(X >= successes) of a binomial variable."""
    chances = [math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
    return min(sum(chances[: successes + 1]), sum(chances[successes:]))


@pytest.mark.nightly
@pytest.mark.slow
def test_labels_are_binomial_around_the_exact_values_and_train_a_model(tmp_path: Path) -> None:
    assert train_stages(recipe(tmp_path)) == 0
    run = tmp_path / "p"
    whole = result(run)
    lines = (run / "stages" / "sample" / "dataset.jsonl").read_text().splitlines()
    chain = Chain(run / "stages" / "first" / "checkpoints" / "step-000002" / "model")
    squares, checked = 0.0, set[str]()
    for row in map(json.loads, lines):
        assert "".join(row["completions"]) == row["completion"]
        assert len(row["labels"]) == len(row["completions"])
        assert row["labels"][-1] == rule(row["completion"])
        prompt = chain.renderer.encode(Task("t", row["prompt"]))
        for number, label in enumerate(row["labels"][:-1]):
            start = "".join(row["completions"][: number + 1])
            if len(checked) == 8 or row["prompt"] + start in checked:
                continue  # a value takes a thousand continuations
            checked.add(row["prompt"] + start)
            p = chain.solved(prompt + chain.renderer.plain(start), start)
            successes = round(label * CONTINUATIONS)
            assert successes == pytest.approx(label * CONTINUATIONS)
            p = min(p, 1.0)
            assert tails(successes, CONTINUATIONS, p) > 1e-5
            if p < 1 - 1e-9:
                squares += (label - p) ** 2 * CONTINUATIONS / (p * (1 - p))
    assert len(checked) >= 5
    assert squares / len(checked) < 3.5  # as far off as chance allows

    # A resumed stage samples the blocks that are missing, and gives the same rows.
    stage = run / "stages" / "sample"
    for name in ("artifact.json", "summary.json", "dataset.jsonl"):
        (stage / name).unlink()
    shutil.rmtree(run / "stages" / "prm")
    assert train_stages(recipe(tmp_path), resume=run) == 0
    assert result(run) == whole


@pytest.mark.nightly
@pytest.mark.slow
def test_labels_by_outcome_average_to_the_exact_values(tmp_path: Path) -> None:
    assert train_stages(recipe(tmp_path, BY_OUTCOME)) == 0
    run = tmp_path / "p"
    whole = result(run)
    stage = run / "stages" / "sample"
    chain = Chain(run / "stages" / "first" / "checkpoints" / "step-000002" / "model")
    seen = defaultdict[tuple[str, str], list[float]](list)
    for row in map(json.loads, (stage / "dataset.jsonl").read_text().splitlines()):
        assert row["labels"] == [float(rule(row["completion"]))] * len(row["completions"])
        seen[row["prompt"], row["completions"][0]] += row["labels"][:1]
    checked, excess, variance = 0, 0.0, 0.0
    for (prompt, start), labels in seen.items():
        ids = chain.renderer.encode(Task("t", prompt)) + chain.renderer.plain(start)
        ended = [(p, text) for p, text, ends in chain.continuations(ids, start, 2) if ends]
        value = sum(p * rule(text) for p, text in ended) / sum(p for p, _ in ended)
        value = min(value, 1.0)
        assert tails(round(sum(labels)), len(labels), value) > 1e-6
        checked += 0.05 < value < 0.95
        excess += sum(labels) - len(labels) * value
        variance += len(labels) * value * (1 - value)
    assert checked >= 10
    assert abs(excess) < 4 * math.sqrt(variance)  # as far off as chance allows

    # A resumed stage samples the blocks that are missing, and gives the same rows.
    for name in ("artifact.json", "summary.json", "dataset.jsonl"):
        (stage / name).unlink()
    shutil.rmtree(run / "stages" / "prm")
    assert train_stages(recipe(tmp_path, BY_OUTCOME), resume=run) == 0
    assert result(run) == whole


def solution(task: str, steps: int, solved: bool | None) -> tuple[Keeper, Group]:
    t = Trajectory.one_turn(
        task, 0, [1], [2], [-1.0], [0], "stop", reward=Reward(0.0, solved=solved)
    )
    return Keeper(Task(task, "q"), 0, "x\n" * steps, 0.0), Group(Task(task, "q"), [t])


def labelled(
    labels: str, first_errors: Sequence[int | None], steps: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[float | None]], int]:
    """Labels of solutions with a first wrong step (None: they are right), and rates asked for."""
    config = SampleConfig(label_steps=4, labels=labels)  # type: ignore[arg-type]
    nothing: Any = SimpleNamespace(plain=None, shown=print)
    labeller = StepLabeller(nothing, nothing, nothing, nothing, config)
    asked = 0

    def rates(pairs: Sequence[Any], seed: int, on_phase: object) -> list[float | None]:
        nonlocal asked
        asked += len(pairs)
        found: list[float | None] = []
        for made, number in pairs:
            first = first_errors[int(made.keeper.task.id)]
            found.append(0.25 if first is None or number < first else 0.0)
        return found

    monkeypatch.setattr(labeller, "_rates", rates)
    made = [solution(f"{n}", steps, first is None) for n, first in enumerate(first_errors)]
    found = labeller.label([k for k, _ in made], [g for _, g in made], 0, lambda phase: None)
    assert all(one.steps == ["x\n"] * steps for one in found)
    return [one.labels for one in found], asked


def test_bisection_finds_the_first_error_with_few_continuations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for steps in range(1, 10):
        errors = [*range(steps), None]
        found, asked = labelled("bisect", errors, steps, monkeypatch)
        assert found == [
            [1.0] * steps if first is None else [*[1.0] * first, 0.0, *[None] * (steps - first - 1)]
            for first in errors
        ]
        assert asked <= steps * math.ceil(math.log2(steps) if steps > 1 else 0)


def test_soft_and_hard_labels_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert labelled("soft", [1, None], 3, monkeypatch)[0] == [[0.25, 0.0, 0.0], [0.25, 0.25, 1.0]]
    assert labelled("hard", [1, None], 3, monkeypatch)[0] == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


def test_solutions_that_cannot_be_labelled() -> None:
    with pytest.raises(ValueError, match=r"sample\.labels has no effect with sample\.label_steps"):
        SampleConfig(labels="hard")
    with pytest.raises(ValueError, match=r"sample\.label_ends has no effect"):
        SampleConfig(label_ends="sentence")
    with pytest.raises(ValueError, match=r"sample\.label_steps = 2 has no effect .* Leave it out"):
        SampleConfig(label_steps=2, labels="outcome", keep="all", deduplicate=False)
    for chosen in ({"keep": "all"}, {"keep": "solved", "deduplicate": False}):
        with pytest.raises(ValueError, match=r"Set sample\.keep = 'all' and sample\.dedup"):
            SampleConfig(labels="outcome", **chosen)


@pytest.mark.slow
def test_episodes_have_no_steps_to_label(tmp_path: Path) -> None:
    text = TEXT.replace('model.scratch.alphabet = "0123456789+-*="', "")
    text = text.replace("sample.samples", 'environment.episode = "calculator"\nsample.samples')
    with pytest.raises(UserError, match=r"label_steps = 100 labels solutions of one reply"):
        train_stages(recipe(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prm.steps = 2", "prm.steps = 2\nmodel.lora.rank = 4", r"has no adapter.*lora\.rank = 0"),
        (
            f'sample.label_steps = {CONTINUATIONS}\nsample.label_ends = "every:1"',
            "",
            r"labels no steps\. Set sample\.label_steps",
        ),
        (
            'sample.keep = "all"',
            'sample.keep = "all"\nsample.mix = [{source = "x.jsonl"}]',
            r"sample\.mix has no effect with sample\.label_steps",
        ),
        (
            'sample.keep = "all"',
            'sample.keep = "all"\nenvironment.rewards = ["prm:judge"]',
            r"stage 'sample': sample\.label_steps = 100 needs rewards that say what is solved",
        ),
        (
            f"sample.label_steps = {CONTINUATIONS}",
            'sample.labels = "outcome"\nsample.deduplicate = false\n'
            'environment.rewards = ["prm:judge"]',
            r"stage 'sample': sample\.labels = 'outcome' needs rewards that say what is solved",
        ),
    ],
)
def test_stages_that_cannot_work_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in TEXT
    with pytest.raises(UserError, match=message):
        recipe(tmp_path, TEXT.replace(old, new))


def test_the_judge_of_labels_that_all_stages_share_may_reward_rl(tmp_path: Path) -> None:
    text = TEXT.replace("sample.label_steps", "# ").replace("sample.label_ends", "# ")
    shared = f'sample.label_steps = {CONTINUATIONS}\nsample.label_ends = "every:1"\n'
    rl = """
[[stages]]
kind = "rl"
model = "stage:first"
run.steps = 1
environment.rewards = ["RULE:rule", "prm:stage:prm"]
environment.prm.credit = "gain"
algorithm.advantage = "process"
"""
    recipe(tmp_path, shared + text + rl)
