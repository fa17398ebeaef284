"""Steps of small models that `sixfold plan --measure` times: engine, trainer, reference, sync.

Every case is a function that does some work, waits for the device, and returns how many equal units
of work it did. Four models differ in one size each, so that costs per layer, FLOP and logit can be
told apart (`sixfold_planning/measured_rates.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.backends.weight_files import open_sealed, streamed_file
from sixfold.batch import Batch, collate
from sixfold.checks.environment import Environment
from sixfold.engine.engine import Engine
from sixfold.event_loop import EventLoop
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import use_own_kernels
from sixfold.model.scratch import character_tokenizer
from sixfold.processes.program import Requests
from sixfold.recipe.schema import TrainerConfig
from sixfold.reference.frozen import FrozenReference
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.player import Limits, Player
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, SamplingParams, Task, Trajectory

from .architectures import Architecture

Case = Callable[[], int]

PROMPT = 64
"""Tokens of a prompt."""

STEPS = 6
"""Decode steps of one measurement. In the first one, weights are not in the processor's caches."""

LONGEST = 1024
"""Positions of the models."""

EPISODES = 256
"""Episodes of one measurement, in groups of `SAMPLES`."""

SAMPLES = 8
"""Samples of one prompt in the trainer's batches."""


@dataclass(frozen=True)
class ProbeModel:
    """Sizes of a Qwen3 model with random weights: heads of 32, twice as many as key heads."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int

    def on(self, device: str) -> ProbeModel:
        if device == "cpu":
            return self
        return replace(self, hidden=GPU_SCALE * self.hidden, heads=GPU_SCALE * self.heads)

    @property
    def architecture(self) -> Architecture:
        """Sizes for the arithmetic of time. Norms are not counted."""
        attention = self.hidden * 32 * (2 * self.heads + 2 * (self.heads // 2))
        layer = attention + 9 * self.hidden**2
        params = (self.layers * layer + self.hidden * self.vocabulary) / 1e9
        sizes = (self.layers, self.hidden, self.heads, self.heads // 2, 32, self.vocabulary)
        return Architecture(self.name, params, params, *sizes, tied=True)

    def build(self, device: str) -> PreTrainedModel:
        """The model in float32, prepared as `load_policy` does."""
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=32,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen3ForCausalLM(config)
        use_own_kernels(model)
        torch.nn.Module.to(model, device)
        return model.eval()


BASE = ProbeModel("base", 128, 2, 4, 64)
DEEP = ProbeModel("deep", 128, 4, 4, 64)
WIDE = ProbeModel("wide", 256, 2, 8, 64)
WORDS = ProbeModel("words", 128, 2, 4, 4096)
MODELS = (BASE, DEEP, WIDE, WORDS)

BUSY_TOKENS = 2048
"""Tokens of the micro-batches of a process that trains beside a measurement."""

GPU_SCALE = 8
"""On a GPU the models are wider by this factor: otherwise launches would hide all arithmetic."""


def waiting(device: str) -> Callable[[], None]:
    """Function that waits until the device has done all work."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def prompts(count: int, length: int) -> list[list[int]]:
    """Token ids of prompts that begin differently, for any vocabulary of 64 or more."""
    return [[(7 * row + place) % 60 for place in range(length)] for row in range(count)]


class EngineCases:
    """Cases on the engine of one model. Every case has an engine of its own.

    Args:
        autocast: dtype of matrix products. None: float32.
    """

    def __init__(self, model: PreTrainedModel, device: str, autocast: torch.dtype | None) -> None:
        self._model, self._wait, self._autocast = model, waiting(device), autocast

    def _engine(self, sequences: int, tokens: int) -> Engine:
        return Engine(
            CausalLM(self._model),
            kv_tokens=sequences * (tokens + 16),
            max_running=sequences,
            prefix_cache="none",
            autocast=self._autocast,
        )

    def decode(self, sequences: int, context: int, most: int, samples: int = 1) -> Case:
        """Decode steps of sequences with prompts of `context` tokens and at most `most` more.

        Every prompt has `samples` of the sequences.
        """
        engine = self._engine(sequences, context + most)
        for row, prompt in enumerate(prompts(sequences // samples, context)):
            engine.add(f"{row}", prompt, SamplingParams(most), [*range(samples)])
        while len(engine.scheduler.running) < sequences:
            engine.step()

        def steps() -> int:
            for _ in range(STEPS):
                engine.step()
            self._wait()
            if len(engine.scheduler.running) < sequences:
                raise RuntimeError("sequences have ended: a step does less than it is timed for")
            return STEPS

        return steps

    def prefill(self, tokens: int) -> Case:
        """Prompts of `PROMPT` tokens, `tokens` in one call."""
        texts = prompts(tokens // PROMPT, PROMPT)
        engine = self._engine(len(texts), PROMPT + 1)

        def fill() -> int:
            for row, prompt in enumerate(texts):
                engine.add(f"{row}", prompt, SamplingParams(1), [0])
            engine.run()
            self._wait()
            return 1

        return fill

    def file(self) -> Case:
        """Weights through a file in memory, as to a sampler in another process."""
        tensors = {name: t.detach() for name, t in self._model.state_dict().items()}
        size = sum(4 * tensor.numel() for tensor in tensors.values())

        def carry() -> int:
            with streamed_file(size, tensors, 1) as path:
                open_sealed(path, 1)
            return 1

        return carry

    def sync(self) -> Case:
        engine = self._engine(1, 16)
        tensors = {name: t.detach().clone() for name, t in self._model.state_dict().items()}

        def load() -> int:
            engine.load_weights(tensors, engine.version + 1)
            self._wait()
            return 1

        return load


class EpisodeCase:
    """Episodes of one token, played and scored as in a run: a worker process gives the rewards.

    Args:
        model: the model. It must have a vocabulary of at least 64 tokens.
        autocast: dtype of matrix products. None: float32.
    """

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None) -> None:
        renderer = Renderer(character_tokenizer("0123456789"), ())
        engine = Engine(
            CausalLM(model),
            kv_tokens=EPISODES * 2 * PROMPT,
            max_running=EPISODES,
            autocast=autocast,
        )
        self._generator = EngineGenerator(engine, renderer)
        player = Player(self._generator, renderer, Limits(2 * PROMPT))
        self._driver = Driver(player, SamplingParams(1, stop_token_ids=()), SAMPLES)
        self._environment, self._loop = Environment(["arithmetic"]), EventLoop()
        self._numbers = count()

    def __call__(self) -> int:
        """Play episodes of new tasks, so that no prompt is cached."""
        numbers = islice(self._numbers, EPISODES // SAMPLES)
        tasks = [Task(f"{n}", f"{n:0{PROMPT}}"[::-1], answer="0") for n in numbers]
        scorer = self._environment.scorer(EPISODES)
        self._loop.run(groups_in_order(self._driver.play(tasks, 0, scorer), tasks))
        return EPISODES

    def close(self) -> None:
        """End the engine's thread and the event loop."""
        self._generator.close()
        self._environment.close()
        self._loop.close()


class TrainerCases:
    """Cases on the trainer and the reference of one model.

    Args:
        autocast: dtype of matrix products. None: float32.
    """

    def __init__(self, model: PreTrainedModel, device: str, autocast: torch.dtype | None) -> None:
        self._wait, self._device = waiting(device), device
        config = TrainerConfig(learning_rate=1e-6, max_tokens_per_microbatch=1 << 20)
        scoring = Scoring(autocast=autocast)
        self._trainer = Trainer(PolicyRoot(model), config, scoring, 1000)
        budget = config.max_tokens_per_microbatch
        self._reference = FrozenReference(model, scoring, budget, True)

    def train(self, tokens: int) -> Case:
        """One update on one micro-batch of `tokens`."""
        method = make_algorithm(ZOO["grpo"], LONGEST)
        batch = method.prepare(self._batch(tokens))

        def learn() -> int:
            self._trainer.learn(batch, method.compute_loss)
            self._wait()
            return 1

        return learn

    def score(self, tokens: int) -> Case:
        """The reference's log-probs of one micro-batch of `tokens`."""
        batch = self._batch(tokens)

        def score() -> int:
            self._reference.score(batch)
            self._wait()
            return 1

        return score

    def update(self) -> Case:
        """One step of the optimizer, with gradients."""

        def step() -> int:
            for parameter in self._trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self._trainer.optimizer.step()
            self._trainer.optimizer.zero_grad(set_to_none=True)
            self._wait()
            return 1

        return step

    def _batch(self, tokens: int) -> Batch:
        groups, length = trained_groups(tokens)
        rows = [_group(number, text, length) for number, text in enumerate(prompts(groups, length))]
        return collate(rows).to(self._device)


def trained_groups(tokens: int) -> tuple[int, int]:
    """Groups of a micro-batch, and the length of each prompt and sample.

    A group has one prompt and `SAMPLES` samples, all of one length of at most `PROMPT`.
    """
    groups = max(1, round(tokens / (SAMPLES + 1) / PROMPT))
    return groups, round(tokens / (SAMPLES + 1) / groups)


def _group(number: int, prompt: list[int], length: int) -> Group:
    """Samples of one prompt with rewards that differ."""
    name = f"task-{number}"
    rows = [
        Trajectory.one_turn(
            name,
            sample,
            prompt,
            [(number + 5 * sample + place) % 60 for place in range(length)],
            [-4.16] * length,  # -log 64: what random weights give
            [0] * length,
            "length",
            reward=Reward(float(sample)),
        )
        for sample in range(SAMPLES)
    ]
    return Group(Task(name, ""), rows)


def matmul(device: str, dtype: torch.dtype, size: int) -> Case:
    a, wait = torch.randn(size, size, device=device).to(dtype), waiting(device)

    def multiply() -> int:
        torch.mm(a, a)
        wait()
        return 1

    return multiply


def copying(device: str, target: str, size: int) -> Case:
    """Copy of `size` float32 numbers from a device to another or to itself."""
    source, copy = torch.zeros(size, device=device), torch.zeros(size, device=target)
    wait = waiting(device)

    def run() -> int:
        copy.copy_(source)
        wait()
        return 1

    return run


def serve(requests: Requests) -> None:
    """Train without end beside a measurement (`processes/program.py`).

    The first request is answered once it trains.
    """
    next(requests)
    train = TrainerCases(WIDE.build("cpu"), "cpu", None).train(BUSY_TOKENS)
    train()
    requests.answer(b"")
    while True:
        train()
