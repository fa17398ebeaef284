"""Implicit process reward models: the log-ratio of two language models as the score of steps.

A policy that is trained on outcomes by losses of the log-ratio to a reference has learned, without
labels of steps, q_k = beta * sum over the tokens up to step k of log pi / pi_ref: the log-odds that
the solution will be right (arXiv:2412.01981; PRIME, arXiv:2502.01456).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..model.loading import load_policy
from ..recipe.schema import ModelConfig
from ..renderer.renderer import Renderer
from ..trainer.logprobs import PolicyRoot, Scores, Scoring
from ..trainer.packing import PackedRow
from .step_model import CONVENTIONS, StepModel


class LogRatioRoot(nn.Module):
    """Scores the tokens of a packed row by beta * (log pi - log pi_ref).

    Args:
        model: the policy.
        reference: the reference, whose tokens mean the same.
        beta: scale.
    """

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel, beta: float) -> None:
        super().__init__()
        self.model = model
        self._roots = PolicyRoot(model), PolicyRoot(reference)
        self._beta = beta

    def forward(self, row: PackedRow, scoring: Scoring) -> Scores:
        """Log-ratio of every scored token, in the order of row.target."""
        policy, reference = (root(row, scoring).values for root in self._roots)
        return Scores(self._beta * (policy - reference), None)

    def prepare(self, *arguments: object) -> None:
        """Do nothing: the models are not trained."""


def load_implicit(
    paths: Sequence[str], beta: float, device: str, dtype: torch.dtype, setting: str
) -> StepModel:
    """Load an implicit process reward model.

    Args:
        paths: folders or hub ids of the policy and of its reference.
        beta: scale of the log-ratio, that of the policy's training.
        device: device of the models.
        dtype: dtype of their weights.
        setting: name of the setting that holds the paths, for error messages.

    Raises:
        UserError: if a model cannot be loaded, or if their tokenizers differ.
    """
    policy, reference = (
        load_policy(
            ModelConfig(path=str(Path(path).expanduser())),
            seed=0,
            device=device,
            dtype=dtype,
            setting=setting,
        )
        for path in paths
    )
    if policy.vocabulary_hash != reference.vocabulary_hash:
        raise UserError(
            f"{setting}: the tokenizers of '{paths[0]}' and '{paths[1]}' differ, and an implicit"
            " process reward model compares the log-probs of the same tokens. Name the model from"
            " which the policy was trained as the reference"
        )
    for one in (policy, reference):
        one.model.requires_grad_(False)
    return StepModel(
        LogRatioRoot(policy.model, reference.model, beta),
        policy.model,
        Renderer(policy.tokenizer, policy.stop_token_ids),
        "sixfold",
        (),
        CONVENTIONS["sixfold"].ends,
        min(policy.context, reference.context),
        models=2,
    )
