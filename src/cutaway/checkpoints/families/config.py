"""Reading a configuration strictly: every key is used, known to change nothing, or refused by its name."""

from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeVar

import numpy as np

from cutaway.checkpoints.stored import quoted
from cutaway.errors import CutawayError

T = TypeVar("T")

# Bounds on what a file may claim before its tensors have been looked at, so that a wrong number is refused at
# once and not first multiplied out: published models have 126 layers and vocabularies of 262,144.
MOST = 2**31 - 1
MOST_LAYERS = 10_000

# Keys of Hugging Face configurations that say nothing about the computation of a pass: bookkeeping, training
# and generation settings, labels of tasks.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    attn_pdrop auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    classifier_dropout cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label
    initializer_range keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905  (a page of names reads better without quotes)
)


class Config:
    """A configuration that remembers what was read of it.

    `where` names it in messages ("config.json of …", "the metadata of …").
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = values
        self._read: set[str] = set()

    @property
    def read(self) -> Set[str]:
        """The keys that have been asked for."""
        return self._read

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value at `key`, which must be of this kind; `default`, where one is given, if the key is absent."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise CutawayError(f"{self.where} lacks {key!r}, which this architecture needs.")
            return default
        if kind is float and type(value) is int and abs(value) <= 2**1023:  # beyond, no float can hold it
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CutawayError(f"{key!r} is {quoted(value)} in {self.where}; it must be {_a(kind)}.")
        return value

    def size(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A width, a length or a count at `key`: a whole number from 1 to `most`."""
        value = self.get(key, int, default)
        if not 1 <= value <= most:
            raise CutawayError(f"{key!r} is {quoted(value)} in {self.where}; it must be from 1 to {most}.")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`, or None where the key is absent or null."""
        self._read.add(key)
        return self.size(key) if key in self else None

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The value at `key`, or None where it is absent or null."""
        self._read.add(key)
        return self.get(key, kind) if key in self else None

    def is_null(self, key: str) -> bool:
        """Whether null is written at `key`: some settings that are on by default are switched off so."""
        self._read.add(key)
        return key in self._values and self._values[key] is None

    def only(self, key: str, *allowed: object, why: str = "") -> None:
        """Refuse any value of `key` but these; an absent or null key is always allowed."""
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            right = " or ".join(repr(a) for a in allowed) or "absent"
            raise CutawayError(
                f"{key!r} is {quoted(value)} in {self.where}; only {right} can be computed{why and f': {why}'}."
            )

    def refuse_unread(self, harmless: Iterable[str] = ()) -> None:
        """Refuse the configuration if it holds a key that was neither read nor is known to change nothing."""
        unread = [k for k in self._values if k not in self._read and k not in HARMLESS and k not in harmless]
        if unread:
            keys = ", ".join(map(quoted, unread[:5])) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
            raise CutawayError(
                f"{self.where} has {keys}, which Cutaway does not know: it may change what the model computes, "
                "so the checkpoint is refused rather than computed wrongly."
            )


def _a(kind: type) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return (names | {dict: "an object", list: "a list"})[kind]


def refuse_encoder_and_quantised(config: Config) -> None:
    """Refuse a model that reads what an encoder made, or whose weights are quantised in a way that is not read."""
    config.only("is_encoder_decoder", False)
    config.only("add_cross_attention", False)
    config.only("quantization_config", why="quantised safetensors are not read; use a GGUF file of the model")


def even_heads(config: Config, d_model: int, n_heads: int) -> int:
    """d_head of heads that share a width equally; CutawayError where they cannot."""
    if d_model % n_heads:
        raise CutawayError(f"A width of {d_model} in {config.where} cannot be split into {n_heads} equal heads.")
    return d_model // n_heads


def decimal(value: float) -> float:
    """A float32 out of a file as the decimal number that was meant: 9.999999747e-06 is 1e-5."""
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused where it is used
        return float(str(np.float32(value)))
