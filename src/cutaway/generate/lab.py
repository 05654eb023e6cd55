"""The sampling lab: one row of logits looked at under several temperatures and filters, and drawn from (chapter 14)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.candidates import Candidates
from cutaway.generate.record import Recording, StageRecord, distribution, taken
from cutaway.generate.sampling import Sampling, run_stages
from cutaway.generate.stages import History

TEMPERATURES = (0.3, 0.7, 1.0, 1.5, 2.0)
FILTERS = (("top_k", 40), ("top_p", 0.9), ("top_p", 0.95), ("min_p", 0.1))  # shown where none is asked for
MOST_DRAWS = 1_000_000
NOTHING_SAID = History()


@dataclass(frozen=True)
class Row:
    """One line of the lab: a token, or several that were given under one name; `ids` says which."""

    label: str
    ids: tuple[int, ...]
    logit: float


@dataclass(frozen=True)
class Heated:
    """The distribution at one temperature: the rows' shares, that of all other tokens, its entropy in bits, and how
    many tokens each filter by itself would keep there."""

    temperature: float
    shares: tuple[float, ...]
    others: float
    entropy: float
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Filter:
    """One filter by itself at the lab's temperature: how many tokens it keeps, and how many of each row's."""

    name: str
    value: float
    kept: int
    of_rows: tuple[int, ...]

    @property
    def label(self) -> str:
        """ "top-p 0.9" """
        return f"{self.name.replace('_', '-')} {self.value:g}"


@dataclass(frozen=True)
class Draws:
    """How often each row came up in `count` draws, beside what is expected; the last entry is all other tokens."""

    count: int
    seed: int
    drawn: tuple[int, ...]
    expected: tuple[float, ...]


@dataclass(frozen=True)
class Lab:
    """All of it. `shares` and `sums` are those at the sampling's own temperature; `stages` what its chain did."""

    rows: tuple[Row, ...]
    others: int
    sampling: Sampling
    heated: tuple[Heated, ...]
    shares: tuple[float, ...]
    sums: tuple[float, ...]
    filters: tuple[Filter, ...]
    stages: tuple[StageRecord, ...]
    draws: Draws


def lab(
    logits: np.ndarray,
    rows: Sequence[Row],
    sampling: Sampling,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    filters: Sequence[tuple[str, float]] = (),
    draws: int = 1000,
    seed: int = 0,
) -> Lab:
    """Work out everything that the lab shows of the logits `[V]`; `rows` are the tokens that it names.

    `filters` are looked at one by one; those of `sampling` are what the draws go through, after one another.
    Raises CutawayError for settings that cannot be.
    """
    if draws < 1:
        raise CutawayError(f"{draws} draws are none to look at; ask for at least 1.")
    if draws > MOST_DRAWS:
        raise CutawayError(f"{draws:,} draws would take too long; ask for at most {MOST_DRAWS:,}.")
    if not temperatures:
        raise CutawayError("There is no temperature to look at; give at least one.")
    chosen = list(filters) or [
        (name, value)
        for name in ("top_k", "top_p", "min_p", "typical_p")
        if (value := getattr(sampling, name)) is not None
    ]
    chosen = chosen or list(FILTERS)
    plain = Sampling(sampling.temperature)
    shares = _shares(distribution(logits, plain)[-1].probabilities, rows)
    last = run_stages(Candidates.of(logits), sampling.stages, NOTHING_SAID)
    random = np.random.default_rng(seed)
    drawn = np.bincount([last.draw(random.random())[0] for _ in range(draws)], minlength=len(logits))
    counts = [int(drawn[list(row.ids)].sum()) for row in rows]
    expected = [draws * share for share in _shares(last.whole(len(logits)), rows)]
    record = taken(Candidates.of(logits), logits, sampling, 0.0, NOTHING_SAID, 0, Recording(leading=len(rows)))
    return Lab(
        rows=tuple(rows),
        others=len(logits) - sum(len(row.ids) for row in rows),
        sampling=sampling,
        heated=tuple(_heated(logits, rows, temperature, chosen) for temperature in temperatures),
        shares=tuple(shares),
        sums=tuple(np.cumsum(shares).tolist()),
        filters=tuple(_filter(logits, rows, plain, name, value) for name, value in chosen),
        stages=record.stages,
        draws=Draws(draws, seed, (*counts, draws - sum(counts)), (*expected, max(0.0, draws - sum(expected)))),
    )


def likeliest_rows(logits: np.ndarray, count: int, labels: Sequence[str] | None = None) -> list[Row]:
    """The `count` likeliest tokens as rows; `labels[i]` names token i (by its number where there are none)."""
    own = Candidates.of(logits)
    return [
        Row(str(token) if labels is None else labels[token], (token,), float(logits[token]))
        for token in own.ids[own.leading(count)].tolist()
    ]


def read_logits(text: str) -> tuple[np.ndarray, list[Row]]:
    """ "validate=8.3 check=7.1 rest*400=0.2" as logits `[V]` and one row for each name, the largest logit first.

    `name*n=ℓ` stands for n tokens of the same logit; a number alone is named by its place. Raises CutawayError for
    what cannot be read so.
    """
    logits: list[float] = []
    rows: list[Row] = []
    named: set[str] = set()
    for word in text.replace(",", " ").split():
        name, equals, value = word.rpartition("=")
        label, star, times = name.rpartition("*")
        if not star:
            label, times = name, "1"
        try:
            logit = float(value)
            count = int(times)
        except ValueError:
            logit, count = math.nan, 0
        if math.isnan(logit) or logit == math.inf or count < 1 or (equals and not label):
            raise CutawayError(
                f"--logits holds {word!r}; it takes name=number, name*count=number or numbers, as in "
                '"Paris=8.3 rest*400=0".'
            )
        if label and label in named:
            raise CutawayError(f"--logits names {label!r} twice; give each name once.")
        named.add(label)
        if count > 1_000_000 - len(logits):
            raise CutawayError(f"{word!r} makes more than a million tokens; that is more than any vocabulary has.")
        ids = tuple(range(len(logits), len(logits) + count))
        shown = label or f"token {len(logits)}"
        rows.append(Row(f"{shown} (×{count:,})" if count > 1 else shown, ids, logit))
        logits += [logit] * count
    if not logits:
        raise CutawayError('--logits is empty; give at least one, as in "Paris=8.3 Lyon=7.1".')
    return np.array(logits), sorted(rows, key=lambda row: -row.logit)


def stretched(gaps: Sequence[float], temperature: float) -> list[float]:
    """e^(−gap / T): what a token that lies `gap` below the largest logit weighs beside the likeliest, 1 at gap 0.

    The curve of T = 2 is that of T = 1 drawn twice as wide (chapter 14.2).
    """
    if temperature == 0:
        return [float(gap == 0) for gap in gaps]
    return [math.exp(-gap / temperature) for gap in gaps]


def _heated(logits: np.ndarray, rows: Sequence[Row], temperature: float, chosen: Sequence[tuple[str, float]]) -> Heated:
    hot = run_stages(Candidates.of(logits), Sampling(temperature).stages, NOTHING_SAID)
    shares = _shares(hot.whole(len(logits)), rows)
    kept = tuple(
        len(run_stages(Candidates.of(logits), _with(Sampling(temperature), name, value).stages, NOTHING_SAID))
        for name, value in chosen
    )
    return Heated(temperature, tuple(shares), max(0.0, 1.0 - sum(shares)), hot.entropy / math.log(2), kept)


def _filter(logits: np.ndarray, rows: Sequence[Row], plain: Sampling, name: str, value: float) -> Filter:
    left = run_stages(Candidates.of(logits), _with(plain, name, value).stages, NOTHING_SAID)
    inside = np.zeros(len(logits), dtype=bool)
    inside[left.ids] = True
    return Filter(name, value, len(left), tuple(int(inside[list(row.ids)].sum()) for row in rows))


def _with(sampling: Sampling, name: str, value: float) -> Sampling:
    return replace(sampling, **{name: value})  # type: ignore[arg-type]


def _shares(probabilities: np.ndarray, rows: Sequence[Row]) -> list[float]:
    return [float(probabilities[list(row.ids)].sum()) for row in rows]
