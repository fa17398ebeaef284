"""The renderer: messages to prompt tokens before sampling, sampled tokens to text after it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..model.chat_template import TemplateRefusal, render
from ..model.turn_end import TurnEnd, turn_end
from ..types import Task
from .call_formats import FORMATS, find_format
from .prompt_cache import CACHED_TOKENS, PromptCache
from .replies import ReplyWriter, WrittenReply
from .shortest_encoding import ShortestEncoding, longest_token
from .special_texts import SpecialTexts
from .suffix import Reply, Suffix, SuffixEncoder
from .task_prompt import bare_text, refusal_error, rendered_prompt, solution_text, task_messages
from .text_stream import REPLACEMENT, CompletionText
from .think import TAGS, continued_block, opened_block
from .token_bytes import TokenBytes
from .tool_calls import CallFormat

_TAG_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for a think tag."""


_REFUSES = "the model's chat template refuses"


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
        stop_token_ids: ids of the tokens that end a completion: those at which sampling stops, and
            no others. They are not part of its text. None: the tokenizer's end token.

    Attributes:
        escaped: number of task prompts that contained the name of a special token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        own = () if eos is None else (eos,)
        self.stop_token_ids = own if stop_token_ids is None else tuple(stop_token_ids)
        self.escaped = 0
        self._special = SpecialTexts(tokenizer)
        self._cache = PromptCache(CACHED_TOKENS)
        self._pieces: dict[int, str] = {}
        self._ends = set(self.stop_token_ids)
        # An end token at which sampling does not stop is text: the reward must see what is trained.
        self._silent = {tokenizer.bos_token_id, tokenizer.pad_token_id} - {eos}

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
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's next turn.

        Args:
            messages: turns, as the chat template expects them.
            tools: descriptions of functions that the model may call.
            arguments: variables of the template.

        Raises:
            RenderError: the template refuses the messages or shows no tools, or the tokenizer does
                not know some characters.
        """
        said = "".join(str(message.get("content") or "") for message in messages)
        messages, tools = self._special.mark_all(messages), self._special.mark_all(tools)
        arguments = self._special.mark_all(arguments or {})
        try:
            text = render(self.tokenizer, messages, tools=tools, arguments=arguments)
        except TemplateRefusal as refusal:
            raise RenderError(f"{_REFUSES} these messages: {refusal}", "messages") from refusal
        if tools and text == self._without_tools(messages, arguments):
            raise RenderError("the model's chat template does not support tools", "tools")
        return self._check_known(self._special.encode_rendered([text])[0], "messages", said)

    def encode_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        following: Sequence[Mapping[str, Any]] = (),
    ) -> WrittenReply:
        """Token ids of a given reply, as the policy would sample it after `encode_messages`.

        They end with the token that ends the reply in sampling.

        Args:
            messages: turns before the reply.
            reply: message of the assistant.
            tools: descriptions of functions, as for `encode_messages`.
            arguments: variables of the template.
            following: messages after the reply, up to the next one. Some templates begin the next
                turn with the token that ends the reply (GLM).

        Raises:
            RenderError: the template refuses the messages or cannot show the reply's calls after
                this prompt, or the tokenizer does not know some characters.
        """
        try:
            turn = self._replies.turn(messages, reply, tools, arguments or {}, following)
        except TemplateRefusal as refusal:
            raise RenderError(f"{_REFUSES} this reply: {refusal}", "messages") from refusal
        by_text = not turn.ended and self._end_tokens and not self._turn_end.tokens
        ids = self._continuation(turn.prompt, turn.text if by_text else turn.text[: turn.stop])
        ids += [] if turn.ended else self.turn_end_tokens
        self._check_known(ids, "messages", str(reply.get("content") or ""))
        return WrittenReply(ids, turn.as_template, turn.hidden)

    def encode_episode(
        self,
        task: Task,
        said: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Token ids of an episode's first text or messages, which may differ from the task's.

        Raises:
            UserError, RenderError: as `encode` and `encode_messages`.
        """
        told: Any = said if isinstance(said, str) else tuple(dict(message) for message in said)
        first = task_messages(replace(task, prompt=told))
        if first == task_messages(task) and (*tools,) == task.tools and self.has_template:
            return self.encode(task)
        if tools or any(set(message) - {"role", "content"} for message in first):
            return self.encode_messages(first, tools, task.template_args)
        return self.encode(replace(task, prompt=told, tools=()))

    def encode_text(self, text: str, mark: bool = False) -> list[int]:
        """Token ids of a prompt without a template, with the tokens that the tokenizer adds.

        Args:
            text: the prompt.
            mark: it is a mark of a model's own format: its special tokens are special, and no
                token is added.

        Raises:
            RenderError: the tokenizer does not know some characters.
        """
        encode = self._special.encode_rendered if mark else self._special.encode_bare
        return self._check_known(encode([text])[0], "prompt", text)

    def suffix(
        self,
        conversation: Sequence[Mapping[str, Any]],
        reply: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
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
            arguments: variables of the template, as in the first prompt.

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
            arguments or {},
        )
        self._check_known(suffix.tokens, "messages", "".join(m["content"] for m in messages))
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
        self._check_known(suffix.tokens, "prompt", text)
        return suffix

    def solution(self, task: Task) -> list[int]:
        """Token ids of the assistant's turn with the task's worked solution, or else its answer.

        The chat template renders the turn, up to and including the token that ends it. If the
        template would omit or rewrite a part of the solution, it is not used. The turn ends with a
        token at which sampling stops, unless there is none.

        Raises:
            UserError: the solution has several replies, or the answer is no text.
        """
        text = solution_text(task)
        if not self.has_template or task.form == "rendered":
            return self.plain(text) + self._end_tokens
        messages, solution = self._messages(task), self._special.mark(text)
        prompt = self._template(task, messages)
        turn = self._turn(task, prompt, messages, solution)
        ids = self._continuation(prompt, turn)
        # Not within the text of the end token: a solution may be a part of that.
        closed = next((e for e in self._end_texts if turn.rstrip().endswith(e)), "")
        at = turn.rfind(solution.strip(), 0, len(turn.rstrip()) - len(closed))
        said = turn[: at + len(solution.strip())]
        # The template's text before the solution may contain end tokens too: skip those.
        before = [] if at == 0 else self._special.encode_rendered([said])[0]
        ends = [i for i, token in enumerate(ids) if token in self._ends][
            sum(token in self._ends for token in before) :
        ]
        if ends:
            return ids[: ends[0] + 1]
        if self._end_tokens and not self._turn_end.tokens:
            return ids + self._end_tokens
        return self._continuation(prompt, said) + self.turn_end_tokens

    @cached_property
    def _end_texts(self) -> list[str]:
        """Texts of the tokens at which sampling stops, the longest first."""
        return sorted(map(self.piece, self._ends), key=len, reverse=True)

    @property
    def turn_end_tokens(self) -> list[int]:
        """Token ids that end the assistant's turn. Empty if the model has no end of turn."""
        return self._end_tokens or self.plain("".join(self._turn_end.strings))

    def plain(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a completion given as text.

        Special tokens that it spells stay text, unless `special` is true.
        """
        return self._special.encode_plain(text, special)

    def unknown(self, text: str) -> str:
        """Characters of a text that the tokenizer does not know."""
        return self._special.unknown(text)

    def has_special(self, reply: str) -> bool:
        """True if a reply spells a special token other than a think tag.

        Its text does not encode to the tokens that were sampled.
        """
        for tag in TAGS:
            reply = reply.replace(tag, "")
        return self._special.spelled_in(reply)

    def render(self, task: Task) -> str:
        """The prompt as text, rendered by the chat template if there is one."""
        if task.form == "rendered" or not self.has_template:
            return bare_text(task)
        return self._template(task, task_messages(task))

    def shows_tools(self, task: Task) -> bool:
        """True if the prompt of the task differs from the same prompt without its tools."""
        return self.render(task) != self.render(replace(task, tools=()))

    def least_tokens(self, given: Task | str) -> int:
        """Lower bound on the number of tokens of a prompt or a text, without tokenizing it."""
        return self._shortest.tokens(given if isinstance(given, str) else self.render(given))

    # Tokens to text.

    def decode(self, completion: Sequence[int], ends: Collection[int] | None = None) -> str:
        """Text of a completion, up to its first end token.

        Padding and the token that begins a text are left out. Special tokens that mark a thought or
        a tool call stay in the text, because rewards read them. So does an end token of the model
        at which sampling does not stop.

        Args:
            completion: sampled token ids.
            ends: end tokens of a request that has a list of its own. None: the renderer's.
        """
        ends = self._ends if ends is None else ends
        end = next((i for i, token in enumerate(completion) if token in ends), len(completion))
        return self.shown([token for token in completion[:end] if token not in self._silent])

    def stream(
        self, stops: Sequence[str] = (), ends: Collection[int] | None = None
    ) -> CompletionText:
        """Reader of a completion that arrives in parts. The result equals `decode` of the whole.

        Args:
            stops: stop strings. The text ends before the one that is complete first.
            ends: as for `decode`.
        """
        return CompletionText(partial(self.decode, ends=ends), stops)

    def opened(self, prompt: Sequence[int]) -> str:
        """The think tag that the prompt ends with, or "" if it leaves no think block open."""
        return opened_block(self.shown(prompt[-_TAG_TOKENS:]))

    def shown(self, ids: Sequence[int], special: bool = True) -> str:
        """Token ids as text, including special tokens unless `special` is false."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

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
        return {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return longest_token(self.tokenizer)

    def _without_tools(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """The messages rendered without tools. Empty if the chat template refuses that."""
        try:
            return render(self.tokenizer, messages, arguments=arguments)
        except TemplateRefusal:
            return ""

    def _encode(self, tasks: Sequence[Task]) -> list[list[int]]:
        encode = self._special.encode_rendered if self.has_template else self._special.encode_bare
        encoded = encode([self._text_with_marks(task) for task in tasks])
        for at, task in enumerate(tasks):
            if task.form == "rendered":
                encoded[at] = self._special.encode_shown(bare_text(task))
            ids = encoded[at]
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

    def _text_with_marks(self, task: Task) -> str:
        """The prompt as text, with marks for the names of special tokens in the task.

        Empty for a prompt that is rendered already.
        """
        if task.form == "rendered":
            return ""
        if not self.has_template:
            text = bare_text(task)
            self.escaped += self._special.spelled_in(text)
            return text
        self.escaped += any(self._special.spelled_in(m["content"]) for m in task_messages(task))
        return self._template(task, self._messages(task))

    def _messages(self, task: Task) -> list[dict[str, Any]]:
        """The task's messages, with marks for the special tokens that they spell."""
        messages: list[dict[str, Any]] = self._special.mark_all(task_messages(task))
        if task.prefill:
            messages[-1]["content"] = self._special.mark_prefill(task.prefill)
        return messages

    def _check_known(
        self, ids: list[int], part: Literal["messages", "prompt"], text: str
    ) -> list[int]:
        if self._special.misses(ids):
            named = f": {unknown!r}" if (unknown := self.unknown(text)) else ""
            raise RenderError(
                f"{part} has characters that the model's tokenizer does not know{named}", part
            )
        return ids

    def _template(self, task: Task, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt rendered by the chat template. Raises UserError if the template refuses it."""
        tools, arguments = map(self._special.mark_all, (task.tools, task.template_args))
        try:
            return rendered_prompt(self.tokenizer, messages, tools, arguments, bool(task.prefill))
        except TemplateRefusal as refusal:
            raise refusal_error(self.tokenizer, task, messages, refusal) from refusal

    def _turn(
        self, task: Task, prompt: str, messages: Sequence[Mapping[str, Any]], solution: str
    ) -> str:
        """Text of the assistant's turn with this solution, to follow the rendered prompt."""
        begun = messages[-1]["content"] if task.prefill else ""
        before = messages[:-1] if task.prefill else messages
        turns = [*before, {"role": "assistant", "content": begun + solution}]
        tools, arguments = map(self._special.mark_all, (task.tools, task.template_args))
        try:
            whole = render(
                self.tokenizer,
                turns,
                tools=tools,
                generation=False,
                arguments=arguments,
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
        """The end token of a turn after which the template writes none that ends sampling."""
        preferred = (*self._turn_end.tokens, self.tokenizer.eos_token_id, *self.stop_token_ids)
        return [token for token in preferred if token in self._ends][:1]

    @cached_property
    def _turn_end(self) -> TurnEnd:
        return turn_end(self.tokenizer)

    @cached_property
    def _suffixes(self) -> SuffixEncoder:
        ends = {*self._ends, *self._turn_end.tokens}
        return SuffixEncoder(self.tokenizer, self._special, ends)

    @cached_property
    def _replies(self) -> ReplyWriter:
        return ReplyWriter(self.tokenizer, self._special, self._ends)

    @cached_property
    def _shortest(self) -> ShortestEncoding:
        return ShortestEncoding(self.tokenizer)
