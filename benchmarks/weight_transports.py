"""Seconds and bytes to pass weights to processes of this machine: by a file, and by gloo.

    python benchmarks/weight_transports.py [--megabytes 200] [--readers 2] [--repeats 5]

`file` is what a run does (`backends/weight_files.py`): one file in memory, with a checksum of every
tensor, that all readers map and check. `gloo` is a bare `torch.distributed` broadcast of the same
tensors in buckets, with the same checksums at both ends, and without what a run would need besides:
order, refusal, and a group that survives the loss of a reader. CPU seconds are those of all
processes together: unlike the wall clock, they hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from sixfold.backends.weight_files import checksum, open_sealed, streamed_file

TENSOR, BUCKET = 1 << 19, 1 << 23
"""Numbers of a tensor, and of the tensors of a bucket together."""


def read(link: Connection, rank: int, size: int, store: str, count: int) -> None:
    """Reader: take weights as the parent says, and answer with the CPU seconds that it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    link.send(None)
    while (path := link.recv()) is not None:
        began = time.process_time()
        if path:
            sums = open_sealed(path, 1).sums
        else:
            sums = broadcast({f"{n}": torch.empty(TENSOR) for n in range(count)})
        link.send((time.process_time() - began, sums))
    dist.destroy_process_group()


def broadcast(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Send or receive tensors in buckets, and compute their checksums."""
    names, each = [*tensors], BUCKET // TENSOR
    for first in range(0, len(names), each):
        bucket = torch.cat([tensors[name] for name in names[first : first + each]])
        dist.broadcast(bucket, 0)
        for name, part in zip(names[first:], bucket.split(TENSOR), strict=False):
            tensors[name].copy_(part)
    return {name: checksum(name, tensor) for name, tensor in tensors.items()}


def passed(
    kind: str, tensors: Mapping[str, torch.Tensor], links: list[Connection]
) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one transport to all readers."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    began, own = time.perf_counter(), time.process_time()
    if kind == "file":
        with streamed_file(size, tensors, 1) as path:
            for link in links:
                link.send(path)
            answers = [link.recv() for link in links]
    else:
        for link in links:
            link.send("")
        broadcast(tensors)
        answers = [link.recv() for link in links]
    seconds, own = time.perf_counter() - began, time.process_time() - own
    wanted = {name: checksum(name, tensor) for name, tensor in tensors.items()}
    if any(sums != wanted for _, sums in answers):
        raise SystemExit(f"{kind}: a reader got other weights")
    return seconds, own + sum(cpu for cpu, _ in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="bytes of the weights")
    parser.add_argument("--readers", type=int, default=2, help="processes that get them")
    parser.add_argument("--repeats", type=int, default=5, help="after one to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.megabytes * 10**6 // (4 * TENSOR)
    tensors = {f"{n}": torch.randn(TENSOR) for n in range(count)}
    context, size = mp.get_context("spawn"), options.readers + 1
    with tempfile.TemporaryDirectory() as folder:
        store, links, processes = str(Path(folder, "store")), [], []
        for rank in range(1, size):
            link, far = context.Pipe()
            processes.append(context.Process(target=read, args=(far, rank, size, store, count)))
            processes[-1].start()
            links.append(link)
        dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=size)
        for link in links:
            link.recv()
        found: dict[str, list[tuple[float, float]]] = {"file": [], "gloo": []}
        for _ in range(options.repeats + 1):
            for kind, timed in found.items():
                timed.append(passed(kind, tensors, links))
        for link in links:
            link.send(None)
        dist.destroy_process_group()
        for process in processes:
            process.join()
    megabytes = count * 4 * TENSOR / 1e6
    print(f"{megabytes:.0f} MB to {options.readers} processes, median of {options.repeats}")
    for kind, timed in found.items():
        wall, cpu = (median(column) for column in zip(*timed[1:], strict=True))
        moved = megabytes * (1 if kind == "file" else options.readers)
        print(f"{kind}: {wall:.2f} s, {cpu:.2f} CPU seconds, {moved:.0f} MB written or sent")


if __name__ == "__main__":
    main()
