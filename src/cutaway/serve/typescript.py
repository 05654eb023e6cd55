"""The page's types, made from the protocol: `python -m cutaway.serve.typescript > web/src/protocol.ts`."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cutaway.serve import protocol

_ALIASES = {"Format": protocol.Format, "Kind": protocol.Kind, "State": protocol.State}
_PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def typescript() -> str:
    """`protocol.ts` in full: one interface for each message, and the numbers that both sides must agree on."""
    lines = ["// Made from src/cutaway/serve/protocol.py by `python -m cutaway.serve.typescript`; do not edit.", ""]
    for name in ("MIDDLE", "STEPS", "WEIGHT_STEPS"):
        lines.append(f"export const {name} = {getattr(protocol, name)};")
    lines.append("")
    lines += [f"export type {name} = {_union(alias)};" for name, alias in _ALIASES.items()]
    for message in protocol.MESSAGES:
        lines += ["", f"/** {_first_sentence(message)} */", f"export interface {message.__name__} {{"]
        hints = get_type_hints(message)
        lines += [f"  {field.name}: {_type(hints[field.name])};" for field in fields(message)]
        lines.append("}")
    return "\n".join(lines) + "\n"


def _first_sentence(message: type) -> str:
    return " ".join((message.__doc__ or "").split("\n\n")[0].split())


def _type(hint: Any) -> str:
    origin = get_origin(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    for name, alias in _ALIASES.items():
        if hint == alias:
            return name
    if is_dataclass(hint) and isinstance(hint, type):
        return hint.__name__
    if origin is Literal:
        return _union(hint)
    if origin is list:
        inside = _type(get_args(hint)[0])
        return f"({inside})[]" if "|" in inside else f"{inside}[]"
    if hint is Any:
        return "unknown"
    if origin is dict:
        return f"Record<string, {_type(get_args(hint)[1])}>"
    if origin is types.UnionType:
        return " | ".join(map(_type, get_args(hint)))
    raise TypeError(f"the protocol uses {hint!r}, which has no counterpart in TypeScript")


def _union(literal: Any) -> str:
    return " | ".join(f'"{value}"' for value in get_args(literal))


if __name__ == "__main__":
    print(typescript(), end="")
