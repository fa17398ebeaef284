"""The root forward: body and head in one call, so that a sharded model can be trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiny import grpo, ragged_batch, tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sixfold.batch import Batch
from sixfold.recipe.schema import TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, ScalarRoot, Scoring, read_states
from sixfold.trainer.packing import pack
from sixfold.trainer.trainer import Trainer

torch.set_num_threads(1)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank on the CPU, without a network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def loss_and_gradient(root: PolicyRoot, batch: Batch, scoring: Scoring) -> tuple[Tensor, Tensor]:
    row = pack(batch, range(len(batch.tokens)), True)
    at = row.slot, row.column
    logp = torch.zeros(batch.tokens.shape).index_put(at, root(row, scoring).values)
    loss = grpo().compute_loss(batch, logp).loss
    loss.backward()
    gradients = [p.grad for p in root.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return loss.detach(), torch.cat([g.flatten() for g in whole if g is not None])


@pytest.mark.parametrize(
    ("chunk", "head"), [(1024, "autograd"), (8, "autograd"), (8, "fused"), (8, "tiled")]
)
@pytest.mark.parametrize("tied", [True, False])
def test_sharded_root_has_the_same_loss_and_gradient(
    tied: bool, chunk: int, head: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are in one chunk, in several checkpointed chunks, or made by another head. Gradients
    of sharded parameters are left to FSDP.
    """
    if head != "autograd":
        monkeypatch.setattr("sixfold.trainer.logprobs.SMALL", 0)
    if head == "tiled":
        monkeypatch.setattr("sixfold.trainer.tiled_head.COLUMNS", 8)
    plain = tiny_model(tie_word_embeddings=tied)
    model, batch, scoring = copy.deepcopy(plain), ragged_batch(0), Scoring(chunk=chunk)
    root = PolicyRoot(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    assert all(isinstance(p, DTensor) for p in root.parameters())
    direct = [
        Trainer(r, TrainerConfig(), scoring, 1).scoring.direct for r in (root, PolicyRoot(plain))
    ]
    assert direct == [False, True]
    ours = loss_and_gradient(root, batch, scoring)
    expected = loss_and_gradient(PolicyRoot(plain), batch, scoring)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def hidden_alone(model: PreTrainedModel, batch: Batch, b: int) -> Tensor:
    """Last hidden states [length, hidden] of row b, computed alone."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    tokens = batch.tokens[b : b + 1, : int(batch.lengths[b])]
    return model(tokens, use_cache=False, output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("share_prefix", [True, False])
def test_scalar_head_reads_the_stated_positions(share_prefix: bool) -> None:
    """Before every scored token, or once per row at its last token, as a reward model would."""
    model, batch, head = tiny_model(), ragged_batch(0), nn.Linear(16, 1)
    row = pack(batch, range(12), share_prefix)
    root = ScalarRoot(head, head, lambda row, scoring: read_states(model, row, scoring))
    with torch.no_grad():
        values, entropy = root(row, Scoring())
        states = [head(hidden_alone(model, batch, b))[:, 0] for b in range(12)]
        before = torch.cat([states[b][batch.mask[b].nonzero()[:, 0] - 1] for b in range(12)])
        torch.testing.assert_close(values, before, atol=1e-5, rtol=1e-5)
        # In the row, the last token of a trajectory is where its next token would be predicted.
        ends = torch.tensor([int((row.slot == b).nonzero().max()) for b in range(12)])
        last = batch.mask[torch.arange(12), batch.lengths - 1]
        at_end = root(replace(row, reads=row.reads[ends] + 1), Scoring()).values[last]
        expected = torch.stack([s[-1] for s in states])[last]
        torch.testing.assert_close(at_end, expected, atol=1e-5, rtol=1e-5)
    assert entropy is None
