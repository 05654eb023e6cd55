"""One head's steps in every kind of attention: grouped queries, latent keys and values, a window, both directions."""

import re
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import expect

import cutaway
from conftest import WORDS, word_model

TEXT = "the cat sat on a mat because it was tired"
WIDE = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"vocab_size": len(WORDS) + 1, "max_position_embeddings": 64, **WIDE}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
FAMILIES = {
    "grouped": ("LlamaConfig", {"num_key_value_heads": 2, **NO_ENDS}),
    "latent": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "first_k_dense_replace": 1, **LATENT, **EXPERTS, **NO_ENDS},
    ),
    "windowed": ("Gemma2Config", {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 4, **NO_ENDS}),
    "encoder": ("BertConfig", {}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> str:
    """The folder of a tiny model of this family."""
    import transformers

    config, more = FAMILIES[request.param]
    kind = "AutoModel" if request.param == "encoder" else "AutoModelForCausalLM"
    made = getattr(transformers, config)(**SIZES, **more)
    return word_model(tmp_path_factory.mktemp("families") / request.param, made, kind)


def test_the_six_steps_of_a_head_are_those_of_the_trace(visit, serving, family):
    trace = cutaway.load(family).trace(TEXT, points=["*"])
    with serving(family) as at:
        for layer, head in ((0, 1), (1, 3)):
            page = visit(f"m={Path(family).name}&p={quote(TEXT)}&v=heads&l={layer}&h={head}", at=at)
            steps = page.locator(".steps button")
            expect(steps).to_have_count(6)
            hidden = np.isneginf(trace[f"layers.{layer}.attn.masked"]).any()
            expect(steps.nth(2)).to_contain_text("mask" if hidden else "no mask")
            for i, name in ((3, "pattern"), (4, "z"), (5, "head_out")):
                value = trace[f"layers.{layer}.attn.{name}"][head]
                name_of_it = re.compile(rf"open attn.{name} of this head, {len(value)} by {value.shape[1]}$")
                expect(steps.nth(i)).to_have_accessible_name(name_of_it)
                canvas = steps.nth(i).locator("canvas")
                box = canvas.bounding_box()
                at_row = {"x": 2.5 * box["width"] / value.shape[1], "y": 3.5 * box["height"] / len(value)}
                canvas.click(position=at_row)
                expect(page.get_by_role("heading", name=f"layers.{layer}.attn.{name}", exact=True)).to_be_visible()
                told = page.locator(".cell .value")
                expect(told).to_have_attribute("data-value", str(float(value[3, 2])))
            page.close()
