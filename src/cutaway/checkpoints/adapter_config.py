"""adapter_config.json as PEFT writes it: what is honoured, what changes nothing, and what is refused by its name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.module_patterns import module_pattern
from cutaway.checkpoints.stored import quoted
from cutaway.errors import CutawayError

# Keys of training, bookkeeping, and of how a matrix began before it was trained.
_HARMLESS = """
    auto_mapping inference_mode lora_dropout peft_version revision task_type runtime_config qalora_group_size
    megatron_core ensure_weight_tying eva_config
""".split()  # noqa: SIM905
# What these would do is not done here; only "switched off" is read.
_REFUSED = {
    "use_qalora": "it averages the inputs first",
    "lora_bias": "a bias on the narrow matrix",
    "use_bdlora": "its matrices stand in blocks",
    "modules_to_save": "these modules are replaced, not adapted; put them into the base model's own checkpoint",
    "target_parameters": "they are stacked matrices of experts, not modules",
    "trainable_token_indices": "rows of the embedding are replaced",
    "layer_replication": "the base model would have other layers",
    "alora_invocation_tokens": "the adapter would act from those tokens on",
    "arrow_config": "a router would choose among adapters",
    "megatron_config": "its layers are split over devices",
    "corda_config": "the base model's own matrices are changed at the start",
    "lora_ga_config": "the base model's own matrices are changed at the start",
    "kasa_config": "the base model's own matrices are changed at the start",
    "velora_config": "the inputs are compressed",
    "monteclora_config": "the matrices are drawn anew in every pass",
}
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")  # of lora_A and lora_B, which leave the base as it is


@dataclass(frozen=True)
class AdapterConfig:
    """What the configuration of an adapter says, checked: which modules it changes, at which rank, how strongly."""

    where: str
    base: str | None  # base_model_name_or_path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool  # use_rslora
    magnitudes: bool  # use_dora
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_pattern_of(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / √r where the ranks are to be stable. (Kalajdzievski 2023)"""
        rank = self.rank_of(module)
        return self.alphas.get(_pattern_of(self.alphas, module), self.alpha) / (sqrt(rank) if self.by_root else rank)

    def targets_module(self, module: str) -> bool:
        """Whether the adapter changes this module, by PEFT's rules."""
        if self.excluded and _named(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return _named(self.targets, module)
        return module in self.targets or (_named(self.targets, module) and self._in_layers(module))

    def _in_layers(self, module: str) -> bool:
        if not self.layers:
            return True
        if not self.layers_pattern:  # any part of the name but the first
            return _numbered("[^.]*", module.partition(".")[2]) in self.layers
        numbers = (_numbered(pattern, module) for pattern in self.layers_pattern)
        return next((number for number in numbers if number is not None), None) in self.layers


def read_adapter_config(values: Mapping[str, Any], where: str) -> AdapterConfig:
    """The configuration of a LoRA adapter.

    Raises CutawayError, naming the key and its value, for whatever is not honoured: other kinds of adapters, biases,
    replaced modules, any key that is not known.
    """
    config = Config(values, where)
    config.only("peft_type", "LORA", why="other adapters change a pass in other ways")
    config.only("bias", "none", why="the base model's biases would be replaced")
    config.only("init_lora_weights", *_BEGINNINGS, why="it changes the base model's own matrices at the start")
    for key, why in _REFUSED.items():
        if (value := values.get(key)) not in (None, False) and value != [] and value != {}:
            raise CutawayError(f"{key!r} is {quoted(value)} in {where}, which cannot be computed: {why}.")
        config.is_null(key)
    if loftq := config.optional("loftq_config", dict):
        raise CutawayError(f"'loftq_config' is {quoted(loftq)} in {where}; it belongs to a base model that it rounded.")
    config.get("fan_in_fan_out", bool, False)  # how the base stores the matrix: its family knows
    read = AdapterConfig(
        where=where,
        base=config.optional("base_model_name_or_path", str),
        rank=config.size("r", 8, most=1 << 16),
        alpha=_finite(config, "lora_alpha", config.get("lora_alpha", float, 8.0)),
        ranks=_ranks(config),
        alphas={
            n: _finite(config, "alpha_pattern", a) for n, a in _pattern(config, "alpha_pattern", (int, float)).items()
        },
        by_root=config.get("use_rslora", bool, False),
        magnitudes=config.get("use_dora", bool, False),
        targets=_texts(config, "target_modules"),
        excluded=_texts(config, "exclude_modules"),
        layers=_layers(config),
        layers_pattern=_as_tuple(_texts(config, "layers_pattern")),
    )
    if not read.targets:
        raise CutawayError(f"{where} lacks 'target_modules', which says what the adapter changes.")
    config.refuse_unread(_HARMLESS)
    _check_patterns(read)
    return read


def _ranks(config: Config) -> dict[str, int]:
    ranks = _pattern(config, "rank_pattern", (int,))
    for name, rank in ranks.items():
        if rank < 1:
            raise CutawayError(f"'rank_pattern' gives {quoted(name)} the rank {rank} in {config.where}; at least 1.")
    return ranks


def _pattern(config: Config, key: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    found = config.optional(key, dict) or {}
    for name, value in found.items():
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CutawayError(
                f"{key!r} gives {quoted(name)} the value {quoted(value)} in {config.where}; a number fits."
            )
    return found


def _finite(config: Config, key: str, value: float) -> float:
    try:
        if isfinite(value):
            return float(value)
    except OverflowError:  # a whole number that no float can hold
        pass
    raise CutawayError(f"{key!r} holds {quoted(value)} in {config.where}; it must be finite.")


def _texts(config: Config, key: str) -> tuple[str, ...] | str:
    """One pattern, or names; nothing where the key is absent."""
    value = config.optional(key, object)
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise CutawayError(f"{key!r} is {quoted(value)} in {config.where}; it must be a text or a list of texts.")
    return tuple(value)


def _as_tuple(texts: tuple[str, ...] | str) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


def _layers(config: Config) -> tuple[int, ...] | None:
    value = config.optional("layers_to_transform", object)
    listed = value if isinstance(value, list) or value is None else [value]
    if listed is None:
        return None
    if any(type(one) is not int or one < 0 for one in listed):
        raise CutawayError(
            f"'layers_to_transform' is {quoted(value)} in {config.where}; it must be one or more layers' numbers."
        )
    return tuple(listed)


def _check_patterns(config: AdapterConfig) -> None:
    """Names may be patterns: one that is none is told here, by its key."""
    texts = {
        "target_modules": [config.targets] if isinstance(config.targets, str) else [],
        "exclude_modules": [config.excluded] if isinstance(config.excluded, str) else [],
        "layers_pattern": config.layers_pattern,
        "rank_pattern": config.ranks,
        "alpha_pattern": config.alphas,
    }
    for key, patterns in texts.items():
        for pattern in patterns:
            try:
                module_pattern(pattern)
            except ValueError as error:
                raise CutawayError(f"{key!r} in {config.where} holds {quoted(pattern)}, no pattern: {error}.") from None


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return module_pattern(names).matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern_of(patterns: Mapping[str, Any], module: str) -> str:
    """The first of the patterns that the end of a module's name matches."""
    starts = _starts(module)
    return next((one for one in patterns if any(module_pattern(one).matches(module, at) for at in starts)), module)


def _numbered(pattern: str, module: str) -> int | None:
    """The number after the first part of a module's name that a pattern matches; None where it matches none."""
    for start in _starts(module):
        for end in reversed(module_pattern(pattern).ends(module, start)):
            if found := re.match(r"\.(\d+)\.", module[end:]):
                return int(found[1])
    return None


def _starts(module: str) -> list[int]:
    """Where the parts of a module's name begin."""
    return [0, *(place + 1 for place, character in enumerate(module) if character == ".")]
