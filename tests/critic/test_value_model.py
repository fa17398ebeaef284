"""The value model: equal to transformers' own forward read one token earlier, zero at first, and
unable to touch the policy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import ARCHITECTURES, make_tiny
from tests.critic.critics import (
    BODIES,
    make_critic,
    ragged,
    randomise_head,
    same,
    squared_error,
    weights_of,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from sixfold.batch import Batch
from sixfold.critic.value_model import PolicyValueHead, make_value_root
from sixfold.errors import UserError
from sixfold.model.attention import NAME
from sixfold.model.scalar_head import scalar_head
from sixfold.trainer.logprobs import PolicyRoot

WITHOUT_CLASS = {"gemma3_text"}
WITH_CLASS = [name for name in ARCHITECTURES if name not in WITHOUT_CLASS]
Tiny = Callable[[str], PreTrainedModel]


def padded_values(model: PreTrainedModel, batch: Batch) -> Tensor:
    """[B, T] by an ordinary padded forward of the token-classification model under transformers'
    own attention: the logit at t - 1 for token t.
    """
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    with torch.no_grad():
        logits = model(input_ids=batch.tokens, attention_mask=real.long(), use_cache=False).logits[
            :, :, 0
        ]
    return torch.where(batch.mask, nn.functional.pad(logits[:, :-1], (1, 0)), 0.0)


def head_values(policy: PreTrainedModel, head: nn.Linear, batch: Batch) -> Tensor:
    """[B, T] by the policy's own forward, a trajectory at a time: the head on its last hidden state
    at t - 1.
    """
    policy = copy.deepcopy(policy)
    policy.set_attn_implementation("eager")
    out = torch.zeros(batch.tokens.shape)
    for b, n in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            hidden = policy(
                batch.tokens[b : b + 1, :n], use_cache=False, output_hidden_states=True
            ).hidden_states[-1][0]
            out[b, 1:n] = head(hidden[:-1])[:, 0]
    return torch.where(batch.mask, out, 0.0)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("name", WITH_CLASS)
def test_an_own_body_gives_what_a_padded_forward_gives_one_token_earlier(
    name: str, share_prefix: bool, tiny: Tiny
) -> None:
    critic, batch = make_critic(tiny(name), "own", share_prefix=share_prefix), ragged()
    randomise_head(critic)
    values = critic.score(batch).values
    assert values is not None and not values.requires_grad and float(values[batch.mask].std()) > 0.1
    assert isinstance(critic.model, PreTrainedModel)
    torch.testing.assert_close(values, padded_values(critic.model, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_head_on_the_policy_reads_its_last_hidden_states_one_token_earlier(
    name: str, share_prefix: bool, tiny: Tiny
) -> None:
    critic, batch = make_critic(tiny(name), "policy", share_prefix=share_prefix), ragged()
    randomise_head(critic)
    values = critic.score(batch).values
    assert values is not None and float(values[batch.mask].std()) > 0.1
    torch.testing.assert_close(
        values, head_values(tiny(name), scalar_head(critic.model), batch), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("body", BODIES)
def test_the_value_of_a_token_has_not_seen_it(body: str, tiny: Tiny) -> None:
    """Change a row's token t: values up to t stay bit for bit (they are baselines for it), the next
    one moves.
    """
    critic, batch = (
        make_critic(tiny("qwen3"), body, share_prefix=False),
        ragged(samples=1, groups=1),
    )
    batch = batch.rows(torch.tensor([0]))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    mask = torch.tensor([[False, False, True, True, True, True]])
    batch = batch.with_(
        tokens=tokens,
        mask=mask,
        lengths=torch.tensor([6]),
        prompt_lengths=torch.tensor([2]),
        rewards=torch.zeros(1, 6),
    )
    randomise_head(critic)
    other = tokens.clone()
    other[0, 3] = 20
    a, b = critic.score(batch).values, critic.score(batch.with_(tokens=other)).values
    assert a is not None and b is not None
    torch.testing.assert_close(a[0, :4], b[0, :4], rtol=0, atol=1e-6)
    assert (a[0, 4:] - b[0, 4:]).abs().min() > 1e-3


@pytest.mark.parametrize("body", BODIES)
def test_at_first_every_value_is_exactly_zero(body: str, tiny: Tiny) -> None:
    batch = make_critic(tiny("qwen3"), body).score(ragged())
    assert batch.values is not None and not batch.values.any()


@pytest.mark.parametrize("name", WITH_CLASS)
def test_an_own_body_is_a_copy_of_the_policys(name: str, tiny: Tiny) -> None:
    policy = tiny(name)
    model = make_value_root(PolicyRoot(policy), "own").model
    assert isinstance(model, PreTrainedModel) and not model.training
    assert same(weights_of(model.base_model), weights_of(policy.base_model))
    assert not {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in policy.parameters()
    }
    assert policy.config.num_labels == 2 and policy.config._attn_implementation == NAME, (
        "the policy's own settings were changed"
    )


@pytest.mark.parametrize("name", WITH_CLASS)
def test_no_dropout_is_left_in_an_own_body(name: str) -> None:
    """Even in training mode two forwards are equal, whatever the policy's settings and the class's
    defaults say.
    """
    policy = make_tiny(name, attention_dropout=0.3)
    policy.config.resid_pdrop = policy.config.embd_pdrop = 0.3
    policy.set_attn_implementation(NAME)
    model = make_value_root(PolicyRoot(policy), "own").model
    assert isinstance(model, PreTrainedModel)
    assert (
        [m.p for m in model.modules() if isinstance(m, nn.Dropout)].count(0.0)
        == sum(isinstance(m, nn.Dropout) for m in model.modules())
        > 0
    )
    torch.nn.init.normal_(scalar_head(model).weight)
    model.set_attn_implementation("eager")
    model.train()
    tokens = torch.arange(2, 22)[None]
    assert torch.equal(model(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


def test_creating_one_does_not_change_the_random_state(tiny: Tiny) -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    make_value_root(PolicyRoot(tiny("qwen3")), "own")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", sorted(WITHOUT_CLASS))
def test_an_architecture_without_such_a_class_is_refused_by_name(name: str, tiny: Tiny) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"critic\.body = 'own': no value model for Gemma3ForCausalLM .*use critic\.body ="
            r" 'policy'"
        ),
    ):
        make_value_root(PolicyRoot(tiny(name)), "own")
    assert isinstance(make_value_root(PolicyRoot(tiny(name)), "policy").model, PolicyValueHead)


# --- A value head on the policy does not change the policy


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_a_head_leaves_every_weight_and_gradient_of_the_policy_alone(
    name: str, tiny: Tiny
) -> None:
    policy = copy.deepcopy(tiny(name))
    before = weights_of(policy)
    critic = make_critic(policy, "policy", weight_decay=0.5)
    batch = critic.score(ragged())
    for _ in range(3):
        assert critic.update(batch, squared_error)["critic/skipped"] == 0.0
    assert same(weights_of(policy), before)
    assert all(p.grad is None and p.requires_grad for p in policy.parameters())
    assert [name for name, _ in critic.model.named_parameters()] == ["score.weight", "score.bias"]
    held = {id(p) for group in critic.trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in critic.model.parameters()}
    assert all(bool(p.any()) for p in critic.model.parameters()), "the head itself did not learn"


def test_a_head_takes_no_part_in_activation_checkpointing_and_leaves_the_policys_as_it_is(
    tiny: Tiny,
) -> None:
    policy = copy.deepcopy(tiny("qwen3"))
    layer = policy.base_model.layers[0]
    layer.gradient_checkpointing = layer.training = True
    make_critic(policy, "policy", activation_checkpointing="full")
    assert layer.gradient_checkpointing and layer.training


# --- Hugging Face form


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", WITH_CLASS)
def test_saved_and_read_back_by_hugging_face_it_gives_equal_values(
    name: str, tiny: Tiny, tmp_path: Path
) -> None:
    critic = make_critic(tiny(name), "own")
    batch = critic.score(ragged())
    for _ in range(2):
        critic.update(batch, squared_error)
    critic.save(tmp_path)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path, attn_implementation="eager")
    assert same(weights_of(loaded), weights_of(critic.model))
    assert AutoConfig.from_pretrained(tmp_path).num_labels == 1
    torch.testing.assert_close(
        critic.score(batch).values, padded_values(loaded, batch), rtol=1e-5, atol=1e-5
    )
    assert all(m.p == 0.0 for m in loaded.modules() if isinstance(m, nn.Dropout))
