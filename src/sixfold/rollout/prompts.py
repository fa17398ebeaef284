"""Tasks to token prompts: the one place where text becomes tokens before sampling, and completions become text after it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..types import Task
from .prompt_cache import PromptCache
from .special_texts import SpecialTexts


class PromptCodec:
    """Renders prompts and decodes completions with one tokenizer.

    A tokenizer with a chat template gets every prompt as messages (plain text as one user message); one without gets the text as it is. Special
    tokens come from the template and the tokenizer alone, never from what a prompt spells. escaped: prompts that spelled one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.escaped = 0
        self._special = SpecialTexts(tokenizer)
        self._cache = PromptCache()
        self._pieces: dict[int, str] = {}

    def encode(self, task: Task) -> list[int]:
        """Token ids of the task's prompt, ready to be continued. Raises UserError for characters that the tokenizer does not have."""
        return self._cache.get(task, self._encode)

    def solution(self, task: Task) -> list[int]:
        """Token ids of the task's worked solution (or bare answer), end-of-sequence token included."""
        text = task.trace if task.trace is not None else str(task.answer)
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    def plain(self, text: str) -> list[int]:
        """Token ids of a text that stands for a completion; what it spells stays text."""
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def render(self, task: Task) -> str:
        """The prompt as the text that is tokenized."""
        return self._template(self._turns(task)) if self.tokenizer.chat_template else self._bare(task)

    def _encode(self, task: Task) -> list[int]:
        ids = self._tokenize(task)
        if self._special.misses(ids):
            raise UserError(f"task {task.id}: the prompt has characters that the tokenizer lacks: {task.prompt_text[:60]!r}")
        return ids

    def _tokenize(self, task: Task) -> list[int]:
        if not self.tokenizer.chat_template:
            text = self._bare(task)
            self.escaped += self._special.spelled_in(text)
            return self._special.encode_bare(text)
        turns = self._turns(task)
        self.escaped += any(self._special.spelled_in(content) for _, content in turns)
        return self._special.encode_rendered(self._template([(role, self._special.mark(content)) for role, content in turns]))

    def _bare(self, task: Task) -> str:
        if not isinstance(task.prompt, str):
            raise UserError(f"task {task.id} is a chat, and the model's tokenizer has no chat template: use a text prompt or a chat model")
        return task.prompt

    def _turns(self, task: Task) -> list[tuple[str, str]]:
        return [("user", task.prompt)] if isinstance(task.prompt, str) else [(m["role"], m["content"]) for m in task.prompt]

    def _template(self, turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def decode(self, completion: Sequence[int]) -> str:
        """Completion text without special tokens: an end-of-turn that the model spells out as text stays text."""
        return str(self.tokenizer.decode(list(completion), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """One token as text, for display."""
        if token not in self._pieces:
            self._pieces[token] = str(self.tokenizer.decode([token]))
        return self._pieces[token]


def check_lengths(codec: PromptCodec, tasks: Sequence[Task], limit: int, overlong: str) -> tuple[list[Task], int]:
    """The tasks whose prompts have at most `limit` tokens, and how many were dropped.

    Raises UserError at the first longer prompt when overlong is "error", and when nothing is left.
    """
    kept = []
    for task in tasks:
        length = len(codec.encode(task))
        if length <= limit:
            kept.append(task)
        elif overlong == "error":
            raise UserError(
                f"task {task.id}: the prompt has {length} tokens and {limit} fit (context less rollout.max_new_tokens, or data.max_prompt_tokens); "
                "data.overlong = 'drop' leaves such tasks out"
            )
    if tasks and not kept:
        raise UserError(f"dataset has 0 usable tasks: {len(tasks)} read, {len(tasks)} dropped with prompts over {limit} tokens")
    return kept, len(tasks) - len(kept)
