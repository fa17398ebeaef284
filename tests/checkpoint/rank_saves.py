"""Functions that the ranks of the checkpoint tests run. Other processes import them by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sixfold.checkpoint import parts, saver
from sixfold.checkpoint.best import BestSteps
from sixfold.checkpoint.checkpoint import load_newest
from sixfold.checkpoint.payload import Payload
from sixfold.checkpoint.registry import load_components, states_of
from sixfold.checkpoint.saver import Saver
from sixfold.checkpoint.state import RunState, with_progress
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.model.loading import Policy, load_policy
from sixfold.ranks import Ranks
from sixfold.recipe.schema import ModelConfig, ParallelConfig, TrainerConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.run.inputs import Inputs
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.sharded import shard_policy, whole
from sixfold.trainer.trainer import Trainer
from sixfold.trainer.whole_weights import WholeWeights
from tests.run.processes import tiny_recipe

from .test_checkpointable import batch_of, policy_loss

SETTINGS = TrainerConfig(learning_rate=1e-2, max_tokens_per_microbatch=24)


class Training:
    """A policy and its trainer on some ranks, with the saver of a run.

    Args:
        ranks: the ranks.
        folder: folder of the run.
        tied: the head is the embedding.
        resume: continue from the newest checkpoint.
        background: save in the background.
        tensor: ranks of a tensor group.
        context: ranks of a context group.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path,
        *,
        tied: bool = True,
        resume: bool = False,
        background: bool = False,
        tensor: int = 1,
        context: int = 1,
    ) -> None:
        heads = {"model__scratch__kv_heads": tensor}
        flags = tiny_recipe(folder.parent, checkpoint__asynchronous=background, **heads)
        recipe = parse_recipe('run.name = "run"', "test", flags)
        folder.mkdir(exist_ok=True)
        self.ranks, self.run, self.warnings = ranks, RunFolder(folder), list[str]()
        checkpoint = load_newest(self.run.checkpoints)[0] if resume else None
        source = ModelConfig(path=str(checkpoint.model_path)) if checkpoint else recipe.model
        self.policy = load_policy(source, seed=0, device="cpu")
        if not tied and not checkpoint:
            untie(self.policy)
        root = PolicyRoot(self.policy.model)
        sharing = ranks
        if ranks.size > 1:
            parallel = ParallelConfig(tensor=tensor, context=context)
            sharing = shard_policy(root, ranks, parallel, None).ranks
        self.trainer = Trainer(root, SETTINGS, Scoring(chunk=16), 10, ranks=sharing)
        self.state = RunState.of(checkpoint) if checkpoint else RunState()
        if checkpoint:
            load_components(checkpoint, self.registry())
        inputs = asdict(Inputs({}, {}, [], "", "", {}))
        self.saver = Saver(
            self.run.checkpoints,
            ranks,
            recipe.checkpoint,
            inputs,
            BestSteps(0),
            self.warnings.append,
        )

    def registry(self) -> Any:
        return {**with_progress(self.state, {"policy": self.trainer})}

    def step(self) -> None:
        self.trainer.train_step(batch_of(self.state.step), policy_loss)
        self.state.step += 1

    def save(self, *, required: bool = True) -> None:
        registry = self.registry()
        self.saver.save("step", self.policy, registry, states_of(registry), required=required)

    def tensors(self) -> dict[str, Tensor]:
        """All weights and moments, gathered from the ranks."""
        live = {**dict(self.policy.model.named_parameters()), **self.trainer.tensors()}
        return {name: whole(tensor.detach()).clone() for name, tensor in live.items()}


def untie(policy: Policy) -> None:
    """Replace the tied head by a head with its own weights."""
    model: Any = policy.model
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)


def train_and_save(
    ranks: Ranks, folder: Path, tied: bool = True, background: bool = False
) -> dict[str, Tensor]:
    """Make two steps, and save after each. Returns the tensors of the last save, gathered.

    With `background`, a third step changes all tensors before the writer starts.
    """
    training = Training(ranks, folder, tied=tied, background=background)
    if background:
        make_late(0.3)
    training.step()
    training.save()
    training.step()
    expected = training.tensors()
    training.save(required=not background)
    training.step()
    training.saver.settle()
    ranks.barrier("the end")
    assert training.warnings == []
    return expected


def make_late(seconds: float) -> None:
    write = Payload.write
    written = parts.Parts.written

    def late(self: parts.Parts, *args: Any) -> Any:
        time.sleep(seconds)
        return written(self, *args)

    parts.Parts.written = late  # type: ignore[method-assign]
    Payload.write = write  # type: ignore[method-assign]


def resume_and_step(ranks: Ranks, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and moments after a resume, and after the next step."""
    training = Training(ranks, folder, resume=True)
    before = training.tensors()
    training.step()
    return before, training.tensors()


def one_group(ranks: Ranks, folder: Path, kind: str) -> tuple[dict[str, Tensor], ...]:
    """Save in one tensor or context group, resume in it, and make another step.

    Returns:
        Weights and moments as saved, as resumed, and after the next step; the weights as a sync
        gathers them after that step.
    """
    groups = {kind: ranks.size}
    training = Training(ranks, folder, **groups)
    training.step()
    training.save()
    saved = training.tensors()
    ranks.barrier("the checkpoint")
    resumed = Training(ranks, folder, **groups, resume=True)
    before = resumed.tensors()
    resumed.step()
    return saved, before, resumed.tensors(), dict(WholeWeights(resumed.policy.model))


def one_fails(ranks: Ranks, folder: Path, how: str) -> tuple[str, list[str]]:
    """Rank 1 cannot write its part of the second checkpoint. Returns the error and the files."""
    training = Training(ranks, folder)
    training.save()
    training.step()
    if ranks.rank == 1:
        fail(how)
    saver.WRITE_SECONDS = 0.5
    error = ""
    try:
        training.save()
    except UserError as raised:
        error = str(raised)
    ranks.barrier("the end")
    return error, sorted(path.name for path in training.run.checkpoints.iterdir())


def fail(how: str) -> None:
    """Make this rank unable to write: the disk is full, or a write takes too long."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, os.strerror(28))

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(1.5)

    action: Callable[..., None] = broken if how == "full disk" else slow
    parts.save_file = action  # type: ignore[assignment]


def not_finite_somewhere(ranks: Ranks, folder: Path) -> str:
    """Save with one NaN, which is in the last rank's part of a weight. Returns the error."""
    training = Training(ranks, folder)
    training.save()
    training.step()
    name, tensor = next(iter(training.policy.model.named_parameters()))
    with torch.no_grad():
        if ranks.rank == ranks.size - 1:
            local: Any = tensor
            local.to_local()[-1, -1] = float("nan")
    try:
        training.save()
    except RuntimeError as error:
        return f"{type(error).__name__} {name in str(error)}"
    return "saved"
