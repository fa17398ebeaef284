"""Sync to an engine in another process, here one in this process that shares nothing: what is
handed over, when, and what a wrong one costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.backends.weight_files import prepare_for_file
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.run.checkpoint_form import checkpoint_form
from sixfold.sync.sync import SyncError
from sixfold.sync.versioned import VersionedSync
from sixfold.types import SamplingParams

LIMIT = 1e-4


class Elsewhere:
    """A Generator with a model of its own. deaf: it says that it has loaded, and has not."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model)
        with torch.no_grad():
            for p in self.model.parameters():
                p.normal_(0, 0.1)
        self.version = -1
        self.loads: list[dict[str, Tensor]] = []
        self.deaf = False

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        raise NotImplementedError

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        self.take(weights, version)
        return 0

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.loads.append({name: tensor.clone() for name, tensor in weights.items()})
        self.version = version
        if not self.deaf:
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return self.log_probs(tokens)

    @torch.no_grad()
    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        logits = (
            self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].log_softmax(-1)
        )
        return logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    async def sleep(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def trained(tiny: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(tiny("qwen3"))


@torch.no_grad()
def nudge(model: PreTrainedModel, by: float = 1.05) -> None:
    for p in model.parameters():
        p.mul_(by)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def names(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_first_weights_are_number_0_and_later_ones_the_trainers(
    trained: PreTrainedModel,
) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, 1, LIMIT, 64)
    sync.refresh()
    assert engine.version == 0 and same(names(engine.model), names(trained))
    nudge(trained)
    sync.sync(3)
    assert engine.version == 3 and same(names(engine.model), names(trained))
    sync.sync(3)  # a step without an update
    assert len(engine.loads) == 2
    nudge(trained)
    sync.refresh()  # within a version, as between SFT steps
    assert engine.version == 3 and same(names(engine.model), names(trained))


def test_every_second_step_counts_steps_and_not_versions(trained: PreTrainedModel) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, 2, LIMIT, 64)
    sync.refresh()
    seen = []
    for step in range(1, 6):
        sync.sync(4 * step)
        seen.append((engine.version, sync.waited))
    assert seen == [(0, 1), (8, 0), (8, 1), (16, 0), (16, 1)]


def test_an_evaluation_gets_the_policy_and_training_its_stale_weights_again(
    trained: PreTrainedModel,
) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, 3, LIMIT, 64)
    sync.refresh()
    old = names(trained)
    nudge(trained)
    sync.sync(1)
    with sync.policy_weights(1):
        assert engine.version == 1 and same(names(engine.model), names(trained))
    assert (engine.version, sync.waited) == (0, 1) and same(names(engine.model), old)
    assert same(sync.tensors(), old), "a checkpoint holds the stale ones"
    for version in (2, 3):
        nudge(trained)
        sync.sync(version)
    loads = len(engine.loads)
    with sync.policy_weights(3):
        assert engine.version == 3 and same(names(engine.model), names(trained))
    assert len(engine.loads) == loads, "what is there already is not handed over again"


def test_an_evaluation_within_version_0_sees_what_sft_has_changed(trained: PreTrainedModel) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, 1, LIMIT, 64)
    sync.refresh()
    nudge(trained)
    with sync.policy_weights(0):
        assert engine.version == 0 and same(names(engine.model), names(trained))


def test_engine_that_did_not_load_weights_is_detected(trained: PreTrainedModel) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, 1, LIMIT, 64)
    sync.refresh()
    engine.deaf = True
    nudge(trained)
    with pytest.raises(
        SyncError,
        match=(
            r"score the probe differently: mean difference 0\.\d+ nats \(limit"
            r" 0.0001\)"
        ),
    ):
        sync.sync(1)


def test_engine_that_computes_nan_is_detected(trained: PreTrainedModel) -> None:
    engine = Elsewhere(trained)
    engine.log_probs = lambda tokens: [float("nan")] * (len(tokens) - 1)  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="mean difference nan nats"):
        VersionedSync(trained, engine, 1, LIMIT, 64).refresh()


def test_weights_that_are_not_finite_stay_here(trained: PreTrainedModel) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, 1, LIMIT, 64)
    sync.refresh()
    with torch.no_grad():
        trained.model.norm.weight.fill_(float("inf"))
    with pytest.raises(SyncError, match=r"weight 'model.norm.weight' is not finite"):
        sync.sync(1)
    assert len(engine.loads) == 1 and engine.version == 0


def test_the_probe_fits_a_short_context(trained: PreTrainedModel) -> None:
    engine = Elsewhere(trained)
    asked = []
    score = engine.score
    engine.score = lambda tokens: asked.append(len(tokens)) or score(tokens)  # type: ignore[method-assign,func-returns-value]
    VersionedSync(trained, engine, 1, LIMIT, 12).refresh()
    VersionedSync(trained, engine, 1, LIMIT, 500).refresh()
    assert asked == [11, 32]  # one token is sampled after the probe


@pytest.mark.parametrize("every", [1, 3])
def test_checkpoint_restores_the_engine_weights(trained: PreTrainedModel, every: int) -> None:
    engine = Elsewhere(trained)
    sync = VersionedSync(trained, engine, every, LIMIT, 64)
    sync.refresh()
    handed = names(trained)
    saved = {k: v.clone() for k, v in sync.tensors().items()}
    assert same(saved, {} if every == 1 else handed)
    nudge(trained)
    if every == 1:
        sync.sync(5)
        handed = names(trained)

    again = Elsewhere(trained)
    resumed = VersionedSync(trained, again, every, LIMIT, 64)
    resumed.refresh()  # as building a world does: the model is the checkpoint's
    resumed.load(saved, {"version": 5, "waited": 0 if every == 1 else 1})
    assert again.version == 5 and resumed.waited == (every > 1) and same(names(again.model), handed)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gemma2", "gpt2"])
def test_weights_go_over_as_save_pretrained_writes_them(
    architecture: str, tiny: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    """The oracle is the file that transformers writes: experts apart, tied weights once."""
    model = tiny(architecture)
    handed: dict[str, Tensor] = {}

    class Taker(Elsewhere):
        def take(self, weights: Mapping[str, Tensor], version: int) -> None:
            handed.update(weights)

    sync = VersionedSync(model, Taker(model), 1, float("inf"), 64)
    sync.refresh()
    model.save_pretrained(tmp_path)
    once, tied = prepare_for_file(handed, torch.float32)
    assert same(once, load_file(tmp_path / "model.safetensors"))
    embedding = "transformer.wte.weight" if architecture == "gpt2" else "model.embed_tokens.weight"
    assert tied == ({"lm_head.weight": embedding} if model.config.tie_word_embeddings else {})
    form, sent = checkpoint_form(model), dict[str, Tensor]()
    for name, tensor in names(model).items():  # one after the other, as ranks gather them
        sent.update(form.parts(name, tensor))
    assert same(sent, handed) and set(form.names) == sent.keys()
    assert form.numbers == sum(tensor.numel() for tensor in handed.values())


def test_stored_casts_and_keeps_apart_what_only_looks_tied() -> None:
    base = torch.arange(6.0)
    weights = {"a": base, "b": base, "front": base[:3], "same_values": base.clone()}
    once, tied = prepare_for_file(weights, torch.bfloat16)
    assert tied == {"b": "a"} and once.keys() == {"a", "front", "same_values"}
    assert all(t.dtype == torch.bfloat16 for t in once.values())
