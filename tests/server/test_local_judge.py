"""A judge from a model folder: a child process serves it, and ends with the run."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import ALPHABET, TEMPLATE

from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.types import Task
from sixfold_environments.judge import local_model
from sixfold_environments.judge.judge import Judge
from sixfold_environments.judge.local_model import LocalModel
from sixfold_environments.judge.reference import reference_reward
from sixfold_environments.judge.settings import JudgeSettings
from sixfold_serving.judge_server import serve

TASK = Task("t", "What is 2+2?", "4")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_local_model_judges_in_a_child_that_ends_with_it(
    scratch_config: ScratchConfig, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    scratch = scratch_config.model_copy(update={"alphabet": ALPHABET, "context": 4096})
    policy = load_policy(ModelConfig(scratch=scratch), seed=3, device="cpu")
    policy.tokenizer.chat_template = TEMPLATE
    policy.save(tmp_path / "model")
    judge = Judge(JudgeSettings(model=str(tmp_path / "model"), device="cpu", max_tokens=900))
    judge.start()

    try:
        one = asyncio.run(reference_reward(judge)("It is 4.", TASK))
        child = judge._local._child  # type: ignore[union-attr]
        assert child is not None and child.process.poll() is None
    finally:
        judge.close()
    # The verdict of a random model is random, but the grammar makes it a valid one.
    assert one.value in (0.0, 1.0), one.detail
    assert judge.spending.spent.calls == 1
    assert child.process.poll() is not None


class Asked:
    """Requests of a parent process: one model."""

    def __init__(self, model: str) -> None:
        self.answers: list[dict[str, str]] = []
        self._requests = iter([json.dumps({"model": model, "device": "cpu"}).encode()])

    def __next__(self) -> bytes:
        return next(self._requests)

    def answer(self, body: bytes) -> None:
        self.answers.append(json.loads(body))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    asked = Asked(str(tmp_path / "none"))
    serve(asked)  # type: ignore[arg-type]
    (answer,) = asked.answers
    assert "environment.judge.model" in answer["fatal"] and "none" in answer["fatal"]


def test_a_cancelled_question_does_not_take_the_address_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A question may be cancelled while the model is loaded. The child answers only once."""
    loaded = threading.Event()

    class Loading:
        """A child that has loaded its model when the test says so."""

        closed = False
        process = SimpleNamespace(poll=lambda: None)

        def __init__(self, target: str, keeps_output: bool) -> None:
            self.answers = ['{"url": "http://here/v1"}']

        def post(self, body: bytes) -> None:
            pass

        def receive(self, timeout_s: float) -> str:
            assert loaded.wait(10)
            return self.answers.pop()

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(local_model, "Child", Loading)
    model = LocalModel("m", "cpu")

    async def urls() -> str:
        first = asyncio.ensure_future(model.url())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(model.url())
        await asyncio.sleep(0)
        loaded.set()
        return await asyncio.wait_for(second, 10)

    assert asyncio.run(urls()) == "http://here/v1"
    assert asyncio.run(model.url()) == "http://here/v1"
    model.close()
