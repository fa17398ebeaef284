"""Weight sync to an engine in another process or thread, with a version number.

The engine's memory is not inspected: weights may be fused, repacked or on another machine. So
outputs are compared: after every sync, engine and trainer score the same fixed sequence. The engine
stamps tokens with its version, which shows that the version arrived.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..checkpointable import check_names, check_tensors
from ..engine.weight_stages import stage
from ..rollout.generator import Generator, wait_for
from .base import AdaptedPolicy
from .measured import StagedWeights
from .sync import PeriodicSync, SyncError, finite_weights

T = TypeVar("T")

PROBE_TOKENS = 32


class Wait(Protocol):
    """Runs a coroutine to its end."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T:
        """Result of the coroutine."""
        ...


class VersionedSync(PeriodicSync[Generator]):
    """Sync for an engine in another process or thread, which gets a copy every `every` steps.

    Args:
        trainer: as for `PeriodicSync`, as are `every` and `lora`.
        engine: samples from a copy of the weights.
        limit: largest mean difference of the probe's log-probs, in nats.
        longest: longest sequence that the engine accepts, in tokens.
        wait: runs a coroutine of the engine to its end.
        renames: the engine expects the names of a checkpoint. False: those of the trainer's module.
    """

    def __init__(
        self,
        trainer: PreTrainedModel,
        engine: Generator,
        every: int,
        limit: float,
        longest: int,
        lora: AdaptedPolicy | None = None,
        wait: Wait = wait_for,
        renames: bool = True,
    ) -> None:
        super().__init__(trainer, engine, every, lora)
        self._wait = wait
        self._renames = renames
        self._limit = limit
        self._probe = probe_tokens(trainer, longest)
        self._handed: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Engine weights by name, if they may be older than the trainer's.

        Otherwise empty: the checkpoint already contains them.
        """
        return dict(self._handed)

    @contextmanager
    def policy_weights(self, version: int) -> Iterator[None]:
        """In this block the engine samples from the policy's weights, not from stale ones.

        Afterwards the engine has its earlier weights and version again. Before RL, where every
        version is 0, it keeps the newer ones: no training samples exist yet.

        Args:
            version: version of the policy's weights.
        """
        before, held = self._engine.version, self._handed
        if version == before and (before > 0 or self.waited):  # no update since it got them
            yield
            return
        self._hand_over(version)
        if not held or version <= before:
            yield
            return
        self._handed = held  # saved in the checkpoint if the evaluation fails and ends the run
        yield
        self._load(held, before)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        check_names(self.state(), state, "value")
        check_tensors(self._handed, tensors)
        if self._every == 1:
            self._hand_over(state["version"])
        else:
            self._handed = {name: tensors[name].clone() for name in self._handed}
            self._load(self._handed, state["version"])
        self.waited = state["waited"]

    @torch.no_grad()
    def _hand_over(self, version: int) -> None:
        with stage("verify"):
            weights: Mapping[str, Tensor] = finite_weights(self._trainer)
        if self._lora:
            weights = StagedWeights(self._lora.merged(), "gather")
        self._load(weights, version)
        if self._every > 1:
            self._handed = {name: tensor.detach().clone() for name, tensor in weights.items()}
        with stage("verify"):
            self.prove()

    def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        with stage("reshard"):
            given = self._checkpoint_form(weights) if self._renames else weights
            try:
                self._wait(self._engine.load(given, version))
            except ValueError as error:
                raise SyncError(f"{error}. The engine keeps its old weights") from error

    def _checkpoint_form(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename the trainer's weights to checkpoint names.

        Experts are stacked in the trainer and separate in a checkpoint. Tied weights appear under
        each of their names.
        """
        plain = self._lora.base if self._lora else self._trainer
        every = {name: weights[own] for name, own in every_name(plain).items()}
        return revert_weight_conversion(plain, every)

    @torch.no_grad()
    def prove(self) -> None:
        """Compare the probe's log-probs of engine and trainer.

        Raises:
            SyncError: if their mean absolute difference exceeds the limit.
        """
        tokens = torch.tensor([self._probe], device=self._trainer.device)
        logits = self._trainer(tokens, use_cache=False).logits[0, :-1].float()
        ours = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].cpu()
        compare_probe(self._wait(self._score()), ours.tolist(), self._limit)

    async def _score(self) -> list[float]:
        logp = await self._engine.score(self._probe)
        await self._engine.sleep()
        return logp


def probe_tokens(trainer: PreTrainedModel, longest: int) -> list[int]:
    """Fixed token sequence for the check. Any tokens work, as long as they are always the same.

    Args:
        trainer: the policy.
        longest: longest sequence that the engine accepts, in tokens.
    """
    vocabulary, length = trainer.config.get_text_config().vocab_size, min(PROBE_TOKENS, longest - 1)
    found: list[int] = torch.randint(
        vocabulary, (length,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return found


def compare_probe(theirs: Sequence[float], ours: Sequence[float], limit: float) -> None:
    """Compare the log-probs of the probe's tokens that engine and trainer have computed.

    Raises:
        SyncError: if their mean absolute difference exceeds the limit.
    """
    gap = float((torch.tensor(theirs) - torch.tensor(ours)).abs().mean())
    if not gap <= limit:
        raise SyncError(
            "engine and trainer score the probe differently: mean difference"
            f" {gap:.2g} nats (limit {limit:g})"
        )


def every_name(model: PreTrainedModel) -> dict[str, str]:
    """Name of each parameter, and the name that `named_parameters` has it under.

    A tied parameter has several names.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every}
