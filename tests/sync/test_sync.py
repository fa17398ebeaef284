"""After a sync the engine has the trainer's weights, provably, and stamps what it samples with
their version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.sync.sync import CopySync, SharedSync, SyncError, WeightsNotFinite
from sixfold.types import SamplingParams


@pytest.fixture
def trained(tiny: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(tiny("qwen3"))


def make_engine(model: PreTrainedModel) -> Engine:
    return Engine(CausalLM(model), kv_tokens=200, block_size=8)


def nudge(model: PreTrainedModel, by: float = 1.01) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(by)


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def versions(engine: Engine) -> list[int]:
    engine.add("t", [2, 3], SamplingParams(max_tokens=2), [0])
    return engine.run()[0].version


class TestSharedSync:
    def test_shared_sync_only_changes_the_version(self, trained: PreTrainedModel) -> None:
        engine = make_engine(trained)
        sync = SharedSync(trained, engine)
        storage = [p.data_ptr() for p in trained.parameters()]
        nudge(trained)
        sync.sync(1)
        assert versions(engine) == [1, 1]
        sync.sync(1)  # a step without an update: nothing new
        assert versions(engine) == [1, 1]
        assert [p.data_ptr() for p in engine.runner.model.module.parameters()] == storage

    def test_a_version_never_falls(self, trained: PreTrainedModel) -> None:
        engine = make_engine(trained)
        SharedSync(trained, engine).sync(3)
        with pytest.raises(RuntimeError, match="must increase: 3 -> 2"):
            SharedSync(trained, engine).sync(2)

    def test_a_tensor_that_is_not_shared_any_more_is_named(self, trained: PreTrainedModel) -> None:
        """Two modules on one storage, as after a load that put a new tensor into one of them."""
        twin = copy.deepcopy(trained)
        for mine, theirs in zip(twin.parameters(), trained.parameters(), strict=True):
            mine.data = theirs.data
        engine = make_engine(twin)
        sync = SharedSync(trained, engine)
        sync.sync(1)
        trained.model.layers[1].mlp.up_proj.weight = nn.Parameter(
            trained.model.layers[1].mlp.up_proj.weight.detach().clone()
        )
        with pytest.raises(
            SyncError, match=r"'model.layers.1.mlp.up_proj.weight' is no longer shared"
        ):
            sync.sync(2)
        assert engine.version == 1

    @pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
    def test_non_finite_weights_never_get_a_version(
        self, trained: PreTrainedModel, bad: float
    ) -> None:
        engine = make_engine(trained)
        with torch.no_grad():
            trained.model.layers[1].mlp.up_proj.weight[3, 5] = bad
        with pytest.raises(WeightsNotFinite, match=r"layers.1.mlp.up_proj.weight.*learning_rate"):
            SharedSync(trained, engine).sync(1)
        assert engine.version == 0


class TestCopySync:
    @pytest.fixture
    def engine(self, trained: PreTrainedModel) -> Engine:
        return make_engine(copy.deepcopy(trained).requires_grad_(False))

    def test_weights_are_copied_bit_for_bit_into_the_same_storage(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        sampler = engine.runner.model.module
        storage = [p.data_ptr() for p in sampler.parameters()]
        assert not set(storage) & {p.data_ptr() for p in trained.parameters()}
        nudge(trained)
        CopySync(trained, engine, every=1).sync(1)
        assert [p.data_ptr() for p in sampler.parameters()] == storage
        for (name, p), q in zip(trained.named_parameters(), sampler.parameters(), strict=True):
            assert torch.equal(p, q), name
        assert versions(engine) == [1, 1]

    def test_sinks_are_weights(self, tiny: Callable[[str], PreTrainedModel]) -> None:
        """Of attention, in no linear layer. The oracle is transformers' own attention."""
        trained = copy.deepcopy(tiny("gpt_oss")).requires_grad_(False)
        engine = make_engine(copy.deepcopy(trained))
        for layer in trained.model.layers:
            layer.self_attn.sinks += 2.0
        CopySync(trained, engine, every=1).sync(1)
        engine.add("t", [2, 3, 4], SamplingParams(max_tokens=8), [0])
        (sequence,) = engine.run()
        trained.set_attn_implementation("eager")
        logp = trained(torch.tensor([sequence.tokens]), use_cache=False).logits[0].log_softmax(-1)
        expected = logp[2:-1].gather(-1, torch.tensor(sequence.tokens[3:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.logp), expected, rtol=0, atol=1e-5)

    def test_between_syncs_the_engine_keeps_its_weights_and_their_version(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        sync, seen, old = CopySync(trained, engine, every=3), [], weights(trained)
        for version in range(1, 8):
            nudge(trained)
            sync.sync(version)
            if version in (3, 6):
                old = weights(trained)
            assert all(
                torch.equal(p, old[name])
                for name, p in engine.runner.model.module.named_parameters()
            )
            seen.append(versions(engine)[0])
        assert seen == [0, 0, 3, 3, 3, 6, 6]

    def test_it_counts_steps_whatever_number_of_updates_each_makes(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        """Four updates a step, then none, then four: a copy every second step, none where nothing
        has changed since.
        """
        sync, seen = CopySync(trained, engine, every=2), []
        for version in (4, 8, 8, 8, 12, 16):
            nudge(trained)
            sync.sync(version)
            seen.append(versions(engine)[0])
        assert seen == [0, 8, 8, 8, 12, 12]

    def test_a_refresh_copies_under_the_number_that_is(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        nudge(trained)
        CopySync(trained, engine, every=5).refresh()
        for (name, p), q in zip(
            trained.named_parameters(), engine.runner.model.module.parameters(), strict=True
        ):
            assert torch.equal(p, q), name
        assert engine.version == 0

    @pytest.mark.parametrize("form", ["copy", "int8", "fp8"])
    @pytest.mark.parametrize("every", [1, 3])
    def test_an_evaluation_gets_the_policy_itself_and_training_its_own_again(
        self, trained: PreTrainedModel, engine: Engine, form: str, every: int
    ) -> None:
        sync, sampler = CopySync(trained, engine, every, form), engine.runner.model.module
        sync.refresh()
        for version in range(6):
            if version:
                nudge(trained)
                sync.sync(version)
            before, held, waited = engine.version, weights(sampler), sync.waited
            with sync.policy_weights(version):
                assert engine.version == version
                assert all(
                    torch.equal(p, weights(trained)[name]) for name, p in sampler.named_parameters()
                )
            assert (engine.version, sync.waited) == (before, waited)
            assert all(torch.equal(p, held[name]) for name, p in sampler.named_parameters())

    def test_an_evaluation_that_fails_leaves_them_too(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        sync, held = CopySync(trained, engine, every=3), weights(engine.runner.model.module)
        nudge(trained)
        sync.sync(1)
        with pytest.raises(RuntimeError, match="in between"), sync.policy_weights(1):
            raise RuntimeError("in between")
        assert engine.version == 0
        assert all(
            torch.equal(p, held[name]) for name, p in engine.runner.model.module.named_parameters()
        )

    def test_checkpoint_has_the_synced_weights_after_a_signal_with_sequences_in_flight(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        sync, held = CopySync(trained, engine, every=3), weights(engine.runner.model.module)
        nudge(trained)
        sync.sync(1)
        with pytest.raises(KeyboardInterrupt), sync.policy_weights(1):
            engine.add("t", [1, 2, 3], SamplingParams(4, 1.0), [0])
            engine.step()
            raise KeyboardInterrupt
        assert engine.busy and all(
            torch.equal(tensor, held[name]) for name, tensor in sync.tensors().items()
        )

    def test_stale_weights_go_through_a_checkpoint(
        self, trained: PreTrainedModel, engine: Engine
    ) -> None:
        """A resumed run samples from the weights that the stopped one would have sampled from:
        those of the last sync.
        """
        sync = CopySync(trained, engine, every=2)
        for version in (1, 2, 3):
            nudge(trained)
            sync.sync(version)
        saved = {name: t.detach().clone() for name, t in sync.tensors().items()}
        resumed = make_engine(copy.deepcopy(trained).requires_grad_(False))
        again = CopySync(trained, resumed, every=2)
        again.load(saved, sync.state())
        for p, q in zip(
            resumed.runner.model.module.parameters(),
            engine.runner.model.module.parameters(),
            strict=True,
        ):
            assert torch.equal(p, q)
        assert versions(resumed) == [2, 2]
        nudge(trained)
        again.sync(4)
        assert versions(resumed) == [4, 4], "one of the two steps was before the checkpoint"

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite_leave_the_engine_as_it_was(
        self, trained: PreTrainedModel, engine: Engine, bad: float
    ) -> None:
        before = weights(engine.runner.model.module)
        nudge(trained)
        with torch.no_grad():
            trained.model.norm.weight[7] = (
                bad  # the last one: all others could be copied before it is met
            )
        with pytest.raises(SyncError, match=r"'model\.norm.weight' is not finite"):
            CopySync(trained, engine, every=1).sync(1)
        assert all(
            torch.equal(p, before[name])
            for name, p in engine.runner.model.module.named_parameters()
        )
        assert engine.version == 0

    def test_an_engine_in_bfloat16_gets_the_rounded_weights(self, trained: PreTrainedModel) -> None:
        engine = make_engine(copy.deepcopy(trained).bfloat16())
        nudge(trained)
        CopySync(trained, engine, every=1).sync(1)
        for p, q in zip(trained.parameters(), engine.runner.model.module.parameters(), strict=True):
            assert torch.equal(p.bfloat16(), q)
