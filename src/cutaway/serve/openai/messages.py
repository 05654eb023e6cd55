"""The messages of a chat, brought into the form that templates take: a role and a text."""

from typing import Any

from cutaway.serve.openai.fields import shown
from cutaway.serve.openai.refusals import Refused

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What clients send back of an answer that was only text; anything in them is not supported.
_EMPTY = frozenset({"name", "tool_calls", "function_call", "refusal", "audio", "annotations"})


def messages_of(messages: object) -> list[dict[str, Any]]:
    """Role and text of each message. Raises Refused for what no template would be given."""
    if not isinstance(messages, list) or not messages:
        raise Refused(
            'messages must be a list of at least one message, as in [{"role": "user", "content": "Hello"}].',
            param="messages",
        )
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Refused(f'{where} must be an object, as in {{"role": "user", "content": "Hello"}}.', param=where)
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if name not in _EMPTY:
            raise Refused(f"{where} has a field {shown(name)}, which nothing reads.", param=where)
        if value:
            raise Refused(f"{where} has {name}, which is not supported: a message is a role and a text.", param=where)
    role = message.get("role")
    if role in ("tool", "function"):
        raise Refused(f"{where} is the answer of a tool; calling tools is not supported.", param=where)
    if not isinstance(role, str) or role not in _ROLES:
        raise Refused(f"The role of {where} is {shown(role)}; it must be one of {', '.join(_ROLES)}.", param=where)
    return {"role": _ROLES[role], "content": _text(message.get("content"), where)}


def _text(content: object, where: str) -> str:
    """A text, or the texts of its parts one after another."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"The content of {where} must be a text, or a list of parts of text.", param=where)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise Refused(f"{where} has a part of the kind {shown(kind)}; only text is supported.", param=where)
        texts.append(part["text"])
    return "".join(texts)
