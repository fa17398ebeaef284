"""A model whose template supports tools, and its server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import ALPHABET, TEMPLATE, Running, running

from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig


@pytest.fixture(scope="session")
def chat_policy(scratch_config: ScratchConfig) -> Policy:
    """A model from scratch whose alphabet contains JSON and whose template supports tools."""
    made = load_policy(
        ModelConfig(
            scratch=scratch_config.model_copy(update={"alphabet": ALPHABET, "context": 512})
        ),
        seed=3,
        device="cpu",
    )
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(chat_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that records, for all tests of a file."""
    with running(chat_policy, record=tmp_path_factory.mktemp("record")) as it:
        yield it
