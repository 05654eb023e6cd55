"""Cutaway as a worker of the benchmark: `python ours.py MODEL`, where MODEL is anything that cutaway.load takes."""

import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import cutaway
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.model import Model
from lines import Job, example_ids, serve


@cache
def loaded() -> Model:
    return cutaway.load(sys.argv[1])


def about() -> dict[str, Any]:
    from importlib.metadata import version  # Numba is not imported: kept kernels are loaded without it

    from cutaway.engines.cpu.processor import has
    from cutaway.engines.cpu.threads import thread_count

    model = loaded()
    return {
        "version": f"Cutaway {cutaway.__version__}, NumPy {np.__version__}, Numba {version('numba')}",
        "threads": thread_count(),
        "instructions": "AVX-512" if has("avx512f") else "AVX2" if has("avx2") else "neither AVX2 nor AVX-512",
        "engine": model.engine.name,
        "file": str(model.path),
        "file_bytes": model.path.stat().st_size,
        "vocabulary": model.spec.vocab_size,
        "layers": model.spec.n_layers,
        "reach": model.spec.n_max or model.spec.context_length,
    }


def ids_of(length: int) -> np.ndarray:
    return np.array(example_ids(length, loaded().spec.vocab_size))


def decode(context: int, tokens: int) -> Job:
    """`tokens` greedy steps after `context` tokens."""
    model = loaded()
    held = KVCache(model.spec, model.engine)
    transformer(model.engine, model.spec, model.parameters, [ids_of(context)], caches=[held])

    def run() -> float:
        held.truncate(context)
        pending = np.array([1])
        begun = time.perf_counter()
        for _ in range(tokens):
            ran = transformer(model.engine, model.spec, model.parameters, [pending], caches=[held])
            pending = np.array([int(np.argmax(model.engine.numpy(ran.logits)[-1]))])
        return time.perf_counter() - begun

    return run


def stream(prompt: int, tokens: int, points: list[str]) -> Job:
    """`tokens` greedy steps as people run them (`model.stream`), after the first, with `points` kept of every step."""
    model = loaded()
    ids = ids_of(prompt).tolist()

    def run() -> float:
        # No token may end it: both sides of a pair take as many steps.
        bias = dict.fromkeys(model.tokenizer.stop_ids, -np.inf)
        steps = model.stream(ids, max_tokens=tokens + 1, temperature=0, points=points, logit_bias=bias)
        kept = [next(steps)]  # the pass over the prompt
        begun = time.perf_counter()
        kept += steps
        seconds = time.perf_counter() - begun
        if len(kept) != tokens + 1:
            raise RuntimeError(f"{len(kept)} steps were made in place of {tokens + 1}")
        return seconds

    return run


def prefill(length: int) -> Job:
    """A prompt into an empty cache; the logits of its last token."""
    model, ids = loaded(), ids_of(length)

    def run() -> float:
        begun = time.perf_counter()
        held = KVCache(model.spec, model.engine)
        transformer(model.engine, model.spec, model.parameters, [ids], caches=[held])
        return time.perf_counter() - begun

    return run


def logits(length: int) -> Job:
    """A whole pass with the logits of every position, nothing cached."""
    model, ids = loaded(), ids_of(length)

    def run() -> float:
        begun = time.perf_counter()
        transformer(model.engine, model.spec, model.parameters, [ids], rows=range(length))
        return time.perf_counter() - begun

    return run


def capture(length: int, points: list[str], read: bool) -> Job:
    """`model.trace` keeping `points`; with `read` every value is fetched from the trace, so that none is only due.

    What a trace works out when it is read (T × T arrays, heads' parts of the output, logits) is let go again.
    """
    model, ids = loaded(), ids_of(length).tolist()

    def run() -> float:
        begun = time.perf_counter()
        trace = model.trace(ids, points=points)
        for address in trace.points if read else ():
            value = trace[address]
            assert value.size > 0
        return time.perf_counter() - begun

    return run


def capture_all(length: int, points: list[str]) -> Job:
    """As `capture`, with all that is worked out held until the end, as in a cache of activations."""
    model, ids = loaded(), ids_of(length).tolist()

    def run() -> float:
        begun = time.perf_counter()
        trace = model.trace(ids, points=points)
        held = {address: trace[address] for address in trace.points}
        seconds = time.perf_counter() - begun
        assert len(held) == len(trace.points)
        return seconds

    return run


def sweep(prompts: int, length: int) -> Job:
    """`model.sweep` over that many prompts, every layer's stream of each read and let go."""
    model = loaded()
    texts = [[(id + 13 * number) % model.spec.vocab_size for id in ids_of(length)] for number in range(prompts)]

    def run() -> float:
        begun = time.perf_counter()
        for trace in model.sweep(texts, "layers.*.resid_post"):
            held = [trace[address] for address in trace.points]
            assert len(held) == model.spec.n_layers and held[0].shape[0] == length
        return time.perf_counter() - begun

    return run


def read(threads: int, repeats: int) -> list[float]:
    """Seconds for all threads together to read the mapped file once, each time anew."""
    import numba

    @numba.njit(nogil=True)
    def total(words: np.ndarray) -> int:
        added = np.uint64(0)
        for i in range(len(words)):
            added += words[i]
        return added

    path = loaded().path
    words = np.memmap(path, np.uint64, "r", shape=(path.stat().st_size // 8,))
    parts = [np.asarray(part) for part in np.array_split(words, threads)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(total, parts))
        for _ in range(repeats):
            begun = time.perf_counter()
            list(pool.map(total, parts))
            seconds.append(time.perf_counter() - begun)
    return seconds


def private_memory(tokens: int) -> dict[str, int] | None:
    """Bytes of this process's own, interpreter and libraries counted, once it has decoded; None where not told.

    The mapped file's pages are the system's to keep or to drop; they are told apart.
    """
    decode(16, tokens)()
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    own, file, inside = {True: 0, False: 0}, str(loaded().path.resolve()), False
    for line in smaps.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(file)
        elif line.startswith(("Private_Clean:", "Private_Dirty:")):
            own[inside] += 1024 * int(line.split()[1])
    return {"private": own[False], "mapped": own[True]}


LLAMA_NAMES = {
    "attn.norm.gain": "input_layernorm.weight",
    "mlp.norm.gain": "post_attention_layernorm.weight",
    **{f"attn.{p}.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"mlp.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def folder(path: str) -> None:
    """The model's weights as float32, in a folder that transformers reads (a LlamaForCausalLM)."""
    import json

    from safetensors.numpy import save_file

    model, spec = loaded(), loaded().spec
    layer = spec.layers[0]
    attention, mlp = layer.attention, layer.feed_forward
    names = {"embed.tokens": "model.embed_tokens.weight", "final.norm.gain": "model.norm.weight"}
    for i in range(spec.n_layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in LLAMA_NAMES.items()}
    if set(names) != set(model.parameters.stored):
        raise RuntimeError(f"{spec.name} has other weights than a Llama with one embedding for both ends")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": mlp.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "rms_norm_eps": layer.norm.eps,
        "rope_theta": attention.rotary.base,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rotary.base},
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with written(Path(path)) as part:
        part.mkdir()
        weights = {theirs: model.parameters.stored[ours].dequantise(np.float32) for ours, theirs in names.items()}
        save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, part / "model.safetensors")
        (part / "config.json").write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def written(place: Path) -> Iterator[Path]:
    """A name to write under, which becomes `place` when all is written."""
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    yield part
    part.rename(place)


if __name__ == "__main__":
    makers = (decode, stream, prefill, logits, capture, capture_all, sweep, read, private_memory, folder)
    serve(about, {maker.__name__: maker for maker in makers})
