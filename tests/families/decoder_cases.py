"""Tiny models of Gemma 2 and 3, Mixtral and Qwen3-MoE: each with what makes it worth a test."""

from typing import Any

import torch
from decoders import Tiny

GEMMA_SIZES = {"vocab_size": 61, "hidden_size": 20, "intermediate_size": 26, "num_attention_heads": 4, "head_dim": 6,
               "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


def gemma2(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Tiny:
    return Tiny(f"gemma 2 {name}", "gemma2", {**GEMMA_SIZES, "num_hidden_layers": 3, **settings}, dtype)


def gemma3(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Tiny:
    return Tiny(f"gemma 3 {name}", "gemma3_text", {**GEMMA_SIZES, "num_hidden_layers": 3, **settings}, dtype)


def two_tables(local: float, everywhere: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": {"rope_type": "default", **everywhere},
    }


GEMMA = (
    gemma2("windows of 7, scores scaled by something else", sliding_window=7, query_pre_attn_scalar=11),
    gemma2("tight caps, one key head, untied, biases", sliding_window=70, attn_logit_softcapping=0.8,
           final_logit_softcapping=1.5, num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True,
           num_hidden_layers=2),
    gemma2("no caps, layers in an order of their own", attn_logit_softcapping=None, final_logit_softcapping=None,
           layer_types=["full_attention", "sliding_attention", "sliding_attention"], sliding_window=1,
           rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
    gemma2("in bfloat16, where √24 is 4.90625", torch.bfloat16, hidden_size=24, sliding_window=64),
    gemma3("five windows to one without", num_hidden_layers=7, sliding_window=9, query_pre_attn_scalar=11),
    gemma3("a factor of 8 on the layers without a window", sliding_window=65, sliding_window_pattern=2,
           max_position_embeddings=90,
           rope_parameters=two_tables(30.0, {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0})),
    gemma3("capped logits, untied, biases, one key head", sliding_window=3, final_logit_softcapping=2.0,
           tie_word_embeddings=False, attention_bias=True, num_key_value_heads=1, num_hidden_layers=2,
           layer_types=["full_attention", "sliding_attention"]),
    gemma3("in float16, where √20 is 4.4727", torch.float16, sliding_window=4, sliding_window_pattern=3),
)  # fmt: skip

MIXTURE_SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 14, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 512}  # fmt: skip


def mixtral(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Tiny:
    return Tiny(f"mixtral {name}", "mixtral", {**MIXTURE_SIZES, **settings}, dtype)


def qwen_moe(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Tiny:
    usual = {"moe_intermediate_size": 10, "num_experts": 6, "num_experts_per_tok": 3}
    return Tiny(f"qwen3 moe {name}", "qwen3_moe", {**MIXTURE_SIZES, **usual, **settings}, dtype)


MIXTURES = (
    mixtral("8 experts, 2 a token", num_local_experts=8),
    mixtral("a window, all of 3 experts, wide heads", num_local_experts=3, num_experts_per_tok=3, sliding_window=7,
            head_dim=10),
    mixtral("one expert a token, tied", num_local_experts=5, num_experts_per_tok=1, tie_word_embeddings=True,
            num_key_value_heads=1),
    mixtral("stretched, in bfloat16, gelu", torch.bfloat16, num_local_experts=4, hidden_act="gelu",
            rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3}, max_position_embeddings=90),
    qwen_moe("gates that sum to 1", norm_topk_prob=True, head_dim=8),
    qwen_moe("gates left as they are, biases", norm_topk_prob=False, attention_bias=True, num_key_value_heads=1),
    qwen_moe("dense where it is listed, and in every other layer", norm_topk_prob=True, num_hidden_layers=5,
             decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=True),
    qwen_moe("in float32, 12 narrow experts, 5 a token", torch.float32, num_experts=12, num_experts_per_tok=5,
             moe_intermediate_size=3, head_dim=6),
)  # fmt: skip
