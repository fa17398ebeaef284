"""The renderer: messages to prompt tokens before sampling, sampled tokens to text after it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ...errors import UserError
from ...model.chat_template import TemplateRefusal, render
from ...model.turn_end import TurnEnd, turn_end
from ...types import Task
from .call_formats import FORMATS, find_format
from .prompt_cache import CACHED_TOKENS, PromptCache
from .shortest_encoding import ShortestEncoding, longest_token
from .special_texts import SpecialTexts
from .suffix import Reply, Suffix, SuffixEncoder
from .text_stream import REPLACEMENT, CompletionText
from .think import continued_block, opened_block
from .token_bytes import TokenBytes
from .tool_calls import CallFormat

_TAG_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for a think tag."""


class RenderError(ValueError):
    """A conversation or a text cannot be converted to tokens.

    Attributes:
        part: the part that cannot be converted.
    """

    def __init__(self, message: str, part: Literal["messages", "tools", "prompt"]) -> None:
        super().__init__(message)
        self.part = part


class Renderer:
    """Converts messages to tokens and tokens to text, with the tokenizer of the policy.

    Training, evaluation, `sixfold generate` and the server all use it, and no other code tokenizes
    or decodes text. The rules are:

    - **Prompts.** If the tokenizer has a chat template, every prompt is rendered as messages, and a
      plain text is one user message. Otherwise the text is tokenized unchanged.
    - **Special tokens.** Only the template and the tokenizer write them. The name of a special
      token in a message, a tool's result, a prompt or a solution stays text.
    - **Completions.** Sampled tokens are decoded and never tokenized again. The text ends before
      the first end token, and before the first stop string if there are any. Tags of thoughts and
      tool calls stay in the text. `call_format` separates the calls.
    - **Think blocks.** `opened` tells whether a prompt leaves one open. The completion then begins
      inside it.

    A renderer is not thread-safe, because fast tokenizers are not. `copy` makes one for another
    thread.

    Args:
        tokenizer: tokenizer of the policy, with the recipe's chat template.
        stop_token_ids: ids of the tokens that end a completion. They are not part of its text.

    Attributes:
        escaped: number of task prompts that contained the name of a special token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self.escaped = 0
        self._special = SpecialTexts(tokenizer)
        self._cache = PromptCache(CACHED_TOKENS)
        self._pieces: dict[int, str] = {}
        self._ends = {*stop_token_ids, tokenizer.eos_token_id}
        self._control = {*self._ends, tokenizer.bos_token_id, tokenizer.pad_token_id}

    def copy(self) -> Renderer:
        """A renderer with its own copy of the tokenizer, for another thread."""
        return Renderer(copy.deepcopy(self.tokenizer), self.stop_token_ids)

    @property
    def has_template(self) -> bool:
        """True if prompts are rendered by a chat template."""
        return bool(self.tokenizer.chat_template)

    # Messages to tokens.

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

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's next turn.

        Args:
            messages: turns, as the chat template expects them.
            tools: descriptions of functions that the model may call.

        Raises:
            RenderError: the template refuses the messages or shows no tools, or the tokenizer does
                not know some characters.
        """
        messages, tools = self._special.mark_all(messages), self._special.mark_all(tools)
        try:
            text = render(self.tokenizer, messages, tools=tools)
            shows_tools = not tools or text != render(self.tokenizer, messages)
        except TemplateRefusal as refusal:
            raise RenderError(
                f"the model's chat template refuses these messages: {refusal}", "messages"
            ) from refusal
        if not shows_tools:
            raise RenderError("the model's chat template does not support tools", "tools")
        return self._known(self._special.encode_rendered([text])[0], "messages")

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a prompt without a template, with the tokens that the tokenizer adds.

        Raises:
            RenderError: the tokenizer does not know some characters.
        """
        return self._known(self._special.encode_bare([text])[0], "prompt")

    def suffix(
        self,
        conversation: Sequence[Mapping[str, Any]],
        reply: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Suffix:
        """Token ids that continue a sampled reply: new messages, and the start of the next turn.

        If the reply has no end token, because a stop string or the token limit ended it, the suffix
        begins with the end of the turn.

        Args:
            conversation: messages before the reply, or `Suffix.conversation` of the last suffix.
            reply: all token ids after the start of the assistant's turn.
            messages: new messages, of any role but "assistant". A message of role "tool" may have a
                `name` and a `tool_call_id`, which some templates need.
            tools: descriptions of functions, as in the first prompt.

        Raises:
            UserError: there is no chat template, or it cannot continue this conversation.
            RenderError: a message has the role "assistant", or characters that the tokenizer does
                not know.
        """
        if not self.has_template:
            raise UserError(
                "model.chat_template: the environment answers with messages, but the model has no"
                " chat template. Set model.chat_template = FILE, or use an environment that answers"
                " with text"
            )
        if any(message["role"] == "assistant" for message in messages):
            raise RenderError("an environment cannot speak for the assistant", "messages")
        text = self.decode(reply)
        end_text = next((end for end in self._turn_end.strings if text.endswith(end)), "")
        suffix = self._suffixes.after(
            conversation,
            Reply(text.removesuffix(end_text), reply[-1] if reply else None, end_text),
            messages,
            tools,
        )
        self._known(suffix.tokens, "messages")
        return suffix

    def suffix_text(self, reply: Sequence[int], text: str) -> Suffix:
        """Token ids of text that continues the assistant's own turn, without a template.

        Args:
            reply: all token ids after the start of the assistant's turn.
            text: the text. Special tokens that it spells stay text.

        Raises:
            RenderError: the reply has ended with an end token, or the text has characters that the
                tokenizer does not know.
        """
        if reply and reply[-1] in self._ends:
            raise RenderError(
                "text cannot continue a reply that has ended with an end token. If"
                " Action.stopped_by is empty, end the episode or answer with messages",
                "prompt",
            )
        suffix = self._suffixes.text(reply, text)
        self._known(suffix.tokens, "prompt")
        return suffix

    def solution(self, task: Task) -> list[int]:
        """Token ids of the assistant's turn with the task's worked solution, or else its answer.

        The chat template renders the turn, up to and including the token that ends it. If the
        template would omit or rewrite a part of the solution, it is not used. The turn has an end
        token unless the model has none.

        Raises:
            UserError: the solution has several replies.
        """
        if isinstance(task.trace, tuple):
            raise UserError(
                f"task {task.id} has a solution of several replies, which needs an environment of"
                " several turns. Set environment.episode"
            )
        text = task.trace if task.trace is not None else str(task.answer)
        if not self.has_template:
            return self.plain(text) + self._end_tokens
        messages, solution = self._special.mark_all(_messages(task)), self._special.mark(text)
        prompt = self._template(task, messages)
        turn = self._turn(prompt, messages, solution)
        ids = self._continuation(prompt, turn)
        at = turn.rfind(solution.strip())
        said = turn[: at + len(solution.strip())]
        # The template's text before the solution may contain end tokens too: skip those.
        before = [] if at == 0 else self._special.encode_rendered([said])[0]
        ends = [i for i, token in enumerate(ids) if token in self._ends][
            sum(token in self._ends for token in before) :
        ]
        if ends:
            return ids[: ends[0] + 1]
        if self._end_tokens:
            return ids + self._end_tokens
        return self._continuation(prompt, said) + self.plain("".join(self._turn_end.strings))

    @property
    def turn_end_tokens(self) -> list[int]:
        """Token ids that end the assistant's turn. Empty if the model has no end of turn."""
        return self._end_tokens or self.plain("".join(self._turn_end.strings))

    def plain(self, text: str) -> list[int]:
        """Token ids of a completion given as text. Special tokens that it spells stay text."""
        return self._special.encode_plain(text)

    def render(self, task: Task) -> str:
        """The prompt as text, rendered by the chat template if there is one."""
        return self._template(task, _messages(task)) if self.has_template else _bare(task)

    def least_tokens(self, given: Task | str) -> int:
        """Lower bound on the number of tokens of a prompt or a text, without tokenizing it."""
        return self._shortest.tokens(given if isinstance(given, str) else self.render(given))

    # Tokens to text.

    def decode(self, completion: Sequence[int]) -> str:
        """Text of a completion, up to its first end token.

        Control tokens (end, padding, beginning) are left out. Special tokens that mark a thought or
        a tool call stay in the text, because rewards read them.
        """
        end = next(
            (i for i, token in enumerate(completion) if token in self._ends), len(completion)
        )
        return self.shown([token for token in completion[:end] if token not in self._control])

    def stream(self, stops: Sequence[str] = ()) -> CompletionText:
        """Reader of a completion that arrives in parts. The result equals `decode` of the whole.

        Args:
            stops: stop strings. The text ends before the one that is complete first.
        """
        return CompletionText(self.decode, stops)

    def opened(self, prompt: Sequence[int]) -> str:
        """The think tag that the prompt ends with, or "" if it leaves no think block open."""
        return opened_block(self.shown(prompt[-_TAG_TOKENS:]))

    def shown(self, ids: Sequence[int]) -> str:
        """Token ids as text, including special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """One token as text, for display. A part of a character becomes a replacement character."""
        if token not in self._pieces:
            self._pieces[token] = self.shown([token])
        return self._pieces[token]

    def piece_bytes(self, token: int) -> bytes:
        """Bytes of `piece`. A part of a character keeps its own bytes."""
        text = self.piece(token)
        return self.token_bytes(token) if REPLACEMENT in text else text.encode()

    @cached_property
    def known_call_format(self) -> CallFormat | None:
        """The format in which the chat template writes tool calls. None if it is not known."""
        return find_format(self.tokenizer) if self.has_template else None

    @property
    def call_format(self) -> CallFormat:
        """The format in which the chat template writes tool calls.

        Raises:
            UserError: there is no chat template, or its format is not known.
        """
        if self.known_call_format is None:
            name = self.tokenizer.name_or_path or "this model"
            problem = (
                "writes tool calls in an unknown format"
                if self.has_template
                else "is missing, so tool calls have no format"
            )
            raise UserError(
                f"model.chat_template: the environment has tools, but the chat template of {name}"
                f" {problem}. Use a template with the calls of"
                f" {', '.join(one.name for one in FORMATS)} (model.chat_template = FILE). A model"
                " from [model.scratch] has tools if model.scratch.words is not empty"
            )
        return self.known_call_format

    # The vocabulary.

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Function from a token id to the token's bytes inside a text."""
        return TokenBytes(self.tokenizer)

    @property
    def special_token_ids(self) -> set[int]:
        """Ids of the tokenizer's special tokens."""
        return {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return longest_token(self.tokenizer)

    def _encode(self, tasks: Sequence[Task]) -> list[list[int]]:
        texts = [self._marked(task) for task in tasks]
        encoded = (
            self._special.encode_rendered(texts)
            if self.has_template
            else self._special.encode_bare(texts)
        )
        for task, ids in zip(tasks, encoded, strict=True):
            if not ids:
                raise UserError(
                    f"task {task.id}: the prompt {task.prompt_text[:60]!r} has no tokens. Give at"
                    " least one token for the model to continue"
                )
            if self._special.misses(ids):
                raise UserError(
                    f"task {task.id}: the prompt has characters that the tokenizer does not know:"
                    f" {task.prompt_text[:60]!r}. Use another tokenizer, or remove them"
                )
        return encoded

    def _marked(self, task: Task) -> str:
        """The prompt as text.

        In a rendered prompt, marks replace the names of special tokens in the task.
        """
        if not self.has_template:
            text = _bare(task)
            self.escaped += self._special.spelled_in(text)
            return text
        messages = _messages(task)
        self.escaped += any(self._special.spelled_in(m["content"]) for m in messages)
        return self._template(task, self._special.mark_all(messages))

    def _known(self, ids: list[int], part: Literal["messages", "prompt"]) -> list[int]:
        if self._special.misses(ids):
            raise RenderError(
                f"{part} has characters that the model's tokenizer does not know", part
            )
        return ids

    def _template(self, task: Task, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt rendered by the chat template. Raises UserError if the template refuses it."""
        try:
            return render(self.tokenizer, messages)
        except TemplateRefusal as refusal:
            raise self._refused(task, messages, refusal) from refusal

    def _refused(
        self, task: Task, messages: Sequence[Mapping[str, str]], refusal: TemplateRefusal
    ) -> UserError:
        """The error for a prompt that the chat template refuses."""
        if messages[0]["role"] == "system":
            try:
                render(self.tokenizer, messages[1:])
            except TemplateRefusal:
                pass
            else:
                return UserError(
                    f"task {task.id}: the model's chat template refuses system messages"
                    f" ({refusal}). Leave data.system_prompt empty and put the instructions into"
                    " the prompt (data.prompt_suffix), or use a template that accepts them"
                    " (model.chat_template = FILE)"
                )
        return UserError(
            f"task {task.id}: the model's chat template refuses the prompt ({refusal}). Change"
            " the messages, or use another template (model.chat_template = FILE, or 'none' for"
            " plain text prompts)"
        )

    def _turn(self, prompt: str, messages: Sequence[Mapping[str, str]], solution: str) -> str:
        """Text of the assistant's turn with this solution, to follow the rendered prompt."""
        turns = [*messages, {"role": "assistant", "content": solution}]
        try:
            whole = render(self.tokenizer, turns, generation=False)
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
        """Ids of the end token, used if the template writes none after the last turn."""
        eos = self.tokenizer.eos_token_id
        return list(self._turn_end.tokens) or ([] if eos is None else [eos])

    @cached_property
    def _turn_end(self) -> TurnEnd:
        return turn_end(self.tokenizer)

    @cached_property
    def _suffixes(self) -> SuffixEncoder:
        ends = {*self._ends, *self._turn_end.tokens} - {None}
        return SuffixEncoder(self.tokenizer, self._special, ends)

    @cached_property
    def _shortest(self) -> ShortestEncoding:
        return ShortestEncoding(self.tokenizer)


def _messages(task: Task) -> list[dict[str, str]]:
    """The task's prompt as messages."""
    if isinstance(task.prompt, str):
        return [{"role": "user", "content": task.prompt}]
    return [{"role": m["role"], "content": m["content"]} for m in task.prompt]


def _bare(task: Task) -> str:
    """The task's prompt as text, for a tokenizer without a chat template."""
    if not isinstance(task.prompt, str):
        raise UserError(
            f"task {task.id} is a chat, but the model has no chat template. Use text prompts, a"
            " chat model, or a template (model.chat_template = FILE)"
        )
    return task.prompt
