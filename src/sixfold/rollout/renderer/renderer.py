"""Convert tasks to prompt tokens before sampling, and completions to text after it.

Rollouts do both conversions only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from ...errors import UserError
from ...model.chat_template import TemplateRefusal, render
from ...model.turn_end import turn_end
from ...types import Task
from .prompt_cache import PromptCache
from .special_texts import SpecialTexts
from .think import continued_block, opened_block

_TAG_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for a think tag."""


class Renderer:
    """Renders prompts and decodes completions with one tokenizer.

    If the tokenizer has a chat template, every prompt is rendered as messages; a plain text is one
    user message. Otherwise the text is tokenized unchanged. Only the template and the tokenizer
    write special tokens. A special token that a prompt spells stays text.

    Args:
        tokenizer: tokenizer of the policy, with the recipe's chat template.
        stop_token_ids: ids of the tokens that end a completion. They are not part of its text.

    Attributes:
        escaped: number of prompts that spelled a special token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.escaped = 0
        self._special = SpecialTexts(tokenizer)
        self._cache = PromptCache()
        self._pieces: dict[int, str] = {}
        self._ends = {*stop_token_ids, tokenizer.eos_token_id}
        self._control = {*self._ends, tokenizer.bos_token_id, tokenizer.pad_token_id}

    def encode(self, task: Task) -> list[int]:
        """Token ids of the task's prompt, ready for the completion.

        Raises:
            UserError: the prompt has no tokens, the tokenizer does not know some of its characters,
                or the chat template refuses it.
        """
        return self.encode_all([task])[0]

    def encode_all(self, tasks: Sequence[Task]) -> list[list[int]]:
        """`encode` for every task. One call with many tasks uses all CPU cores."""
        return self._cache.get(tasks, self._encode)

    def solution(self, task: Task) -> list[int]:
        """Token ids of the assistant's turn with the task's worked solution, or else its answer.

        The chat template renders the turn, up to and including the token that ends it. If the
        template would omit or rewrite a part of the solution, it is not used. Special tokens that
        the solution spells stay text. The turn has an end token unless the model has none.
        """
        text = task.trace if task.trace is not None else str(task.answer)
        if not self.tokenizer.chat_template:
            return self.plain(text) + self._end_tokens
        turns = [(role, self._special.mark(content)) for role, content in self._turns(task)]
        prompt, marked = self._template(task, turns), self._special.mark(text)
        turn = self._turn(prompt, turns, marked)
        ids = self._continuation(prompt, turn)
        at = turn.rfind(marked.strip())
        said = turn[: at + len(marked.strip())]
        # The template's text before the solution may contain end tokens too: skip those.
        before = [] if at == 0 else self._special.encode_rendered([said])[0]
        ends = [i for i, token in enumerate(ids) if token in self._ends][
            sum(token in self._ends for token in before) :
        ]
        if ends:
            return ids[: ends[0] + 1]
        if self._end_tokens:
            return ids + self._end_tokens
        return self._continuation(prompt, said) + self.plain(
            "".join(turn_end(self.tokenizer).strings)
        )

    def plain(self, text: str) -> list[int]:
        """Token ids of a completion given as text. Special tokens that it spells stay text."""
        return list(
            self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        )

    def render(self, task: Task) -> str:
        """The prompt as text, rendered by the chat template if there is one."""
        return (
            self._template(task, self._turns(task))
            if self.tokenizer.chat_template
            else self._bare(task)
        )

    def shown(self, ids: Sequence[int]) -> str:
        """Token ids as text, including special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def opened(self, prompt: Sequence[int]) -> str:
        """The think tag that the prompt ends with, or "" if it leaves no think block open."""
        return opened_block(self.shown(prompt[-_TAG_TOKENS:]))

    def decode(self, completion: Sequence[int]) -> str:
        """Text of a completion, up to its first end token.

        Control tokens (end, padding, beginning) are left out. Special tokens that mark a thought or
        a tool call stay in the text, because rewards read them.
        """
        end = next(
            (i for i, token in enumerate(completion) if token in self._ends), len(completion)
        )
        return self.shown([token for token in completion[:end] if token not in self._control])

    def _encode(self, tasks: Sequence[Task]) -> list[list[int]]:
        texts = [self._marked(task) for task in tasks]
        encoded = (
            self._special.encode_rendered(texts)
            if self.tokenizer.chat_template
            else self._special.encode_bare(texts)
        )
        for task, ids in zip(tasks, encoded, strict=True):
            if not ids:
                raise UserError(
                    f"task {task.id}: the prompt {task.prompt_text[:60]!r} has no tokens; a prompt"
                    " needs at least one for the model to continue"
                )
            if self._special.misses(ids):
                raise UserError(
                    f"task {task.id}: the prompt has characters that the tokenizer lacks:"
                    f" {task.prompt_text[:60]!r}"
                )
        return encoded

    def _marked(self, task: Task) -> str:
        """The prompt as text.

        In a rendered prompt, marks replace special tokens that the task spells.
        """
        if not self.tokenizer.chat_template:
            text = self._bare(task)
            self.escaped += self._special.spelled_in(text)
            return text
        turns = self._turns(task)
        self.escaped += any(self._special.spelled_in(content) for _, content in turns)
        return self._template(
            task, [(role, self._special.mark(content)) for role, content in turns]
        )

    def _bare(self, task: Task) -> str:
        if not isinstance(task.prompt, str):
            raise UserError(
                f"task {task.id} is a chat, and the model has no chat template: use text prompts, a"
                " chat model, or give a template (model.chat_template = FILE)"
            )
        return task.prompt

    def _turns(self, task: Task) -> list[tuple[str, str]]:
        return (
            [("user", task.prompt)]
            if isinstance(task.prompt, str)
            else [(m["role"], m["content"]) for m in task.prompt]
        )

    def _template(self, task: Task, turns: list[tuple[str, str]]) -> str:
        """The prompt rendered by the chat template. Raises UserError if the template refuses it."""
        try:
            return render(self.tokenizer, _messages(turns))
        except TemplateRefusal as refusal:
            raise self._refused(task, turns, refusal) from refusal

    def _refused(
        self, task: Task, turns: list[tuple[str, str]], refusal: TemplateRefusal
    ) -> UserError:
        """The error for a prompt that the chat template refuses."""
        if turns[0][0] == "system":
            try:
                render(self.tokenizer, _messages(turns[1:]))
            except TemplateRefusal:
                pass
            else:
                return UserError(
                    f"task {task.id}: the model's chat template refuses system messages"
                    f" ({refusal}): leave data.system_prompt empty and put the instructions into"
                    " the prompt (data.prompt_suffix), or give a template that takes them"
                    " (model.chat_template = FILE)"
                )
        return UserError(
            f"task {task.id}: the model's chat template refuses the prompt ({refusal}): change the"
            " messages, or give another template (model.chat_template = FILE, or 'none' for plain"
            " text prompts)"
        )

    def _turn(self, prompt: str, turns: list[tuple[str, str]], solution: str) -> str:
        """Text of the assistant's turn with this solution, to follow the rendered prompt."""
        try:
            whole = render(
                self.tokenizer, _messages([*turns, ("assistant", solution)]), generation=False
            )
        except TemplateRefusal:
            whole = ""
        turn = whole.removeprefix(prompt)
        return (
            turn
            if whole.startswith(prompt) and solution.strip() in turn
            else continued_block(opened_block(prompt), solution)
        )

    def _continuation(self, prompt: str, turn: str) -> list[int]:
        """Token ids of a turn after its prompt.

        Prompt and turn are tokenized together, because some tokenizers add a space before the first
        word of a text.
        """
        before, whole = self._special.encode_rendered([prompt, prompt + turn])
        return (
            whole[len(before) :]
            if whole[: len(before)] == before
            else self._special.encode_rendered([turn])[0]
        )

    @cached_property
    def _end_tokens(self) -> list[int]:
        """Token that ends a turn, used if the template writes none after the last turn."""
        eos = self.tokenizer.eos_token_id
        return list(turn_end(self.tokenizer).tokens) or ([] if eos is None else [eos])

    def piece(self, token: int) -> str:
        """One token as text, for display."""
        if token not in self._pieces:
            self._pieces[token] = str(self.tokenizer.decode([token]))
        return self._pieces[token]


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]
