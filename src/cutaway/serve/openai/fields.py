"""The fields of a request's body, each read with its kind and bounds, or refused by name."""

from collections.abc import Mapping
from typing import Any

from cutaway import reading
from cutaway.serve.openai.refusals import Refused


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises Refused for anything else, also for NaN and Infinity, which are no JSON."""
    try:
        told = reading.parsed(body)
    except reading.Unreadable as error:
        raise Refused(f"The request's body is not JSON: {error}.") from None
    if not isinstance(told, dict):
        raise Refused('The request\'s body must be a JSON object, as in {"model": "toy", …}.')
    return told


def shown(value: object) -> str:
    """A value of somebody's request, short enough to be told back."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


class Fields:
    """A body whose fields are all known: `read` are taken, `idle` change nothing, `unsupported` are not done.

    `unsupported` gives for each of its names the values that ask for nothing (null always does) and why the others
    are refused. A field that is null counts as left out. `within` is the field whose object this is, where it is one.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        read: frozenset[str],
        idle: frozenset[str],
        unsupported: Mapping[str, tuple[tuple[object, ...], str]],
        within: str = "",
    ) -> None:
        self._body, self._before = body, f"{within}." if within else ""
        for name, value in body.items():
            if name in unsupported:
                harmless, why = unsupported[name]
                if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
                    raise self._refused(name, f"is {shown(value)}: {why}")
            elif name not in read and name not in idle:
                raise Refused(
                    f"There is no field {shown(self._before + name)} here; there are {', '.join(sorted(read))}.",
                    param=(self._before + name)[:60],
                )

    def get(self, name: str) -> Any:
        """The value as it is; None where it was left out."""
        return self._body.get(name)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.get(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self._refused(name, f"is {shown(value)}; it must be a whole number from {low} to {high}.")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._refused(name, f"is {shown(value)}; it must be a number from {low:g} to {high:g}.")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it was left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refused(name, f"is {shown(value)}; it must be true or false.")
        return bool(value)

    def _refused(self, name: str, why: str) -> Refused:
        return Refused(f"{self._before}{name} {why}", param=self._before + name)
