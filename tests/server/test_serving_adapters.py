"""`--adapter NAME=FOLDER`: a request's model chooses the adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from serving import Running, running

from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.model.lora import read_adapter
from sixfold.types import SamplingParams
from sixfold_serving.exchange import noise_key
from sixfold_serving.record import read_trajectories
from sixfold_serving.verb import PARSER

NAMES = ("poet", "clerk")


@pytest.fixture(scope="module")
def folders(chat_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters with large effects."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        made = get_peft_model(
            copy.deepcopy(chat_policy.model),
            LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"]),
        )
        with torch.no_grad():
            for key, p in made.named_parameters():
                if "lora_B" in key:
                    p.normal_(0, 0.5)
        made.save_pretrained(root / name)
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def serving(
    chat_policy: Policy, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    adapters = tuple((name, str(folder)) for name, folder in folders.items())
    with running(chat_policy, adapter=adapters, record=tmp_path_factory.mktemp("record")) as it:
        yield it


@pytest.mark.slow
def test_the_model_of_a_request_chooses_the_adapter(
    serving: Running, folders: dict[str, Path]
) -> None:
    prompt = [5, 6, 7, 8]
    module = serving.engine.runner.model.module
    direct = Engine(CausalLM(module), kv_tokens=500)  # type: ignore[arg-type]
    for name in NAMES:
        direct.load_adapter(name, read_adapter(str(folders[name]), module))  # type: ignore[arg-type]
    texts = set()
    for name in ("tiny", *NAMES):
        params = SamplingParams(max_tokens=12, seed=3, stop_token_ids=serving.served.stop_token_ids)
        direct.add(noise_key(prompt), prompt, params, [0], adapter=None if name == "tiny" else name)
        (expected,) = direct.run()
        answer = serving.client().completions.create(
            model=name, prompt=prompt, max_tokens=12, seed=3, extra_body={"return_token_ids": True}
        )
        extra = answer.choices[0].model_extra or {}
        assert (extra["token_ids"], extra["token_logprobs"]) == (expected.tokens[4:], expected.logp)
        assert answer.model == name
        texts.add(tuple(extra["token_ids"]))
    assert len(texts) == 3
    served = serving.served.recorder
    assert (
        served is not None
        and {tuple(t.tokens[4:]) for t in read_trajectories(served.path)} >= texts
    )


def test_models_are_listed_with_their_parent(serving: Running) -> None:
    cards = serving.client().models.list().data
    assert [(card.id, (card.model_extra or {}).get("parent")) for card in cards] == [
        ("tiny", None),
        ("poet", "tiny"),
        ("clerk", "tiny"),
    ]
    assert serving.client().models.retrieve("clerk").id == "clerk"


def test_an_unknown_name_is_a_404_in_openais_form(serving: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        serving.client().chat.completions.create(
            model="poets", messages=[{"role": "user", "content": "hi"}]
        )
    assert caught.value.body == {
        "message": "the model 'poets' does not exist here; 'tiny', 'poet', 'clerk' are served",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert httpx.get(f"{serving.url}/v1/models/poets").status_code == 404


def test_names_and_folders_are_checked_before_serving(
    chat_policy: Policy, folders: dict[str, Path], tmp_path: Path
) -> None:
    poet, run = str(folders["poet"]), tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").touch()  # for a run, the newest adapter is served
    for adapters, message in (
        ((("tiny", poet),), "the name 'tiny' is taken"),
        ((("poet", poet), ("poet", poet)), "the name 'poet' is taken"),
        ((("poet", str(tmp_path)),), "has no adapter_config.json"),
        ((("poet", str(run)),), "--adapter poet = .*the run has no intact checkpoint"),
    ):
        with pytest.raises(UserError, match=message), running(chat_policy, adapter=adapters):
            pass


def test_the_option_repeats() -> None:
    given = PARSER.parse(["model", "--adapter", "a=x/y", "--adapter", "b=z=1"])
    assert given.adapter == (("a", "x/y"), ("b", "z=1"))
    assert PARSER.parse(["model"]).adapter == ()
    with pytest.raises(UserError, match="expected NAME=FOLDER, got 'x'"):
        PARSER.parse(["model", "--adapter", "x"])


def test_a_search_samples_from_the_adapter(chat_policy: Policy, folders: dict[str, Path]) -> None:
    adapters = tuple((name, str(folder)) for name, folder in folders.items())
    texts = set()
    with running(chat_policy, adapter=adapters) as it:
        for name in ("tiny", *NAMES):
            plain = {"model": name, "prompt": "ab", "max_tokens": 12, "temperature": 0}
            url, search = f"{it.url}/v1/completions", {"method": "greedy"}
            (whole,) = httpx.post(url, json=plain).json()["choices"]
            (found,) = httpx.post(url, json={**plain, "search": search}).json()["choices"]
            assert found == whole
            texts.add(found["text"])
    assert len(texts) == 3
