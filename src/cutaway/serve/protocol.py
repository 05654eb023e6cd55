"""What page and server say to one another, written once: `typescript.py` makes the page's types of these records.

JSON carries the small things. Tensors travel as binary: each is a `TensorHeader` as JSON, its length before it
(uint32, little endian), padded with spaces so that the numbers begin at a multiple of 8, then the numbers, padded
with zeros to a multiple of 8. Several stand one after another in one answer. A run that is asked for with `slices`
answers in one with all that the page draws first: the manifest as such a header without numbers, the lengths of the
streams' rows as a tensor "norms", the median of each over the tokens as "medians", the last row of the logits where
there are any, then the slices.
"""

from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["u8", "f32"]
Kind = Literal["signed", "weights", "ids"]
State = Literal["ready", "loading", "here", "absent", "failed"]

MIDDLE = 128  # of the 8-bit codes: 0 is hidden (masked), 1 … 255 are −scale … scale, 128 is zero
STEPS = 127  # codes on each side of the middle
WEIGHT_STEPS = 254  # of the codes of weights: 1 is 0, 255 is 1


@dataclass(frozen=True)
class Failure:
    """Every refusal: one or two sentences for people, and a word for programs."""

    error: str
    kind: Literal["refused", "busy", "missing", "forbidden", "too long"]


@dataclass(frozen=True)
class ModelEntry:
    """One model that may be chosen; `note` says why it cannot be, or how to get it."""

    name: str
    title: str
    size_bytes: int
    state: State
    note: str


@dataclass(frozen=True)
class PointCard:
    """A point as a kind of layer has it: what it is, why, and its formula in LaTeX."""

    name: str
    symbols: list[str]
    meaning: str
    reason: str
    chapter: str
    kind: Kind
    formula: str


@dataclass(frozen=True)
class LayerKind:
    """Layers `first:stop`, which are built alike."""

    first: int
    stop: int
    sizes: dict[str, int]
    points: list[PointCard]
    facts: list[str]
    dot_inputs: list[str]
    parallel: bool
    placement: Literal["pre", "post"]
    gated: bool
    activation: str
    gate_input: bool


@dataclass(frozen=True)
class ModelCard:
    """What a model is; asked for once."""

    name: str
    origin: str
    engine: str
    dtype: str
    parameters: int
    sizes: dict[str, int]
    points: list[PointCard]
    layers: list[LayerKind]
    context_length: int | None
    longest: int
    generates: bool
    examples: list[str]
    stop_ids: list[int]
    parts: list[str]


@dataclass(frozen=True)
class Token:
    """One token of the prompt."""

    id: int
    piece: str


@dataclass(frozen=True)
class NextTokenCard:
    """One candidate for the next token, with its logit and its probability at temperature 1."""

    id: int
    piece: str
    logit: float
    p: float


@dataclass(frozen=True)
class PassWork:
    """FLOPs of this pass whole, of its last token alone with a cache, and what that cache weighs."""

    whole: int
    step: int
    cache_bytes: int
    cache_bytes_per_token: int


@dataclass(frozen=True)
class EditCard:
    """One edit of a run: its JSON form, in words, the points at which it acted, on how many elements, how many it
    made others.
    """

    edit: dict[str, Any]
    words: str
    points: list[str]
    elements: int
    changed: int


@dataclass(frozen=True)
class Manifest:
    """The answer to a run. `captured` says which points are at hand; the others are computed when asked for."""

    run: str
    model: str
    tokens: list[Token]
    added: str
    text: str | None
    edits: list[EditCard]
    seconds: float
    captured: Literal["all", "overview"]
    next: list[NextTokenCard]
    work: PassWork


@dataclass(frozen=True)
class TensorHeader:
    """What stands before a tensor's numbers.

    `shape` is that of the numbers that follow, `[heads, rows, columns]`; `of` that of the part they were pooled
    from. `start` is where that part begins. Where 8-bit codes follow, ±`scale` are the ends of the scale, and
    `beyond` counts the values past them (outliers, drawn with the last colour and marked).
    """

    point: str
    shape: list[int]
    of: list[int]
    start: list[int]
    format: Format
    kind: Kind
    scale: float
    largest: float
    beyond: int


@dataclass(frozen=True)
class HeadScores:
    """What a head's pattern is like, each from 0 to 1; `induction` is null where no token repeats."""

    previous: float
    first: float
    itself: float
    entropy: float
    induction: float | None


@dataclass(frozen=True)
class AtlasHeader:
    """Before the patterns of layers `first:stop`: one `side × side` triangle of weights for each head.

    The codes are those of weights; row by row, and of row r only its first r + 1 columns where `triangle`.
    """

    first: int
    stop: int
    heads: int
    side: int
    triangle: bool
    scores: list[HeadScores]


@dataclass(frozen=True)
class Term:
    """One product of a sum: where it stands, its two factors and what they give."""

    at: str
    left: float
    right: float
    product: float


@dataclass(frozen=True)
class Cell:
    """One number of a tensor and the arithmetic that made it.

    `terms` are the largest of a sum in full, `rest` how many more there are and what they come to. `left` and
    `right` name the factors. `steps` are sentences of arithmetic in LaTeX, the last ending in the value. Where an edit
    has acted at the point (`edited`) its number need not be what the arithmetic gives. Where the sum is a dot product,
    `left_row` and `right_row` are its two rows of factors in their own order; they are empty where there is none, or
    where it is too long to draw.
    """

    point: str
    at: list[int]
    value: float | None
    hidden: bool
    edited: bool
    left: str
    right: str
    terms: list[Term]
    rest_count: int
    rest_sum: float
    steps: list[str]
    left_row: list[float]
    right_row: list[float]


@dataclass(frozen=True)
class Lineage:
    """Where a point comes from and where it goes, as addresses, and the weights that are used on the way."""

    point: str
    inputs: list[str]
    consumers: list[str]
    weights: list[str]
    code: str


@dataclass(frozen=True)
class Continuation:
    """Tokens that would follow, one by one."""

    tokens: list[NextTokenCard]
    finish: str


MESSAGES = (
    Failure,
    ModelEntry,
    PointCard,
    LayerKind,
    ModelCard,
    Token,
    NextTokenCard,
    PassWork,
    EditCard,
    Manifest,
    TensorHeader,
    HeadScores,
    AtlasHeader,
    Term,
    Cell,
    Lineage,
    Continuation,
)
