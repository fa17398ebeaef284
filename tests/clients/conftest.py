"""A running server of a tiny model, and the interpreters with the clients (`make clients`).

Each client runs as a script of this folder in its own environment: SCRIPT URL FOLDER. It prints one
JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.serving import ALPHABET, TEMPLATE, Running, running

from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig

HERE = Path(__file__).parent
PYTHONS = {
    2: os.environ.get("SIXFOLD_CLIENTS_OPENAI2", ""),
    3: os.environ.get("SIXFOLD_CLIENTS_OPENAI3", ""),
}
"""Major version of the `openai` package -> interpreter. The clients need different versions."""


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """Server of a model whose template shows tools, with a context for the prompts of agents."""
    if not all(PYTHONS.values()):
        pytest.skip(
            "SIXFOLD_CLIENTS_OPENAI2 and SIXFOLD_CLIENTS_OPENAI3 are not set. Run make clients"
        )
    sizes = ScratchConfig(
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        context=2048,
        alphabet=ALPHABET + "$",
    )
    policy = load_policy(ModelConfig(scratch=sizes), seed=3, device="cpu")
    policy.tokenizer.chat_template = TEMPLATE
    with running(policy, kv_tokens=16384, max_tokens=24) as it:
        yield it


@pytest.fixture
def client(server: Running, tmp_path: Path) -> Callable[..., Any]:
    """client(NAME, openai=2): the JSON object that with_NAME.py prints, run with this major version
    of the `openai` package.
    """
    server.served.encoders[0].tokenizer.save_pretrained(tmp_path)

    def run(name: str, openai: int = 2) -> Any:
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "PYTHONPATH"))
        }
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "INSPECT_LOG_DIR": str(tmp_path),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = [PYTHONS[openai], str(HERE / f"with_{name}.py"), server.url, str(tmp_path)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
