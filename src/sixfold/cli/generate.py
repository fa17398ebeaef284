"""`sixfold generate MODEL_OR_RUN --prompt TEXT`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from .parsing import VerbParser, add_device, at_least, temperature


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("generate", "Sample completions of one prompt.")
    arguments.add_argument(
        "model", metavar="MODEL_OR_RUN", help="a run, a checkpoint, or a Hugging Face model"
    )
    arguments.add_argument(
        "--prompt",
        metavar="TEXT",
        required=True,
        help="text to complete; for a chat model, the user message",
    )
    arguments.add_argument(
        "--n", metavar="N", type=at_least(1), default=1, help="number of completions (default 1)"
    )
    arguments.add_argument(
        "--temperature",
        metavar="T",
        type=temperature,
        default=1.0,
        help="sampling temperature; 0 is greedy (default 1)",
    )
    arguments.add_argument(
        "--max-tokens",
        metavar="N",
        type=at_least(1),
        help="maximum completion length in tokens (default 256, or less if the context is shorter)",
    )
    arguments.add_argument(
        "--seed",
        metavar="N",
        type=at_least(0),
        default=0,
        help="seed of the sampling noise (default 0)",
    )
    arguments.add_argument(
        "--speculation",
        choices=("none", "ngram"),
        default="none",
        help="speculative decoding; ngram guesses tokens from repeated text (default none)",
    )
    add_device(arguments)
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and sample."""
    given, _ = parser().parse(argv)
    if not given.prompt.strip():
        raise UserError("sixfold generate: --prompt is empty; give the text to complete")
    from ..commands.generate import generate_command

    return generate_command(
        given.model,
        given.prompt,
        n=given.n,
        temperature=given.temperature,
        max_tokens=given.max_tokens,
        seed=given.seed,
        speculation=given.speculation,
        device=given.device,
        precision=given.precision,
    )
