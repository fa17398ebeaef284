"""The fake device itself: its results are the CPU's, and it refuses and counts what CUDA does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from phantom import (
    NAME,
    count_launches,
    count_synchronisations,
    is_phantom,
    largest_tensor,
    register,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DEVICE = register()
ROOT = "/devices/"


def there(x: Tensor) -> Tensor:
    """A copy on the device that does not block."""
    return x.to(DEVICE, non_blocking=True)


def _trained(device: torch.device, fused: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 7, bias=False))
    net[3].weight = net[0].weight
    tokens = torch.tensor([[1, 2, 3, 4]])
    net.to(device)
    assert net[3].weight is net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        optimizer.zero_grad()
        logits = checkpoint(net, tokens.to(device), use_reentrant=False)
        F.cross_entropy(logits[0], tokens[0].to(device)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert all(p.device == device for p in net.parameters())
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("fused", [False, True])
def test_training_gives_the_bits_of_the_cpu(fused: bool) -> None:
    for ours, theirs in zip(
        _trained(DEVICE, fused), _trained(torch.device("cpu"), fused), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("inference", [False, True])
def test_views_and_indices_work_on_the_same_memory(inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.arange(12.0).view(3, 4).to(DEVICE)
        row = x[1]
        row.add_(1)
        x[:, 3] = 0.0
        x[there(torch.tensor([2, 0])), 0] = there(torch.tensor([7.0, 8.0]))
        assert x.tolist() == [[8, 1, 2, 0], [5, 6, 7, 0], [7, 9, 10, 0]]
        assert row.data_ptr() == x.data_ptr() + 16
        assert x[there(torch.tensor([True, False, True]))].shape == (2, 4)


def test_out_arguments_grow_and_copies_are_deep() -> None:
    assert torch.arange(3, device=DEVICE).tolist() == [0, 1, 2]
    assert torch.empty(0, device=DEVICE).resize_(4).shape == (4,)
    net = nn.Linear(2, 2).to(DEVICE)
    twin = copy.deepcopy(net)
    assert is_phantom(twin.weight) and twin.weight.data_ptr() != net.weight.data_ptr()


def test_autocast_lowers_products_and_keeps_sums_in_float32() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    with torch.autocast(NAME, torch.bfloat16):
        assert F.linear(x, x).dtype is (x @ x).dtype is torch.bfloat16
        assert (x @ x).softmax(-1).dtype is (x @ x).sum().dtype is (x + x).dtype is torch.float32


def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(3)
    drawn = torch.randn(4, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(drawn.cpu(), torch.randn(4))


A, B, ROWS = torch.ones(3, 3), torch.ones(3, 3, device=DEVICE), torch.tensor([0, 1])
REFUSED: dict[str, Callable[[], object]] = {
    "sum": lambda: B + A,
    "number on the device": lambda: A + B.sum(),
    "product": lambda: B @ A,
    "cat": lambda: torch.cat([B, A]),
    "out": lambda: torch.add(B, B, out=A),
    "embedding": lambda: F.embedding(ROWS, B),
    "index_select": lambda: B.index_select(0, ROWS),
    "device index of a CPU tensor": lambda: A[there(ROWS)],
    "CPU values": lambda: B.index_put((there(ROWS),), A[:2]),
    "CPU generator": lambda: torch.rand(3, device=DEVICE, generator=torch.Generator()),
}


@pytest.mark.parametrize("mixed", REFUSED.values(), ids=REFUSED)
def test_mixed_devices_are_refused(mixed: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        mixed()


READS: dict[str, Callable[[], object]] = {
    "item": lambda: B.sum().item(),
    "bool": lambda: bool(B.all()),
    "tolist": lambda: B.tolist(),
    "cpu": lambda: B.cpu(),
    "nonzero": lambda: B.nonzero(),
    "boolean index": lambda: B[B > 0],
    "boolean index put": lambda: B.index_put((B[0] > 0,), there(A)),
    "unique": lambda: B.unique(),
    "bincount": lambda: there(ROWS).bincount(),
    "repeat_interleave": lambda: B.repeat_interleave(there(torch.tensor([1, 0, 2])), dim=0),
    "equal": lambda: torch.equal(B, B),
}
WRITES: dict[str, Callable[[], object]] = {
    "to": lambda: A.to(DEVICE),
    "tensor": lambda: torch.tensor([1.0], device=DEVICE),
    "copy_": lambda: torch.empty(3, 3, device=DEVICE).copy_(A),
    "list index": lambda: B[[0, 1]],
    "CPU index": lambda: B[ROWS],
}
NEITHER: dict[str, Callable[[], object]] = {
    "non_blocking": lambda: there(A),
    "factory": lambda: torch.full((3,), 2.0, device=DEVICE),
    "elementwise": lambda: torch.where(B > 0, B * 2, 0.0).masked_fill(B > 1, 1.0).argmax(-1),
    "CPU number": lambda: B * torch.tensor(2.0),
    "repeat_interleave": lambda: B.repeat_interleave(2, dim=0),
    "scatter": lambda: torch.zeros(3, 3, device=DEVICE).scatter_add_(1, B.long(), B),
    "CPU alone": lambda: A.nonzero().tolist(),
}


@pytest.mark.parametrize("inference", [False, True])
def test_host_waits_are_counted_at_their_place(inference: bool) -> None:
    for table, reads, writes in (
        (READS, True, False),
        (WRITES, False, True),
        (NEITHER, False, False),
    ):
        for name, run in table.items():
            with torch.inference_mode(inference), count_synchronisations(ROOT) as counts:
                run()
            assert (bool(counts.reads), bool(counts.writes)) == (
                reads,
                writes,
            ), f"{name}\n{counts.table()}"
            assert counts.at("cases_device.py") == counts.total, name


def test_other_threads_are_counted_and_only_inside_the_block() -> None:
    with count_synchronisations(ROOT) as counts:
        thread = threading.Thread(target=lambda: B.sum().item())
        thread.start()
        thread.join()
    B.sum().item()
    assert counts.total == 1


def test_the_largest_result_is_seen() -> None:
    with largest_tensor() as seen:
        (B @ B).sum()
        torch.ones(5, 2, device=DEVICE).t()
    assert seen.elements == 10
    with largest_tensor() as seen:
        B.add_(1).view(9)
    assert seen.elements == 0


def test_only_operations_that_compute_count_as_launches() -> None:
    with count_launches() as counts:
        x = (B @ B).t()[1:].reshape(3, 2) + 1
        there(A)
        x.sum().item()
        torch.empty(3, device=DEVICE).view(1, 3)
        torch.zeros(3, device=DEVICE)
    assert counts.pop("zeros", 0) + counts.pop("zero_", 0) + counts.pop("fill_", 0) == 1
    assert counts == {"mm": 1, "_copy_from": 1, "add": 1, "sum": 1}
