"""A model with saved stop strings stops at them, and at those that a request adds."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from serving import running

from sixfold.model.loading import Policy
from sixfold.run.sampling_model import load_for_sampling

ASK = {"model": "tiny", "prompt": "one two", "seed": 3, "max_tokens": 60, "temperature": 1.0}
CHAT = {
    **{k: v for k, v in ASK.items() if k != "prompt"},
    "messages": [{"role": "user", "content": "one two"}],
}


def until(text: str, *stops: str) -> str:
    """A text before the first of several strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


@pytest.mark.slow
def test_stop_strings_of_the_model_end_every_kind_of_answer(
    chat_policy: Policy, tmp_path: Path
) -> None:
    chat_policy.save(tmp_path)

    def answers(stop: list[str]) -> tuple[str, str]:
        with running(load_for_sampling(str(tmp_path), "cpu", "float32", "MODEL")) as server:
            text = httpx.post(
                server.url + "/v1/completions", json={**ASK, "stop": stop}, timeout=60
            ).json()["choices"][0]["text"]
            chat = httpx.post(
                server.url + "/v1/chat/completions", json={**CHAT, "stop": stop}, timeout=60
            ).json()["choices"][0]
            return text, chat["message"]["content"]

    whole, chat = answers([])
    own, theirs = whole[len(whole) // 2], whole[len(whole) // 4]
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"stop_strings": [own]}))
    assert until(whole, own) != whole != until(whole, own, theirs)
    assert answers([]) == (until(whole, own), until(chat, own))
    assert answers([theirs]) == (until(whole, own, theirs), until(chat, own, theirs))
