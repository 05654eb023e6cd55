"""The tokenizer that a GGUF file carries in its metadata, under `tokenizer.ggml.*`."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.text.library import LibraryCodec
from cutaway.text.pretokenizers import pre_tokenizer
from cutaway.text.sentencepiece import PieceType, SentencePieceCodec
from cutaway.text.spelling import SPACE_MARK
from cutaway.text.tokenizer import Codec, Tokenizer

_NAMED = {
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "seperator_token_id": "sep_token",  # sic: the format spells it so
    "separator_token_id": "sep_token",
    "cls_token_id": "cls_token",
    "mask_token_id": "mask_token",
}


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata (keys as in the file; arrays as lists or NumPy arrays).

    Knows `tokenizer.ggml.model` "gpt2" (byte-level BPE), "llama" (SentencePiece BPE) and "bert"
    (WordPiece). A text goes in as it is typed: GGUF does not record the Unicode normalisation that some
    models of the "gpt2" kind (Qwen) were trained with.
    Raises CutawayError for another kind, an unknown `tokenizer.ggml.pre`, and entries that are missing or
    do not fit together.
    """
    entries = _Entries(metadata)
    kind = entries.text("model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_piece}
    if kind is None:
        raise CutawayError("This GGUF file carries no tokenizer: its metadata has no tokenizer.ggml.model.")
    if kind not in builders:
        raise CutawayError(
            f"This GGUF file has a tokenizer of the kind {kind!r} (tokenizer.ggml.model), which is not known here; "
            f"known are {', '.join(builders)}."
        )
    return builders[kind](entries)


class _Entries:
    """The `tokenizer.*` entries of the metadata, each checked when it is read."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.pieces = self._pieces()
        self.types = self._numbers("token_type", default=PieceType.NORMAL).astype(int)
        self.specials = self._of_type(PieceType.CONTROL, PieceType.UNKNOWN)
        self.user_defined = self._of_type(PieceType.USER_DEFINED)

    def _of_type(self, *types: PieceType) -> dict[str, int]:
        return {self.pieces[id]: id for id in np.flatnonzero(np.isin(self.types, types)).tolist()}

    def _array(self, name: str) -> list[Any] | None:
        value: Any = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            return value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise CutawayError(f"tokenizer.ggml.{name} must be an array, not {type(value).__name__}.")
        return list(value)

    def strings(self, name: str) -> list[str]:
        values = self._array(name)
        if not values:
            raise CutawayError(f"This GGUF file's tokenizer is incomplete: tokenizer.ggml.{name} is missing or empty.")
        if set(map(type, values)) != {str}:
            wrong = next(place for place, value in enumerate(values) if not isinstance(value, str))
            raise CutawayError(f"tokenizer.ggml.{name}[{wrong}] must be a string, not {values[wrong]!r}.")
        return values

    def _pieces(self) -> list[str]:
        pieces = self.strings("tokens")
        if len(set(pieces)) != len(pieces):
            first: dict[str, int] = {}
            id, piece = next((id, piece) for id, piece in enumerate(pieces) if first.setdefault(piece, id) != id)
            raise CutawayError(
                f"tokenizer.ggml.tokens names {piece!r} twice, as {first[piece]} and {id}; every token needs one id."
            )
        return pieces

    def _numbers(self, name: str, *, default: float | None) -> np.ndarray:
        """One finite number for each token, `float64 [V]`."""
        values = self._array(name)
        if values is None:
            if default is None:
                raise CutawayError(f"This GGUF file's tokenizer is incomplete: tokenizer.ggml.{name} is missing.")
            return np.full(len(self.pieces), default, dtype=np.float64)
        if len(values) != len(self.pieces):
            raise CutawayError(
                f"tokenizer.ggml.{name} has {len(values)} entries for {len(self.pieces)} tokens; it needs one each."
            )
        try:
            numbers = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            numbers = np.array([np.nan])
        if not np.isfinite(numbers).all():
            raise CutawayError(f"tokenizer.ggml.{name} must hold finite numbers only.")
        return numbers

    def scores(self) -> list[float]:
        return self._numbers("scores", default=None).tolist()

    def text(self, name: str) -> str | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and not isinstance(value, str):
            raise CutawayError(f"tokenizer.ggml.{name} must be a string, not {value!r}.")
        return value

    def flag(self, name: str) -> bool | None:
        value: Any = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and value not in (True, False):
            raise CutawayError(f"tokenizer.ggml.{name} must be true or false, not {value!r}.")
        return None if value is None else bool(value)

    def id(self, name: str) -> int | None:
        """A token id that the metadata names; the refusal of one that is no token."""
        value: Any = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not hasattr(value, "__index__") or not 0 <= operator.index(value) < len(self.pieces):
            raise CutawayError(
                f"tokenizer.ggml.{name} is {value!r}, but a token's id lies from 0 to {len(self.pieces) - 1}."
            )
        return operator.index(value)

    @property
    def chat_template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def named_tokens(self) -> dict[str, str]:
        """The tokens that have a role of their own, under the names that chat templates use."""
        found = {name: self.id(key) for key, name in _NAMED.items()}
        return {name: self.pieces[id] for name, id in found.items() if id is not None}

    def tokenizer(self, codec: Codec, *, adds_bos: bool, bos_default: int | None = None) -> Tokenizer:
        """The public tokenizer around `codec`; `adds_bos` is the custom where the file does not say."""
        bos_id = self.id("bos_token_id")
        bos_id = bos_default if bos_id is None else bos_id
        eos_id = self.id("eos_token_id")
        stated = self.flag("add_bos_token")
        begins = adds_bos if stated is None else stated
        stops = [self.id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
        return Tokenizer(
            codec,
            special_tokens=self.specials,
            bos_id=bos_id,
            eos_id=eos_id,
            stop_ids=[id for id in stops if id is not None],
            prefix_ids=[bos_id] if begins and bos_id is not None else [],
            suffix_ids=[eos_id] if self.flag("add_eos_token") and eos_id is not None else [],
            custom="tokenizer.ggml.add_bos_token is "
            + (
                f"not given, which means {str(begins).lower()} for this kind" if stated is None else str(begins).lower()
            ),
            named_tokens=self.named_tokens(),
            chat_template=self.chat_template,
        )


def _byte_level(entries: _Entries) -> Tokenizer:
    """GPT-2's kind: BPE over bytes, cut by the patterns that `tokenizer.ggml.pre` names."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    cut = pre_tokenizer(entries.text("pre") or "default")
    vocabulary = dict(zip(entries.pieces, range(len(entries.pieces)), strict=True))
    merges: list[Any] = [tuple(merge.split(" ")) for merge in entries.strings("merges")]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words_first)
    except Exception as error:
        raise CutawayError(_wrong_merge(entries, vocabulary, merges, error)) from None
    inner = LibraryTokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    inner.decoder = decoders.ByteLevel()
    _mark_specials(inner, entries)
    return entries.tokenizer(LibraryCodec(inner), adds_bos=cut.adds_bos)


def _wrong_merge(
    entries: _Entries, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]], error: Exception
) -> str:
    """The sentence for merges that the library refuses: which one, and what is wrong with it."""
    for place, merge in enumerate(merges):
        if len(merge) != 2 or not all(merge):
            return f"tokenizer.ggml.merges[{place}] is {' '.join(merge)!r}; a merge is two tokens with a space between."
        missing = next((part for part in (*merge, "".join(merge)) if part not in vocabulary), None)
        if missing is not None:
            return (
                f"tokenizer.ggml.merges[{place}], {' '.join(merge)!r}, needs the token {missing!r}, "
                f"which is not among the {len(entries.pieces)} of tokenizer.ggml.tokens."
            )
    return f"This GGUF file's tokenizer cannot be built ({error})."


def _mark_specials(inner: Any, entries: _Entries) -> None:
    """Tell the library which tokens are found in a text before anything else is."""
    from tokenizers import AddedToken

    inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in entries.specials])
    inner.add_tokens([AddedToken(piece, normalized=False) for piece in entries.user_defined])


def _sentencepiece(entries: _Entries) -> Tokenizer:
    """Llama's kind: SentencePiece BPE by scores, bytes for unknown characters."""
    unknown = entries.id("unknown_token_id")
    if unknown is None:
        unknown = next((id for id in entries.specials.values() if entries.types[id] == PieceType.UNKNOWN), 0)
    space_prefix = entries.flag("add_space_prefix")
    codec = SentencePieceCodec(
        entries.pieces,
        entries.scores(),
        entries.types.tolist(),
        unknown_id=unknown,
        space_prefix=True if space_prefix is None else space_prefix,
    )
    bos_default = entries.specials.get("<s>")
    return entries.tokenizer(codec, adds_bos=True, bos_default=bos_default)


def _word_piece(entries: _Entries) -> Tokenizer:
    """BERT's kind. GGUF writes a word's first piece as "▁paris" and a later one bare, where BERT writes
    "paris" and "##ing"."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    unknown, cls = entries.id("unknown_token_id"), entries.id("cls_token_id")
    cls = entries.id("bos_token_id") if cls is None else cls
    sep = entries.id("seperator_token_id")
    sep = entries.id("separator_token_id") if sep is None else sep
    if unknown is None or cls is None or sep is None:
        raise CutawayError(
            "This GGUF file's tokenizer is incomplete: a bert tokenizer names its unknown_token_id, "
            "cls_token_id (or bos_token_id) and seperator_token_id under tokenizer.ggml."
        )
    vocabulary: dict[str, int] = {}
    for id, (piece, kind) in enumerate(zip(entries.pieces, entries.types, strict=True)):
        if piece.startswith(SPACE_MARK):
            piece = piece.removeprefix(SPACE_MARK)
        elif kind == PieceType.NORMAL:
            piece = "##" + piece
        vocabulary[piece] = id
    lower = entries.flag("normalizer.lowercase")
    lower = True if lower is None else lower
    inner = LibraryTokenizer(models.WordPiece(vocabulary, unk_token=entries.pieces[unknown]))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=entries.flag("normalizer.strip_accents")
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    _mark_specials(inner, entries)
    return Tokenizer(
        LibraryCodec(inner),
        special_tokens=entries.specials,
        prefix_ids=[cls],
        suffix_ids=[sep],
        custom="a text for this encoder stands between the two",
        named_tokens=entries.named_tokens(),
    )
