"""The one exception that Cutaway raises for anything its caller can mend, and its kind for addresses."""


class CutawayError(Exception):
    """What was wrong, with which value, and what would be right: one or two plain sentences.

    The command line prints it without a traceback and ends with exit code 2.
    """


class UnknownPoint(CutawayError, KeyError):
    """An address at which nothing can be read; a KeyError too, as from any other thing with keys."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would put its sentence in quotation marks
