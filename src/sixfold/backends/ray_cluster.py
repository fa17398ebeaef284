"""A Ray cluster, and the resources that a run reserves in it for its actors."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import UserError
from ..processes.child import Child, ChildError
from .ray_head import forget_token, private_cluster

_REACH_S = 10.0
_ANY = 1 << 20
"""Calls that an asynchronous actor may run at once: more than can be open."""


@dataclass(frozen=True)
class Reserved:
    """Resources of a Ray cluster, one bundle for each actor.

    Attributes:
        group: the placement group.
        cpus: CPUs of an actor.
        gpus: its GPUs.
    """

    group: Any
    cpus: int
    gpus: int

    def start(self, actor: type, number: int, *arguments: object, calls: int = _ANY) -> Any:
        """Start an actor in a bundle, without waiting for it.

        Args:
            actor: its class.
            number: number of the bundle.
            arguments: of the class.
            calls: calls that it may run at once. Without `async`, each has a thread.
        """
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
        resources = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        made: Any = ray.remote(actor)
        return made.options(**resources, max_concurrency=calls, scheduling_strategy=place).remote(
            *arguments
        )


@contextmanager
def reserved(
    address: str, count: int, cpus: int, gpus: int, wait_s: float, who: str = "samplers"
) -> Iterator[Reserved]:
    """Connect to a Ray cluster and reserve bundles for actors, until the block is left.

    Args:
        address: the cluster. Empty: a new one on this machine, which ends with the block. A program
            that is connected to a cluster already stays so.
        count: number of bundles.
        cpus: CPUs of each.
        gpus: GPUs of each.
        wait_s: longest time to wait for resources that others use, in seconds.
        who: what the actors are, for messages. `placement` has their number.

    Raises:
        UserError: if there is no such cluster, or it has too few resources.
    """
    remedy = f"Lower placement.{who.split()[-1]} or placement.threads"
    with connected(address, count * cpus, wait_s):
        needed = {"CPU": count * cpus, "GPU": count * gpus}
        _check_size(ray.cluster_resources(), needed, f"the {who} need", remedy)
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        group = placement_group([bundle] * count)
        try:
            if not group.wait(wait_s):
                raise UserError(
                    f"the Ray cluster has not given {count} {who} their resources within"
                    f" {wait_s:g} s ({bundle} each): others use them, or no node has as many."
                    f" {remedy}"
                )
            yield Reserved(group, cpus, gpus)
        finally:
            remove_placement_group(group)


@contextmanager
def connected(address: str, cpus: int, wait_s: float) -> Iterator[None]:
    """Connect to a cluster, or to a new one on this machine, until the block is left."""
    if ray.is_initialized():
        yield
        return
    with ExitStack() as ending:
        try:
            _reach(address)
            ending.callback(lambda: None if address else forget_token())
            with nullcontext() if address else private_cluster():
                found = address or ending.enter_context(_new_cluster(cpus, wait_s))
                ray.init(address=found, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            # RuntimeError: also a cluster of another version of Ray or Python
            why = str(error).strip().replace("\n", " ")
            raise UserError(
                f"placement.address = {address!r}: {why}. Start a cluster with `ray start --head`,"
                " or leave the address empty: the run starts one on this machine"
            ) from error
        ending.callback(ray.shutdown)
        yield


def _reach(address: str) -> None:
    """Check that somebody listens at an address. Ray itself would try for minutes.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), _REACH_S).close()


@contextmanager
def _new_cluster(cpus: int, wait_s: float) -> Iterator[str]:
    """Address of a new cluster on this machine, which ends with the block or this process."""
    # Paths of sockets are limited to about 100 characters.
    files = TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with files as folder:
        head = Child("sixfold.backends.ray_head", keeps_output=True)
        try:
            head.send(json.dumps({"cpus": cpus, "folder": folder}).encode(), wait_s)
            address = head.receive(wait_s).decode()
        except ChildError as error:
            words = head.last_words()
            head.close(grace_s=0.0)
            raise UserError(
                f"placement.kind = 'ray': no cluster started on this machine. The process {error}."
                f" Its last output:\n{words}"
            ) from error
        try:
            yield address
        finally:
            head.close()


def _check_size(has: Mapping[str, float], needed: Mapping[str, int], who: str, remedy: str) -> None:
    for what, amount in needed.items():
        if amount > (there := has.get(what, 0)):
            raise UserError(
                f"{who} {amount} {what}s, and the Ray cluster has {there:g}. {remedy}, or add a"
                " node"
            )
