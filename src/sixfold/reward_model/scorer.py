"""Scores of completions by one reward model, or by an ensemble."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import collate
from ..errors import UserError
from ..renderer.renderer import Renderer
from ..trainer.logprobs import Scoring, score_tables
from ..types import Group, Reward, Task, Trajectory
from .model import RewardModel, scalar_root
from .rows import completion_lengths, row_scores, scored_groups


class Scorer:
    """Scores completions by a reward model. Completions of one prompt share its computation.

    Args:
        reward_model: the model.
        max_tokens: most tokens that are computed at once.

    Attributes:
        tokens: tokens that the model has computed.
        renderer: with the model's tokenizer.
    """

    def __init__(self, reward_model: RewardModel, max_tokens: int) -> None:
        self.tokens = 0
        self._reward_model = reward_model
        self._max_tokens = max_tokens
        self._root = scalar_root(reward_model.model)
        self.renderer = Renderer(reward_model.tokenizer, reward_model.stop_token_ids)
        self._root.register_forward_pre_hook(self._count)

    @property
    def vocabulary(self) -> int:
        """Number of embeddings: larger token ids cannot be scored."""
        embeddings: Any = self._reward_model.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def context(self) -> int:
        """Longest prompt with a completion, in tokens: a closing token follows it."""
        return self._reward_model.context - 1

    @property
    def reads_completions(self) -> bool:
        """True if a score depends on where the completion begins."""
        known = self._reward_model
        return known.head == "mean" or known.calibration.length_slope != 0.0

    def spelled(self, text: str) -> list[int]:
        """Token ids of a text in which all special tokens are spelled out."""
        return self.renderer.encode(Task("scored", text, form="rendered"))

    def encoded(
        self, task: Task, texts: Sequence[str], ended: Sequence[bool]
    ) -> tuple[list[int], list[list[int]]]:
        """Token ids of a prompt and of completions given as text.

        Args:
            task: has the prompt.
            texts: the completions.
            ended: whether each has ended, so that its turn has an end.
        """
        renderer = self.renderer
        # `solution` leaves out a prefill that is repeated. A completion may begin as the prefill.
        begun = task.prefill if task.prefill.strip() else ""
        ids = [
            renderer.solution(replace(task, trace=begun + text)) if end else renderer.plain(text)
            for text, end in zip(texts, ended, strict=True)
        ]
        return renderer.encode(task), ids

    def rewards(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> Tensor:
        """[N] scores with the model's offset, scale and length slope, float64 on the CPU.

        Args:
            prompt: token ids, at least one.
            completions: token ids of N completions of the prompt.

        Raises:
            UserError: if a completion does not fit the model's context.
        """
        return self._reward_model.calibration.reward(*self._scores(prompt, completions))

    def _scores(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Scores [N] and lengths [N] of completions."""
        longest, room = max(map(len, completions)), self.context
        if len(prompt) + longest > room:
            raise UserError(
                f"the reward model reads at most {room} tokens, and a prompt with its completion"
                f" has {len(prompt) + longest}"
            )
        device = self._reward_model.model.device
        rows = [_trajectory(prompt, self._unpadded(c)) for c in completions]
        head = self._reward_model.head
        groups = scored_groups([Group(Task("scored", ""), rows)], head)
        batch = collate(groups).to(device)
        values, _ = score_tables(self._root, batch, Scoring(), self._max_tokens, share_prefix=True)
        return row_scores(batch, values, head).double().cpu(), completion_lengths(batch).cpu()

    def _count(self, root: nn.Module, given: tuple[Any, ...]) -> None:
        """Count the tokens of a packed row before it is computed."""
        self.tokens += len(given[0].tokens)

    def _unpadded(self, completion: Sequence[int]) -> Sequence[int]:
        """A completion without pad tokens at its end, which transformers does not read either."""
        end, pad = len(completion), self._reward_model.pad
        while pad is not None and end and completion[end - 1] == pad:
            end -= 1
        return completion[:end]


def combined(
    rewards: Sequence[Tensor], std_factor: float, limit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mean - k * standard deviation over an ensemble (https://arxiv.org/abs/2310.02743), and the
    standard deviation.

    Args:
        rewards: [N] of each model, calibrated, so that they have one scale.
        std_factor: k. 0: the mean.
        limit: bound of the first result. 0: none.

    Returns:
        Two tensors [N]. The deviation is that of the population: 0 for one model.
    """
    every = torch.stack(list(rewards))
    std = every.std(0, correction=0)
    bound = limit or math.inf
    return (every.mean(0) - std_factor * std).clamp(-bound, bound), std


def _trajectory(prompt: Sequence[int], completion: Sequence[int]) -> Trajectory:
    zeros, versions = [0.0] * len(completion), [-1] * len(completion)
    return Trajectory.one_turn(
        "scored", 0, prompt, completion, zeros, versions, "stop", reward=Reward(0.0)
    )
