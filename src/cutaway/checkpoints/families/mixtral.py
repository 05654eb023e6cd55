"""Mixtral: Mistral with experts in the place of every feed-forward (Jiang et al. 2024).

The router takes the softmax over all experts, then the best few of it, and makes those sum to 1 again. GGUF files
of it name the architecture "llama" and are read there.
"""

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.mixtures import expert_sources, hugging_face_experts, with_experts
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.stored import Tensors
from cutaway.spec import ModelSpec, RouterSpec

MODEL_TYPES = ("mixtral",)
GGUF_ARCHITECTURES: tuple[str, ...] = ()
HARMLESS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # they act in training only
IGNORED = llama.BUFFERS
_EXPERT_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    config.only("attention_bias", False)
    window = config.optional_size("sliding_window")
    spec = llama.llama_spec(config, name, default_kv_heads=8, default_eps=1e-5, default_base=1e6, window=window)
    n_experts = config.size("num_local_experts", config.size("num_experts", 8))
    router = RouterSpec(config.size("num_experts_per_tok", 2))
    config.refuse_unread(HARMLESS)
    return with_experts(spec, n_experts, router)


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint, in the published layout or in that of transformers 5."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    layers = f"{prefix}layers."
    experts = hugging_face_experts(
        tensors,
        f"{layers}{{layer}}.block_sparse_moe.experts.{{expert}}.{{part}}.weight",
        _EXPERT_PARTS,
        f"{layers}{{layer}}.mlp.experts",
    )
    routers = {}
    for i in range(spec.n_layers):
        new = f"{layers}{i}.mlp.gate.weight"
        routers[f"layers.{i}.moe.router.weight"] = Source(
            new if new in tensors else f"{layers}{i}.block_sparse_moe.gate.weight"
        )
    return llama.sources(spec, tensors) | routers | expert_sources(spec, experts)
