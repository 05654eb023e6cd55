"""What happened at one step, stage by stage, so that it can be looked at and done again without the model."""

from dataclasses import dataclass, replace

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.candidates import Candidates
from cutaway.generate.sampling import Sampling
from cutaway.generate.stages import History, Stage


@dataclass(frozen=True)
class Recording:
    """What a record keeps: so many `leading` candidates of every stage; the step's row of `logits` `[V]`, in the
    engine's own precision (196 kB for 49,152 tokens in float32), without which a step cannot be replayed; and,
    only if asked, the `whole` distribution after every stage."""

    leading: int = 20
    logits: bool = True
    whole: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.leading, int) or isinstance(self.leading, bool) or self.leading < 1:
            raise CutawayError(f"A record cannot keep {self.leading!r} leading candidates; it must be at least 1.")


@dataclass(frozen=True, eq=False)
class StageRecord:
    """What one stage left and what it took away.

    `ids` and `shares` are the leading candidates that are left, likeliest first, with their probabilities, and
    `tail` is the probability of all others that are left. `removed` candidates had `removed_share` of the
    probability before the stage; those that were among the leading ones are `removed_ids`, with what they had.
    What is left was multiplied by 1 / (1 − removed_share). The first stage of a step is the model's own
    distribution, "logits". `probabilities` `[V]` is there only where it was asked for.
    """

    name: str
    stage: Stage | None
    kept: int
    removed: int
    removed_share: float
    ids: np.ndarray
    logits: np.ndarray
    shares: np.ndarray
    tail: float
    removed_ids: np.ndarray
    removed_shares: np.ndarray
    whole: np.ndarray | None = None

    @property
    def probabilities(self) -> np.ndarray:
        """`[V]` float64, 0 for what is removed. Raises CutawayError where the record does not keep it."""
        if self.whole is None:
            raise CutawayError(
                f"The whole distribution after {self.name} was not kept; record with Recording(whole=True)."
            )
        return self.whole


@dataclass(frozen=True, eq=False, repr=False)
class StepRecord:
    """One step of the loop: the stages, the number that was drawn, and the piece of the line that it fell in.

    `number` from [0, 1) lies in `interval`, the token's piece of the line on which all shares are laid end to end
    by ascending id; a token that was forced was not drawn, and its interval is None. `entropy` (bits) and
    `margin` (p₁ − p₂) are those of the model's own distribution, before any stage: how undecided it was.
    """

    index: int
    token: int
    stages: tuple[StageRecord, ...]
    number: float
    interval: tuple[float, float] | None
    entropy: float
    margin: float
    forced: bool
    sampling: Sampling
    recording: Recording
    logits: np.ndarray | None
    history: History

    def __repr__(self) -> str:
        chain = " → ".join(f"{stage.name} {stage.kept}" for stage in self.stages)
        return f"<StepRecord {self.index}: {chain} → token {self.token}>"

    def replay(self, sampling: Sampling | None = None, number: float | None = None) -> "StepRecord":
        """The same step again, without the model: with other settings, or as if another number had been drawn.

        With neither, token, stages and interval come out the same. Raises CutawayError where the record keeps no
        logits, and for a number outside [0, 1).
        """
        if self.logits is None:
            raise CutawayError(f"The record of step {self.index} keeps no logits; record with Recording(logits=True).")
        if number is not None and not 0 <= number < 1:
            raise CutawayError(f"The number is {number}; it must lie from 0 to 1, and be below 1.")
        again = taken(
            Candidates.of(self.logits),
            self.logits,
            self.sampling if sampling is None else sampling,
            self.number if number is None else number,
            self.history.until(self.index),
            self.index,
            self.recording,
        )
        if self.forced and sampling is None and number is None:
            return replace(again, token=self.token, interval=None, forced=True)
        return again


def taken(
    own: Candidates,
    logits: np.ndarray,
    sampling: Sampling,
    number: float,
    history: History,
    index: int,
    recording: Recording,
) -> StepRecord:
    """Run the stages on the candidates `own` of the logits `[V]`, let the number fall, and write down all of it."""
    told = [stage_record(None, own, own, len(logits), recording)]
    last = own
    for stage in sampling.stages:
        before, last = last, stage(last, history)
        told.append(stage_record(stage, before, last, len(logits), recording))
    token, low, high = last.draw(number)
    return StepRecord(
        index=index,
        token=token,
        stages=tuple(told),
        number=number,
        interval=(low, high),
        entropy=float(own.entropy / np.log(2)),
        margin=_margin(own),
        forced=False,
        sampling=sampling,
        recording=recording,
        logits=np.array(logits) if recording.logits else None,  # the pass may use its memory again
        history=history,
    )


def _margin(own: Candidates) -> float:
    """By how much the likeliest is likelier than the second: p₁ − p₂; 1 where there is one token only."""
    best = own.weights[own.leading(2)] / own.total
    return float(best[0] - best[1]) if len(best) > 1 else 1.0


def stage_record(
    stage: Stage | None, before: Candidates, after: Candidates, vocab_size: int, recording: Recording
) -> StageRecord:
    """What became of `before`; `stage` None is the model's own distribution."""
    best = after.leading(recording.leading)
    probabilities = after.weights[best] / after.total
    removed = len(before) - len(after)
    gone, gone_shares, gone_share = _NONE, _NO_SHARES, 0.0
    if removed:
        filtered = stage is not None and stage.name in FILTERS
        gone, gone_shares, gone_share = _removed(before, after, recording.leading, filtered)
    return StageRecord(
        name="logits" if stage is None else stage.name,
        stage=stage,
        kept=len(after),
        removed=removed,
        removed_share=gone_share,
        ids=after.ids_at(best),
        logits=after.at(best),
        shares=probabilities,
        tail=max(0.0, 1.0 - float(probabilities.sum())) if len(after) > len(best) else 0.0,
        removed_ids=gone,
        removed_shares=gone_shares,
        whole=after.whole(vocab_size) if recording.whole else None,
    )


FILTERS = ("top_k", "top_p", "min_p", "typical_p")  # stages that take away and change no logit
_NONE = np.empty(0, dtype=np.intp)
_NO_SHARES = np.empty(0)


def _removed(
    before: Candidates, after: Candidates, leading: int, filtered: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """Those of the leading candidates that are gone, what they had, and what all that are gone had together."""
    best = before.leading(leading)
    ids = before.ids_at(best)
    _, stayed = after.positions(ids)
    gone = np.ones(len(ids), dtype=bool)
    gone[stayed] = False
    if filtered:  # the logits that stayed are what they were, so that weights differ by one factor at most
        left = after.total * np.exp(after.highest - before.highest) / before.total
    else:
        places, _ = before.positions(after.ids)
        left = float(before.weights[places].sum()) / before.total
    return ids[gone], before.weights[best[gone]] / before.total, max(0.0, 1.0 - float(left))


def distribution(logits: np.ndarray, sampling: Sampling, history: History | None = None) -> list[StageRecord]:
    """What every stage makes of the logits `[V]`, with whole distributions; the last is the one drawn from.

    Raises CutawayError for logits that hold NaN or +∞, or nothing but −∞.
    """
    history = history or History()
    before, told = Candidates.of(logits), []
    for stage in sampling.stages:
        after = stage(before, history)
        told.append(stage_record(stage, before, after, len(logits), Recording(whole=True)))
        before = after
    return told


def alternatives(own: Candidates, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest ids with their natural-log probabilities, likeliest first."""
    best = own.leading(count)
    logarithms = own.at(best) - own.highest - np.log(own.total)
    return tuple(zip(own.ids_at(best).tolist(), logarithms.tolist(), strict=True))
