"""Who trains and who samples on given devices. A capability of Sixfold is a row of `TOPOLOGIES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Settings = Mapping[str, object]
"""Dotted name of a setting -> value."""
OWN, PROCESS, VLLM = "own", "process", "vllm"
"""Who samples: the engine of a trainer's rank, one in a process of its own, or vLLM."""


@dataclass(frozen=True)
class Split:
    """Trainer ranks and samplers of equal machines.

    Attributes:
        tensor: devices of a sampler. 0: it uses that of a rank.
    """

    nodes: int
    ranks: int
    samplers: int
    tensor: int

    @property
    def training(self) -> int:
        """Devices that train."""
        return self.nodes * self.ranks

    @property
    def sampling(self) -> int:
        """Devices that only sample."""
        return self.nodes * self.samplers * self.tensor

    @property
    def engines(self) -> int:
        return self.nodes * self.samplers

    def prompts_each(self, prompts: int) -> int:
        """Most prompts of a step for one sampler. Rank r has the tasks i with i % ranks == r."""
        ranks = self.ranks if self.samplers % self.ranks else 1  # that share samplers
        rounds, rest = divmod(prompts, self.training)
        return -(-(rounds * ranks + min(rest, ranks)) * self.ranks // (ranks * self.samplers))


@dataclass(frozen=True)
class Topology:
    """One way to place samplers.

    Attributes:
        engine: OWN, PROCESS or VLLM.
        settings: recipe lines of a split.
        ranks: smallest and largest number of trainer ranks.
        most: samplers that a rank may have.
        shared: the ranks of a machine share its samplers.
        ahead: samplers may run a step ahead (`rollout.staleness`).
    """

    name: str
    engine: str
    settings: Callable[[Split], Settings] = lambda split: {}
    ranks: tuple[float, float] = (1, float("inf"))
    most: int = 1
    shared: bool = False
    ahead: bool = False

    def splits(self, nodes: int, devices: int, heads: int) -> Iterator[Split]:
        """Splits with as many samplers as have room.

        Args:
            heads: attention heads of the model, which the devices of a sampler divide.
        """
        if self.engine == OWN:
            yield Split(nodes, devices, devices, 0)
            return
        for ranks in range(1, devices):
            for tensor in (1, 2, 4, 8) if self.engine == VLLM else (1,):
                room = (devices - ranks) // tensor
                samplers = room if self.shared else min(self.most, room // ranks) * ranks
                allowed = self.ranks[0] <= nodes * ranks <= self.ranks[1]
                if samplers and allowed and heads % tensor == 0:
                    yield Split(nodes, ranks, samplers, tensor)


def _vllm(split: Split) -> Settings:
    gpus = range(split.ranks, split.ranks + split.samplers * split.tensor)
    return {
        "rollout.backend.kind": "vllm",
        "rollout.backend.tensor_parallel": split.tensor,
        "rollout.backend.devices": ",".join(map(str, gpus)),
    }


def _vllm_shared(split: Split) -> Settings:
    processes = {"placement.kind": "processes", "placement.samplers": split.samplers}
    return {**processes, **_vllm(split)}


TOPOLOGIES = (
    Topology("colocated", OWN),
    Topology(
        "processes",
        PROCESS,
        lambda split: {
            "placement.kind": "processes",
            "placement.samplers": split.samplers // split.ranks,
            "placement.devices": ",".join(str(split.ranks + n) for n in range(split.samplers)),
        },
        most=64,
        ahead=True,
    ),
    Topology("vLLM", VLLM, _vllm, ranks=(1, 1)),
    Topology("vLLM shared", VLLM, _vllm_shared, ranks=(2, float("inf")), shared=True, ahead=True),
)
"""Topologies. The checks of recipes decide whether Sixfold runs one."""
