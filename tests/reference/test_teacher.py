"""A teacher scores by its own weights, on the policy's samples; one that reads other tokens, or too
few, is refused with what differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sixfold.batch import Batch, collate
from sixfold.errors import UserError
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.reference.frozen import FrozenReference
from sixfold.reference.teacher import load_teacher
from sixfold.trainer.logprobs import Scoring
from sixfold.types import Group, Reward, Task, Trajectory

SMALL = ScratchConfig(
    alphabet="abcd",
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    context=64,
)
LARGER = dict(hidden_size=32, layers=2)
TEMPERATURE = 0.7


def _make(seed: int = 0, **changes: object) -> Policy:
    return load_policy(
        ModelConfig(scratch=SMALL.model_copy(update=changes)), seed=seed, device="cpu"
    )


def _saved(folder: Path, seed: int = 5, **changes: object) -> str:
    teacher = _make(seed, **changes)
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.mul_(3.0)  # random weights of the usual size make every distribution flat
    teacher.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return _make()


def _batch() -> Batch:
    rows = []
    for k, length in enumerate((4, 7)):
        rows.append(
            Trajectory.one_turn(
                "t",
                k,
                [4, 6, 7],
                [6 + (3 * i + k) % 4 for i in range(length)],
                [-1.0] * length,
                [0] * length,
                "stop",
                reward=Reward(float(k)),
            )
        )
    return collate([Group(Task("t", "?"), rows)])


def _by_softmax(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """[B, T] log-probs of the plain forward, row by row, 0 where mask is False."""
    out = torch.zeros(batch.tokens.shape)
    for b, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            table = (
                model(input_ids=batch.tokens[b : b + 1, :length]).logits[0] / TEMPERATURE
            ).log_softmax(-1)
        out[b, 1:length] = table[:-1].gather(-1, batch.tokens[b, 1:length, None])[:, 0]
    return torch.where(batch.mask, out, 0.0)


@pytest.mark.slow
def test_it_scores_by_its_own_weights_at_the_sampling_temperature(
    policy: Policy, tmp_path: Path
) -> None:
    teacher = load_teacher(_saved(tmp_path, **LARGER), policy, longest=64)
    reference = FrozenReference(teacher, Scoring(TEMPERATURE, 16), 32, True, copy=False)
    batch = _batch()
    got = reference.score(batch).ref_logp
    teacher.set_attn_implementation("eager")
    torch.testing.assert_close(got, _by_softmax(teacher, batch), atol=1e-5, rtol=1e-5)
    assert got is not None and float((got - _by_softmax(_plain(policy), batch)).abs().max()) > 0.1


def _plain(policy: Policy) -> PreTrainedModel:
    model = _make().model
    model.load_state_dict(policy.model.state_dict())
    model.set_attn_implementation("eager")
    return model


def test_it_is_taken_over_frozen_and_not_copied(policy: Policy, tmp_path: Path) -> None:
    teacher = load_teacher(_saved(tmp_path), policy, longest=64)
    reference = FrozenReference(teacher, Scoring(), 32, True, copy=False)
    assert reference.model is teacher
    assert not any(p.requires_grad for p in teacher.parameters()) and not any(
        m.training for m in teacher.modules()
    )
    assert all(p.requires_grad for p in policy.model.parameters())
    reference.check_apart(torch.optim.AdamW(policy.model.parameters()))
    with pytest.raises(RuntimeError, match="would be trained"):
        reference.check_apart(torch.optim.AdamW(teacher.parameters()))


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"alphabet": "abdc"},
            r"2 tokens have other ids, for example 'c': 8 in the policy's, 9 in the teacher's$",
        ),
        (
            {"alphabet": "abce"},
            (
                r"1 tokens of the policy are unknown to the teacher, for example 'd'; 1 tokens of"
                r" the teacher are unknown to the policy$"
            ),
        ),
        ({"alphabet": "abcde"}, r"policy's: 1 tokens of the teacher are unknown to the policy$"),
        (
            {"context": 63},
            (
                r"its context of 63 tokens is too short for sequences of up to 64; lower"
                r" rollout.max_new_tokens$"
            ),
        ),
    ],
)
def test_teacher_with_other_tokens_or_short_context_is_refused(
    changes: dict[str, object], words: str, policy: Policy, tmp_path: Path
) -> None:
    path = _saved(tmp_path, **changes)
    with pytest.raises(UserError, match=words) as error:
        load_teacher(path, policy, longest=64)
    assert str(error.value).startswith(f"reference.path = '{path}': ") and "\n" not in str(
        error.value
    )


@pytest.mark.slow
def test_a_vocabulary_padded_less_than_the_policys_is_refused(tmp_path: Path) -> None:
    """Same tokenizer, but the policy's logits have rows for ids that no token has: it may sample
    them.
    """
    policy, path = _make(), _saved(tmp_path)
    policy.model.resize_token_embeddings(16)
    with pytest.raises(
        UserError,
        match=(
            r"the teacher has 10 token ids, the policy 16\. Use a teacher with at least as many$"
        ),
    ):
        load_teacher(path, policy, longest=64)
    policy.save(tmp_path / "padded")
    load_teacher(str(tmp_path / "padded"), _make(), longest=64)


def test_error_of_an_unloadable_teacher_names_the_setting(policy: Policy, tmp_path: Path) -> None:
    for path, words in [(tmp_path / "none", "no such folder"), (tmp_path, "has no config.json")]:
        with pytest.raises(UserError, match=words) as error:
            load_teacher(str(path), policy, longest=64)
        assert str(error.value).startswith("reference.path = ")
