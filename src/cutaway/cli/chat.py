"""`cutaway chat`: a conversation with a chat model, turn by turn."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.arguments import add_model, add_sampling, load_model, sampling_settings
from cutaway.cli.generate import harmless
from cutaway.errors import CutawayError
from cutaway.reading import read_text

if TYPE_CHECKING:
    from cutaway.generate import Step
    from cutaway.generate.conversation import Conversation

HELP = """\
/regenerate        another answer to your last message
/system TEXT       begin anew with this system prompt (/system alone: with none)
/history           every message so far
/ids               the exact ids of the next prompt, by role
/cache             the keys and values that are kept: what the last answer reused and added
/save FILE         write the conversation as JSON
/load FILE         go on with a saved one
/reset             forget all but the system prompt
/quit              or Ctrl-D
A line that ends in \\ goes on in the next. Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="the first thing to say; more is read line by line")
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt, the first message")
    parser.add_argument("--system-file", type=Path, metavar="FILE", help="the same, from a UTF-8 text file")
    parser.add_argument("--load", type=Path, metavar="FILE", help="go on with a conversation that /save wrote")
    parser.add_argument("--show-ids", action="store_true", help="before every answer show the exact ids of its prompt")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="at most so many tokens an answer (512)"
    )
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    if options.system is not None and options.system_file is not None:
        raise CutawayError("Both --system and --system-file were given; give one of them.")
    system = _text_of(options.system_file) if options.system_file is not None else options.system
    settings = sampling_settings(options) | {"max_tokens": options.max_tokens}
    model = load_model(options)

    from cutaway.generate.conversation import Conversation
    from cutaway.generate.settings import Basic

    conversation = Conversation(model, system, **settings)
    named = {name: settings.pop(name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")}
    model.request([0], Basic(**named), settings)  # type: ignore[arg-type]  # wrong settings are refused before the first turn
    if options.load is not None:
        conversation.load(options.load)
    if sys.stdin.isatty():
        _tell(f"{model.spec.name}, {model.engine.name} engine. /help lists the commands; Ctrl-D ends.")
    if options.message is not None:
        _answer(conversation, conversation.say(options.message), options.show_ids)
    for line in _lines():
        try:
            if line.startswith("/"):
                if _command(conversation, line) == "quit":
                    break
            elif line.strip():
                _answer(conversation, conversation.say(line), options.show_ids)
        except CutawayError as error:
            if not sys.stdin.isatty():
                raise
            _tell(f"cutaway: {error}")
    return 0


def _lines() -> Iterator[str]:
    """What the user types, line by line; a line that ends in a backslash goes on in the next."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history)
    held = ""
    while True:
        try:
            line = input(("… " if held else "> ") if sys.stdin.isatty() else "").removeprefix("\ufeff")
        except EOFError:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            if held:
                yield held
            return
        except UnicodeDecodeError as error:
            raise CutawayError(
                f"Standard input cannot be read: it is not UTF-8 text (0x{error.object[error.start]:02X})."
            ) from None
        if line.endswith("\\"):
            held += line[:-1] + "\n"
            continue
        yield held + line
        held = ""


def _command(conversation: "Conversation", line: str) -> str | None:
    """Do what a line that begins with / asks for."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word == "/quit":
        return "quit"
    if word == "/help":
        _tell(HELP)
    elif word == "/regenerate":
        _answer(conversation, conversation.regenerate(), show_ids=False)
    elif word == "/history":
        for message in conversation.messages:
            print(f"{message['role']}: {harmless(message['content'])}")
    elif word == "/ids":
        _show_ids(conversation)
    elif word == "/cache":
        if conversation.cache_use is None:
            raise CutawayError("Nothing is kept yet; say something first.")
        conversation.cache_use.show()
    elif word in ("/save", "/load"):
        if not rest:
            raise CutawayError(f"{word} needs a file, as in {word} talk.json.")
        if word == "/save":
            _tell(f"{len(conversation.messages)} messages written to {conversation.save(rest)}")
        else:
            conversation.load(rest)
            _tell(f"{len(conversation.messages)} messages read from {rest}")
    elif word in ("/system", "/reset"):
        system = [m for m in conversation.messages[:1] if m["role"] == "system"] if word == "/reset" else []
        conversation.messages = [{"role": "system", "content": rest}] if word == "/system" and rest else system
    else:
        raise CutawayError(f"There is no command {word}; /help lists them, and a text may begin with a space.")
    return None


def _answer(conversation: "Conversation", steps: "Iterator[Step]", show_ids: bool) -> None:
    """Print an answer as it comes; Ctrl-C ends it, and what was said stays in the conversation."""
    if show_ids:
        _show_ids(conversation)
    begun = first = time.perf_counter()
    count, finish = 0, "stopped by you"
    try:
        for step in steps:
            if count == 0:
                first = time.perf_counter()
            count += 1
            sys.stdout.write(harmless(step.text) if sys.stdout.isatty() else step.text)
            sys.stdout.flush()
            finish = step.finish or finish
    except KeyboardInterrupt:
        pass
    finally:
        steps.close()  # type: ignore[attr-defined]
        print(flush=True)
    ended = time.perf_counter()
    speed = f", {(count - 1) / (ended - first):,.1f} tokens/s" if count > 1 else ""
    reused = f" ({conversation.reused:,} more were read before)" if conversation.reused else ""
    _tell(
        f"{count:,} token{'s' if count != 1 else ''}, {finish}; {conversation.read:,} prompt tokens read in "
        f"{first - begun:.2f} s{reused}{speed}"
    )


def _show_ids(conversation: "Conversation") -> None:
    """Every token of the next prompt under its role: what the template writes, and the message's own words."""
    from rich.text import Text

    from cutaway.trace.drawing.page import LIKELY, Page, quoted

    page, tokenizer = Page.on(), conversation.model.tokenizer
    whole = 0
    for part in conversation.parts() if conversation.messages else []:
        page.heading(f"{part.role}, {len(part.ids)} tokens")
        whole += len(part.ids)
        for begun, ended, whose, style in (
            (0, part.start, "template", "dim"),
            (part.start, part.stop, "message", LIKELY),
            (part.stop, len(part.ids), "template", "dim"),
        ):
            line = Text()
            for token in part.ids[begun:ended]:
                told = f"{token} {quoted(harmless(tokenizer.piece(token)))}   "
                if line and line.cell_len + len(told) > page.width:
                    page.line(line)
                    line = Text()
                line.append(told if line else f"{whose:10}{told}", style=style)
            if line:
                page.line(line)
    page.line()
    page.note(f"{whole} tokens")


def _text_of(path: Path) -> str:
    try:
        return read_text(path).removesuffix("\n")
    except CutawayError as error:
        raise CutawayError(f"The system prompt: {error}") from None


def _tell(line: str) -> None:
    """A line that is not part of the conversation, on standard error."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, highlight=False).print(Text(line, style="dim"), soft_wrap=True)
