"""A conversation with a chat model: its messages, the ids that they become, and what of them has been read already."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.generate.cache_use import CacheStep, CacheUse
from cutaway.generate.passes import shared_prefix
from cutaway.generate.response import Step
from cutaway.reading import Unreadable, parsed, read_bytes
from cutaway.spec import ModelSpec
from cutaway.text.tokenizer import Tokenizer

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


class ChatModel(Protocol):
    """What a conversation needs of a model."""

    spec: ModelSpec
    engine: Engine

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stream(self) -> Callable[..., Iterator[Step]]: ...


@dataclass(frozen=True)
class Part:
    """The ids that one message takes, and which of them, `ids[start:stop]`, are its own words; the others are the
    template's. The last part, the beginning of the answer to come, has the role "assistant" and no words yet."""

    role: str
    ids: tuple[int, ...]
    start: int
    stop: int


class Conversation:
    """Messages and answers. Every turn is rendered and encoded anew, whole, and only what the cache of the turn
    before does not hold is run: what was edited or regenerated can never linger.

    `system` is the first message, where there is one; `settings` are those of `Model.stream`, for every answer.
    Raises CutawayError for a model without a chat template.
    """

    def __init__(self, model: ChatModel, system: str | None = None, **settings: Any) -> None:
        self.model = model
        self.settings = settings
        self.messages: list[Message] = []
        self.reused = 0
        """Tokens of the last prompt that were not run again."""
        self.read = 0
        """Tokens of the last prompt that were."""
        self._cache = KVCache(model.spec, model.engine)
        self.cache_use: CacheUse | None = None
        """What the last answer found in the cache and added to it, step by step."""
        self._answers = 0
        if model.tokenizer.chat_template is None:
            raise CutawayError(
                f"{model.spec.name} comes without a chat template: it continues plain text and was not made to chat. "
                "Use `cutaway generate`."
            )
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that are held between the turns."""
        return self._cache.nbytes

    def ids(self) -> list[int]:
        """The prompt of the next answer: every message through the template, and the beginning of an answer."""
        return chat_ids(self.model.tokenizer, self.messages)

    def say(self, text: str) -> Iterator[Step]:
        """Add the user's message and stream the answer, which becomes a message when the stream ends or is closed.

        Raises CutawayError for what the model cannot read; then the conversation stays as it was.
        """
        if not text.strip():
            raise CutawayError("The message is empty; a chat needs at least one character from the user.")
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Iterator[Step]:
        """Another answer to the last message of the user, in place of the one that is there."""
        if not any(message["role"] == "user" for message in self.messages):
            raise CutawayError("There is nothing to answer yet; say something first.")
        last = max(place for place, message in enumerate(self.messages) if message["role"] == "user")
        return self._answer(self.messages[: last + 1])

    def _answer(self, messages: list[Message]) -> Iterator[Step]:
        """The answer to these messages, which are those of the conversation once all about them is found right."""
        ids = chat_ids(self.model.tokenizer, messages)
        settings = dict(self.settings)
        if settings.get("seed") is not None:
            settings["seed"] += self._answers  # else two answers to one message would be the same
        steps = self.model.stream(ids, cache=self._cache, **settings)
        self.messages[:] = messages
        self._answers += 1
        self.reused = shared_prefix(self._cache.ids, ids[:-1])
        self.read = len(ids) - self.reused
        return self._kept(steps, len(ids))

    def _kept(self, steps: Iterator[Step], length: int) -> Iterator[Step]:
        said: list[str] = []
        found: list[CacheStep] = []
        try:
            for step in steps:
                said.append(step.text)
                found += [step.cache] if step.cache is not None else []
                yield step
        finally:
            steps.close()  # type: ignore[attr-defined]
            self.messages.append({"role": "assistant", "content": "".join(said)})
            if found:
                model = self.model
                self.cache_use = CacheUse(model.spec, model.engine.dtype.name, length, True, tuple(found))

    def parts(self) -> list[Part]:
        """The prompt of the next answer, message by message."""
        return parts(self.model.tokenizer, self.messages)

    def save(self, path: str | Path) -> Path:
        """Write the messages as JSON: the whole file or none of it. Raises CutawayError where that cannot be."""
        path = Path(path)
        written = json.dumps({"model": self.model.spec.name, "messages": self.messages}, ensure_ascii=False, indent=2)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(written + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise CutawayError(f"The conversation could not be written to {path}: {error.strerror}.") from None
        return path

    def load(self, path: str | Path) -> None:
        """Go on with a saved conversation. Raises CutawayError for what is none, and changes nothing."""
        try:
            told = parsed(read_bytes(path))
        except Unreadable as error:
            raise CutawayError(f"{path} holds no saved conversation, which is JSON: {error}.") from None
        messages = told.get("messages") if isinstance(told, dict) else told
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise CutawayError(
                f'{path} holds no saved conversation: that is {{"messages": [{{"role": "user", "content": "…"}}, …]}}.'
            )
        if messages:
            chat_ids(self.model.tokenizer, messages)
        self.messages = messages


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """The ids of a conversation, as its template writes it, special tokens and BOS included, and nothing added.

    A special token that somebody writes into a message ("<|im_end|>") stays the characters that it is made of:
    only the template may end a turn. Raises CutawayError where there is no template, or where it refuses.
    """
    written = [name for name in tokenizer.special_tokens if any(name in _content(message) for message in messages)]
    if not written:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt)
        return tokenizer.encode(text, bos=False)
    marks = _unused_characters(messages, len(written))
    stand_in = dict(zip(sorted(written, key=len, reverse=True), marks, strict=True))
    pattern = re.compile("|".join(map(re.escape, stand_in)))
    marked = [
        message | {"content": pattern.sub(lambda found: stand_in[found[0]], _content(message))}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    text = tokenizer.apply_chat_template(marked, add_generation_prompt=add_generation_prompt)
    named = {mark: name for name, mark in stand_in.items()}
    ids: list[int] = []
    for part in re.split(f"([{''.join(marks)}])", text):
        if part:
            ids += tokenizer.encode(named.get(part, part), bos=False, special=part not in named)
    return ids


def parts(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Part]:
    """The ids of the conversation and of the answer's beginning, cut where each message ends."""
    whole = chat_ids(tokenizer, messages)
    found, begun = [], 0
    for count, message in enumerate(messages, start=1):
        until = chat_ids(tokenizer, messages[:count], add_generation_prompt=False)
        end = max(begun, shared_prefix(until, whole))
        found.append(_part(tokenizer, message, whole[begun:end]))
        begun = end
    if begun < len(whole):
        found.append(Part("assistant", tuple(whole[begun:]), len(whole) - begun, len(whole) - begun))
    return found


def _part(tokenizer: Tokenizer, message: Message, ids: Sequence[int]) -> Part:
    """A message's ids, with the place of its own words among them (all of it where they cannot be told apart)."""
    pieces = [tokenizer.token_bytes(token) for token in ids]
    words = _content(message).strip().encode("utf-8")
    at = b"".join(pieces).rfind(words) if words else -1
    if at < 0:
        return Part(message["role"], tuple(ids), 0, len(ids))
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    start = next(place for place, end in enumerate(ends) if end > at)
    stop = next(place for place, end in enumerate(ends) if end >= at + len(words)) + 1
    return Part(message["role"], tuple(ids), start, stop)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _unused_characters(messages: Sequence[Message], count: int) -> list[str]:
    """Characters for private use (no text has a meaning for them) that none of the messages holds."""
    used = set("".join(map(_content, messages)))
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
    return [next(free) for _ in range(count)]


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
