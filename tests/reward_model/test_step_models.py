"""Process reward models in folders: Sixfold's own, and small models in the forms of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import policy, saved
from safetensors.torch import load_file, save_file
from tests.conftest import make_tiny
from tests.reward_model.test_step_loss import random_step_model
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.model.scratch import character_tokenizer
from sixfold.reward_model.step_model import load_step_model
from sixfold.reward_model.step_scorer import ProcessScorer, _without
from sixfold.types import Task

ALPHABET = "0123456789+-=*/ abcdefghijk\nки"
PROMPT = "1+2"
TEXTS = ["a=1\nb=2 c\n\nd", "a=1\nk", "3\n"]
STEPS = [["a=1", "b=2 c", "d"], ["a=1", "k"], ["3"]]


def scorer(folder: Path, convention: str = "auto", ends: str = "") -> ProcessScorer:
    return ProcessScorer(load_step_model(str(folder), convention, "cpu"), 4096, ends)


def found(scores: ProcessScorer) -> list[list[float]]:
    return scores.score(Task("t", PROMPT), TEXTS, [scores.steps.ends(text) for text in TEXTS])


def own(name: str = "qwen3") -> Policy:
    made = policy(name)
    return Policy(made.model, character_tokenizer(ALPHABET), 256, (1,), "")


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[T, labels] by transformers' own forward pass."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2"])
def test_the_second_label_of_a_saved_model_is_the_score(name: str, tmp_path: Path) -> None:
    base = own(name)
    model = random_step_model(name)
    folder = saved(model, base, tmp_path / "prm")
    scores = scorer(folder)
    assert load_step_model(str(folder), "auto", "cpu").ends == "newline"
    loaded = AutoModelForTokenClassification.from_pretrained(folder)
    assert loaded.config.num_labels == 2
    prompt = scores.renderer.encode(Task("t", PROMPT))
    expected = []
    for text in TEXTS:
        ids = scores.renderer.plain(text)  # one token per character
        table = logits(loaded, prompt + ids).softmax(-1)[:, 1]
        expected.append([float(table[len(prompt) + end - 1]) for end in scores.steps.ends(text)])
    assert [len(row) for row in expected] == [3, 2, 1]
    for row, right in zip(found(scores), expected, strict=True):
        assert row == pytest.approx(right, abs=1e-5)


def test_prefixes_are_computed_once_and_all_tokens_are_counted(tmp_path: Path) -> None:
    scores = scorer(saved(random_step_model(), own(), tmp_path / "prm"))
    prompt = len(scores.renderer.encode(Task("t", PROMPT)))
    found(scores)
    # Shared is what comes before the first step that is read: "3" of TEXTS is another first token.
    assert scores.tokens == prompt + sum(len(text) + 1 for text in TEXTS)
    alone = [
        scores.score(Task("t", PROMPT), [text], [scores.steps.ends(text)])[0] for text in TEXTS
    ]
    for row, single in zip(found(scores), alone, strict=True):
        assert row == pytest.approx(single, abs=1e-5)
    assert scores.score(Task("t", PROMPT), ["", "3"], [[], [1]])[0] == []


def two_labels(folder: Path) -> tuple[Any, list[list[tuple[list[int], int]]]]:
    """TRL's PRMTrainer: prompt, then every step and a newline, each encoded by itself."""
    base = own()
    tokenizer: Any = base.tokenizer
    start = "<|user|>"  # a tokenizer that writes a token before every text
    tokenizer.bos_token = start
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.convert_tokens_to_ids(start))]
    )
    config = base.model.config
    config.num_labels = 2
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_config(config)
    nn.init.normal_(model.score.weight)
    saved(model, base, folder)
    return model, read_apart(tokenizer, PROMPT, "\n")


def read_apart(
    tokenizer: PreTrainedTokenizerBase, prompt: str, mark: str
) -> list[list[tuple[list[int], int]]]:
    """For each step of each text: the tokens up to the mark after it, and its place."""
    rows = []
    for steps in STEPS:
        ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id, *ids]
        row = []
        for step in steps:
            ids = ids + tokenizer(step + mark, add_special_tokens=False)["input_ids"]
            row.append((ids, len(ids) - 1))
        rows.append(row)
    return rows


def value_head(folder: Path) -> tuple[Any, list[list[tuple[list[int], int]]]]:
    """Skywork-o1-Open-PRM: `model.*` and `v_head.summary.*`, read at the newline by a sigmoid."""
    base = own()
    base.tokenizer.bos_token = "<|user|>"  # which this tokenizer does not write by itself
    saved(base.model, base, folder)
    torch.manual_seed(4)
    size = base.model.config.hidden_size
    head = nn.Linear(size, 1)
    parts = {"v_head.summary.weight": head.weight, "v_head.summary.bias": head.bias}
    rewrite(folder, "Qwen3ForPrmModel", parts)
    body = base.model.base_model

    class Whole(nn.Module):
        def set_attn_implementation(self, name: str) -> None:
            body.set_attn_implementation(name)

        def forward(self, ids: torch.Tensor) -> Any:
            value = head(body(ids).last_hidden_state)
            zero = torch.zeros_like(value)
            return type("Out", (), {"logits": torch.cat([zero, value], -1)})

    return Whole(), read_apart(base.tokenizer, PROMPT + "\n", "\n")


def two_layers(folder: Path) -> tuple[Any, list[list[tuple[list[int], int]]]]:
    """Qwen2.5-Math-PRM: chat template, <extra_0> after every step, two layers in the head."""
    base = own()
    tokenizer: Any = base.tokenizer
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<extra_0>", special=True)]}
    )
    base.model.resize_token_embeddings(len(tokenizer))
    saved(base.model, base, folder)
    torch.manual_seed(4)
    size = base.model.config.hidden_size
    head = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
    rewrite(
        folder,
        "Qwen3ForProcessRewardModel",
        {f"score.{name}": p for name, p in head.named_parameters()},
    )
    body = base.model.base_model

    class Whole(nn.Module):
        def set_attn_implementation(self, name: str) -> None:
            body.set_attn_implementation(name)

        def forward(self, ids: torch.Tensor) -> Any:
            return type("Out", (), {"logits": head(body(ids).last_hidden_state)})

    mark = tokenizer.convert_tokens_to_ids("<extra_0>")
    rows = []
    for steps in STEPS:
        ids = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": "<extra_0>".join(steps) + "<extra_0>"},
            ],
            tokenize=True,
            return_dict=False,
        )
        rows.append([(ids, at) for at, token in enumerate(ids) if token == mark])
    return Whole(), rows


def words(folder: Path) -> tuple[Any, list[list[tuple[list[int], int]]]]:
    """Math-Shepherd: a causal LM, softmax over + and - at the last token of the mark."""
    base = own()
    saved(base.model, base, folder)
    tokenizer = base.tokenizer
    plus, minus = (tokenizer.convert_tokens_to_ids(word) for word in "+-")

    class Whole(nn.Module):
        def set_attn_implementation(self, name: str) -> None:
            base.model.set_attn_implementation(name)

        def forward(self, ids: torch.Tensor) -> Any:
            table = base.model(ids).logits[..., [minus, plus]]
            return type("Out", (), {"logits": table})

    rows = []
    for steps in STEPS:
        text = f"{PROMPT} " + "\n".join(f"{step} ки" for step in steps)
        ids = tokenizer(text)["input_ids"]
        last = tokenizer.convert_tokens_to_ids("и")
        rows.append([(ids, at) for at, token in enumerate(ids) if token == last])
    return Whole(), rows


def rewrite(folder: Path, architecture: str, more: dict[str, torch.Tensor]) -> None:
    """Make a causal LM's folder one of another class, with other weights for its head."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", architecture))
    file = folder / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if not name.startswith("lm_head")}
    save_file({**kept, **{n: t.detach().clone() for n, t in more.items()}}, file, {"format": "pt"})


MADE: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("auto", "trl", two_labels),
    ("auto", "skywork", value_head),
    ("auto", "qwen", two_layers),
    ("math_shepherd", "math_shepherd", words),
]


@pytest.mark.parametrize(("asked", "name", "make"), MADE, ids=[name for _, name, _ in MADE])
def test_models_of_others_are_read_by_their_conventions(
    asked: str, name: str, make: Callable[[Path], Any], tmp_path: Path
) -> None:
    model, rows = make(tmp_path / name)
    scores = scorer(tmp_path / name, asked, "newline")
    for row, right in zip(found(scores), rows, strict=True):
        expected = [float(logits(model, ids)[at].softmax(-1)[1]) for ids, at in right]
        assert row == pytest.approx(expected, abs=1e-5)
    # A policy that writes the mark itself cannot choose where it is scored.
    if name in ("qwen", "math_shepherd"):
        mark = {"qwen": "<extra_0>", "math_shepherd": "ки"}[name]
        forged = TEXTS[1].replace("a", f"a{mark}")
        assert scores.score(Task("t", PROMPT), [forged], [scores.steps.ends(forged)])[
            0
        ] == pytest.approx(found(scores)[1], abs=1e-5)


def test_folders_that_are_no_process_reward_models(tmp_path: Path) -> None:
    base = own()
    language = saved(base.model, base, tmp_path / "lm")
    config = make_tiny("qwen3").config
    config.num_labels = 3
    three = saved(AutoModelForTokenClassification.from_config(config), base, tmp_path / "three")
    for folder, convention, message in (
        (language, "auto", r"names Qwen3ForCausalLM\. Name the result of a stage of kind prm"),
        (language, "qwen", "score.0|no token '<extra_0>'|is missing"),
        (three, "auto", "has 3 labels, and a process reward model has two"),
        (tmp_path / "none", "auto", "cannot be loaded as a process reward model"),
        (language, "math-shepherd", "Did you mean 'math_shepherd'"),
    ):
        with pytest.raises(UserError, match=message):
            load_step_model(str(folder), convention, "cpu", setting="environment.rewards")


def test_what_cannot_be_scored(tmp_path: Path) -> None:
    scores = scorer(saved(random_step_model(), own(), tmp_path / "prm"))
    with pytest.raises(UserError, match=r"reads at most \d+ tokens, and .* has"):
        scores.score(Task("t", PROMPT), ["1" * 600], [[600]])
    with pytest.raises(UserError, match="ends at character 9"):
        scores.score(Task("t", PROMPT), ["12"], [[9]])


@pytest.mark.parametrize("ends", ["os:system", "own.py:f", ["newline"]])
def test_code_that_a_config_names_is_not_loaded(ends: object, tmp_path: Path) -> None:
    folder = saved(random_step_model(), own(), tmp_path / "prm")
    config = json.loads((folder / "config.json").read_text()) | {"step_ends": ends}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"no code .* Set environment\.prm\.ends"):
        scorer(folder)
    assert scorer(folder, ends="newline").ends == "newline"


def test_a_mark_that_removing_marks_makes_is_removed() -> None:
    assert _without("1 ккии", "ки") == "1"
    assert _without("<extra<extra_0>_0>2", "<extra_0>") == "2"


def test_a_prefill_is_the_start_of_the_first_step(tmp_path: Path) -> None:
    two_labels(tmp_path)
    scores = scorer(tmp_path)
    messages = ({"role": "user", "content": PROMPT}, {"role": "assistant", "content": "a="})
    begun = scores.score(Task("t", messages, form="continued"), ["1\nk"], [[2, 3]])
    assert begun[0] == pytest.approx(
        scores.score(Task("t", PROMPT), ["a=1\nk"], [[4, 5]])[0], abs=1e-6
    )
