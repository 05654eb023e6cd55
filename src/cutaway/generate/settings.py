"""The settings of a generation as people give them, checked, as the request that a loop or a batch works on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.generate.record import Recording
from cutaway.generate.response import Limits, Request
from cutaway.generate.sampling import Sampling
from cutaway.spec import ModelSpec
from cutaway.spec.check import is_whole
from cutaway.text.tokenizer import Tokenizer


class Settings(TypedDict, total=False):
    """What else `generate` and `stream` take, all by name; each may be left out.

    `typical_p`, `repetition_penalty` (over prompt and response), `presence_penalty` and `frequency_penalty` (over
    the response), `logit_bias` ({id: number}; −∞ bans) and `order` ("cutaway", "hf", "vllm", "llama.cpp", or stage
    names) are those of `Sampling`. `alternatives`: so many of the likeliest tokens are told with each step.
    `record`: True keeps what every stage did (`step.record`), a `Recording` says how much. `force`: {step: token},
    steps counted from 0; a text of several tokens takes as many steps; one that is never reached raises
    CutawayError. `until`: a function of the text so far that ends the response when it returns something true.
    `guess`: so many tokens are guessed at a time from the text itself, which gives the same tokens in fewer passes.
    `cache`: a KVCache that an earlier call left; what it shares with the prompt is not run again. False keeps
    nothing: every step runs the whole text, as without a cache. `score_prompt`: the first step's `prompt` tells how
    likely each token of the prompt was.
    """

    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    order: str | Sequence[str]
    alternatives: int
    record: bool | Recording
    force: Mapping[int, int | str] | None
    until: Callable[[str], object] | None
    guess: int
    cache: KVCache | Literal[False] | None
    score_prompt: bool


_OF_SAMPLING = frozenset(
    {"typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "order"}
)


@dataclass(frozen=True)
class Basic:
    """The settings that `generate` and `stream` take in the order in which they stand."""

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Iterable[str] = ()


def make_request(
    spec: ModelSpec, tokenizer: Tokenizer | None, ids: Sequence[int], settings: Settings, basic: Basic
) -> Request:
    """The request that these settings make. Raises CutawayError for any that cannot be, before anything runs."""
    cache = settings.get("cache")
    if cache is not None and cache is not False and not isinstance(cache, KVCache):
        raise CutawayError(f"cache is {cache!r}; it must be a KVCache that an earlier call left, or False for none.")
    if unknown := sorted(set(settings) - set(Settings.__annotations__)):
        known = ", ".join(sorted(Settings.__annotations__))
        raise CutawayError(
            f"There is no setting {unknown[0]!r}; besides those with a place of their own there are {known}."
        )
    chosen = {name: value for name, value in settings.items() if name in _OF_SAMPLING}
    sampling = Sampling(basic.temperature, basic.top_k, basic.top_p, basic.min_p, **chosen)  # type: ignore[arg-type]
    for token in sampling.logit_bias or ():
        if token >= spec.vocab_size:
            raise CutawayError(f"logit_bias names token {token}; {spec.name} has ids 0 to {spec.vocab_size - 1}.")
    if not is_whole(basic.max_tokens) or basic.max_tokens < 1:
        raise CutawayError(f"max_tokens is {basic.max_tokens!r}; it must be a whole number, at least 1.")
    if basic.seed is not None and (not is_whole(basic.seed) or basic.seed < 0):
        raise CutawayError(f"The seed is {basic.seed!r}; it must be 0 or a positive whole number.")
    stop_ids = tokenizer.stop_ids if tokenizer is not None else frozenset[int]()
    return Request(
        ids=tuple(ids),
        limits=Limits(basic.max_tokens, spec.n_max, stop_ids, _stops(basic.stop, tokenizer)),
        sampling=sampling,
        seed=basic.seed,
        alternatives=settings.get("alternatives", 0),
        recording=_recording(settings.get("record", False)),
        force=_reachable(_forced(settings.get("force") or {}, spec, tokenizer), len(ids), basic.max_tokens, spec),
        until=settings.get("until"),
        guess=settings.get("guess", 0),
        cached=settings.get("cache") is not False,
        score_prompt=_scores(settings),
    )


def _scores(settings: Settings) -> bool:
    scores = settings.get("score_prompt", False)
    if not isinstance(scores, bool):
        raise CutawayError(f"score_prompt is {scores!r}; it must be True or False.")
    if scores and settings.get("cache"):
        raise CutawayError("To score a prompt all of it is run; leave out cache.")
    return scores


def _stops(stop: str | Iterable[str], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    if not isinstance(stop, Iterable):
        raise CutawayError(f"stop is {stop!r}; it must be a text or several.")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if stops and tokenizer is None:
        raise CutawayError("Stop strings need a tokenizer, and this checkpoint came without one.")
    return stops


def _recording(record: bool | Recording) -> Recording | None:
    if isinstance(record, Recording):
        return record
    if not isinstance(record, bool):
        raise CutawayError(f"record is {record!r}; it must be True, False or a Recording.")
    return Recording() if record else None


def _forced(force: Mapping[int, int | str], spec: ModelSpec, tokenizer: Tokenizer | None) -> dict[int, int]:
    """Each step's token; a text takes as many steps as it has tokens."""
    if not isinstance(force, Mapping):
        raise CutawayError(f"force is {force!r}; it must map steps to tokens, as in {{3: ' Lyon'}}.")
    forced: dict[int, int] = {}
    for step, told in force.items():
        if not is_whole(step) or step < 0:
            raise CutawayError(f"force names step {step!r}; steps are counted from 0.")
        if isinstance(told, str):
            if tokenizer is None:
                raise CutawayError(f"{spec.name} came without a tokenizer; force a token by its id, not as {told!r}.")
            tokens = tokenizer.encode(told, bos=False)
        else:
            tokens = [told]
        if not tokens:
            raise CutawayError(f"There is nothing to force at step {step}: {told!r} has no token.")
        for place, token in enumerate(tokens, start=int(step)):
            if not is_whole(token) or not 0 <= token < spec.vocab_size:
                raise CutawayError(f"Token {token!r} cannot be forced: {spec.name} has ids 0 to {spec.vocab_size - 1}.")
            if forced.setdefault(place, int(token)) != token:
                raise CutawayError(f"Two tokens are forced at step {place}: {forced[place]} and {token}.")
    return forced


def _reachable(forced: dict[int, int], length: int, max_tokens: int, spec: ModelSpec) -> dict[int, int]:
    """The same; CutawayError where a step is surely never reached."""
    last = max(forced, default=-1)
    if last >= max_tokens:
        raise CutawayError(
            f"force names step {last}, but max_tokens {max_tokens} ends at step {max_tokens - 1} (steps count from 0); "
            "name an earlier step or ask for more tokens."
        )
    if spec.n_max is not None and last > spec.n_max - length:
        raise CutawayError(
            f"force names step {last}, but after a prompt of {length} tokens the {spec.n_max} positions of {spec.name} "
            f"end at step {spec.n_max - length}; name an earlier step."
        )
    return forced


def seeds_of(seed: int | Sequence[int] | None, count: int) -> list[int | None]:
    """One seed for each of `count` sequences: the given ones, or a number and those that follow it.

    Raises CutawayError where there are more or fewer seeds than sequences.
    """
    if seed is None:
        return [None] * count
    if is_whole(seed):
        return [seed + index for index in range(count)]  # type: ignore[operator]
    if not isinstance(seed, Sequence) or len(seed) != count:
        raise CutawayError(f"seed is {seed!r}; it must be one whole number, or one for each of the {count} prompts.")
    return list(seed)


def refuse_one_prompt(prompts: object) -> None:
    """Raise CutawayError where one text, or what is no list, stands for several: letters would be prompts."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__getitem__") or not hasattr(prompts, "__len__"):
        raise CutawayError(f"generate_many takes a list of prompts, not {type(prompts).__name__}; [prompt] is one.")


def refuse_encoder(spec: ModelSpec) -> None:
    """Raise CutawayError for a model that cannot continue a text."""
    if spec.headless or not spec.causal:
        raise CutawayError(
            f"{spec.name} is an encoder: it reads a text in both directions and cannot continue one. "
            "Trace it, or take a vector for each text with `embed`."
        )


def refuse_one_cache(settings: Settings) -> None:
    """Raise CutawayError where several responses are to share one cache, which each would take from the others."""
    if settings.get("cache"):
        raise CutawayError(
            "One cache cannot serve several responses; leave it out: what they share is read once anyway."
        )


def refuse_shortcuts(request: Request, settings: Settings) -> None:
    """Raise CutawayError for what cannot be beside edits or a trace of each step."""
    if request.score_prompt:
        raise CutawayError(
            "Steps that are traced tell the prompt's logits: ask for points=['logits'], not score_prompt."
        )
    if request.guess or settings.get("cache") is not None:
        raise CutawayError(
            "Steps that are traced or edited run one token at a time from an empty cache; leave out guess and cache."
        )
