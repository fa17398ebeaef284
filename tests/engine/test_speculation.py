"""Speculative decoding: the distribution against that of the model alone, the same tokens whatever
the engine's sizes, and true log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from chi_square import agree, fits
from test_acceptance import accept_always, resample_from_p
from test_same_seed_same_tokens import PROMPTS, SIZES
from test_sampler import slow_distribution
from tests.conftest import END, VOCABULARY
from tests.engine.drain import drain
from torch import Tensor, nn
from transformers import PreTrainedModel

from sixfold.engine import speculative
from sixfold.engine.engine import Engine
from sixfold.engine.ngram import NGramProposer
from sixfold.engine.sequence import Sequence
from sixfold.engine.speculative import Speculation
from sixfold.model.base import Body, LayerAdditions, Layout
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.recipe.schema import EngineConfig, NgramSpeculation, Recipe
from sixfold.run.sampler import make_engine
from sixfold.types import Kept, SamplingParams

LEVEL = 1e-3
SYMBOLS = 6


class Chain:
    """A Markov chain as a language model: what follows a token is known exactly. sharpness: of its
    random logits.
    """

    def __init__(self, seed: int, sharpness: float = 1.5, symbols: int = SYMBOLS) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module: nn.Module = nn.Embedding(symbols, symbols)
        self.module.requires_grad_(False).weight.mul_(sharpness)  # type: ignore[union-attr]

    @property
    def table(self) -> Tensor:
        """[V, V]: logits after each token."""
        return next(self.module.parameters())

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        return self.module(tokens)

    steady = True

    def body(self, build: object) -> Body:
        return self

    def ready(self) -> Body:
        return self

    def refresh(self) -> None:
        """Nothing is copied."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def mixed(self, other: Chain, share: float) -> Chain:
        """A draft: this chain with a share of another in its logits."""
        made = copy.deepcopy(self)
        made.table.mul_(1 - share).add_(share * other.table)
        return made

    def probs(self, params: SamplingParams) -> np.ndarray:
        """[V, V], without a repetition penalty."""
        return np.stack([slow_distribution(row.numpy(), params, []) for row in self.table])


TARGET = Chain(0)
PROPOSERS = {
    "n-gram": Speculation(shortest=1, longest=3, k=3),
    "good draft": Speculation(draft=TARGET.mixed(Chain(1), 0.2)),
    "bad draft": Speculation(draft=Chain(2, 3.0), k=2),
}
SAMPLING = {
    "plain": SamplingParams(max_tokens=25, seed=1),
    "cool": SamplingParams(max_tokens=25, temperature=0.6, seed=2),
    "truncated": SamplingParams(
        max_tokens=25, temperature=1.3, top_k=5, top_p=0.85, min_p=0.05, seed=3
    ),
}


def walk(
    speculation: Speculation, params: SamplingParams, samples: int = 850
) -> tuple[np.ndarray, Engine]:
    """Tokens [samples, 1 + max_tokens] of the chain, from token 3 on."""
    engine = Engine(
        TARGET, kv_tokens=1 << 15, max_running=1000, prefix_cache="none", speculation=speculation
    )
    engine.add("walk", [0, 3], params, list(range(samples)))
    return np.array([s.tokens[1:] for s in engine.run()]), engine


def steps(tokens: np.ndarray, length: int) -> np.ndarray:
    """[V, V^length] counts of (token, the next `length`), cut from the walks one after another. The
    first of a walk is not speculation's.
    """
    width = (tokens.shape[1] - 2) // length * length
    after = tokens[:, 2 : 2 + width].reshape(len(tokens), -1, length)
    before = tokens[:, 1 : 1 + width : length]
    code = np.concatenate([before[..., None], after], axis=-1) @ SYMBOLS ** np.arange(
        length, -1, -1
    )
    return np.bincount(code.reshape(-1), minlength=SYMBOLS ** (length + 1)).reshape(SYMBOLS, -1)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_tokens_follow_the_models_distribution(proposer: str, sampling: str) -> None:
    """The distribution of the next token, and the joint distribution of the next three, equal the
    chain's own.
    """
    tokens, engine = walk(PROPOSERS[proposer], SAMPLING[sampling])
    probs = TARGET.probs(SAMPLING[sampling])
    assert engine.stats.decoded_tokens >= 20_000 and engine.stats.accepted_tokens > 1000
    assert fits(steps(tokens, 1), probs) > LEVEL
    joint = probs[:, :, None, None] * probs[None, :, :, None] * probs[None, None, :, :]
    assert fits(steps(tokens, 3), joint.reshape(SYMBOLS, -1)) > LEVEL


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("rule", [accept_always, resample_from_p])
@pytest.mark.parametrize(
    ("proposer", "sampling"),
    [("good draft", "plain"), ("bad draft", "cool"), ("bad draft", "truncated")],
)
def test_the_same_test_catches_a_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, proposer: str, sampling: str, rule: Callable
) -> None:
    monkeypatch.setattr(speculative, "reject", rule)
    tokens, _ = walk(PROPOSERS[proposer], SAMPLING[sampling])
    assert fits(steps(tokens, 1), TARGET.probs(SAMPLING[sampling])) < LEVEL


@pytest.mark.slow
def test_tokens_per_pass_are_those_of_theory() -> None:
    """If guesses are accepted with one probability a at every place, a pass gives (1 - a^(k+1)) /
    (1 - a) tokens on average (Leviathan et al., eq. 1).
    """
    p, q = Chain(0), Chain(1)
    for chain in (p, q):
        chain.table.copy_(chain.table[:1].clone())
    params, k = SamplingParams(max_tokens=200, seed=1), 4
    engine = Engine(
        p, kv_tokens=1 << 15, prefix_cache="none", speculation=Speculation(k=k, draft=q)
    )
    engine.add("t", [1], params, list(range(60)))
    engine.run()
    a = np.minimum(p.probs(params)[0], q.probs(params)[0]).sum()
    assert 0.3 < a < 0.9
    assert engine.stats.tokens_per_pass == pytest.approx(
        (1 - a ** (k + 1)) / (1 - a), rel=0.03
    )  # the last passes are cut by the limit
    assert engine.stats.acceptance_rate == pytest.approx(
        sum(a**i for i in range(1, k + 1)) / k, rel=0.03
    )
    assert engine.stats.decoded_tokens == 60 + engine.stats.pass_tokens
    assert (
        engine.stats.pass_tokens == engine.stats.target_passes + engine.stats.accepted_tokens
    )  # no stop token cuts a run here


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["n-gram", "draft"])
def test_acceptance_falls_as_the_temperature_rises(proposer: str) -> None:
    """The draft knows what is likeliest after each token, and is surer of it than the model. (Hot
    enough, any two models agree again.)
    """
    sure = copy.deepcopy(TARGET)
    sure.table.add_(9.0 * nn.functional.one_hot(TARGET.table.argmax(-1), SYMBOLS))
    speculation = PROPOSERS["n-gram"] if proposer == "n-gram" else Speculation(draft=sure)
    stats = [
        walk(speculation, SamplingParams(max_tokens=30, temperature=t), samples=150)[1].stats
        for t in (0.0, 0.4, 0.7, 1.0)
    ]
    acceptance, per_pass = [s.acceptance_rate for s in stats], [s.tokens_per_pass for s in stats]
    assert (
        acceptance == sorted(acceptance, reverse=True)
        and acceptance[0] > 0.8
        and acceptance[-1] < 0.6
    )
    assert per_pass == sorted(per_pass, reverse=True) and per_pass[-1] > 1


Drawn = dict[tuple[str, int], tuple[list[int], list[float], Kept, list[dict[int, float]]]]
MIX = (
    dict(temperature=0.3),
    dict(temperature=0.0),
    dict(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    dict(temperature=1.0, top_k=7, min_p=0.02, top_logprobs=3),
)
"""By turns: rows of one batch that ask for other things."""


def draw(
    model: PreTrainedModel, speculation: Speculation | None, **sizes: object
) -> tuple[Drawn, Engine, list[Sequence]]:
    engine = Engine(CausalLM(model), speculation=speculation, **{"kv_tokens": 4000, **sizes})  # type: ignore[arg-type]
    for i, prompt in enumerate(PROMPTS):
        engine.add(
            f"task-{i}",
            prompt,
            SamplingParams(max_tokens=20, stop_token_ids=(END,), seed=2, **MIX[i % len(MIX)]),
            [0, 1],
        )  # type: ignore[arg-type]
    done = engine.run()
    for s in done:
        assert len(s.kept) == (len(s.logp) if s.request.params.truncates else 0)
        assert len(s.top) == (len(s.logp) if s.request.params.top_logprobs else 0)
    return (
        {(s.request.key, s.sample): (s.tokens, s.logp, s.kept, s.top) for s in done},
        engine,
        done,
    )


def near(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """The same model with noise on its weights."""
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() > 1:
                p.add_(noise * torch.randn(p.shape, generator=generator))
    return made


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_ngram_speculation_changes_no_bit(
    name: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    plain, _, _ = draw(tiny(name), None)
    for i, sizes in enumerate(SIZES[:: -2 if name == "qwen3" else -5]):
        drawn, engine, _ = draw(tiny(name), Speculation(k=1 + i % 6, shortest=1 + i % 2), **sizes)
        assert drawn == plain, sizes
        assert engine.stats.accepted_tokens > 10


@pytest.mark.slow
def test_a_draft_that_is_the_model_itself_leaves_every_token_as_it_is(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Its guesses take the noise of plain sampling, and all of them stand."""
    plain, _, _ = draw(tiny("qwen3"), None)
    drawn, engine, done = draw(tiny("qwen3"), Speculation(k=3, draft=CausalLM(tiny("qwen3"))))
    for key, (tokens, logp, kept, _) in drawn.items():
        assert (tokens, kept.ids) == (plain[key][0], plain[key][2].ids) and logp == pytest.approx(
            plain[key][1], abs=1e-5
        )
    full = sum((len(s.logp) - 1) // 4 for s in done)
    assert engine.stats.accepted_tokens >= 3 * full > 100


@pytest.mark.nightly
@pytest.mark.slow
def test_with_a_draft_tokens_depend_on_the_two_models_and_nothing_else(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Not on k either, nor on where a step ended: preempted, without room for guesses, or with a
    neighbour that guessed better.
    """
    draft = CausalLM(near(tiny("qwen3"), 0.01))
    reference, engine, _ = draw(tiny("qwen3"), Speculation(draft=draft), prefix_cache="none")
    assert reference != draw(tiny("qwen3"), None)[0]
    assert 0.2 < engine.stats.acceptance_rate < 0.9
    for i, sizes in list(enumerate(SIZES))[::-3]:
        assert (
            draw(tiny("qwen3"), Speculation(k=1 + i % 7, draft=draft), **sizes)[0] == reference
        ), sizes


@pytest.mark.nightly
@pytest.mark.slow
def test_a_draft_keeps_the_distribution_of_a_model_with_a_memory(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Two samples of 20,000 tokens, pairs of neighbours by their place in the completion: with and
    without a draft.
    """
    params = SamplingParams(max_tokens=8, temperature=0.6, top_p=0.95, seed=8)
    pairs = []
    for speculation in (None, Speculation(k=3, draft=CausalLM(near(tiny("qwen3"), 0.01)))):
        engine = Engine(
            CausalLM(tiny("qwen3")),
            kv_tokens=1 << 15,
            max_running=1250,
            prefix_cache="none",
            speculation=speculation,
        )
        engine.add(
            "t" if speculation else "u", [5, 9, 2], params, list(range(2500))
        )  # independent noise
        tokens = np.array([s.tokens[3:] for s in engine.run()])
        assert tokens.size == 20_000
        pairs.append(
            [
                np.bincount(tokens[:, i] * VOCABULARY + tokens[:, i + 1], minlength=VOCABULARY**2)
                for i in (0, 2, 4, 6)
            ]
        )
    assert 0.2 < engine.stats.acceptance_rate < 0.9
    assert (
        min(agree(with_draft, without) for without, with_draft in zip(*pairs, strict=True)) > LEVEL
    )


@pytest.mark.slow
@pytest.mark.parametrize("guesser", ["n-gram", "draft"])
def test_log_probs_are_the_models_own(
    guesser: str, tiny: Callable[[str], PreTrainedModel], plain: Callable[[str], PreTrainedModel]
) -> None:
    speculation = (
        Speculation(shortest=1)
        if guesser == "n-gram"
        else Speculation(draft=CausalLM(near(tiny("llama"), 0.01)))
    )
    _, engine, done = draw(tiny("llama"), speculation)
    assert engine.stats.accepted_tokens > 20
    for s in done:
        with torch.no_grad():
            logits = plain("llama")(torch.tensor([s.tokens])).logits[0].float().numpy()
        for at in range(len(s.request.prompt), s.length):
            probs = slow_distribution(logits[at - 1], s.request.params, s.tokens[:at])
            assert s.logp[at - len(s.request.prompt)] == pytest.approx(
                np.log(probs[s.tokens[at]]), abs=2e-4 if s.request.params.truncates else 2e-5
            )


@pytest.mark.slow
def test_new_weights_of_either_model_are_used_at_once(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Nothing that the old ones computed outlives a new version, in the draft's cache neither; and
    every token carries its version.
    """
    model, draft = copy.deepcopy(tiny("qwen3")), near(tiny("qwen3"), 0.01)
    params = SamplingParams(max_tokens=20, seed=3)

    def run(engine: Engine) -> list[tuple[list[int], list[float]]]:
        engine.add("t", PROMPTS[9], params, [0, 1, 2])
        done = drain(engine)
        assert {v for s in done for v in s.version} == {engine.version}
        assert all(len(s.version) == len(s.logp) == s.length - len(s.request.prompt) for s in done)
        return [(s.tokens, s.logp) for s in sorted(done, key=lambda s: s.sample)]

    engine = Engine(CausalLM(model), kv_tokens=1000, speculation=Speculation(draft=CausalLM(draft)))
    old = run(engine)
    for i, changed in enumerate((model, draft)):
        with torch.no_grad():
            next(changed.parameters()).mul_(1.1)
        engine.set_version(i + 1)
        new = run(engine)
        assert (
            new
            == run(
                Engine(
                    CausalLM(model), kv_tokens=1000, speculation=Speculation(draft=CausalLM(draft))
                )
            )
            != old
        )
        old = new
    engine.release_memory()
    assert run(engine) == old


@pytest.mark.slow
def test_a_stop_token_and_the_limit_cut_a_run(tiny: Callable[[str], PreTrainedModel]) -> None:
    free = Engine(
        CausalLM(tiny("qwen3")),
        kv_tokens=400,
        speculation=Speculation(k=8, draft=CausalLM(tiny("qwen3"))),
    )
    free.add("t", [4, 5, 6], SamplingParams(max_tokens=19), [0])
    (whole,) = free.run()
    assert free.stats.target_passes == 2 and whole.length == 22  # 1 + 9 + 9
    for at in range(1, 10):
        stop = whole.tokens[3 + at]
        if stop in whole.tokens[3 : 3 + at]:
            continue
        engine = Engine(
            CausalLM(tiny("qwen3")),
            kv_tokens=400,
            speculation=Speculation(k=8, draft=CausalLM(tiny("qwen3"))),
        )
        engine.add("t", [4, 5, 6], SamplingParams(max_tokens=19, stop_token_ids=(stop,)), [0])
        (s,) = engine.run()
        assert (s.tokens, s.logp, s.finish_reason) == (
            whole.tokens[: 4 + at],
            whole.logp[: 1 + at],
            "stop",
        )
        assert engine.stats.accepted_tokens == min(at, 8) and engine.stats.target_passes == 1
        assert engine.scheduler.blocks.used == 0


def test_the_recipe_switches_it_on_and_it_is_off_by_default(policy: Policy) -> None:
    engines = [
        make_engine(Recipe(engine=EngineConfig(**asked)), policy, 64, None)
        for asked in ({}, {"speculation": NgramSpeculation(tokens=3)})
    ]
    assert engines[0].speculator is None
    assert engines[1].speculator is not None and isinstance(
        engines[1].speculator.proposer, NGramProposer
    )


def test_draft_of_another_vocabulary_and_invalid_sizes_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"the draft model has 7 tokens, but the model has 6\. .* the same tokenizer",
    ):
        Engine(TARGET, kv_tokens=64, speculation=Speculation(draft=Chain(0, symbols=7)))
    for sizes in (dict(k=0), dict(shortest=0), dict(shortest=3, longest=2)):
        with pytest.raises(ValueError, match="speculation needs"):
            Speculation(**sizes)  # type: ignore[arg-type]
