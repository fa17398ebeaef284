"""Soak test of the server: clients come and go for a minute. It finds leaked blocks, wrong answers
and hangs.

    python benchmarks/serve_soak.py [--clients 64] [--seconds 60]

A server on a loopback port with a small random model, its engine looked at from the inside; every
answer that a client waits for is compared with the answer that an idle server gave to the same
request.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

import httpx
from serving import ALPHABET, running
from test_under_load import TEXT, Client, body, texts

from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig


def main() -> int:
    """Print the counts; 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(
        ModelConfig(scratch=ScratchConfig(alphabet=ALPHABET)), seed=3, device="cpu"
    )
    with running(policy, max_running=64, kv_tokens=16384) as server:
        expected = {
            i: texts(httpx.post(server.url + TEXT, json=body(i), timeout=60).json())
            for i in range(20)
        }
        started = time.monotonic()
        clients = [
            Client(k, server.url, expected, started + given.seconds) for k in range(given.clients)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(given.seconds + 60)
        seconds = time.monotonic() - started
        hanging = sum(c.is_alive() for c in clients)
        wrong = [w for c in clients for w in c.wrong]
        answered, left = sum(c.answered for c in clients), sum(c.left for c in clients)
        server.idle(30)
        blocks = server.engine.scheduler.blocks
        print(
            f"{given.clients} clients, {seconds:.0f} s: {answered} answers checked, {left} clients"
            " left in the middle"
        )
        print(
            f"wrong {len(wrong)}, hanging {hanging}, blocks in use {blocks.used} of {blocks.count},"
            f" aborted {server.metric('aborted_total'):.0f}"
        )
        print(
            f"{server.engine.stats.decoded_tokens / seconds:.0f} tokens/s, most blocks in use"
            f" {server.engine.stats.peak_blocks}"
        )
        print("\n".join(wrong[:5]))
    return int(bool(wrong or hanging))


if __name__ == "__main__":
    sys.exit(main())
