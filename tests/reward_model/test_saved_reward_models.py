"""Reward models in folders: scores equal those of transformers' pipeline, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import padded_states, policy, random_reward_model, saved
from tests.conftest import make_tiny
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    pipeline,
)

from sixfold.checkpoint.model_source import is_process_reward_model, is_reward_model
from sixfold.errors import UserError
from sixfold.model.loading import load_policy
from sixfold.model.scalar_head import check_causal, scalar_head
from sixfold.recipe.schema import ModelConfig, RewardScoringConfig
from sixfold.reward_model.calibration import Calibration
from sixfold.reward_model.model import load_reward_model
from sixfold.reward_model.reward import reward_model
from sixfold.reward_model.scorer import Scorer

TEXTS = ["12+30=42", "7", "9*9=81 abc", "1+1=3"]


def piped(folder: Path, texts: list[str], batch_size: int = 1) -> list[float]:
    """Scores by transformers' pipeline."""
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    found = classify(texts, function_to_apply="none", batch_size=batch_size, top_k=None)
    return [float(one[-1]["score"]) for one in found]


def scores(folder: Path, texts: list[str]) -> list[float]:
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    found = []
    for text in texts:
        ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        found.append(float(scorer.rewards(ids[:1], [ids[1:]])[0]))
    return found


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "minigpt", "gemma2"])
def test_the_pipeline_gives_the_scores_of_a_saved_model(name: str, tmp_path: Path) -> None:
    own = policy(name)
    model = random_reward_model(name, own=own)
    folder = saved(model, own, tmp_path / "rm")
    assert scores(folder, TEXTS) == pytest.approx(piped(folder, TEXTS, batch_size=3), abs=1e-5)
    plain = load_reward_model(str(folder), "cpu")
    Calibration(0.5, 2.0, 0.01, 3.0).write(model.config)
    loaded = load_reward_model(str(saved(model, own, tmp_path / "rm2")), "cpu")
    assert loaded.calibration == Calibration(0.5, 2.0, 0.01, 3.0)
    raw, rewards = (Scorer(m, 64).rewards([7, 8], [[9], [10, 11, 12]]) for m in (plain, loaded))
    lengths = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert torch.allclose(rewards, (raw - 0.01 * (lengths - 3) - 0.5) / 2)


def test_models_of_others_are_read_where_transformers_reads_them(tmp_path: Path) -> None:
    """Their pad token is often the end token, and their head may have two labels."""
    own = policy()
    own.tokenizer.pad_token = own.tokenizer.eos_token
    for labels in (1, 2):
        config = make_tiny("qwen3").config
        config.num_labels, config.pad_token_id = labels, own.tokenizer.eos_token_id
        torch.manual_seed(5)
        model = AutoModelForSequenceClassification.from_config(config)
        folder = saved(model, own, tmp_path / f"{labels}")
        texts = [*TEXTS, "1+2=3<|end|>", "1+2=3<|end|><|end|>"]
        found = scores(folder, texts)
        with torch.no_grad():
            expected = []
            for text in texts:
                ids = torch.tensor([own.tokenizer(text)["input_ids"]])
                logits = model(ids).logits[0]
                expected.append(float(logits[-1] - (logits[0] if labels == 2 else 0.0)))
        assert found == pytest.approx(expected, abs=1e-5)
        if labels == 1:
            assert found == pytest.approx(piped(folder, texts), abs=1e-5)
        assert found[-1] == pytest.approx(found[-2], abs=1e-5)


def test_the_id_of_the_pad_token_has_no_influence(tmp_path: Path) -> None:
    own = policy()
    model = random_reward_model(own=own)
    end = int(own.tokenizer.eos_token_id)
    found = []
    for pad in (0, end, 9, None):
        model.config.pad_token_id = pad
        scorer = Scorer(load_reward_model(str(saved(model, own, tmp_path / f"{pad}")), "cpu"), 4096)
        found.append(scorer.rewards([7, 8], [[9, end], [9, 9]]).tolist())
    assert found[0] == found[1] == found[2] == found[3]


def test_a_model_whose_pad_token_ends_completions_gives_transformers_none() -> None:
    own = policy()
    assert random_reward_model(own=own).config.pad_token_id == own.tokenizer.pad_token_id
    own.tokenizer.pad_token = own.tokenizer.eos_token
    assert random_reward_model(own=own).config.pad_token_id is None
    own.tokenizer.eos_token = "<|unknown|>"  # the template still ends turns with the pad token
    assert random_reward_model(own=own).config.pad_token_id is None


def test_the_mean_head_reads_the_tokens_of_the_completion(tmp_path: Path) -> None:
    own = policy()
    model = random_reward_model(head="mean", own=own)
    scorer = Scorer(load_reward_model(str(saved(model, own, tmp_path / "rm")), "cpu"), 4096)
    found = scorer.rewards([7, 8, 9], [[10], [11, 12, 13, 1]]).tolist()
    with torch.no_grad():
        expected = [
            float(scalar_head(model)(padded_states(model, [7, 8, 9, *ids])[3:].mean(0)))
            for ids in ([10], [11, 12, 13, 1])
        ]
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_the_longest_completion_leaves_a_place_for_the_closing_token(
    name: str, tmp_path: Path
) -> None:
    own = policy(name)
    folder = saved(random_reward_model(name, own=own), own, tmp_path / "rm")
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    room = scorer.context - 1  # beside a prompt of one token
    assert scorer.rewards([7], [[9] * room]).isfinite().all()
    with pytest.raises(UserError, match=f"at most {scorer.context} tokens"):
        scorer.rewards([7], [[9] * (room + 1)])


def test_a_policy_is_no_reward_model_and_the_reverse(tmp_path: Path) -> None:
    own = policy()
    folder = saved(random_reward_model(own=own), own, tmp_path / "rm")
    own.save((tmp_path / "policy").absolute())
    with pytest.raises(UserError, match=r"policy' is no reward model: .*Qwen3ForCausalLM"):
        load_reward_model(str(tmp_path / "policy"), "cpu")
    with pytest.raises(UserError, match=r"is a reward model .*belongs into environment\.rewards"):
        load_policy(ModelConfig(path=str(folder)), seed=0, device="cpu")
    with pytest.raises(UserError, match=r"'stage:rm' names a stage"):
        reward_model(["stage:rm"], RewardScoringConfig())


def test_another_vocabulary_is_scored_by_text(tmp_path: Path) -> None:
    """Tokens that mean the same texts are scored as they were sampled."""
    own = policy()
    model = random_reward_model(own=own)
    folder = saved(model, own, tmp_path / "rm")
    function = reward_model([str(folder)], RewardScoringConfig(device="cpu"))
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    tokenizer = own.tokenizer
    prompt = scorer.renderer.shown(ids := scorer.renderer.plain("1+1="))
    replies = [[*scorer.renderer.plain(text), 1] for text in ("2", "3 a")]
    shown = [scorer.renderer.shown(one, special=False) for one in replies]
    given = (["1+1="] * 2, shown)

    def call(token_shift: int) -> list[float]:
        moved = [[token + token_shift for token in one] for one in replies]
        found = function(*given, moved, [ids] * 2, [prompt] * 2, ["stop", "stop"])
        return [float(one) for one in found if isinstance(one, float)]

    assert call(0) == pytest.approx(scorer.rewards(ids, replies).tolist(), abs=1e-9)
    chat = tokenizer("<|user|>1+1=<|assistant|>")["input_ids"]
    assert call(1) == pytest.approx(scorer.rewards(chat, replies).tolist(), abs=1e-9)
    assert call(0) != pytest.approx(call(1), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BertForSequenceClassification, BertConfig),
        (ModernBertForSequenceClassification, ModernBertConfig),
    ],
)
def test_encoders_are_refused(kind: Any, config: Any, tmp_path: Path) -> None:
    """Their tokens read those after them. They had been scored as if they were decoders."""
    own = policy()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1)
    size = len(own.tokenizer)
    made = config(
        **sizes, **ends, vocab_size=size, intermediate_size=32, num_labels=1, pad_token_id=0
    )
    folder = saved(kind(made), own, tmp_path)
    with pytest.raises(UserError, match="is no causal decoder"):
        load_reward_model(str(folder), "cpu")


def test_a_model_of_four_tokens_is_a_decoder_and_one_of_nan_is_none() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=4, intermediate_size=32, num_labels=1)
    model = LlamaForSequenceClassification(config).eval()
    check_causal(model, "here")
    torch.nn.init.constant_(model.model.embed_tokens.weight, float("nan"))
    with pytest.raises(UserError, match="here: its weights are not finite"):
        check_causal(model, "here")


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("mean", None, "mean of its config.json must be a finite number, got None"),
        ("mean", [0.5], "mean of its config.json must be a finite number"),
        ("std", 0.0, "std of its config.json must be a number above 0, got 0.0"),
        ("reward_head", "median", "reward_head of its config.json must be last or mean"),
    ],
)
def test_a_bad_calibration_is_refused(key: str, value: Any, error: str, tmp_path: Path) -> None:
    own = policy()
    config = saved(random_reward_model(own=own), own, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(UserError, match=error):
        load_reward_model(str(tmp_path), "cpu")


@pytest.mark.parametrize("text", ["[]", "{", '{"architectures": null}', "{}"])
def test_a_folder_without_classes_is_no_reward_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert not is_reward_model(str(tmp_path))


def test_an_architecture_that_transformers_does_not_know_may_be_a_reward_model(
    tmp_path: Path,
) -> None:
    """As `minigpt`, which is registered only when a model is loaded."""
    classes = ["OwnForSequenceClassification"]
    config = {"model_type": "known_to_nobody", "architectures": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_reward_model(str(tmp_path)) and not is_process_reward_model(str(tmp_path))
