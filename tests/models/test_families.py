"""Each model family from its folder on the hub to a trained one: it stops where its turn ends, and
only the turn is graded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sixfold
from sixfold.commands.generate import Options, generate
from sixfold.renderer.renderer import Renderer
from sixfold.report.rollouts import read_rollouts
from sixfold.types import Task
from tests.models.families import FAMILIES, QUESTION, Family, make_tokenizer

TASKS = [Task(f"{i}", QUESTION, answer="42") for i in range(4)]
LONGEST = 12
SETTINGS: dict[str, Any] = {
    "run.steps": 3, "run.threads": 1, "rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": LONGEST,
    "data.max_prompt_tokens": 400, "trainer.learning_rate": 1e-3, "environment.preflight": 4, "eval.every": 0, "checkpoint.every": 0,
}  # fmt: skip


@pytest.mark.mostly_nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_three_steps(
    family: Family,
    family_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = family_folder(family.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends, script = (
        [tokenizer.convert_tokens_to_ids(token) for token in tokens]
        for tokens in (family.ends, family.script)
    )
    followed = []

    def reward(
        completion: str,
        task: Task,
        finish_reason: str,
        completion_ids: list[int],
        prompt_ids: list[int],
        rendered_prompt: str,
    ) -> float:
        assert prompt_ids == _prompt(tokenizer, str(task.prompt))
        assert rendered_prompt == tokenizer.decode(prompt_ids)
        assert not [token for token in completion_ids[:-1] if token in ends]
        assert (finish_reason == "stop") == (completion_ids[-1] in ends)
        assert not [token for token in family.ends if token in completion]
        followed.append(completion_ids == script)
        assert (completion == family.text) == followed[-1]
        return float(completion.endswith("42"))

    settings = SETTINGS | {"model.path": str(folder), "run.dir": str(tmp_path)}
    run = sixfold.train(
        reward=reward,
        tasks=TASKS,
        heldout=[Task("held-out", f"{QUESTION} ", answer="42")],
        settings=settings,
    )
    assert json.loads((run / "summary.json").read_text())["heldout_after"] == 1.0
    shown = capsys.readouterr().err
    assert "first prompt as the model reads it" in shown and all(
        end in shown for end in family.ends
    )
    sampled = [
        record
        for step in (1, 2, 3)
        for record in read_rollouts(run / "rollouts" / f"step-{step:06d}.jsonl.zst")
    ]
    drawn = [record["tokens"][record["prompt_length"] :] == script for record in sampled]
    assert any(followed) and sum(drawn) > len(drawn) / 3
    assert all(
        record["provenance"].lstrip("p") == "s" * (len(record["tokens"]) - record["prompt_length"])
        for record in sampled
    )
    _transformers_says_the_same(run / "checkpoints" / "step-000003" / "model", family, ends)


SOLUTIONS = {"mistral": " so 42", "phi-3": " so 42", "gpt-oss": "<|channel|>final<|message|>so 42"} | dict.fromkeys(
    ("qwen3-base", "qwen3"), "<think>\n\n</think>\n\nso 42"
) | dict.fromkeys(("qwen3-thinking", "r1-distill"), "\n</think>\n\nso 42")  # fmt: skip
"""What SFT trains after the prompt, where it is more than the solution."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_solution_is_the_familys_turn(family: Family) -> None:
    tokenizer = make_tokenizer(family)
    renderer = Renderer(
        tokenizer, [tokenizer.convert_tokens_to_ids(token) for token in family.ends]
    )
    task = Task("t", QUESTION, trace="so 42")
    *turn, end = renderer.solution(task)
    assert tokenizer.decode([end]) == family.script[-1]
    spoken = tokenizer.decode([*renderer.encode(task), *turn]).removeprefix(
        tokenizer.decode(renderer.encode(task))
    )
    assert spoken == SOLUTIONS.get(family.name, "so 42")


def _prompt(tokenizer: Any, question: str = QUESTION) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return ids


def _transformers_says_the_same(saved: Path, family: Family, ends: list[int]) -> None:
    """The same greedy text, by the folder's own settings for where to stop."""
    ours = generate(Options(model=str(saved), prompt=QUESTION, temperature=0, max_tokens=LONGEST))
    tokenizer, model = (
        AutoTokenizer.from_pretrained(saved),
        AutoModelForCausalLM.from_pretrained(saved).eval(),
    )
    prompt = torch.tensor([_prompt(tokenizer)])
    with torch.no_grad():
        theirs = model.generate(
            prompt, max_new_tokens=LONGEST, do_sample=False, repetition_penalty=1.0
        )[0, prompt.shape[1] :].tolist()
    assert theirs[-1] in ends
    assert (
        ours
        == [tokenizer.decode(theirs[:-1])]
        == [family.text.removeprefix("<think>\n") if "\n" in family.text else family.text]
    )
