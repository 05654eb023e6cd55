"""The commands on an encoder without a head: it is shown and verified, and says that it cannot continue a text."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cutaway.checkpoints.families import bert
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.stored import Tensors
from cutaway.spec import parameter_shapes

CONFIG = {
    "model_type": "bert",
    "vocab_size": 19,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


def saved(folder: Path, architecture: str) -> Path:
    """A tiny BERT with random weights, as `save_pretrained` lays it out."""
    config = CONFIG | {"architectures": [architecture]}
    spec = bert.spec_from_config(Config(config, "config.json"), "tiny")
    shapes, random = parameter_shapes(spec), np.random.default_rng(0)
    weights = {
        source.name: random.standard_normal(shapes[ours]).astype(np.float32)
        for ours, source in bert.sources(spec, Tensors(folder, {}, {})).items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return saved(tmp_path, "BertModel")


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    return saved(tmp_path, "BertForMaskedLM")


def test_trace_shows_the_pass_up_to_the_pooler_and_no_next_token(here, encoder: Path) -> None:
    told = here("trace", "--ids", "3 1 4 1 5", "--model", str(encoder), "--json")
    assert told.code == 0
    points = [stage["point"] for stage in json.loads(told.out)["stages"]]
    assert {"embed.types", "embed.norm", "layers.0.attn.sum", "pooler.out"} <= set(points) and "logits" not in points
    shown = here("trace", "--ids", "3 1 4 1 5", "--model", str(encoder))
    assert shown.code == 0 and "pooler.out" in shown.out


def test_trace_of_a_masked_language_model_shows_logits_and_no_next_token(here, masked: Path) -> None:
    told = json.loads(here("trace", "--ids", "3 1 4 1 5", "--model", str(masked), "--json").out)
    assert "logits" in [stage["point"] for stage in told["stages"]] and told["next_tokens"] == []
    shown = here("trace", "--ids", "3 1 4 1 5", "--model", str(masked))
    assert shown.code == 0 and "logits" in shown.out and "next token" not in shown.out.lower()


def test_verify_holds(here, encoder: Path) -> None:
    told = here("verify", str(encoder))
    assert told.code == 0 and "pooler" in told.out


@pytest.mark.parametrize(
    ("command", "said"),
    (
        (("generate", "--ids", "3 1 4"), "is an encoder: it reads a text in both directions"),
        (("trace", "--ids", "3 1 4", "--point", "logits"), "is an encoder without a head"),
    ),
)
def test_what_needs_a_head_is_refused_in_one_sentence(here, encoder: Path, command: tuple, said: str) -> None:
    told = here(*command, "--model", str(encoder))
    assert told.code == 2 and told.out == "" and said in told.err and "Traceback" not in told.err
