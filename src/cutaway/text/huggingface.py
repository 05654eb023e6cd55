"""The tokenizer of a model folder in Hugging Face's form: tokenizer.json and the small files beside it."""

from pathlib import Path
from typing import Any

from cutaway.errors import CutawayError
from cutaway.reading import read_object, read_text
from cutaway.text.library import LibraryCodec
from cutaway.text.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNREAD = {"tokenizer.model": "SentencePiece's own format", "vocab.txt": "a plain list of word pieces"}


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer in `folder`, or None where there is none at all.

    Reads tokenizer.json, else GPT-2's vocab.json and merges.txt; beside it, where they are there,
    tokenizer_config.json, special_tokens_map.json, chat_template.jinja or chat_template.json,
    generation_config.json and config.json. Raises CutawayError for files that are malformed, that
    contradict each other, or that hold a tokenizer of a kind not known here.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        inner = _read_library_file(folder / "tokenizer.json")
        source = "the post-processor of tokenizer.json"
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        inner = _gpt2(folder)
        source = "GPT-2's tokenizer adds nothing"
    else:
        _refuse_what_is_not_read(folder)
        return None
    settings = _Settings(folder)
    _add_tokens(inner, settings)
    return _assembled(LibraryCodec(inner), settings, source)


class _Settings:
    """The small JSON files beside a tokenizer; a file that is not there is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = _object(folder / "tokenizer_config.json")
        self.specials = _object(folder / "special_tokens_map.json")
        self.generation = _object(folder / "generation_config.json")
        self.model = _object(folder / "config.json")

    def token(self, role: str) -> str | None:
        """The text of the token with this role ("bos_token"), None where no file gives it one."""
        for name, settings in (("tokenizer_config.json", self.tokenizer), ("special_tokens_map.json", self.specials)):
            value = settings.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None and not isinstance(text, str):
                raise CutawayError(f"{self.folder / name}: {role} must be a token's text, not {text!r}.")
            if text:
                return text
        return None

    def extra_specials(self) -> list[str]:
        """Further special tokens without a role of their own."""
        found = []
        for settings in (self.tokenizer, self.specials):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                listed = settings.get(key) or []
                for value in listed.values() if isinstance(listed, dict) else listed:
                    found.append(value.get("content") if isinstance(value, dict) else value)
        return [text for text in found if isinstance(text, str) and text]

    def ids(self, key: str) -> list[int]:
        """The ids under `key` ("eos_token_id", a number or a list) in generation_config.json, else config.json."""
        for name, settings in (("generation_config.json", self.generation), ("config.json", self.model)):
            value = settings.get(key)
            if value is None:
                continue
            listed = value if isinstance(value, list) else [value]
            if not all(isinstance(id, int) and not isinstance(id, bool) for id in listed):
                raise CutawayError(f"{self.folder / name}: {key} must be a token id or a list of them, not {value!r}.")
            return listed
        return []

    def flag(self, key: str) -> bool | None:
        value = self.tokenizer.get(key)
        return value if isinstance(value, bool) else None


def _object(path: Path) -> dict[str, Any]:
    """A file that must hold one JSON object; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    return read_object(path)


def _read_library_file(path: Path) -> Any:
    from tokenizers import Tokenizer as LibraryTokenizer

    text = read_text(path)
    if not text.strip():
        raise CutawayError(f"{path} is empty; it must hold a tokenizer.")
    try:
        return LibraryTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise CutawayError(f"{path} holds no tokenizer that can be read: {error}.") from None


def _gpt2(folder: Path) -> Any:
    """Byte-level BPE from GPT-2's two files, which say nothing of how the text is cut before merging."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    settings = _object(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise CutawayError(
            f"{folder} holds vocab.json and merges.txt for a {kind}, whose way of cutting text they do not "
            f"record; add the model's tokenizer.json."
        )
    vocabulary = _object(folder / "vocab.json")
    if not all(isinstance(id, int) and id >= 0 for id in vocabulary.values()):
        raise CutawayError(f"{folder / 'vocab.json'} must map every token to its id, a whole number from 0.")
    merges = []
    for number, line in enumerate(read_text(folder / "merges.txt").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        merge = tuple(line.rstrip("\r").split(" "))
        if len(merge) != 2:
            raise CutawayError(f"{folder / 'merges.txt'}, line {number}: {line!r} is not two tokens and one space.")
        missing = next((part for part in (*merge, "".join(merge)) if part not in vocabulary), None)
        if missing is not None:
            raise CutawayError(
                f"{folder / 'merges.txt'}, line {number}: {line!r} needs the token {missing!r}, "
                f"which vocab.json does not have."
            )
        merges.append(merge)
    inner = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    inner.decoder = decoders.ByteLevel()
    if inner.token_to_id("<|endoftext|>") is not None:
        inner.add_special_tokens(["<|endoftext|>"])
    return inner


def _refuse_what_is_not_read(folder: Path) -> None:
    for name, description in _UNREAD.items():
        if (folder / name).is_file():
            raise CutawayError(
                f"{folder} has its tokenizer only as {name} ({description}), which is not read; "
                f"add the model's tokenizer.json."
            )


def _add_tokens(inner: Any, settings: _Settings) -> None:
    """Tokens that only the files beside tokenizer.json know of, each under the id that they claim."""
    from tokenizers import AddedToken

    known = inner.get_added_tokens_decoder()
    claimed = settings.tokenizer.get("added_tokens_decoder") or {}
    try:
        entries = sorted((int(id), entry) for id, entry in claimed.items())
        contents = {id: entry["content"] for id, entry in entries}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CutawayError(
            f"{settings.folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to tokens "
            f'such as {{"0": {{"content": "<s>", "special": true}}}}.'
        ) from None
    for id, entry in entries:
        if id in known:
            continue
        flags = {
            key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        inner.add_tokens([AddedToken(contents[id], **flags)])
        if inner.token_to_id(contents[id]) != id:
            raise CutawayError(
                f"{settings.folder / 'tokenizer_config.json'} gives {contents[id]!r} the id {id}, "
                f"but in the vocabulary it is {inner.token_to_id(contents[id])}."
            )
    known = inner.get_added_tokens_decoder()
    already = {token.content for token in known.values() if token.special}
    wanted = [*filter(None, (settings.token(role) for role in _ROLES)), *settings.extra_specials()]
    unmarked = [text for text in dict.fromkeys(wanted) if text not in already and inner.token_to_id(text) is not None]
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unmarked])


def _assembled(codec: LibraryCodec, settings: _Settings, source: str) -> Tokenizer:
    specials = {codec.name(id): id for id in sorted(codec.special_ids)}
    before, after = codec.around()
    named = {role: text for role in _ROLES if (text := settings.token(role)) is not None}
    bos_id = specials.get(named.get("bos_token", ""))
    eos_id = specials.get(named.get("eos_token", ""))
    in_range = [id for id in settings.ids("bos_token_id") if 0 <= id < codec.vocab_size]
    if bos_id is None and "bos_token" not in named and not after:
        bos_id = before[0] if len(before) == 1 else next(iter(in_range), None)
    stops = [id for id in settings.ids("eos_token_id") if 0 <= id < codec.vocab_size]
    if eos_id is None and stops:
        eos_id = stops[0]

    custom = source
    asked, asked_end = settings.flag("add_bos_token"), settings.flag("add_eos_token")
    if asked is not None and bos_id is not None and before in ([], [bos_id]):
        before = [bos_id] if asked else []
        custom = f"add_bos_token is {str(asked).lower()} in tokenizer_config.json"
    elif not before and not after:
        custom = "neither tokenizer_config.json nor the tokenizer's post-processor asks for it"
    if asked_end is not None and eos_id is not None and after in ([], [eos_id]):
        after = [eos_id] if asked_end else []
    return Tokenizer(
        codec,
        special_tokens=specials,
        bos_id=bos_id,
        eos_id=eos_id,
        stop_ids=stops,
        prefix_ids=before,
        suffix_ids=after,
        custom=custom,
        named_tokens=named,
        chat_template=_chat_template(settings),
    )


def _chat_template(settings: _Settings) -> str | None:
    """The chat template: a file of its own comes before the entry in tokenizer_config.json."""
    path = settings.folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    for name, holder in (
        ("chat_template.json", _object(settings.folder / "chat_template.json")),
        ("tokenizer_config.json", settings.tokenizer),
    ):
        template = holder.get("chat_template")
        if isinstance(template, list):  # several, by name; the one called "default" is for plain chat
            template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            continue
        if not isinstance(template, str):
            raise CutawayError(f"{settings.folder / name}: chat_template must be text, not {type(template).__name__}.")
        return template
    return None
