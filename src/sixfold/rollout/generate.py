"""`sixfold generate`: sample completions of one prompt from a model folder, a checkpoint, a run or a hub id."""

from __future__ import annotations

from ..config import ModelConfig
from ..engine.engine import Engine
from ..engine.speculative import Speculation
from ..errors import UserError
from ..model.causal_lm import CausalLM
from ..model.loading import load_policy
from ..types import SamplingParams, Task
from .engine_rollout import EngineRollout
from .prompts import PromptCodec


def generate(model: str, prompt: str, params: SamplingParams, n: int, speculation: Speculation | None = None) -> list[str]:
    """`n` completions of the prompt, as text. Raises UserError for a model that cannot be loaded or a prompt that does not fit."""
    policy = load_policy(ModelConfig(path=model), seed=0, device="cpu")
    codec = PromptCodec(policy.tokenizer, policy.stop_token_ids)
    task = Task("prompt", prompt)
    length = len(codec.encode(task)) + params.max_tokens
    if length > policy.context:
        raise UserError(f"prompt and max-tokens need {length} tokens, the model's context has {policy.context}: lower --max-tokens")
    engine = Engine(CausalLM(policy.model), kv_tokens=(length + 32) * n, speculation=speculation)
    sampling = SamplingParams(params.max_tokens, params.temperature, stop_token_ids=policy.stop_token_ids)
    (group,) = EngineRollout(engine, codec, sampling, n, stops=policy.stop_strings).generate([task], params.seed)
    return [t.text for t in group.trajectories]


def generate_command(model: str, prompt: str, n: int, temperature: float, max_tokens: int, seed: int, speculation: str) -> int:
    """Print the completions, one after another. Gives the exit code."""
    from ..evaluation.command import model_folder
    from ..report.untrusted import visible

    params = SamplingParams(max_tokens, temperature, seed=seed)
    for i, text in enumerate(generate(model_folder(model), prompt, params, n, Speculation() if speculation == "ngram" else None)):
        print(f"--- {i + 1} of {n}" if n > 1 else "", end="\n" if n > 1 else "")
        print(visible(text))
    return 0
