"""The one tokenizer that people hold: text to ids and back, with nothing added that they do not see."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cutaway.errors import CutawayError
from cutaway.text.chat import render_chat
from cutaway.text.spelling import shown
from cutaway.text.stream import TextStream

# Names under which models know the end of a turn or of a text; many files do not name them all by id.
_STOP_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
)


REMEMBERED = 4096  # tokens whose bytes are kept: a text says most of its own again and again


class Codec(Protocol):
    """What a Tokenizer needs of the machinery inside it. A codec never adds BOS or anything else."""

    vocab_size: int
    specials_keep_start: bool
    """Whether the text still counts as not begun after a special token (it decides about a leading space)."""
    shows_own_pieces: bool
    """Whether people should see the vocabulary's own spelling ("##ing") rather than the bytes."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of `text`; special tokens written in it are recognised only when `special`."""

    def name(self, id: int) -> str:
        """The vocabulary's own spelling of an id in range."""

    def token_bytes(self, id: int, *, at_start: bool) -> bytes:
        """The bytes that an id in range adds to the text, which may differ where the text begins."""


@dataclass(frozen=True)
class Encoding:
    """Ids and the truth about what was added to them."""

    ids: list[int]
    bos_added: bool
    reason: str
    """One sentence for people: why BOS was added, or why not."""


class Tokenizer:
    """Text to ids and back. Made by `tokenizer_from_gguf`, `tokenizer_from_folder` and `word_tokenizer`.

    `prefix_ids` and `suffix_ids` are what the checkpoint customarily puts around a text: BOS for most
    decoders, [CLS] and [SEP] for BERT, mostly nothing. `custom` says where the checkpoint says so.
    Safe to use from several threads.

    What encoding loses: byte-level vocabularies lose nothing. SentencePiece reads "▁" as a space,
    and the space it puts before a text is put again, and stays, after each special token inside one. A
    vocabulary with a normaliser (lower-casing BERT, for one) or one that splits at spaces gives back
    normalised text.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        special_tokens: Mapping[str, int] | None = None,
        bos_id: int | None = None,
        eos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        custom: str = "the checkpoint names no custom",
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._codec = codec
        self._remembered: dict[tuple[int, bool], bytes] = {}
        self.vocab_size = codec.vocab_size
        self.special_tokens = dict(special_tokens or {})
        self._special_ids = frozenset(self.special_tokens.values())
        self.bos_id = bos_id
        self.eos_id = eos_id
        named_stops = (self.special_tokens[name] for name in _STOP_NAMES if name in self.special_tokens)
        self.stop_ids = frozenset([*stop_ids, *named_stops, *([] if eos_id is None else [eos_id])])
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        self.custom = custom
        self.chat_template = chat_template
        self._named_tokens = dict(named_tokens or {})
        for id in (*self.prefix_ids, *self.suffix_ids, *self.stop_ids, *self._special_ids):
            self._checked(id)
        if bos_id is not None:
            self._named_tokens.setdefault("bos_token", codec.name(self._checked(bos_id)))
        if eos_id is not None:
            self._named_tokens.setdefault("eos_token", codec.name(self._checked(eos_id)))

    @property
    def adds_bos(self) -> bool:
        """Whether the checkpoint says that a text customarily begins with BOS."""
        return self.bos_id is not None and self.prefix_ids[:1] == (self.bos_id,)

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """The ids of `text`.

        `bos` None follows the checkpoint's custom, True and False overrule it (False adds nothing at
        either end); a BOS that the text begins with is never doubled. `special` recognises special
        tokens written in the text ("<|im_start|>"); without it they are ordinary characters.
        Raises CutawayError for text that is not Unicode text, or that the vocabulary cannot write.
        """
        return self.explain(text, bos=bos, special=special).ids

    def explain(self, text: str, *, bos: bool | None = None, special: bool = True) -> Encoding:
        """As `encode`, and says whether BOS was added and why."""
        ids = self._codec.encode(_unicode_text(text), special=special)
        prefix = self.prefix_ids or (() if self.bos_id is None else (self.bos_id,))
        if bos and not prefix:
            raise CutawayError(
                "A BOS token was asked for, but this vocabulary has none; leave bos at None or set it to False."
            )
        if bos is False:
            return Encoding(ids, False, "Nothing was added: it was asked to add no BOS.")
        if bos is None and not (self.prefix_ids or self.suffix_ids):
            return Encoding(ids, False, self._why_nothing())
        begin = prefix if bos or self.prefix_ids else ()
        already = bool(begin) and tuple(ids[: len(begin)]) == begin
        if already:
            begin = ()
        end = self.suffix_ids
        if end and tuple(ids[-len(end) :]) == end:
            end = ()
        why = "because it was asked for" if bos else f"as is this checkpoint's custom ({self.custom})"
        reason = self._what_was_added(begin, end, already=already, why=why)
        return Encoding([*begin, *ids, *end], bool(begin), reason)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that make no character read "\\ufffd". Raises CutawayError for a foreign id."""
        at_start = True
        contributions = []
        for id in ids:
            contribution, at_start = self.contribution(id, at_start=at_start, skip_special=skip_special)
            contributions.append(contribution)
        return b"".join(contributions).decode("utf-8", errors="replace")

    def contribution(self, id: int, *, at_start: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        """The bytes that `id` adds to a text, and whether the text still counts as not begun after it."""
        id = self._checked(id)
        if id not in self._special_ids:
            return self._token_bytes(id, at_start), False
        if skip_special:
            return b"", at_start
        return self._token_bytes(id, at_start), at_start and self._codec.specials_keep_start

    def _token_bytes(self, id: int, at_start: bool) -> bytes:
        spelled = self._remembered.get((id, at_start))
        if spelled is None:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            spelled = self._remembered[id, at_start] = self._codec.token_bytes(id, at_start=at_start)
        return spelled

    def piece(self, id: int) -> str:
        """One token as it is shown to people: " Paris", "\\\\n", "<0xE2>" for a byte that is no whole
        character, a special token by its name."""
        id = self._checked(id)
        if self._codec.shows_own_pieces or id in self._special_ids:
            return shown(self._codec.name(id).encode("utf-8"))
        return shown(self._codec.token_bytes(id, at_start=False))

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes that the token contributes anywhere but at the very start of a text."""
        return self._codec.token_bytes(self._checked(id), at_start=False)

    def stream(self, *, after: Sequence[int] = (), skip_special: bool = False) -> TextStream:
        """A stream that turns ids into text as they come. `after` holds the ids that stand before, such as
        the prompt's: some vocabularies drop a space where a text begins, and a continuation is no beginning."""
        return TextStream(self, after=after, skip_special=skip_special)

    def apply_chat_template(self, messages: list[dict], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the one text that the model was trained to read.

        `messages`: dicts with "role" and "content". The text often begins with BOS; encoding it does not
        double it. Raises CutawayError where there is no template, or where the template refuses.
        """
        if self.chat_template is None:
            raise CutawayError(
                "This model comes without a chat template; it continues plain text, so give it the prompt as text."
            )
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            named_tokens=self._named_tokens,
        )

    def _checked(self, id: int) -> int:
        """`id` as a Python int, or the refusal of one that the vocabulary does not have."""
        try:
            number = operator.index(id)
        except TypeError:
            raise CutawayError(f"A token id is a whole number, not {id!r}.") from None
        if not 0 <= number < self.vocab_size:
            raise CutawayError(
                f"There is no token {number}: this vocabulary has {self.vocab_size} tokens, 0 to {self.vocab_size - 1}."
            )
        return number

    def _called(self, ids: Sequence[int]) -> str:
        return " ".join(f"{self.piece(id)} (id {id})" for id in ids)

    def _why_nothing(self) -> str:
        if self.bos_id is None:
            return "No BOS was added: this vocabulary has no BOS token."
        return f"BOS {self._called([self.bos_id])} was not added, as is this checkpoint's custom ({self.custom})."

    def _what_was_added(self, begin: Sequence[int], end: Sequence[int], *, already: bool, why: str) -> str:
        label = "BOS " if tuple(begin) == (self.bos_id,) else ""
        if begin and end:
            return f"{label}{self._called(begin)} was added before the text and {self._called(end)} after it, {why}."
        if begin:
            return f"{label}{self._called(begin)} was added before the text, {why}."
        standing = "The text already begins with BOS, so none was added" if already else "No BOS was added"
        return f"{standing}; {self._called(end)} was added after the text, {why}." if end else f"{standing}."


def _unicode_text(text: str) -> str:
    if not isinstance(text, str):
        raise CutawayError(f"Only text (str) can be tokenized, not {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CutawayError(
            f"The text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}, "
            f"which is no Unicode character; decode the text properly first, or replace it."
        ) from None
    return text
