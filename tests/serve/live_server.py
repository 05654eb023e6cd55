"""A real server on a free port of this machine, and a small model whose words are known beforehand."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import uvicorn

from cutaway.serve import make_app
from cutaway.serve.models import Models

END = 256  # the speaker's end token
WORDS = [
    "abcdefghijklmnopqrstuvwxyz",
    "😀",
    "漢",
    "न",
]  # each is said round and round: after its last byte comes its first
ANSWER = ":HELO!"  # what it says after a colon, and then it ends


@contextmanager
def live(*sources: str, default: str = "toy", **settings: Any) -> Iterator[int]:
    """The port of a server with these models, on threads of this process."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    app = make_app(Models(sources), default=default, **settings)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def client_of(port: int, key: str = "none") -> openai.OpenAI:
    """The client, which reports the first refusal instead of trying again."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


def write_speaker(folder: Path) -> None:
    """A checkpoint of 260 tokens, one for each byte: mostly each says the next one of a word, whatever stood before;
    drawn at temperature 1 it strays now and then."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(5)
    width, wide, layers, vocab = 64, 96, 2, 260
    rows = random.standard_normal((vocab, width)).astype(np.float32)
    after = dict(zip(ANSWER.encode(), [*ANSWER.encode()[1:], END], strict=True))
    for word in WORDS:
        data = word.encode()
        after |= dict(zip(data, data[1:] + data[:1], strict=True))
    others = [token for token in range(vocab) if token not in after.values()]
    after |= dict(zip([token for token in range(vocab) if token not in after], others, strict=True))
    head = np.zeros_like(rows)
    for one, following in after.items():
        head[following] = rows[one]
    weights = {
        "model.embed_tokens.weight": rows,
        "lm_head.weight": (0.12 * head).astype(np.float32),
        "model.norm.weight": np.ones(width, np.float32),
    }
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 2, width),
        "self_attn.v_proj": (width // 2, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (wide, width),
        "mlp.up_proj": (wide, width),
        "mlp.down_proj": (width, wide),
    }
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(width, np.float32)
        for name, shape in shapes.items():
            size = 0.2 if name.endswith(("o_proj", "down_proj")) else 1.0
            values = size * random.standard_normal(shape) / np.sqrt(shape[1])
            weights[f"model.layers.{layer}.{name}.weight"] = values.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_bytes_tokenizer(folder)


def _write_bytes_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    readable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in readable]
    letters = {byte: chr(byte) for byte in readable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|begin|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|begin|>assistant:"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
