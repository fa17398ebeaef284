"""Branches: a request that begins with what another sequence has so far shares its full blocks,
computes what is new, and changes nobody's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.drain import drain
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

SIZE, PROMPT = 8, [(3 * j) % 59 + 2 for j in range(19)]
BRANCHES = [[5, 6, 7], [8], [5, 9, 9, 9, 9, 9, 9, 9, 9, 9], [5, 6, 7, 4]]
Texts = dict[str, tuple[list[int], list[float]]]


@pytest.fixture
def make(tiny: Callable[[str], PreTrainedModel]) -> Callable[[str], Engine]:
    return lambda kind: Engine(
        CausalLM(tiny("qwen3")), kv_tokens=2000, block_size=SIZE, prefix_cache=kind
    )


def ask(engine: Engine, key: str, prompt: list[int], tokens: int) -> None:
    engine.add(key, prompt, SamplingParams(tokens, seed=len(key)), [0])


def texts(sequences: list[Sequence]) -> Texts:
    return {s.request.key: (s.tokens, s.logp) for s in sequences}


def alone(engine: Engine, prompts: dict[str, list[int]], tokens: int) -> Texts:
    """Each from an empty cache."""
    found: Texts = {}
    for key, prompt in prompts.items():
        ask(engine, key, prompt, tokens)
        found |= texts(engine.run())
    return found


def assert_same(found: Texts, expected: Texts) -> None:
    """The same tokens; log-probs to rounding, for what was sampled was computed token by token, and
    alone as a prompt.
    """
    assert found.keys() == expected.keys()
    for key, (tokens, logp) in expected.items():
        assert found[key][0] == tokens, key
        assert found[key][1] == pytest.approx(logp, abs=1e-5), key


def owners(engine: Engine, blocks: list[int]) -> list[int]:
    return [engine.scheduler.blocks._owners[b] for b in blocks]


def longest_known(kind: str, held: list[list[int]], prompt: list[int]) -> int:
    """The slow search: how many tokens of the prompt stand at the beginning of a text that is held,
    to the token (radix) or to the block (hash).
    """

    def common(text: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b),
            min(len(text), len(prompt)),
        )

    if kind == "hash":
        return max(common(text[: len(text) // SIZE * SIZE]) // SIZE * SIZE for text in held)
    return max(map(common, held))


def branch(
    engine: Engine, kind: str, trunk: list[int], held: list[list[int]]
) -> dict[str, list[int]]:
    """Start a branch for each of BRANCHES behind `trunk`, one a step. held: texts in the cache.
    Each computes what the cache does not have, and owns the trunk's full blocks that it does have
    together with the others. -> prompts by key."""
    prompts = {"b" * (i + 1): trunk + new for i, new in enumerate(BRANCHES)}
    full = longest_known(kind, held, trunk) // SIZE
    shared = engine.prefixes.match(trunk[: full * SIZE]).blocks
    before, held = owners(engine, shared), list(held)
    assert len(shared) == full > 1
    for n, (key, prompt) in enumerate(prompts.items()):
        computed = engine.stats.prefill_tokens
        ask(engine, key, prompt, 12)
        engine.step()
        assert engine.stats.prefill_tokens - computed == len(prompt) - longest_known(
            kind, held, prompt
        )
        assert engine.scheduler.running[-1].blocks[:full] == shared
        assert owners(engine, shared) == [count + n + 1 for count in before]
        held.append(prompt[: len(prompt) // SIZE * SIZE])
    return prompts


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("at", [24, 29, 32, 44, 45])
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_branches_of_a_sequence_that_has_ended(
    make: Callable[[str], Engine], kind: str, at: int
) -> None:
    """After `at` of its 45 tokens: on the edge of a block, within one, and at its end, where the
    newest was never computed.
    """
    engine = make(kind)
    ask(engine, "parent", PROMPT, 26)
    parent = texts(engine.run())["parent"][0]
    prompts = branch(engine, kind, parent[:at], [parent[:-1]])
    found = texts(engine.run())
    assert engine.usage().used == 0
    assert_same(found, alone(make("none"), prompts, 12))


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("at", [24, 25, 29, 33, 40])
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_branches_of_a_sequence_that_runs_on(
    make: Callable[[str], Engine], kind: str, at: int
) -> None:
    """Between two of its steps, `at` tokens long. It shares its prompt's full blocks. It goes on as
    if there were no branches, and leaves what it computed to further ones.
    """
    engine = make(kind)
    ask(engine, "parent", PROMPT, 26)
    while not engine.scheduler.running or engine.scheduler.running[0].length < at:
        engine.step()
    (parent,) = engine.scheduler.running
    held = PROMPT[: len(PROMPT) // SIZE * SIZE]
    prompts = branch(engine, kind, parent.tokens[:at], [held])
    assert parent.length == at
    assert all(
        b not in other.blocks
        for b in parent.blocks[len(held) // SIZE :]
        for other in engine.scheduler.running[1:]
    )
    found = texts(drain(engine))
    assert engine.usage().used == 0
    expected = alone(make("none"), prompts, 12) | alone(make("none"), {"parent": PROMPT}, 26)
    assert_same(found, expected)
    late = engine.stats.prefill_tokens
    ask(engine, "late", [*parent.tokens, 3], 1)
    drain(engine)
    known = parent.length - 1 if kind == "radix" else (parent.length - 1) // SIZE * SIZE
    assert engine.stats.prefill_tokens - late == parent.length + 1 - known
