"""Configurations as they were published say what the catalog says, and none of their keys is refused."""

import pytest

from cutaway.checkpoints.families import family_of
from cutaway.checkpoints.families.config import Config
from cutaway.spec import ModelSpec
from cutaway.spec.catalog import catalog_spec

_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
PUBLISHED = {
    "gpt2": {**_GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12},
    "gpt2-medium": {**_GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0,
                    "predict_special_tokens": True},
    "gpt2-large": {**_GPT2, "n_embd": 1280, "n_head": 20, "n_layer": 36},
    "gpt2-xl": {**_GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_model_of_the_catalog(name: str) -> None:
    values = PUBLISHED[name]
    family = family_of(values["model_type"], "config.json", "MODEL_TYPES")
    spec: ModelSpec = family.spec_from_config(Config(values, "config.json"), name)
    assert spec == catalog_spec(name)
