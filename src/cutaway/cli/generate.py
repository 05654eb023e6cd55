"""`cutaway generate`: a text continued, shown as it comes."""

import argparse
import random
import sys
import time
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import (
    add_model,
    add_prompt,
    add_sampling,
    load_model,
    print_json,
    read_prompt,
    sampling_settings,
)
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.generate import Generation, Recording, Step
    from cutaway.model import Model

_ENDED = {
    "length": "as many as --max-tokens asked for",
    "stop token": "ended by the model itself",
    "stop string": "ended at a --stop text",
    "context": "ended where the model's learned positions end",
    "callback": "ended by a callback",
    "cancelled": "cancelled",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    add_model(parser)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="at most so many tokens (128)")
    add_sampling(parser)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message to a chat model")
    parser.add_argument(
        "--guess",
        type=int,
        default=0,
        metavar="N",
        help="guess N tokens at a time from the text itself: the same tokens, in fewer passes where it repeats itself",
    )
    looking = parser.add_argument_group("looking closer")
    looking.add_argument(
        "--force",
        action="append",
        default=[],
        metavar="STEP=TEXT",
        help='put another token at a step (from 0), as in "3= Lyon", beside what comes without it; repeatable',
    )
    looking.add_argument(
        "--beside-greedy", action="store_true", help="show what always taking the likeliest gives, beside the draws"
    )
    looking.add_argument(
        "--steps",
        action="store_true",
        help="then show each step: probability, entropy, margin, what was drawn, what else",
    )
    looking.add_argument(
        "--show-cache",
        action="store_true",
        help="then show the keys and values that were kept: bytes, rows reused and run at each step, the work saved",
    )
    looking.add_argument(
        "--no-cache",
        action="store_true",
        help="keep nothing: run the whole text at every step, for the same tokens; --show-cache runs both and compares",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def run(options: argparse.Namespace) -> int:
    given = read_prompt(options)
    if options.chat and not isinstance(given, str):
        raise CutawayError("--chat wraps a text into the model's chat template; ids stay as they are, so leave it out.")
    if options.force and options.beside_greedy:
        raise CutawayError("--force and --beside-greedy each show two continuations; give one of them.")
    forced = _forced(options.force)
    if forced and 0 < options.max_tokens <= max(forced):
        raise CutawayError(
            f"--force names step {max(forced)}, but --max-tokens {options.max_tokens} ends at step "
            f"{options.max_tokens - 1} (steps count from 0); name an earlier step or ask for more tokens."
        )
    settings = _settings(options)
    model = load_model(options)
    prompt: str | list[int] = given
    if options.chat:
        if not given:
            raise CutawayError("The prompt is empty; a chat needs at least one character from the user.")
        from cutaway.generate.conversation import chat_ids

        prompt = chat_ids(model.tokenizer, [{"role": "user", "content": given}])
    if forced or options.beside_greedy:
        return _side_by_side(model, prompt, settings, forced, options)
    if options.json:
        return _as_json(model, prompt, settings, options)
    return _as_text(model, given, prompt, settings, options)


def _looked_at() -> "Recording":
    """What is kept of every step that is to be shown."""
    from cutaway.generate import Recording

    return Recording(leading=8, logits=False)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return sampling_settings(options) | {
        "max_tokens": options.max_tokens,
        "stop": options.stop,
        "guess": options.guess,
        "cache": False if options.no_cache else None,
        "record": _looked_at() if options.steps else False,
    }


def _forced(given: list[str]) -> dict[int, str]:
    forced: dict[int, str] = {}
    for text in given:
        step, equals, token = text.partition("=")
        if not equals or not step.strip().isdecimal() or not token:
            raise CutawayError(
                f'--force is {text!r}; it takes a step and a text, as in "3= Lyon" (steps count from 0).'
            )
        if forced.get(int(step), token) != token:
            raise CutawayError(
                f"--force names step {int(step)} twice, with {forced[int(step)]!r} and {token!r}; give one of them."
            )
        forced[int(step)] = token
    return forced


def _side_by_side(
    model: "Model",
    prompt: str | list[int],
    settings: dict[str, Any],
    forced: dict[int, str],
    options: argparse.Namespace,
) -> int:
    """Two continuations of one prompt, in one batch: with and without a forced token, or drawn and greedy."""
    from cutaway.generate.draw_cache import draw_cache
    from cutaway.generate.draw_steps import Continuation, draw_beside, draw_steps

    if not forced and options.temperature == 0:
        raise CutawayError(
            "At temperature 0 the draws are greedy themselves; give --beside-greedy a temperature above 0."
        )
    other: dict[str, Any] = {"force": forced} if forced else {"temperature": 0}
    titles = (
        ("as it comes", "with " + ", ".join(f'"{text}" at step {step}' for step, text in forced.items()))
        if forced
        else (_drawn(settings), "greedy")
    )
    watched = settings | {"record": _looked_at()}
    if settings["seed"] is None:
        watched["seed"] = random_seed()  # both draw the same numbers, so that only what was changed differs
    outs = [model.generate(prompt, **(watched | changed)) for changed in ({}, other)]
    if options.json:
        documents = [_document(model, prompt, out, settings) for out in outs]
        print_json(dict(zip(("free", "forced") if forced else ("drawn", "greedy"), documents, strict=True)))
        return 0
    shown = []
    for title, out in zip(titles, outs, strict=True):
        given = frozenset(step.index for step in out.steps if step.forced)
        shown.append(Continuation(title, out, [harmless(text) for text in said(model, out)], given))
    draw_beside(shown[0], shown[1])
    for continuation in shown:
        if options.steps:
            draw_steps(continuation.out.steps, lambda token: harmless(model.piece(token)), title=continuation.title)
        if options.show_cache and continuation.out.cache is not None:
            draw_cache(continuation.out.cache, title=continuation.title)
    return 0


def said(model: "Model", out: "Generation") -> list[str]:
    """The text of each token of a response, whole characters with the last of their tokens."""
    known = model.tokenizer.vocab_size
    stream = model.tokenizer.stream(after=[token for token in out.prompt_ids if token < known], skip_special=True)
    texts = [stream.push(token) if token < known else "" for token in out.tokens]
    texts[-1:] = [text + stream.flush() for text in texts[-1:]]
    return texts


def random_seed() -> int:
    """A seed that nobody chose."""
    return random.randrange(2**32)


def _drawn(settings: dict[str, Any]) -> str:
    return f"drawn at T = {settings['temperature']:g}"


def _as_json(model: "Model", prompt: str | list[int], settings: dict[str, Any], options: argparse.Namespace) -> int:
    document = _document(model, prompt, model.generate(prompt, **settings), settings)
    if options.chat:
        document["prompt"] = model.tokenizer.decode(document["prompt_ids"])
    print_json(document)
    return 0


def _document(model: "Model", prompt: str | list[int], out: "Generation", settings: dict[str, Any]) -> dict[str, Any]:
    from cutaway.generate.repetition import repetition

    tokens: list[dict[str, Any]] = [
        {"id": token, "piece": model.piece(token), "logprob": logprob}
        for token, logprob in zip(out.tokens, out.logprobs, strict=True)
    ]
    for told, step in zip(tokens, out.steps, strict=False):
        if (record := step.record) is not None:
            told |= {"entropy_bits": record.entropy, "margin": record.margin, "number": record.number}
            told |= {"interval": record.interval, "forced": step.forced}
            told["stages"] = [
                {"stage": stage.name, "kept": stage.kept, "removed_share": stage.removed_share, "tail": stage.tail}
                | {"leading": dict(zip(stage.ids.tolist(), stage.shares.tolist(), strict=True))}
                for stage in record.stages
            ]
    measured = repetition(out.tokens)
    return {
        "model": model.spec.name,
        "engine": model.engine.name,
        "settings": _told_settings(settings),
        "prompt": prompt if isinstance(prompt, str) else None,
        "prompt_ids": out.prompt_ids,
        "text": out.text,
        "tokens": tokens,
        "finish": out.finish,
        "repeated": measured.repeated,
        "loop": None if measured.loop is None else asdict(measured.loop),
        "passes": out.passes,
        "prompt_seconds": out.prompt_seconds,
        "decode_seconds": out.decode_seconds,
        "tokens_per_second": out.tokens_per_second,
        "cache": None if out.cache is None else out.cache.as_dict(),
    }


def _told_settings(settings: dict[str, Any]) -> dict[str, Any]:
    biases = settings["logit_bias"] or {}
    written = {token: bias if isfinite(bias) else "-inf" for token, bias in biases.items()}  # JSON has no infinity
    told = {name: value for name, value in settings.items() if name != "record"}
    return told | {"logit_bias": written or None, "cache": settings["cache"] is not False}


def _as_text(
    model: "Model",
    given: str | list[int],
    prompt: str | list[int],
    settings: dict[str, Any],
    options: argparse.Namespace,
) -> int:
    if options.show_cache and options.no_cache and settings["seed"] is None:
        settings["seed"] = random_seed()  # both runs draw the same numbers
    steps = model.stream(prompt, **settings)  # wrong settings are refused here, before anything is shown
    watched = sys.stdout.isatty()
    begun = first = time.perf_counter()
    finish, last = "length", ""
    taken: list[Step] = []
    try:
        for step in steps:
            if not taken:
                first = time.perf_counter()
                if watched:
                    _show_prompt(given, "\n" if options.chat else "")
            text = harmless(step.text) if watched else step.text
            if text:
                last = text
                sys.stdout.write(text)
                sys.stdout.flush()
            taken.append(step)
            finish = step.finish or finish
    finally:
        if watched and taken:
            print(flush=True)
    if not watched and not last.endswith("\n"):
        print(file=sys.stderr)  # both may end up in one place, and the text ends where the model ended it
    if options.steps:
        from cutaway.generate.draw_steps import draw_steps

        draw_steps(taken, lambda token: harmless(model.piece(token)))
    _tell(model, prompt, taken, finish, first - begun, time.perf_counter() - first)
    if options.show_cache:
        _show_cache(model, prompt, taken, settings)
    return 0


def _show_cache(model: "Model", prompt: str | list[int], taken: "list[Step]", settings: dict[str, Any]) -> None:
    """What was kept at each step; after a run that kept nothing, the same with a cache beside it, timed."""
    from cutaway.generate.cache_use import CacheUse
    from cutaway.generate.draw_cache import draw_cache
    from cutaway.generate.draw_steps import draw_beside_cached

    ids = model.prompt(prompt).ids
    told = tuple(step.cache for step in taken if step.cache is not None)
    use = CacheUse(model.spec, model.engine.dtype.name, len(ids), settings["cache"] is not False, told)
    draw_cache(use)
    if not use.kept:
        without, with_ = (model.generate(list(ids), **(settings | {"cache": kept})) for kept in (False, None))
        draw_beside_cached(without, with_)


def _show_prompt(prompt: str | list[int], end: str) -> None:
    from rich.console import Console
    from rich.text import Text

    shown = prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) + " →"
    Console(highlight=False).print(Text(harmless(shown), style="dim"), end=end, soft_wrap=True)
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Control characters spelt out: a model may write any, and a terminal would obey them."""
    return "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else f"\\x{ord(c):02x}" for c in text)


def _tell(
    model: "Model", prompt: str | list[int], taken: "list[Step]", finish: str, prompt_time: float, rest: float
) -> None:
    """How it ended and how fast it went: one line on standard error."""
    from rich.console import Console
    from rich.text import Text

    length = len(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    count, passes = len(taken), sum(not step.guessed for step in taken)
    guessed = f", {count / passes:.2f} tokens a pass" if passes < count else ""
    speed = f", {(count - 1) / rest:,.1f} tokens/s" if count > 1 and rest > 0 else ""
    line = (
        f"{_counted(count, 'token')}, {_ENDED[finish]}; {_counted(length, 'prompt token')} in {prompt_time:.2f} s"
        f"{speed}{guessed} ({model.engine.name} engine)"
    )
    Console(stderr=True, highlight=False).print(Text(line, style="dim"), soft_wrap=True)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
