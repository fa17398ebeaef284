"""The program of a process that keeps a Ray cluster on this machine (`processes/program.py`).

Its one request has the fields of `serve`, as JSON. The answer is the cluster's address. When the
parent ends, in whatever way, so do all processes of the cluster.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from ..processes.program import Requests

_PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default 15, as if actors were less than the run
}


@contextmanager
def private_cluster() -> Iterator[None]:
    """Context in which a new cluster can be used by this process and its children alone.

    By default Ray listens on all interfaces, and whoever knows the token in the user's home may run
    code. Here it listens on the loopback address, with a token of its own. The switch of the
    address exists for other systems than Linux; no argument of `ray.init` sets it.
    """
    environment = dict(os.environ)
    several_nodes, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    os.environ |= _PRIVATE
    Config.initialize("")  # reads the environment again
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_nodes
        for name in _PRIVATE:  # programs that the run starts have no use for the token
            os.environ.pop(name)
            if name in environment:
                os.environ[name] = environment[name]


def forget_token() -> None:
    """After a private cluster has ended: the next one may have another token, or none."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def machine_name() -> str:
    """Name of this machine, which no other has, also if their host names are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else os.uname().nodename


def serve(requests: Requests) -> None:
    """Start a cluster with `cpus` CPUs and files in `folder`, until the parent hangs up."""
    given = json.loads(next(requests))
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init(
        address="local",
        num_cpus=given["cpus"],
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=given["folder"],
        _node_ip_address="127.0.0.1",
    )
    requests.answer(ray.get_runtime_context().gcs_address.encode())
    next(requests, None)
    shutil.rmtree(given["folder"], ignore_errors=True)  # the parent may have been killed
