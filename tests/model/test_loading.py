"""Saving and loading: what Hugging Face reads back is what we had, and a broken folder is the
user's to mend, in one line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import ARCHITECTURES, make_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sixfold.errors import UserError
from sixfold.model.loading import Policy, load_policy, vocabulary_hash
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import ModelConfig, ScratchConfig

TOKENS = torch.tensor([[2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]])


def load(path: Path | str) -> Policy:
    return load_policy(ModelConfig(path=str(path)), seed=0, device="cpu")


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hugging_face_loads_what_was_saved_with_equal_weights_and_logits(
    name: str, tmp_path: Path, plain: Callable[[str], PreTrainedModel]
) -> None:
    given, saved = tmp_path / "given", tmp_path / "saved"
    make_tiny(name).save_pretrained(given)
    character_tokenizer("abc").save_pretrained(given)
    policy = load(given)
    policy.save(saved)
    theirs = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").eval()
    for key, p in plain(name).named_parameters():
        assert torch.equal(theirs.get_parameter(key), p)
    with torch.no_grad():
        assert torch.equal(theirs(TOKENS).logits, plain(name)(TOKENS).logits)
    assert vocabulary_hash(AutoTokenizer.from_pretrained(saved)) == policy.vocabulary_hash
    assert load(saved).vocabulary_hash == policy.vocabulary_hash


def test_a_saved_model_needs_no_sixfold(policy: Policy, tmp_path: Path) -> None:
    """A name of ours in config.json would make it unreadable for everybody else."""
    policy.save(tmp_path)
    assert "sixfold" not in "".join(p.read_text() for p in tmp_path.glob("*.json"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_settings_that_rollout_needs(tmp_path: Path) -> None:
    """Context from the config; stop tokens of the tokenizer and of the generation settings
    together; no dropout.
    """
    model = make_tiny("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(tmp_path)
    character_tokenizer("abc").save_pretrained(tmp_path)
    policy = load(tmp_path)
    assert policy.context == 256
    assert policy.stop_token_ids == (1, 7, 9)
    assert (
        policy.model.config.resid_pdrop
        == policy.model.config.attn_pdrop
        == policy.model.config.embd_pdrop
        == 0.0
    )
    policy.model.train()
    first, second = (policy.model(TOKENS).logits for _ in range(2))
    assert torch.equal(first, second)


def test_half_precision_weights_are_loaded_in_float32(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path)
    weights = {k: v.bfloat16() for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert {p.dtype for p in load(tmp_path).model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model folder to break copies of."""
    folder = tmp_path_factory.mktemp("model") / "whole"
    sizes = ScratchConfig(
        hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16
    )
    load_policy(ModelConfig(scratch=sizes), seed=0, device="cpu").save(folder)
    return folder


def _edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder: Path) -> None:
    for file in [*folder.glob("tokenizer*"), *folder.glob("*.jinja")]:
        file.unlink()


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        r"has no config.json. Give a model folder \(found \['",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "no weights .*Give a complete model folder",
    ),
    "pickle only": (
        _pickle_only,
        (
            r"only pickle weights \['pytorch_model.bin'\], which can run code. Convert them to"
            r" safetensors"
        ),
    ),
    "no tokenizer": (_no_tokenizer, "has no tokenizer files"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
    "unknown architecture": (lambda f: _edit_config(f, model_type="nosuch"), "model type `nosuch`"),
    "no language model": (
        lambda f: _edit_config(f, model_type="vit"),
        "cannot be loaded as a causal LM",
    ),
    "weights cut short": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:999]
        ),
        "header",
    ),
    "a weight lost": (
        _lose_a_weight,
        "1 weights are missing .*'model.layers.0.mlp.up_proj.weight'",
    ),
    "other sizes": (
        lambda f: _edit_config(f, intermediate_size=32),
        "3 weights are missing or .*shape.* 'model.layers.0.mlp.down_proj",
    ),
    "tokenizer not JSON": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "cannot be loaded as a causal LM with tokenizer",
    ),
    "tokenizer empty": (
        lambda f: (f / "tokenizer.json").write_text("[]"),
        "cannot be loaded as a causal LM with tokenizer",
    ),
}


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_folder_is_one_line_to_the_user(case: str, whole: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    load(broken)  # sound so far
    break_it, words = BREAKS[case]
    break_it(broken)
    with pytest.raises(UserError, match=words) as error:
        load(broken)
    assert "\n" not in str(error.value) and str(broken) in str(error.value)


def test_a_file_is_no_folder(whole: Path) -> None:
    with pytest.raises(UserError, match=r"is a file. Give the folder that has config.json"):
        load(whole / "config.json")


@pytest.mark.parametrize(
    "path",
    [
        "/no/such/model",
        "./model",
        "runs/x/checkpoints/step-1/model",
        "runs/nope",
        "models\\nope",
        "~/nope",
    ],
)
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(path: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load(path)


def test_unavailable_hub_model_error_gives_the_reason() -> None:
    with pytest.raises(
        UserError, match=r"model.path = 'nobody/nothing-1': cannot be loaded .*\(.+\)"
    ):
        load("nobody/nothing-1")


@pytest.mark.slow
def test_a_revision_chooses_the_commit_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache on disk, with two commits: the newest (main) and one tagged v1."""
    sizes = ScratchConfig(
        hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=32, context=64
    )
    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    weights = {}
    for seed, (reference, commit) in enumerate({"main": "a" * 40, "v1": "b" * 40}.items()):
        policy = load_policy(ModelConfig(scratch=sizes), seed=seed, device="cpu")
        policy.save(repository / "snapshots" / commit)
        (repository / "refs" / reference).write_text(commit)
        weights[commit] = next(policy.model.parameters())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision, commit in {
        "": "a" * 40,
        "main": "a" * 40,
        "v1": "b" * 40,
        "b" * 40: "b" * 40,
    }.items():
        loaded = load_policy(ModelConfig(path="org/tiny", revision=revision), seed=0, device="cpu")
        assert torch.equal(next(loaded.model.parameters()), weights[commit])
        assert loaded.hub_commits == {"org/tiny": commit}
    with pytest.raises(UserError, match=r"model.path = 'org/tiny': cannot be loaded"):
        load_policy(ModelConfig(path="org/tiny", revision="v2"), seed=0, device="cpu")


def test_a_revision_of_a_folder_is_refused(whole: Path) -> None:
    with pytest.raises(
        UserError, match=r"model\.revision = 'v1' .*'.*' is a local folder. Leave it empty"
    ):
        load_policy(ModelConfig(path=str(whole), revision="v1"), seed=0, device="cpu")
