"""The one exception that Cutaway raises for anything its caller can mend."""


class CutawayError(Exception):
    """What was wrong, with which value, and what would be right: one or two plain sentences.

    The command line prints it without a traceback and ends with exit code 2.
    """
