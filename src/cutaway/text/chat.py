"""Chat templates: the Jinja programs that checkpoints carry, rendered in a sandbox."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from jinja2 import Template


def render_chat(
    template: str,
    messages: list[dict],
    *,
    add_generation_prompt: bool,
    named_tokens: Mapping[str, str],
) -> str:
    """`messages` as the text that the template makes of them.

    `named_tokens` maps names such as "bos_token" to the tokens' texts. The variables, functions and
    filters are those that Hugging Face's `apply_chat_template` gives to a template.
    Raises CutawayError for messages of a wrong form, a broken template, or one that refuses.
    """
    from jinja2.exceptions import TemplateSyntaxError

    _check(messages)
    try:
        return _compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **named_tokens,
        )
    except _Refusal as refusal:
        raise CutawayError(f"The model's chat template refuses these messages: {refusal}") from None
    except TemplateSyntaxError as error:
        raise CutawayError(f"The model's chat template is broken in line {error.lineno}: {error.message}.") from None
    except Exception as error:  # a template is a program from a stranger: it may fail in any way
        raise CutawayError(
            f"The model's chat template failed on these messages ({type(error).__name__}: {error})."
        ) from None


class _Refusal(Exception):
    """Raised by a template itself, through `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape `<`, `>`, `&` and quotes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(template: str) -> "Template":
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's words for training: here, just text."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _check(messages: list[dict]) -> None:
    form = 'each message is a dict such as {"role": "user", "content": "Hello"}'
    if not isinstance(messages, list) or not messages:
        raise CutawayError(f"A conversation is a list of at least one message; {form}.")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise CutawayError(f"Message {place} is a {type(message).__name__}; {form}.")
        if not isinstance(message.get("role"), str):
            raise CutawayError(f'Message {place} has no "role" (system, user, assistant or tool); {form}.')
        if "content" not in message and "tool_calls" not in message:
            raise CutawayError(f'Message {place}, from {message["role"]}, has no "content"; {form}.')
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise CutawayError(f'The "content" of message {place} is a {type(content).__name__}, not text; {form}.')
