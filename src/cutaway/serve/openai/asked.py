"""What a completion or a chat asks for, read from its body: every field checked, and what is not done refused."""

from dataclasses import dataclass, field, replace
from typing import Any

from cutaway.generate.settings import Settings
from cutaway.serve.openai.fields import Fields, parsed, shown
from cutaway.serve.openai.messages import messages_of
from cutaway.serve.openai.refusals import Refused

MOST_CHOICES = 16  # responses to one request, of all its prompts
MOST_STOPS = 16
MOST_STOP = 1000  # characters of a stop string
MOST_BIASES = 1024
MOST_ALTERNATIVES = 20
MOST_TOKENS = 10**9  # as a number; the model's context ends a response long before

_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "logit_bias"}
    | {"repetition_penalty", "presence_penalty", "frequency_penalty"}
)
_BOTH = _SAMPLING | {"model", "max_tokens", "n", "stop", "stream", "stream_options", "logprobs"}
# About who asks, not about what.
_IDLE = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
_NO_TOOLS = "calling tools is not supported; write what the model should know of them into a message."
_NOT_DONE: dict[str, tuple[tuple[object, ...], str]] = {
    "service_tier": (("auto", "default"), "there is only one kind of service."),
    "store": ((False,), "responses are not kept."),
}
_NOT_IN_COMPLETIONS = _NOT_DONE | {
    "suffix": (("",), "these models go on from a text; they cannot fill a gap in one."),
}
_NOT_IN_CHATS = _NOT_DONE | {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "responses are plain text; none is held to a format."),
    "modalities": ((["text"],), "only text comes out."),
    "audio": ((), "only text comes out."),
    "prediction": ((), "a prediction is not made use of."),
    "reasoning_effort": (("none",), "how long a model reasons cannot be set."),
    "verbosity": (("medium",), "how much a model says cannot be set; max_tokens ends it."),
    "web_search_options": ((), "nothing is searched."),
}


@dataclass(frozen=True)
class Asked:
    """A request as it was read. `prompts` are texts or ids; a chat has `messages` instead.

    `alternatives` None: no log-probabilities are told; 0: those of the tokens alone. With `echo` the prompt stands
    before each response, with its log-probabilities where such were asked for; then `max_tokens` may be 0.
    """

    model: str
    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, Any]] | None
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    alternatives: int | None
    stream: bool
    include_usage: bool
    settings: Settings = field(default_factory=Settings)
    echo: bool = False


def completion_asked(body: bytes) -> Asked:
    """A completion. Raises Refused with the field that is to blame."""
    fields = Fields(parsed(body), _BOTH | {"prompt", "echo", "best_of"}, _IDLE, _NOT_IN_COMPLETIONS)
    echo = fields.flag("echo")
    tokens = fields.whole("max_tokens", 0 if echo else 1, MOST_TOKENS)
    alternatives = fields.whole("logprobs", 0, MOST_ALTERNATIVES)
    made, returned = fields.whole("best_of", 1, MOST_CHOICES), fields.whole("n", 1, MOST_CHOICES) or 1
    if made is not None and made != returned:
        raise Refused(
            f"best_of is {made} and n {returned}: as many responses come back as are made; ask for n, and choose.",
            param="best_of",
        )
    asked = _asked(fields, _prompts(fields.get("prompt")), None, tokens, alternatives)
    return replace(asked, echo=echo, settings=asked.settings | {"score_prompt": echo and alternatives is not None})


def chat_asked(body: bytes) -> Asked:
    """A chat. Raises Refused with the field that is to blame."""
    read = _BOTH | {"messages", "max_completion_tokens", "top_logprobs"}
    fields = Fields(parsed(body), read, _IDLE, _NOT_IN_CHATS)
    tokens = fields.whole("max_completion_tokens", 1, MOST_TOKENS)
    older = fields.whole("max_tokens", 1, MOST_TOKENS)
    if tokens is not None and older is not None and tokens != older:
        raise Refused(
            f"max_tokens is {older} and max_completion_tokens {tokens}; they mean the same, so give one of them.",
            param="max_tokens",
        )
    top = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
    told = fields.flag("logprobs")
    if top and not told:
        raise Refused("top_logprobs needs logprobs to be true.", param="top_logprobs")
    messages = messages_of(fields.get("messages"))
    return _asked(fields, (), messages, older if tokens is None else tokens, (top or 0) if told else None)


def _asked(
    fields: Fields,
    prompts: tuple[str | list[int], ...],
    messages: list[dict[str, Any]] | None,
    max_tokens: int | None,
    alternatives: int | None,
) -> Asked:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise Refused("model must be a text; /v1/models lists the names that may be given.", param="model")
    if not model:
        raise Refused("model is missing; /v1/models lists the names that may be given.", param="model")
    n = fields.whole("n", 1, MOST_CHOICES) or 1
    if n * max(1, len(prompts)) > MOST_CHOICES:
        raise Refused(
            f"{len(prompts)} prompts with {n} responses each are more than {MOST_CHOICES}; ask in several requests.",
            param="n",
        )
    stream = fields.flag("stream")
    temperature = fields.number("temperature", 0, 100)
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:
        raise Refused("top_p is 0; it must be above 0 (temperature 0 takes the likeliest token).", param="top_p")
    settings: Settings = {
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
        "typical_p": fields.number("typical_p", 1e-9, 1),
        "logit_bias": _biases(fields.get("logit_bias")),
        "alternatives": alternatives or 0,
    }
    return Asked(
        model,
        prompts,
        messages,
        n,
        max_tokens,
        1.0 if temperature is None else temperature,
        None if top_p == 1 else top_p,
        fields.whole("top_k", 1, MOST_TOKENS),
        fields.number("min_p", 0, 1),
        fields.whole("seed", 0, 2**63 - 1),
        _stops(fields.get("stop")),
        alternatives,
        stream,
        _includes_usage(fields.get("stream_options"), stream),
        settings,
    )


def _prompts(prompt: object) -> tuple[str | list[int], ...]:
    """A text, several, the ids of one, or those of several; none of them empty."""
    if prompt == "" or (isinstance(prompt, list) and ("" in prompt or [] in prompt)):
        raise Refused("The prompt is empty; it must have at least one character or token.", param="prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return (_ids(prompt),)
        if all(isinstance(one, str) for one in prompt):
            return tuple(prompt)
        if all(isinstance(one, list) and all(type(token) is int for token in one) for one in prompt):
            return tuple(_ids(one) for one in prompt)
    raise Refused(
        "prompt must be a text, a list of texts, a list of token ids, or a list of such lists.", param="prompt"
    )


def _ids(tokens: list[int]) -> list[int]:
    for token in tokens:
        if not 0 <= token < 2**31:
            raise Refused(f"There is no token {shown(token)}.", param="prompt")
    return tokens


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise Refused(f"stop is {shown(stop)}; it must be a text or a list of texts, none of them empty.", param="stop")
    if len(stops) > MOST_STOPS or any(len(one) > MOST_STOP for one in stops):
        raise Refused(f"stop may be {MOST_STOPS} texts of up to {MOST_STOP} characters.", param="stop")
    return tuple(stops)


def _biases(biases: object) -> dict[int, float] | None:
    """Token → what is added to its logit."""
    if biases is None:
        return None
    if not isinstance(biases, dict) or len(biases) > MOST_BIASES:
        raise Refused(
            f'logit_bias must map up to {MOST_BIASES} token ids to numbers, as in {{"5": -1.5}}.', param="logit_bias"
        )
    read: dict[int, float] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise Refused(f"logit_bias names token {shown(token)}; a token id is a whole number.", param="logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise Refused(
                f"logit_bias adds {shown(bias)} to token {token}; it must be a number from -100 to 100.",
                param="logit_bias",
            )
        read[int(token)] = float(bias)
    return read


def _includes_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise Refused("stream_options are for streams; set stream to true.", param="stream_options")
    if not isinstance(options, dict):
        raise Refused('stream_options must be an object, as in {"include_usage": true}.', param="stream_options")
    fields = Fields(
        options,
        frozenset({"include_usage"}),
        frozenset(),
        {"include_obfuscation": ((False,), "streams are not padded.")},
        within="stream_options",
    )
    return fields.flag("include_usage")
