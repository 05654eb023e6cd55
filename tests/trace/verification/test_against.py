"""A user's own checkpoint is held against transformers, point by point."""

import json
import re

import pytest
import torch
import transformers

import cutaway
from cutaway.cli import main
from cutaway.engines.protocol import Gain
from cutaway.forward.parameters import Parameters


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_streams_patterns_and_logits_agree(checkpoint):
    checks = list(cutaway.load(checkpoint).compare())
    assert [check.name for check in checks] == [
        "embed.out",
        "layers.0.attn.pattern",
        "layers.0.resid_post",
        "layers.1.attn.pattern",
        "layers.1.resid_post",
        "layers.2.attn.pattern",
        "final.norm",
        "logits",
    ]
    assert all(check.holds for check in checks)
    assert max(check.deviation for check in checks) < 1e-5


def test_the_command_says_where_the_two_first_part(checkpoint, capsys, monkeypatch):
    """With one of our weights changed behind the loader's back, only what comes after it differs."""
    make = Parameters.__init__

    def spoiled(self, spec, weights, engine):
        make(self, spec, weights, engine)
        self.layers[1]["attn.norm"] = Gain(self.layers[1]["attn.norm"].gain * 1.5)

    monkeypatch.setattr(Parameters, "__init__", spoiled)
    assert main(["verify", str(checkpoint), "--against", "transformers"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"first part at layers\.1\.attn\.pattern", out)
    assert main(["verify", str(checkpoint), "--against", "transformers", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in told["checks"] if c["holds"]] == [
        "embed.out",
        "layers.0.attn.pattern",
        "layers.0.resid_post",
    ]


def test_a_checkpoint_that_transformers_cannot_read_is_refused_with_its_reason(capsys):
    assert main(["verify", "toy", "--against", "transformers"]) == 2
    assert "transformers cannot load" in capsys.readouterr().err
