"""From what was asked to the requests that a batch takes: templates, ids, the room that is left, seeds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.generate import Basic, Request
from cutaway.generate.conversation import chat_ids
from cutaway.generate.settings import refuse_encoder
from cutaway.serve.openai.asked import Asked
from cutaway.serve.openai.refusals import Refused
from cutaway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cutaway.model import Model

COMPLETION_TOKENS = 16  # of a completion that does not say how many
UNBOUNDED_TOKENS = 4096  # of a chat that does not, where the model names no length that it was made for


@dataclass(frozen=True)
class Echo:
    """A prompt as it is sent back: its text, and where in it each of its ids begins."""

    text: str
    offsets: list[int]


@dataclass(frozen=True)
class Prepared:
    """Prompt by prompt, and for each its `n` responses one after another. `echoes` are there where asked for."""

    requests: list[Request]
    prompt_tokens: int
    echoes: list[Echo]


def prepared(model: "Model", asked: Asked) -> Prepared:
    """Everything checked, nothing run. Raises Refused, with the field that is to blame where it is one.

    Response j of a prompt has the seed + j, whichever prompt of the request it is: it says what it would say if it
    had been asked for alone.
    """
    with _blamed("model"):
        refuse_encoder(model.spec)
        chats = asked.messages is None or model.tokenizer.chat_template is not None
    field = "prompt" if asked.messages is None else "messages"
    with _blamed(field if chats else "model"):
        prompts = _encoded(model, asked) if asked.messages is None else [chat_ids(model.tokenizer, asked.messages)]
    requests = []
    for ids in prompts:
        room = _room(model, len(ids), asked)
        with _blamed(field):
            model.prompt(ids)
        for j in range(asked.n):
            seed = None if asked.seed is None else asked.seed + j
            basic = Basic(max(room, 1), asked.temperature, asked.top_k, asked.top_p, asked.min_p, seed, asked.stop)
            beyond = any(token >= model.spec.vocab_size for token in asked.settings.get("logit_bias") or ())
            with _blamed("logit_bias" if beyond else None):
                requests.append(model.request(ids, basic, asked.settings))
    given = asked.prompts if asked.echo else ()
    echoes = [_echo(model.tokenizer, told, ids) for told, ids in zip(given, prompts, strict=False)]
    return Prepared(requests, sum(map(len, prompts)), echoes)


@contextmanager
def _blamed(param: str | None) -> Iterator[None]:
    """What goes wrong in here is refused with the field that is to blame."""
    try:
        yield
    except CutawayError as error:
        raise Refused(str(error), param=param) from None


def _encoded(model: "Model", asked: Asked) -> list[list[int]]:
    return [model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]


def _echo(tokenizer: Tokenizer, told: str | list[int], ids: list[int]) -> Echo:
    """The prompt as it was given; a BOS that was put before a text is no part of it."""
    added = len(ids) - len(tokenizer.encode(told, bos=False)) if isinstance(told, str) else 0
    text, at_start, offset, offsets = b"", True, 0, []
    for place, token in enumerate(ids):
        offsets.append(offset)
        data = b""
        if token < tokenizer.vocab_size:  # an embedding may have more rows
            data, at_start = tokenizer.contribution(token, at_start=at_start)
        if place >= added:
            text += data
            offset += sum(byte & 0xC0 != 0x80 for byte in data)  # characters that begin here
    return Echo(told if isinstance(told, str) else text.decode("utf-8", "replace"), offsets)


def _room(model: "Model", length: int, asked: Asked) -> int:
    """How many tokens may follow a prompt of this length: what was asked for; else a few, in a chat all that fit."""
    usual = UNBOUNDED_TOKENS if asked.messages is not None else COMPLETION_TOKENS
    limits = [limit for limit in (model.spec.n_max, model.spec.context_length) if limit is not None]
    if not limits:
        return usual if asked.max_tokens is None else asked.max_tokens
    context = min(limits)
    if length + (1 if asked.max_tokens is None else asked.max_tokens) > context:
        asked_for = "" if asked.max_tokens is None else f" and max_tokens asks for {asked.max_tokens:,} more"
        raise Refused(
            f"The context of {asked.model} is {context:,} tokens; the prompt has {length:,}{asked_for}. "
            "Shorten the prompt or max_tokens.",
            param="prompt" if asked.messages is None else "messages",
            code="context_length_exceeded",
        )
    if asked.max_tokens is not None:
        return asked.max_tokens
    return context - length if asked.messages is not None else min(usual, context - length)
