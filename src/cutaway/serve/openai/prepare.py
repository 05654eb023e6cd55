"""From what was asked to the requests that a batch takes: templates, ids, the room that is left, seeds."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.generate import Basic, Request
from cutaway.generate.conversation import chat_ids
from cutaway.serve.openai.asked import Asked
from cutaway.serve.openai.refusals import Refused

if TYPE_CHECKING:
    from cutaway.model import Model

COMPLETION_TOKENS = 16  # of a completion that does not say how many
UNBOUNDED_TOKENS = 4096  # of a chat that does not, where the model names no length that it was made for


@dataclass(frozen=True)
class Prepared:
    """Prompt by prompt, and for each its `n` responses one after another."""

    requests: list[Request]
    prompt_tokens: int


def prepared(model: "Model", asked: Asked) -> Prepared:
    """Everything checked, nothing run. Raises Refused.

    Response j of a prompt has the seed + j, whichever prompt of the request it is: it says what it would say if it
    had been asked for alone.
    """
    try:
        prompts = [chat_ids(model.tokenizer, asked.messages)] if asked.messages is not None else _encoded(model, asked)
        requests = []
        for ids in prompts:
            room = _room(model, len(ids), asked)
            for j in range(asked.n):
                seed = None if asked.seed is None else asked.seed + j
                basic = Basic(room, asked.temperature, asked.top_k, asked.top_p, asked.min_p, seed, asked.stop)
                requests.append(model.request(ids, basic, asked.settings))
    except Refused:
        raise
    except CutawayError as error:
        raise Refused(str(error)) from None
    return Prepared(requests, sum(map(len, prompts)))


def _encoded(model: "Model", asked: Asked) -> list[list[int]]:
    return [model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]


def _room(model: "Model", length: int, asked: Asked) -> int:
    """How many tokens may follow a prompt of this length: what was asked for; else a few, in a chat all that fit."""
    usual = UNBOUNDED_TOKENS if asked.messages is not None else COMPLETION_TOKENS
    limits = [limit for limit in (model.spec.n_max, model.spec.context_length) if limit is not None]
    if not limits:
        return usual if asked.max_tokens is None else asked.max_tokens
    context = min(limits)
    if length + (asked.max_tokens or 1) > context:
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
