"""The other programs as workers of the benchmark: `python rivals.py NAME FILE`, in an interpreter that has them.

Nothing of Cutaway is imported here. NAME is one of CONTENDERS; FILE is a GGUF file for llama.cpp, a folder that
transformers reads for transformers and TransformerLens, a converted folder for CTranslate2.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lines import Job, example_ids, serve

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
Makers = dict[str, Callable[..., Any]]
About = Callable[[], dict[str, Any]]


def version(*packages: str) -> str:
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def llama_cpp(file: str) -> tuple[About, Makers]:
    """llama.cpp through its C interface: no Python beside the calls and the argmax, which our side takes alike."""
    import llama_cpp as llama

    llama.llama_backend_init()

    @cache
    def model() -> Any:
        loaded = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        return loaded

    def vocabulary() -> int:
        return llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model()))

    def new_context(room: int) -> Any:
        asked = llama.llama_context_default_params()
        asked.n_ctx = -(-room // 256) * 256
        asked.n_batch = asked.n_ubatch = 512
        asked.n_threads = asked.n_threads_batch = THREADS
        made = llama.llama_init_from_model(model(), asked)
        if not made:
            raise RuntimeError("llama.cpp makes no context")
        return made

    def run_ids(made: Any, ids: list[int]) -> None:
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            tokens = (llama.llama_token * len(part))(*part)  # a name keeps it alive; the batch holds its address only
            if status := llama.llama_decode(made, llama.llama_batch_get_one(tokens, len(part))):
                raise RuntimeError(f"llama_decode gave status {status}")

    def decode(context: int, tokens: int) -> Job:
        made = new_context(context + tokens + 8)
        memory, width = llama.llama_get_memory(made), vocabulary()
        run_ids(made, example_ids(context, width))

        def run() -> float:
            llama.llama_memory_seq_rm(memory, 0, context, -1)
            pending = 1
            begun = time.perf_counter()
            for _ in range(tokens):
                run_ids(made, [pending])
                row = np.ctypeslib.as_array(llama.llama_get_logits_ith(made, -1), (width,))
                pending = int(row.argmax())
            return time.perf_counter() - begun

        return run

    def prefill(length: int) -> Job:
        made = new_context(length + 8)
        memory, ids = llama.llama_get_memory(made), example_ids(length, vocabulary())

        def run() -> float:
            llama.llama_memory_clear(memory, False)
            begun = time.perf_counter()
            run_ids(made, ids)
            np.ctypeslib.as_array(llama.llama_get_logits_ith(made, -1), (vocabulary(),)).argmax()
            return time.perf_counter() - begun

        return run

    def quantise(target: str, kind: str) -> None:
        asked = llama.llama_model_quantize_default_params()
        asked.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
        asked.allow_requantize, asked.nthread = True, THREADS
        part = f"{target}.{os.getpid()}.part"
        if status := llama.llama_model_quantize(file.encode(), part.encode(), ctypes.byref(asked)):
            raise RuntimeError(f"llama_model_quantize gave status {status}")
        Path(part).rename(target)

    def about() -> dict[str, Any]:
        told = llama.llama_print_system_info().decode().split("|")
        return {"version": version("llama-cpp-python"), "instructions": " ".join(x.strip() for x in told if "= 1" in x)}

    return about, {"decode": decode, "prefill": prefill, "quantise": quantise}


def _torch() -> Any:
    import torch

    torch.set_num_threads(THREADS)
    return torch


def _of_torch(*packages: str) -> dict[str, Any]:
    torch = _torch()
    return {"version": version(*packages, "torch"), "instructions": torch.backends.cpu.get_cpu_capability()}


def transformers(file: str) -> tuple[About, Makers]:
    """transformers in float32, with the attention that it picks by itself."""
    torch = _torch()

    @cache
    def model() -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(file, dtype=torch.float32).eval()

    def ids_of(length: int) -> Any:
        return torch.tensor([example_ids(length, model().config.vocab_size)])

    def logits(length: int) -> Job:
        ids = ids_of(length)

        def run() -> float:
            with torch.inference_mode():
                begun = time.perf_counter()
                model()(ids, use_cache=False)
                return time.perf_counter() - begun

        return run

    def decode(context: int, tokens: int) -> Job:
        ids = ids_of(context)

        def run() -> float:
            with torch.inference_mode():
                past = model()(ids, use_cache=True, logits_to_keep=1).past_key_values
                pending = torch.tensor([[1]])
                begun = time.perf_counter()
                for _ in range(tokens):
                    out = model()(pending, past_key_values=past, use_cache=True)
                    past, pending = out.past_key_values, out.logits[:, -1:].argmax(-1)
                return time.perf_counter() - begun

        return run

    return lambda: _of_torch("transformers"), {"logits": logits, "decode": decode}


def transformer_lens(file: str) -> tuple[About, Makers]:
    """TransformerLens' bridge over the same transformers model; run_with_cache as it stands, nothing filtered."""
    torch = _torch()

    @cache
    def bridge() -> Any:
        from transformer_lens.model_bridge import TransformerBridge
        from transformers import AutoTokenizer, LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(file, dtype=torch.float32, attn_implementation="eager").eval()
        with TemporaryDirectory() as folder:  # it wants a tokenizer that was read from a folder
            stand_in(file).save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            return TransformerBridge.boot_transformers(file, hf_model=model, tokenizer=tokenizer, device="cpu")

    def ids_of(length: int) -> Any:
        return torch.tensor([example_ids(length, bridge().cfg.d_vocab)])

    def capture(length: int) -> Job:
        ids = ids_of(length)

        def run() -> float:
            with torch.inference_mode():
                begun = time.perf_counter()
                bridge().run_with_cache(ids)
                return time.perf_counter() - begun

        return run

    def kept(length: int) -> dict[str, list[int]]:
        with torch.inference_mode():
            _, cache = bridge().run_with_cache(ids_of(length))
        return {name: list(value.shape) for name, value in cache.items() if hasattr(value, "shape")}

    def sweep(prompts: int, length: int, batch: int) -> Job:
        """A loop over the prompts, `batch` at a time, keeping every layer's stream of each."""
        vocabulary, layers = bridge().cfg.d_vocab, bridge().cfg.n_layers
        texts = torch.tensor(
            [[(id + 13 * number) % vocabulary for id in example_ids(length, vocabulary)] for number in range(prompts)]
        )

        def run() -> float:
            with torch.inference_mode():
                begun = time.perf_counter()
                for part in texts.split(batch):
                    _, cache = bridge().run_with_cache(part, names_filter=lambda name: name.endswith("hook_resid_post"))
                    held = [cache[f"blocks.{layer}.hook_resid_post"] for layer in range(layers)]
                    if len(cache) != layers or held[0].shape[:2] != part.shape:
                        raise RuntimeError(f"{len(cache)} values were kept, not the {layers} streams")
                return time.perf_counter() - begun

        return run

    made = {"capture": capture, "kept": kept, "sweep": sweep}
    return lambda: _of_torch("transformer-lens", "transformers"), made


def stand_in(folder: str) -> Any:
    """A tokenizer whose tokens are called by their numbers: conversion and bridge ask for one, the passes do not."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def ctranslate2(file: str) -> tuple[About, Makers]:
    """CTranslate2 with weights and activations in 8 bits."""
    import ctranslate2 as ct2

    @cache
    def generator() -> Any:
        return ct2.Generator(file, device="cpu", compute_type="int8", inter_threads=1, intra_threads=THREADS)

    def prefill(length: int) -> Job:
        """The prompt, and the one token that follows it."""
        vocabulary = json.loads((Path(file) / "vocabulary.json").read_text())
        tokens = [vocabulary[i] for i in example_ids(length, len(vocabulary))]

        def run() -> float:
            begun = time.perf_counter()
            generator().generate_batch([tokens], max_length=1, sampling_topk=1, include_prompt_in_result=False)
            return time.perf_counter() - begun

        return run

    def convert(folder: str) -> None:
        if not (Path(folder) / "tokenizer.json").exists():
            stand_in(folder).save_pretrained(folder)
        part = f"{file}.{os.getpid()}.part"
        ct2.converters.TransformersConverter(folder).convert(part, quantization="int8")
        Path(part).rename(file)

    def about() -> dict[str, Any]:
        types = ", ".join(sorted(ct2.get_supported_compute_types("cpu")))
        forced = os.environ.get("CT2_FORCE_CPU_ISA", "the best it finds")
        return {"version": version("ctranslate2"), "instructions": f"{forced} (computes in {types})"}

    return about, {"prefill": prefill, "convert": convert}


# By name: what serves it, what has to be importable, and what installs it.
CONTENDERS: dict[str, tuple[Callable[[str], tuple[About, Makers]], tuple[str, ...], str]] = {
    "llama.cpp": (llama_cpp, ("llama_cpp", "numpy"), "pip install llama-cpp-python"),
    "transformers": (transformers, ("transformers", "torch"), "pip install torch transformers"),
    "TransformerLens": (transformer_lens, ("transformer_lens",), "pip install transformer-lens"),
    "CTranslate2": (
        ctranslate2,
        ("ctranslate2", "transformers", "torch"),
        "pip install ctranslate2 transformers torch",
    ),
}


def missing() -> dict[str, str]:
    """Of the contenders that this interpreter lacks, the line that would install each."""
    found = importlib.util.find_spec
    return {name: pip for name, (_, needs, pip) in CONTENDERS.items() if not all(map(found, needs))}


if __name__ == "__main__":
    if sys.argv[1] == "missing":
        print(json.dumps(missing()))
    else:
        serve(*CONTENDERS[sys.argv[1]][0](sys.argv[2]))
