"""How likely a model found a text: the log-probability of each token, perplexity, divergence from another model."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cutaway.errors import CutawayError
from cutaway.trace.prompt import Prompt


@dataclass(frozen=True, eq=False)
class Score:
    """One text. `logprobs` `[T]` float64 are ln p(token | those before it in its window), NaN where there are none.

    `divergence` `[T]` is Σ p ln(p / q) in nats between this model's prediction of the token and the other's, where
    another was given. The text was read in windows of at most `context` tokens, `stride` apart; None where it was read
    whole.
    """

    prompt: Prompt
    logprobs: np.ndarray
    divergence: np.ndarray | None
    context: int | None
    stride: int | None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt.ids

    @property
    def scored(self) -> int:
        """How many tokens were predicted."""
        return int(np.isfinite(self.logprobs).sum() + np.isneginf(self.logprobs).sum())

    @property
    def total(self) -> float:
        """ln p of the whole text: the sum over the tokens that were predicted, 0 where there are none."""
        return float(self.logprobs[~np.isnan(self.logprobs)].sum())

    @property
    def sums(self) -> "Total":
        """The sums of a corpus that is this one text."""
        return Total.of([self])

    @property
    def loss(self) -> float:
        """The mean of −ln p over the tokens that were predicted. Raises CutawayError for a single token."""
        return self.sums.loss

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens the model would have been as unsure."""
        return self.sums.perplexity

    @property
    def mean_divergence(self) -> float:
        """The mean of `divergence` over the tokens that were predicted."""
        return self.sums.divergence

    def show(self) -> None:
        """Print the text, each token coloured by how much it surprises."""
        from cutaway.trace.drawing.score import draw_score

        draw_score(self)

    def __repr__(self) -> str:
        told = f", perplexity {self.perplexity:.4g}" if self.scored else ""
        return f"<Score of {len(self.ids):,} tokens: ln p = {self.total:.4f}{told}>"


class Total:
    """Sums over the scores of a corpus: each predicted token counts once, whatever text it stands in."""

    def __init__(self) -> None:
        self.texts, self.tokens, self.scored = 0, 0, 0
        self.logprob = 0.0
        self._divergence: float | None = None

    @classmethod
    def of(cls, scores: Iterable[Score]) -> "Total":
        total = cls()
        for score in scores:
            total.add(score)
        return total

    def add(self, score: Score) -> None:
        self.texts, self.tokens, self.scored = self.texts + 1, self.tokens + len(score.ids), self.scored + score.scored
        self.logprob += score.total
        if score.divergence is not None:
            predicted = score.divergence[~np.isnan(score.divergence)]
            self._divergence = (self._divergence or 0.0) + float(predicted.sum())

    @property
    def compared(self) -> bool:
        """Whether another model was given."""
        return self._divergence is not None

    @property
    def loss(self) -> float:
        """The mean of −ln p over all predicted tokens. Raises CutawayError where there is none."""
        self._refuse_nothing()
        return -self.logprob / self.scored

    @property
    def perplexity(self) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(self.loss))

    @property
    def divergence(self) -> float:
        """The mean divergence over all predicted tokens. Raises CutawayError where no other model was given."""
        self._refuse_nothing()
        if self._divergence is None:
            raise CutawayError("There is no divergence: no other model was given; score with against=model.")
        return self._divergence / self.scored

    def _refuse_nothing(self) -> None:
        if self.scored == 0:
            raise CutawayError(
                "There is no token to score: each is predicted from those before it, and no text has two tokens."
            )
