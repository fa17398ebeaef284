"""Implicit process reward models: their scores are log-ratios, computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import policy, saved
from tests.reward_model.test_step_models import PROMPT, own
from transformers import AutoModelForCausalLM

from sixfold.environment.grade import Grade
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import ProcessScoringConfig, RewardScoringConfig
from sixfold.recipe.toml import parse_staged
from sixfold.reward_model.step_reward import load_process_scorer, process_reward
from sixfold.types import Task

CPU = RewardScoringConfig(device="cpu")
BETA = 0.4
TEXTS = ["a=1\nb=2 c\n\nd", "a=1\nk", "3\n"]
RECIPE = """\
run.name = "implicit"
[[stages]]
kind = "sft"
sft.steps = 1
[[stages]]
kind = "sample"
name = "solutions"
sample.keep = "all"
[[stages]]
kind = "preference"
name = "judge"
model = "stage:sft"
data.source = "stage:solutions"
preference.losses = ["outcome"]
preference.epochs = 1
[[stages]]
kind = "rl"
run.steps = 1
model = "stage:sft"
environment.rewards = ["prm:stage:judge,stage:sft"]
environment.prm.credit = "log_odds"
algorithm.advantage = "process"
"""


def with_weights(std: float, seed: int) -> Policy:
    made = own()
    torch.manual_seed(seed)
    for p in made.model.parameters():
        torch.nn.init.normal_(p, std=std)
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two models with other weights and one tokenizer."""
    place = tmp_path_factory.mktemp("implicit")
    found = []
    for seed, name in enumerate(("policy", "reference")):
        made = with_weights(0.3, seed)
        made.save(place / name)
        found.append(str(place / name))
    return found


def log_ratios(pair: list[str], prompt: list[int], ids: list[int]) -> list[float]:
    """beta * (log pi - log pi_ref) of each token of a completion, by transformers."""
    tables = []
    for folder in pair:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0].double()
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        tables.append(rows[range(len(ids)), ids])
    return (BETA * (tables[0] - tables[1])).tolist()


def test_a_step_has_the_sum_of_the_log_ratios_up_to_it(pair: list[str]) -> None:
    config = ProcessScoringConfig(beta=BETA, credit="log_odds")
    reward = process_reward(pair, config, CPU)
    scorer = reward._scorer
    prompt = scorer.renderer.encode(Task("t", PROMPT))
    ids = [scorer.renderer.plain(text) for text in TEXTS]  # one token per character
    ends = [scorer.steps.ends(text) for text in TEXTS]
    by_hand = [log_ratios(pair, prompt, one) for one in ids]
    found = scorer.score(Task("t", PROMPT), TEXTS, ends)
    for scores, at, ratios in zip(found, ends, by_hand, strict=True):
        sums = [sum(ratios[:end]) for end in at]
        assert max(map(abs, sums)) > 0.05  # else the test would not tell
        assert scores == pytest.approx([1 / (1 + math.exp(-one)) for one in sums], abs=1e-5)
    # Both models compute the prompt once, and each completion with its closing token.
    assert scorer.tokens == 2 * (len(prompt) + sum(len(one) + 1 for one in ids))

    count = len(TEXTS)
    shown = scorer.renderer.shown(prompt)
    grades: list[Grade] = reward(
        [PROMPT] * count, TEXTS, ids, [prompt] * count, [shown] * count, ["stop"] * count
    )
    for grade, at, ratios in zip(grades, ends, by_hand, strict=True):
        steps = [sum(ratios[a:b]) for a, b in zip([0, *at], at, strict=False)]
        assert [reward for _, reward in grade.steps] == pytest.approx(steps, abs=1e-4)


def test_pairs_that_are_refused(pair: list[str], tmp_path: Path) -> None:
    made = policy()
    other = Policy(made.model, character_tokenizer("0123456789+"), 256, (1,), "")
    other.save(tmp_path / "other")
    saved(own().model, own(), tmp_path / "same")
    cases: list[tuple[list[str], dict[str, Any], str]] = [
        ([pair[0], str(tmp_path / "other")], {}, "the tokenizers of .* differ"),
        ([pair[0], "/nowhere"], {}, "'/nowhere'"),
        ([*pair, pair[0]], {}, "names 3 models"),
        (pair, {"convention": "trl"}, "convention = 'trl' has no effect"),
    ]
    for paths, settings, message in cases:
        with pytest.raises(UserError, match=message):
            load_process_scorer(paths, ProcessScoringConfig(**settings), CPU, "here")


def test_two_stages_that_make_models_are_a_pair() -> None:
    staged = parse_staged(RECIPE, "implicit.toml")
    made = {"sft": "/a", "judge": "/b", "solutions": "/c"}
    assert staged.stages[3].bound(made).environment.rewards == ("prm:/b,/a",)
    for old, new, message in (
        ("judge,stage:sft", "judge,stage:solutions", "makes a dataset, .* takes a model"),
        ("judge,stage:sft", "judge,stage:none", "no earlier stage has this name"),
        ("prm:stage:judge,stage:sft", "prm:stage:judge", "makes a model, .* takes a reward_model"),
    ):
        with pytest.raises(UserError, match=message):
            parse_staged(RECIPE.replace(old, new), "implicit.toml")
