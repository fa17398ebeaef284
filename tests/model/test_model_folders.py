"""Model folders with contents that no model has: one error that names the file, and nothing hangs.

The values are those that JSON can hold, in the fields of the files that transformers reads.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from sixfold.checkpoint.model_source import with_model_folders
from sixfold.errors import UserError
from sixfold.model.loading import load_policy, load_tokenizer
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import ModelConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.sizing.model_files import read_config, stored_weights

DEEP = "@deep@"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer("0123456789+=", ())
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
    )
    made = AutoModelForCausalLM.from_config(config)
    made.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "m")
    return tmp_path / "m"


def write(file: Path, field: str, value: Any) -> None:
    """Replace a field, or with an empty name the whole file."""
    content = {**json.loads(file.read_text()), field: value} if field else value
    text = json.dumps(content).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    file.write_text(text)


def load(folder: Path) -> None:
    load_policy(ModelConfig(path=str(folder)), seed=0, device="cpu")


def plan(folder: Path) -> None:
    flags = ["--model.path", str(folder), "--rollout.max_new_tokens", "16"]
    make_plan(with_model_folders(parse_recipe('run.name = "r"', "test", flags)))


def test_the_model_itself_loads(folder: Path) -> None:
    load(folder)
    plan(folder)
    stored = stored_weights(folder)
    size = Qwen3Config.from_pretrained(folder)
    assert stored is not None and stored.numbers == 2 * 16 * size.vocab_size + 16 + 2 * (
        2 * 16 + 2 * 8 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32
    )


SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "head_dim")
CONFIG = [
    *((name, value) for name in SIZES for value in (-1, "12", 1.5, True, [None], {}, 10**12)),
    ("num_hidden_layers", 10**30),
    ("intermediate_size", 10**12),
    ("max_position_embeddings", 10**30),
    ("max_position_embeddings", "64"),
    ("max_position_embeddings", [64]),
    ("attention_bias", "no"),
    ("rms_norm_eps", [1]),
    ("rope_parameters", 3),
    ("model_type", ["qwen3"]),
    ("architectures", DEEP),
    ("", DEEP),
    ("", ["a"]),
    ("", 3),
]


@pytest.mark.parametrize(("field", "value"), CONFIG)
def test_a_config_that_no_model_has(folder: Path, field: str, value: Any) -> None:
    write(folder / "config.json", field, value)
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(folder) in str(error.value) and len(str(error.value)) < 1000
    with pytest.raises(UserError):
        load_tokenizer(ModelConfig(path=str(folder)))
        load(folder)


@pytest.mark.parametrize(("field", "value"), CONFIG)
def test_a_plan_refuses_it_or_needs_no_such_field(folder: Path, field: str, value: Any) -> None:
    """No other error than one that says what to correct. Wrong sizes are always refused.

    A plan does not compare large ones with the weights, as loading does.
    """
    write(folder / "config.json", field, value)
    large = isinstance(value, int) and value >= 10**12
    if not large and field in (*SIZES, "intermediate_size", "max_position_embeddings", ""):
        with pytest.raises(UserError, match=r"config\.json"):
            plan(folder)
        return
    try:
        plan(folder)
    except UserError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        *(
            ("generation_config.json", "eos_token_id", value)
            for value in (10**12, -1, "a", [None], {}, [[1]], True, 0.5)
        ),
        ("generation_config.json", "stop_strings", 3),
        ("generation_config.json", "stop_strings", [3]),
        ("generation_config.json", "", DEEP),
        ("tokenizer_config.json", "", DEEP),
        ("tokenizer_config.json", "", [1]),
        ("tokenizer_config.json", "tokenizer_class", ["a"]),
        ("tokenizer.json", "model", 3),
        ("tokenizer.json", "added_tokens", DEEP),
        ("tokenizer.json", "", []),
    ],
)
def test_other_files_that_no_model_has(folder: Path, file: str, field: str, value: Any) -> None:
    write(folder / file, field, value)
    with pytest.raises(UserError):
        load(folder)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
def test_a_named_pipe_is_refused_and_not_waited_for(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(UserError, match=f"{file} is not a regular file"):
        load(folder)
    with pytest.raises(UserError, match=f"{file} is not a regular file"):
        load_tokenizer(ModelConfig(path=str(folder)))
    if file == "config.json":
        with pytest.raises(UserError, match=f"{file} is not a regular file"):
            plan(folder)


def test_weights_with_a_damaged_header_are_named(folder: Path) -> None:
    for header in (b"{}x", b"[" * 50_000, b'{"a": 3}', b'{"a": {"shape": "x"}}', b"[]"):
        size = len(header).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(size + header)
        with pytest.raises(UserError, match=r"model\.safetensors is not a complete"):
            stored_weights(folder)


def test_sizes_just_above_the_weights_reach_the_check_of_shapes(folder: Path) -> None:
    """A model that is somewhat larger than its weights is refused by the name of a weight."""
    write(folder / "config.json", "intermediate_size", 64)
    read_config(folder)
    with pytest.raises(UserError, match=r"weights are missing .*layers\.0"):
        load(folder)
