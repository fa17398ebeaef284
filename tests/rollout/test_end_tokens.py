"""One list of end tokens decides where sampling stops, what the text is, and what is trained.

Public recipes set a list that leaves out the tokenizer's end token (Qwen2.5 base: the list is
<|im_end|>, the tokenizer's end token is <|endoftext|>).
"""

from __future__ import annotations

import pytest
import torch
from tests.rollouts import EngineRollout

from sixfold.backends.sglang_server import SglangServer
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_job import Choice, Job
from sixfold.rollout.generator import wait_for
from sixfold.types import SAMPLED, SamplingParams, Task

TASKS = [Task(f"t{i}", f"{i}+{i}=") for i in range(12)]


@pytest.fixture
def listed(policy: Policy) -> int:
    """The end token of the list: one that the tokenizer does not call its end token."""
    (token,) = Renderer(policy.tokenizer).plain("7")
    return token


def test_text_outcome_and_mask_follow_the_list_that_sampling_has(
    policy: Policy, listed: int
) -> None:
    renderer = Renderer(policy.tokenizer, [listed])
    params = SamplingParams(max_tokens=40, stop_token_ids=(listed,))
    engine = Engine(CausalLM(policy.model), kv_tokens=4000)
    groups = EngineRollout(engine, renderer, params, 4).generate(TASKS, seed=5)
    found = [t for group in groups for t in group.trajectories]
    eos = policy.tokenizer.eos_token_id
    assert sum(eos in t.tokens[t.prompt_length :] for t in found) > 10, "the case under test"
    for t in found:
        said = t.tokens[t.prompt_length :]
        ended = said[-1] == listed
        assert listed not in said[:-1] and (ended or len(said) == 40)
        assert t.finish_reason == ("stop" if ended else "length")
        shown = [x for x in said[: -1 if ended else None] if x != policy.tokenizer.pad_token_id]
        assert t.text == policy.tokenizer.decode(shown)
        assert t.provenance.count(SAMPLED) == len(said)


def test_the_text_of_a_request_ends_at_the_list_of_the_request(policy: Policy, listed: int) -> None:
    """As a Sixfold server samples for a run whose list is not that of the served model."""
    served = Renderer(policy.tokenizer, policy.stop_token_ids)
    eos = policy.tokenizer.eos_token_id
    prompt, said = served.plain("1+1="), [*served.plain("2"), eos, *served.plain("3;4")]
    for ends, stops, text in (
        ((listed,), (), "2<|end|>3;4"),
        ((listed,), (";",), "2<|end|>3"),
        ((listed, eos), (";",), "2"),
    ):
        job = Job(
            ["n"], [prompt], SamplingParams(9, stop_token_ids=ends), [0], print, stops, decoded=True
        )
        choice = Choice(job, 0, served)
        sequence = _Ended(prompt, said)
        choice.advance(sequence)  # type: ignore[arg-type]
        assert choice.text == text


class _Ended:
    """A sequence of the engine after its last token."""

    finish_reason = "length"

    def __init__(self, prompt: list[int], said: list[int]) -> None:
        self.request = type("Request", (), {"prompt": prompt})
        self.tokens = [*prompt, *said]
        self.logp = self.version = [0] * len(said)
        self.top: list[object] = []

    def cut(self, length: int) -> None:
        del self.tokens[length:]


@pytest.mark.parametrize("ends", [("7",), ("<|user|>", "7"), ("<|end|>", "7")])
def test_a_worked_solution_ends_where_sampling_would(policy: Policy, ends: tuple[str, ...]) -> None:
    ids = policy.tokenizer.convert_tokens_to_ids(list(ends))
    renderer = Renderer(policy.tokenizer, ids)
    solution = renderer.solution(Task("t", "1+1=", answer="2"))
    assert solution[:-1] == renderer.plain("2") and solution[-1] in ids
    assert (solution[-1] == policy.tokenizer.eos_token_id) == ("<|end|>" in ends)
    assert renderer.decode(solution) == "2"


def test_without_end_tokens_nothing_ends_a_text(policy: Policy) -> None:
    renderer = Renderer(policy.tokenizer, ())
    eos = policy.tokenizer.eos_token_id
    assert renderer.decode([*renderer.plain("2"), eos, *renderer.plain("3")]) == "2<|end|>3"


def test_sglang_ends_at_the_tokenizers_token_whatever_the_list_says(
    policy: Policy, listed: int
) -> None:
    engine = SglangServer(
        "http://127.0.0.1:9",
        policy.model.config,
        torch.float32,
        Renderer(policy.tokenizer, [listed]),
    )
    with pytest.raises(UserError, match=r"rollout\.stop_tokens.*<\|end\|>.*Add it"):
        wait_for(engine.check())
