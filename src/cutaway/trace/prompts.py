"""What people give as a prompt, checked: a text, ids, or vectors in the place of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace.prompt import Prompt

PromptLike = str | Sequence[int] | np.ndarray
NO_TOKEN = -1  # the id of what was given as a vector


@dataclass(frozen=True, eq=False)
class Given:
    """A prompt as people give it, with the sentence kinds of its tokens where they told them."""

    prompt: PromptLike
    types: Any = None


@dataclass(frozen=True, eq=False)
class Fed:
    """What a pass is fed: the prompt, the kinds of its tokens `[T]`, the vectors `[T, d]` in their place."""

    prompt: Prompt
    types: np.ndarray | None = None
    vectors: np.ndarray | None = None

    @property
    def sequence(self) -> np.ndarray:
        """The ids `[T]`, or the vectors."""
        return np.asarray(self.prompt.ids) if self.vectors is None else self.vectors


def fed(given: Given, spec: ModelSpec, read: Callable[[PromptLike], Prompt]) -> Fed:
    """What is run for what was given; `read` makes a prompt of texts and ids. Raises CutawayError as `trace` does."""
    vectors = None
    if is_vectors(given.prompt):
        prompt, vectors = read_vectors(np.asarray(given.prompt), spec)
    else:
        prompt = read(given.prompt)
    return Fed(prompt, read_types(given.types, len(prompt.ids), spec), vectors)


def is_vectors(prompt: Any) -> bool:
    """Whether a prompt is `[T, d]` floats."""
    return isinstance(prompt, np.ndarray) and prompt.ndim == 2 and prompt.dtype.kind == "f"


@dataclass(frozen=True, eq=False)
class Reader:
    """How a model reads: its spec, and its tokenizer where it came with one."""

    spec: ModelSpec
    tokenizer: Tokenizer | None

    def required(self) -> Tokenizer:
        """The tokenizer. Raises CutawayError where the checkpoint came without one."""
        if self.tokenizer is None:
            raise CutawayError(
                f"{self.spec.name} came without a tokenizer; give the prompt as a list of token ids, or put a "
                "tokenizer.json beside its weights."
            )
        return self.tokenizer

    def piece(self, token: int) -> str:
        """How a token reads; by its number where the tokenizer knows it not, as in an embedding padded past it."""
        if self.tokenizer is None:
            return str(token)
        return self.tokenizer.piece(token) if token < self.tokenizer.vocab_size else f"<{token}>"

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(map(self.piece, ids))

    def read(self, prompt: PromptLike, *, any_length: bool = False) -> Prompt:
        """What would be run for `prompt`. Raises CutawayError for what cannot be run.

        With `any_length` it may be longer than learned positions reach: it is then run in parts.
        """
        if isinstance(prompt, str):
            encoding = self.required().explain(prompt)
            ids, added, text = encoding.ids, encoding.reason, prompt
            if not prompt or not ids:
                raise CutawayError("The prompt is empty; the model needs at least one token to predict what follows.")
        else:
            ids, added, text = read_ids(prompt), "Nothing was added: the prompt was given as ids.", None
            if not ids:
                raise CutawayError("The prompt is an empty list; the model needs at least one token id.")
        for position, token in enumerate(ids):
            if not 0 <= token < self.spec.vocab_size:
                raise CutawayError(
                    f"Token id {token} at position {position} is outside the vocabulary of {self.spec.name}, "
                    f"which has ids 0 to {self.spec.vocab_size - 1}."
                )
        if not any_length:
            _refuse_too_long(len(ids), self.spec)
        return Prompt(tuple(ids), self.pieces(ids), added, text)


def read_vectors(vectors: np.ndarray, spec: ModelSpec) -> tuple[Prompt, np.ndarray]:
    """Vectors `[T, d]` in the place of tokens, and the prompt that stands for them: none of its ids is a token's."""
    if vectors.shape[1] != spec.d_model or len(vectors) == 0:
        raise CutawayError(
            f"The vectors are {list(vectors.shape)}; {spec.name} reads [T, {spec.d_model}], at least one row."
        )
    if not np.isfinite(vectors).all():
        raise CutawayError("The vectors must be finite numbers; some are infinite or no numbers at all.")
    _refuse_too_long(len(vectors), spec)
    told = Prompt((NO_TOKEN,) * len(vectors), ("·",) * len(vectors), "Vectors were given in the place of tokens.")
    return told, vectors.copy()


def read_ids(prompt: Any) -> list[int]:
    """A list of token ids. Raises CutawayError for anything else."""
    try:
        array = np.asarray(prompt)
    except ValueError:  # lists of different lengths in a list
        raise CutawayError("A prompt is a text or one list of token ids, not several lists; run them singly.") from None
    if array.ndim == 0:
        raise CutawayError(
            f"A prompt is a text or one list of whole-number token ids, not {type(prompt).__name__}: {prompt!r}."
        )
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise CutawayError(
            f"A prompt is a text or one list of whole-number token ids, not {type(prompt).__name__} of {array.dtype}, "
            f"shape {list(array.shape)}."
        )
    return [int(token) for token in array]


def read_types(types: Sequence[int] | np.ndarray | None, length: int, spec: ModelSpec) -> np.ndarray | None:
    """The sentence kind of every token, checked; None where none were given."""
    if types is None:
        return None
    if spec.token_types is None:
        raise CutawayError(f"{spec.name} tells no kinds of sentences apart; leave `types` out.")
    try:
        kinds = np.asarray(types)
    except ValueError:  # lists of different lengths in a list
        kinds = np.asarray(None)
    if kinds.dtype.kind not in "iu" or kinds.shape != (length,):
        raise CutawayError(
            f"`types` must be whole numbers, one for each of the {length} tokens, not {kinds.dtype} of shape "
            f"{list(kinds.shape)}."
        )
    outside = np.flatnonzero((kinds < 0) | (kinds >= spec.token_types))
    if outside.size:
        raise CutawayError(
            f"The type {kinds[outside[0]]} at position {outside[0]} is unknown: {spec.name} has types 0 to "
            f"{spec.token_types - 1}."
        )
    return kinds


def _refuse_too_long(length: int, spec: ModelSpec) -> None:
    if spec.n_max is not None and length > spec.n_max:
        raise CutawayError(
            f"The prompt has {length} tokens, but {spec.name} has learned positions for {spec.n_max} "
            "only: there is no row to look up for the rest. Shorten the prompt."
        )
