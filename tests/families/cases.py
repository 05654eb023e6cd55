"""The tiny models: each has something that a wrong forward pass or a wrong loader would trip over."""

from torch_reference import Case


def _gpt2(name: str, **settings: object) -> Case:
    return Case(name, "gpt2", {"vocab_size": 61, "n_positions": 400, "n_layer": 2, **settings})


def _llama(name: str, **settings: object) -> Case:
    usual = {"vocab_size": 67, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 512}
    return Case(name, "llama", {**usual, **settings})


def _heads(hidden: int, query: int, key: int, **more: object) -> dict[str, object]:
    return {"hidden_size": hidden, "num_attention_heads": query, "num_key_value_heads": key, **more}


def _rope(base: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


GPT2 = (
    _gpt2("gpt2 plain", n_embd=24, n_head=4),
    _gpt2("gpt2 odd heads of 5, untied", n_embd=20, n_head=4, tie_word_embeddings=False),
    _gpt2("gpt2 odd heads of 7, one layer", n_embd=21, n_head=3, n_layer=1, activation_function="gelu"),
    _gpt2("gpt2 one head of 10, relu", n_embd=10, n_head=1, activation_function="relu"),
    _gpt2("gpt2 narrow inside", n_embd=24, n_head=6, n_inner=17, activation_function="gelu_pytorch_tanh"),
    _gpt2("gpt2 scaled by depth", n_embd=18, n_head=3, n_layer=3, scale_attn_by_inverse_layer_idx=True),
    _gpt2("gpt2 not scaled", n_embd=12, n_head=2, scale_attn_weights=False, layer_norm_epsilon=1e-3),
    _gpt2("gpt2 neither but by depth", n_embd=12, n_head=2, scale_attn_weights=False,
          scale_attn_by_inverse_layer_idx=True, n_inner=64),
)  # fmt: skip

LLAMA = (
    _llama("llama plain", **_heads(24, 4, 4)),
    _llama("llama two queries a key, tied", **_heads(24, 4, 2), tie_word_embeddings=True),
    _llama("llama three queries a key", **_heads(60, 6, 2), **_rope(100_000.0), num_hidden_layers=3),
    _llama("llama one key, heads of 10", **_heads(40, 4, 1), **_rope(5e5), hidden_act="gelu"),
    _llama("llama wide heads", **_heads(21, 3, 1, head_dim=14), attention_bias=True, mlp_bias=True),
    _llama("llama narrow heads", **_heads(36, 6, 3, head_dim=4), attention_bias=True, hidden_act="relu"),
    _llama("llama smallest heads", **_heads(18, 9, 3, head_dim=2), mlp_bias=True, hidden_act="gelu_new"),
    _llama("llama small base", **_heads(24, 2, 1), **_rope(37.5), rms_norm_eps=1e-2, hidden_act="gelu_pytorch_tanh"),
    _llama("llama tied with biases", **_heads(24, 4, 2), tie_word_embeddings=True, attention_bias=True,
           num_hidden_layers=1),
)  # fmt: skip

LENGTHS = (1, 5, 17, 64, 65, 321)  # 321 crosses a chunk of 256 rows and blocks of 64, and leaves one row over
