"""What a value may be: whole numbers, and refusing what a spec cannot have."""

from numbers import Integral

from cutaway.errors import CutawayError


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of Python or of NumPy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require(holds: bool, what: str, value: object, right: str) -> None:
    """Raise CutawayError, naming the value and what would be right, unless `holds`."""
    if not holds:
        raise CutawayError(f"The {what} is {value!r}; it must be {right}.")


def require_positive(owner: object, *names: str) -> None:
    """Refuse an attribute that is not a whole number above 0."""
    for name in names:
        value = getattr(owner, name)
        require(isinstance(value, int) and value > 0, name, value, "a positive whole number")
