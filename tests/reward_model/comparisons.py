"""Made-up comparisons, and a small policy with a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.conftest import make_tiny
from transformers import PreTrainedModel

from sixfold.model.attention import NAME
from sixfold.model.loading import Policy
from sixfold.model.scalar_head import scalar_head
from sixfold.model.scratch import character_tokenizer
from sixfold.reward_model.model import reward_model_of
from sixfold.reward_model.rows import Head
from sixfold.types import Group, Reward, Task, Trajectory


def comparison(task: str, prompt: list[int], graded: Sequence[tuple[list[int], float]]) -> Group:
    rows = [
        Trajectory.one_turn(
            task, k, prompt, ids, [0.0] * len(ids), [-1] * len(ids), "stop", reward=Reward(grade)
        )
        for k, (ids, grade) in enumerate(graded)
    ]
    return Group(Task(task, ""), rows)


def comparisons(count: int = 5, seed: int = 0) -> list[Group]:
    """Groups of 2 to 4 completions of 1 to 6 tokens. The second group has a tie."""
    draw = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [draw.randrange(2, 40) for _ in range(draw.randint(1, most))]

    return [
        comparison(
            f"t{g}",
            tokens(5),
            [(tokens(6), float(0 if g == 1 and k == 2 else -k)) for k in range(2 + g % 3)],
        )
        for g in range(count)
    ]


def policy(name: str = "qwen3") -> Policy:
    model = make_tiny(name)
    model.set_attn_implementation(NAME)
    tokenizer = character_tokenizer("0123456789+-=*/ abcdefghijklmnop")
    return Policy(model, tokenizer, 256, (int(tokenizer.eos_token_id),), "")


def random_reward_model(name: str = "qwen3", head: Head = "last", own: Policy | None = None) -> Any:
    """A reward model with random head weights."""
    own = own or policy(name)
    model = reward_model_of(own, own.model, head)
    torch.manual_seed(1)
    torch.nn.init.normal_(scalar_head(model).weight, std=0.5)
    return model


def padded_states(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Hidden states [T, hidden] by transformers' own forward pass of one sequence."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    states = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    model.set_attn_implementation(before)
    return states


def saved(model: PreTrainedModel, own: Policy, folder: Path) -> Path:
    """Write a reward model as a checkpoint does."""
    model.save_pretrained(folder)
    own.tokenizer.save_pretrained(folder)
    return folder
