"""The command line: one file per command, of which only the one that was asked for is imported.

Exit codes: 0 done, 1 a check did not hold, 2 something was asked for that cannot be, 130 interrupted, 141
nobody reads the output any more.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import TextIO

from cutaway.errors import CutawayError

# command → what it is for, and a line that works when it is pasted
COMMANDS: dict[str, tuple[str, str]] = {
    "trace": ("Run a model on a text and show every stage of the pass.", 'cutaway trace "the cat sat on it"'),
    "generate": (
        "Continue a text, token by token.",
        'cutaway generate "Once upon a time" --temperature 0 --max-tokens 40',
    ),
    "sample": (
        "Look at how the next token is picked: temperatures, filters, draws.",
        'cutaway sample "The capital of France is"',
    ),
    "chat": ("Talk with a chat model.", 'cutaway chat "Say hello." --temperature 0'),
    "score": (
        "Say how likely a model finds texts: each token, and the perplexity of a corpus.",
        'cutaway score "The capital of France is Paris."',
    ),
    "sweep": (
        "Run many prompts and keep the same points of every pass.",
        'cutaway sweep "the cat sat" "a dog ran home" --point "layers.*.resid_post | norm"',
    ),
    "serve": ("Open the live page: type a text and watch a model think.", "cutaway serve"),
    "pull": ("Fetch a model, so that later runs need no network.", "cutaway pull smollm2-135m"),
    "models": ("List the models that are here, and those that can be fetched.", "cutaway models"),
    "verify": ("Check that a model computes what it says, identity by identity.", "cutaway verify toy"),
    "points": ("List every address of a model: its shape, its meaning, its chapter.", "cutaway points smollm2-135m"),
    "count": ("Count parameters, work and bytes of a configuration, without weights.", "cutaway count llama-2-70b"),
    "doctor": ("Say what this installation runs on, and what is wrong with it.", "cutaway doctor"),
}

_SUMMARY = "See inside a transformer while it runs: its whole forward pass, every intermediate named."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own where not given) and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    _write_unicode()
    with warnings.catch_warnings():
        warnings.showwarning = _tell_warning
        return _ended(arguments)


def _ended(arguments: list[str]) -> int:
    """The exit code of a command line, whatever ends it."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # how argparse ends: 0 after --help, 2 for what it cannot read
        if isinstance(end.__context__, BrokenPipeError):  # how a rich console ends where nobody reads
            return 141
        return _flushed(end.code if isinstance(end.code, int) else 2)
    except CutawayError as error:
        _flushed(0)
        print(f"cutaway: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _nobody_reads()
        return 141
    except MemoryError:
        print("cutaway: memory ran out; a shorter prompt or fewer points need less.", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None:  # not the output: a fault of ours, which is told in full
            raise
        _nobody_reads()
        print(f"cutaway: the output could not be written: {error.strerror or error}.", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        name = arguments[0]
        command = import_module(f"cutaway.cli.{name}")
        parser = _parser(f"cutaway {name}", *COMMANDS[name])
        command.add_arguments(parser)
        options, left = parser.parse_known_args(arguments[1:])
        if left:
            parser.error(f"unrecognized arguments: {' '.join(left)}{_quotation_hint(name, options, left)}")
        code: int = command.run(options)
        return code
    parser = _top_parser()
    if not arguments:
        parser.print_help()
        return 2
    if not arguments[0].startswith("-"):
        near = get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" There are {', '.join(COMMANDS)}."
        parser.error(f"there is no command {arguments[0]!r}.{hint}")
    parser.parse_args(arguments[:1])
    return 0


def _quotation_hint(name: str, options: argparse.Namespace, left: list[str]) -> str:
    """What to say of `cutaway trace the cat sat`, where the shell has made several arguments of one text."""
    first = getattr(options, "prompt", None)
    if first is None or any(word.startswith("-") for word in left):
        return ""
    return f'; a text of several words stands in quotation marks: cutaway {name} "{" ".join([first, *left])}"'


def _tell_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning to the user as a sentence; any other with the line of the program that gave it."""
    told = f"cutaway: {message}" if category is UserWarning else f"{filename}:{lineno}: {category.__name__}: {message}"
    print(told, file=sys.stderr)


def _parser(program: str, purpose: str, example: str) -> argparse.ArgumentParser:
    # Abbreviations would make every new option a possible break of somebody's script.
    return argparse.ArgumentParser(
        prog=program,
        description=purpose,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _top_parser() -> argparse.ArgumentParser:
    from cutaway import __version__

    wide = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{wide}}  {purpose}" for name, (purpose, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="cutaway",
        usage="cutaway COMMAND …",
        description=f"{_SUMMARY}\n\ncommands:\n{listed}",
        epilog=f"Each command tells more: cutaway trace --help.\nA beginning:\n  {COMMANDS['trace'][1]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cutaway {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _open_closed_streams() -> None:
    """Standard streams that were closed before the start (`>&-`) are None: what is said there goes nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _write_unicode() -> None:
    """Let output be UTF-8 where it is read by programs, and never fail on a character a terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            if (stream.encoding or "").lower().replace("-", "") != "utf8":
                if stream.isatty():
                    stream.reconfigure(errors="replace")  # type: ignore[union-attr]
                else:
                    stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]


def _flushed(code: int) -> int:
    """`code`, once what was printed is out; 141 where nobody takes it."""
    try:
        sys.stdout.flush()
    except OSError:
        _nobody_reads()
        return 141
    return code


def _nobody_reads() -> None:
    """Send the rest of the output nowhere, or Python would complain once more on its way out."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
