"""What is sent back: whole responses and the pieces of streams, of completions and of chats."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cutaway.generate import ScoredToken, Step
from cutaway.serve.openai.asked import Asked
from cutaway.serve.openai.prepare import Echo, Prepared

if TYPE_CHECKING:
    from cutaway.model import Model

LEAST = -9999.0  # stands for the logarithm of 0, which JSON cannot write


@dataclass
class Choice:
    """What one response is so far."""

    texts: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    characters: int = 0  # of its tokens' texts, for the places that log-probabilities are told with
    echo: Echo | None = None

    def add(self, step: Step) -> None:
        self.texts.append(step.text)
        self.steps.append(step)


class Answer(ABC):
    """The answer to one request. `prompt_tokens` counts each prompt once, however many responses it gets."""

    kind: str
    piece_kind: str

    def __init__(self, model: "Model", asked: Asked, ready: Prepared, prefix: str) -> None:
        self._model, self._asked = model, asked
        self.n = asked.n
        self._prompt_tokens = ready.prompt_tokens
        self._completion_tokens = 0
        from cutaway import __version__

        engine = model.engine
        self._head = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": f"cutaway-{__version__}-{engine.name}-{engine.dtype.name}",
        }
        self._choices: dict[int, Choice] = {}

    def whole(self, count: int, reused: int) -> dict[str, Any]:
        """The response with all its `count` choices."""
        choices = [self._choice(index, self._choices[index]) for index in range(count)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(reused)}

    def take(self, index: int, step: Step) -> Choice:
        """Note a step of choice `index`."""
        choice = self._choices.setdefault(index, Choice())
        choice.add(step)
        self._completion_tokens += self._asked.max_tokens != 0  # where none was asked for, the one made is not told
        return choice

    def begun(self, count: int) -> list[bytes]:
        """The events that a stream begins with."""
        return []

    def piece(self, index: int, step: Step) -> bytes:
        """The events of a stream that tell one step; none where there is nothing to tell of it."""
        choice = self.take(index, step)
        step = choice.steps[-1]
        told = self._logprobs(self._told([step]), choice)
        if not step.text and step.finish is None and told is None:
            return b""
        return self._event([self._part(index, step, told)])

    def ended(self, reused: int) -> bytes:
        """The events that a stream ends with."""
        usage = event({**self._head, "object": self.piece_kind, "choices": [], "usage": self._usage(reused)})
        return (usage if self._asked.include_usage else b"") + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._head, "object": self.piece_kind, "choices": choices, **usage})

    def _usage(self, reused: int) -> dict[str, Any]:
        """Tokens that were read and made; the end token that a model gives counts, as it was made too."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def _logprobs(self, steps: list[Step], choice: Choice) -> dict[str, Any] | None:
        """The log-probabilities of these steps, if they were asked for."""
        return None if self._asked.alternatives is None else self._log_probabilities(steps, choice)

    def _told(self, steps: list[Step]) -> list[Step]:
        """The steps whose log-probabilities are told: not that of the end token."""
        return [step for step in steps if step.finish != "stop token"]

    def _bytes(self, token: int) -> bytes:
        tokenizer = self._model.tokenizer
        return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, index: int, step: Step, logprobs: dict[str, Any] | None) -> dict[str, Any]: ...

    @abstractmethod
    def _log_probabilities(self, steps: list[Step], choice: Choice) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    """Text that goes on from a prompt."""

    kind = piece_kind = "text_completion"

    def __init__(self, model: "Model", asked: Asked, ready: Prepared) -> None:
        super().__init__(model, asked, ready, "cmpl-")
        self._echoes = ready.echoes

    def take(self, index: int, step: Step) -> Choice:
        if self._asked.max_tokens == 0:
            step = replace(step, text="", finish="length")
        if step.index == 0 and self._echoes:
            echo = self._echoes[index // self.n]
            step = replace(step, text=echo.text + step.text)
            self._choices[index] = Choice(echo=echo, characters=len(echo.text))
        return super().take(index, step)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": self._logprobs(self._told(choice.steps), choice),
            "finish_reason": finish_reason(choice.steps[-1]),
        }

    def _told(self, steps: list[Step]) -> list[Step]:
        """With an echo every token that was made: who scores texts counts them from the end."""
        return steps if self._asked.echo else super()._told(steps)

    def _part(self, index: int, step: Step, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": step.text, "logprobs": logprobs, "finish_reason": finish_reason(step)}

    def _log_probabilities(self, steps: list[Step], choice: Choice) -> dict[str, Any]:
        told: list[Step | ScoredToken] = []
        offsets: list[int] = []
        for step in steps:
            if step.index == 0 and choice.echo is not None:
                told += step.prompt
                offsets += choice.echo.offsets
            if self._asked.max_tokens == 0:
                continue
            told.append(step)
            offsets.append(choice.characters)
            if step.finish != "stop token":
                choice.characters += len(self._bytes(step.token).decode("utf-8", "ignore"))
        return {
            "tokens": [self._named(one.token) for one in told],
            "token_logprobs": [None if one.logprob is None else _finite(one.logprob) for one in told],
            "top_logprobs": [self._best(one) for one in told] if self._asked.alternatives else None,
            "text_offset": offsets,
        }

    def _best(self, one: Step | ScoredToken) -> dict[str, float] | None:
        """The token and the likeliest there; None for the first of a prompt, which nothing predicted."""
        if one.logprob is None:
            return None
        return {self._named(token): _finite(value) for token, value in (*one.alternatives, (one.token, one.logprob))}

    def _named(self, token: int) -> str:
        """A token's text; its bytes, written out, where they are no whole characters."""
        data = self._bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatAnswer(Answer):
    """The assistant's next message."""

    kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: "Model", asked: Asked, ready: Prepared) -> None:
        super().__init__(model, asked, ready, "chatcmpl-")

    def begun(self, count: int) -> list[bytes]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(count)
        ]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._logprobs(self._told(choice.steps), choice),
            "finish_reason": finish_reason(choice.steps[-1]),
        }

    def _part(self, index: int, step: Step, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        delta = {"content": step.text} if step.text or logprobs is not None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason(step)}

    def _log_probabilities(self, steps: list[Step], choice: Choice) -> dict[str, Any]:
        told = [
            self._token(step.token, step.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in step.alternatives]}
            for step in steps
        ]
        return {"content": told, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def finish_reason(step: Step) -> str | None:
    """Why a response ended, in the interface's two words for it; None where it goes on."""
    if step.finish is None:
        return None
    return "length" if step.finish in ("length", "context") else "stop"


def event(data: dict[str, Any]) -> bytes:
    """One event of a stream. Plain ASCII: some clients take U+2028 and its like for the end of a line."""
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
