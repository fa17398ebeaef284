"""Whole tensors from shards: exactly those that were sharded, in few collective calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sixfold.trainer import whole_weights
from sixfold.trainer.whole_weights import WholeWeights, pack, unpack

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@given(st.lists(shapes, min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packed_shards_give_the_tensors_again(
    sizes: list[list[int]], ranks: int, seed: int
) -> None:
    """Rows are split as FSDP splits them: some ranks may have fewer, or none."""
    rng = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=rng) for size in sizes]
    given_shapes = [t.shape for t in tensors]
    sent = []
    for rank in range(ranks):
        parts = [dict(enumerate(t.chunk(ranks))).get(rank, t[:0]) for t in tensors]
        sent.append(pack(parts, given_shapes, ranks))
    for whole, tensor in zip(unpack(torch.stack(sent), given_shapes), tensors, strict=True):
        assert torch.equal(whole, tensor)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_small_tensors_share_a_collective_call(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(64, 64))
    plain = {name: p.detach().clone() for name, p in module.named_parameters()}
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh)
    calls: list[int] = []
    gather = DTensor.full_tensor

    def counted(shard: DTensor) -> Tensor:
        calls.append(shard.numel())
        return gather(shard)

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    monkeypatch.setattr(whole_weights, "BUCKET_BYTES", 4000)
    weights = WholeWeights(module)
    for _ in range(2):
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], plain[name]) for name in weights)
    # 6 x (64 + 8) numbers in one buffer, then the large matrix, then its bias.
    assert calls == [432, 4096, 64] * 2


def test_a_tensor_that_is_split_by_columns_is_gathered_alone(one_rank: None) -> None:
    module, mesh = nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (1,))
    plain = module.weight.detach().clone()
    module.weight = nn.Parameter(distribute_tensor(plain, mesh, [Shard(1)]))
    assert isinstance(module.weight, DTensor)
    assert torch.equal(WholeWeights(module)["weight"], plain)
