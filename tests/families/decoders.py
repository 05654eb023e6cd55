"""Tiny decoders of `transformers` with sandwich norms, windows and experts, and every intermediate they share with us.

Both sides load the same folder. `lifted` raises the places that `transformers` keeps in float32 (norms, rotary
angles, softmax, router) to float64 for as long as it lasts.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from compared import EXACT, assert_shown, deviation, prompt
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

import cutaway


@dataclass(frozen=True)
class Tiny:
    """A tiny model: what makes it worth a test, its architecture, its settings, the precision it is saved in."""

    name: str
    architecture: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float64

    def build(self) -> Any:
        """The model in float64, random in all its parameters."""
        torch.manual_seed(sum(map(ord, self.name)))
        config = AutoConfig.for_model(self.architecture, **self.settings)
        model = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre = 1.0 if name.endswith("norm.weight") and "gemma" not in self.architecture else 0.0
                if parameter.dim() == 1:
                    parameter.normal_(centre, 0.4)
                else:
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        return model

    def save(self, folder: Path, **options: Any) -> tuple[Path, Any]:
        """The folder, and what `transformers` loads from it, in float64."""
        self.build().to(self.dtype).save_pretrained(folder, **options)
        return folder, reloaded(folder)


def write_gguf(path: Path, architecture: str, settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A GGUF file with these settings of its architecture and these tensors, all as float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edited(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a model's folder whose config.json says something else; a key set to ... is taken out."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not ...}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def reloaded(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")
    if hasattr(model.config, "num_experts_per_tok"):
        model.config._experts_implementation = "eager"
    return model.to(torch.float64).eval()


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
    """Plain and linear rotary angles from their definition; other kinds are for the tests of rotary scaling."""
    rope = self.config.rope_parameters if layer_type is None else self.config.rope_parameters[layer_type]
    assert rope["rope_type"] in ("default", "linear")
    dims = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
    base, factor = float(rope["rope_theta"]), float(rope.get("factor", 1.0))
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    angles = position_ids[..., None].double() / factor * base**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@contextmanager
def lifted() -> Iterator[None]:
    """Norms, rotary angles, softmax and router of `transformers` in the precision of the model, not in float32."""
    softmax = torch.nn.functional.softmax

    def in_own_precision(x: torch.Tensor, dim: int | None = None, dtype: Any = None, **rest: Any) -> torch.Tensor:
        return softmax(x, dim=dim, **rest)

    patches = [
        (torch.Tensor, "float", torch.Tensor.double),  # how Gemma's norms and Mixtral's router widen their input
        (torch.nn.functional, "softmax", in_own_precision),
        (modeling_mixtral.MixtralRMSNorm, "forward", _rms_norm),
        (modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", _rms_norm),
        (modeling_gemma2.Gemma2RotaryEmbedding, "forward", _rotary),
        (modeling_gemma3.Gemma3RotaryEmbedding, "forward", _rotary),
        (modeling_mixtral.MixtralRotaryEmbedding, "forward", _rotary),
        (modeling_qwen3_moe.Qwen3MoeRotaryEmbedding, "forward", _rotary),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def body_of(model: Any) -> Any:
    """The stack of layers, also inside a model that sees images."""
    body = model.model
    return getattr(body, "language_model", body)


def run(model: Any, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Every intermediate that `transformers` shares with us, under our address and in our shape."""
    points: dict[str, np.ndarray] = {}
    hooks: list[Any] = []

    def keep(address: str, module: Any, *, entry: bool = False, heads: int | None = None, normed: bool = False) -> None:
        def hook(_: Any, given: Any, returned: Any) -> None:
            value = given[0] if entry else returned[0] if isinstance(returned, tuple) else returned
            array = value.detach().numpy().copy()
            if normed:  # [1, T, H, d_head], or with heads first where they were swapped before the norm
                array = array[0] if array.shape[1] == heads else array[0].swapaxes(0, 1)
            else:
                array = array.reshape(-1, array.shape[-1])
                array = array if heads is None else array.reshape(len(array), heads, -1).swapaxes(0, 1)
            points[address] = array

        hooks.append(module.register_forward_hook(hook))

    body = body_of(model)
    keep("embed.out", body.embed_tokens)
    keep("final.norm", body.norm)
    for i, layer in enumerate(body.layers):
        at, attention, config = f"layers.{i}.", layer.self_attn, body.config
        sandwich = hasattr(layer, "pre_feedforward_layernorm")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        assert len(ids) == 1 or len(ids) not in (heads, kv_heads)  # else one could be taken for the other
        keep(f"{at}resid_pre", layer, entry=True)
        keep(f"{at}attn.norm", layer.input_layernorm)
        keep(f"{at}attn.q", attention.q_proj, heads=heads)
        keep(f"{at}attn.k", attention.k_proj, heads=kv_heads)
        keep(f"{at}attn.v", attention.v_proj, heads=kv_heads)
        if hasattr(attention, "q_norm"):
            keep(f"{at}attn.q_normed", attention.q_norm, heads=heads, normed=True)
            keep(f"{at}attn.k_normed", attention.k_norm, heads=kv_heads, normed=True)
        keep(f"{at}attn.z", attention.o_proj, entry=True, heads=heads)
        keep(f"{at}attn.raw", attention.o_proj)
        keep(f"{at}attn.out", layer.post_attention_layernorm if sandwich else attention.o_proj)
        before = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        keep(f"{at}resid_mid", before, entry=True)
        keep(f"{at}mlp.norm", before)
        if hasattr(layer.mlp, "experts"):
            hooks.append(layer.mlp.gate.register_forward_hook(_router(points, at)))
            hooks.append(layer.mlp.experts.register_forward_hook(_experts(points, at)))
        else:
            keep(f"{at}mlp.gate", layer.mlp.gate_proj)
            keep(f"{at}mlp.up", layer.mlp.up_proj)
            keep(f"{at}mlp.act", layer.mlp.down_proj, entry=True)
        keep(f"{at}mlp.raw", layer.mlp)
        keep(f"{at}mlp.out", layer.post_feedforward_layernorm if sandwich else layer.mlp)
        keep(f"{at}resid_post", layer)
    try:
        with torch.no_grad():
            out = model(torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(out.attentions) == len(body.layers)
    for i, pattern in enumerate(out.attentions):
        points[f"layers.{i}.attn.pattern"] = pattern[0].numpy()
    points["logits"] = out.logits[0].numpy()
    return points


def _router(points: dict[str, np.ndarray], at: str) -> Any:
    def hook(_: Any, __: Any, returned: Any) -> None:
        logits, gates, chosen = returned
        points[f"{at}moe.router_logits"] = logits.numpy().copy()
        points[f"{at}moe.scores"] = torch.softmax(logits, -1).numpy()
        points[f"{at}moe.gates"] = gates.numpy().copy()
        points[f"{at}moe.chosen"] = chosen.numpy().copy()

    return hook


def _experts(points: dict[str, np.ndarray], at: str) -> Any:
    """What each chosen expert gives by itself: the same module again, one expert a token, counted fully."""

    def hook(module: Any, given: Any, _: Any) -> None:
        x, chosen, gates = given
        one = torch.ones_like(gates[:, :1])
        alone = [module.forward(x, chosen[:, k : k + 1], one).numpy() for k in range(chosen.shape[1])]
        points[f"{at}moe.expert_out"] = np.stack(alone, axis=1)

    return hook


def assert_same(model: cutaway.Model, reference: Any, ids: Sequence[int], within: float = EXACT) -> None:
    """Every shared point is the same, to `within` of its largest value; the chosen experts are the same numbers."""
    with lifted():
        expected = run(reference, ids)
    chosen = {name: expected.pop(name) for name in [*expected] if name.endswith("moe.chosen")}
    assert_shown(model, expected, ids, within)
    trace = model.trace(ids, points=[*chosen]) if chosen else {}
    for name, value in chosen.items():
        assert np.array_equal(trace[name], value), name


def assert_cached_is_whole(model: cutaway.Model, within: float) -> None:
    """Token by token from the start; a prompt, a second turn, and tokens past it; odd pieces."""
    from cutaway.forward.cache import KVCache
    from cutaway.forward.transformer import transformer

    ids = np.array(prompt(model.spec.vocab_size, 140))
    whole = model.trace(ids).logits
    for pieces in ([1] * 20, [64, 1, 1, 60, *[1] * 8], [17, 65, 3, 55]):
        cache, done = KVCache(model.spec, model.engine), 0
        for size in pieces:
            piece = ids[done : done + size]
            ran = transformer(
                model.engine, model.spec, model.parameters, [piece], caches=[cache], rows=range(len(piece))
            )
            assert deviation(model.engine.numpy(ran.logits), whole[done : done + size]) < within
            done += size


def assert_padding_on_the_left_changes_nothing(model: cutaway.Model, reference: Any) -> None:
    """A padded batch of `transformers` gives, on the rows that are no pads, what each text gives us without pads."""
    texts = [prompt(model.spec.vocab_size, length) for length in (5, 40, 29)]
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with lifted(), torch.no_grad():
        padded = reference(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for text, logits in zip(texts, padded, strict=True):
        assert deviation(model.trace(text).logits, logits[-len(text) :].numpy()) < EXACT
