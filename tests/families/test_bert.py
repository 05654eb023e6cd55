"""BERT computes what `transformers` computes: bare, with its pooler, with its masked-LM head, alone and in company."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import EXACT, SINGLE, assert_verified, deviation, prompt
from safetensors.torch import load_file, save_file
from streams import assert_same, built, saved, shown
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification, BertModel

import cutaway
from cutaway.checkpoints.families import bert
from cutaway.checkpoints.families.config import Config
from cutaway.errors import CutawayError
from cutaway.forward.transformer import transformer
from cutaway.spec.catalog import catalog_spec

LENGTHS = (1, 5, 17, 65, 273)  # 273 crosses a chunk of 256 rows and leaves a run of single rows


def config(**settings: Any) -> BertConfig:
    usual = {"vocab_size": 71, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
    more = {"intermediate_size": 40, "max_position_embeddings": 300}
    return BertConfig(**{**usual, **more, **settings})


CASES = {
    "pooler": lambda: built(BertModel, config(), 1),
    "bare, one type, wide eps": lambda: built(
        BertModel, config(type_vocab_size=1, layer_norm_eps=1e-3), 2, add_pooling_layer=False
    ),
    "masked LM": lambda: built(BertForMaskedLM, config(num_hidden_layers=3, hidden_act="gelu_new"), 3),
    "masked LM, untied, odd heads of 7": lambda: built(
        BertForMaskedLM,
        config(hidden_size=21, num_attention_heads=3, tie_word_embeddings=False, type_vocab_size=3, hidden_act="relu"),
        4,
    ),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name, build in CASES.items():
        model = build()
        made[name] = saved(model, tmp_path_factory.mktemp("bert")), model
    return made


every_case = pytest.mark.parametrize("name", CASES)


def types_for(model: cutaway.Model, length: int) -> list[int]:
    assert model.spec.token_types is not None
    return [i * model.spec.token_types // length for i in range(length)]


@every_case
def test_streams_patterns_logits_and_pooler_are_those_of_transformers(name: str, cases: dict) -> None:
    folder, reference = cases[name]
    model = cutaway.load(folder, engine="numpy", dtype="float64")
    for length in LENGTHS:
        ids = prompt(model.spec.vocab_size, length)
        assert_same(model, reference, ids)
        assert_same(model, reference, ids, types=types_for(model, length))


@every_case
def test_the_cpu_engine_computes_the_same_in_single_precision(name: str, cases: dict, tmp_path: Path) -> None:
    reference = cases[name][1]
    single = type(reference)(reference.config, **({} if "bare" not in name else {"add_pooling_layer": False}))
    single.load_state_dict(reference.state_dict())
    model = cutaway.load(saved(single, tmp_path), engine="cpu")
    exact = single.double().eval()
    for length in LENGTHS:
        assert_same(model, exact, prompt(model.spec.vocab_size, length), SINGLE, types_for(model, length))


@every_case
def test_the_identities_hold(name: str, cases: dict) -> None:
    for engine, dtype in (("numpy", "float64"), ("cpu", "float32")):
        assert_verified(cutaway.load(cases[name][0], engine=engine, dtype=dtype))


def test_what_a_checkpoint_stores_decides_what_stands_on_the_encoder(cases: dict) -> None:
    has = {name: cutaway.load(folder).points for name, (folder, _) in cases.items()}
    assert {name for name, points in has.items() if "pooler.out" in points} == {"pooler"}
    assert {name for name, points in has.items() if "logits" in points} == {n for n in CASES if "masked" in n}
    counts = {name: cutaway.load(folder).spec.count().total for name, (folder, _) in cases.items()}
    for name, (_, reference) in cases.items():
        parameters = dict(reference.named_parameters())
        if "cls.predictions.decoder.bias" in parameters:  # it is added; the other, not tied to it, does nothing
            del parameters["cls.predictions.bias"]
        assert counts[name] == sum(p.numel() for p in parameters.values())


def test_the_original_layout_is_read(cases: dict, tmp_path: Path) -> None:
    """As Google's checkpoints came over: gamma and beta, position_ids, two heads, both copies of what is tied."""
    model = built(BertForPreTraining, config(), 5)
    saved(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value.clone()
        for name, value in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(300)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = cutaway.load(tmp_path, engine="numpy", dtype="float64")
    assert "cls.seq_relationship.weight" in old and {"pooler.out", "logits"} <= set(loaded.points)
    ids = prompt(71, 17)
    trace = loaded.trace(ids, points=["logits", "pooler.out"])
    with torch.no_grad():
        body = model.bert(torch.tensor([ids]))
        expected = model.cls.predictions(body.last_hidden_state)[0].numpy()
    assert deviation(trace["pooler.out"], body.pooler_output.numpy()) < EXACT
    assert deviation(trace["logits"], expected) < EXACT

    old["cls.predictions.decoder.bias"][3] += 1
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CutawayError, match="two biases"):
        cutaway.load(tmp_path)


def test_a_head_that_the_configuration_ties_but_that_differs_is_refused(cases: dict, tmp_path: Path) -> None:
    saved(cases["masked LM"][1], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CutawayError, match=r"cls\.predictions\.decoder\.weight that differs"):
        cutaway.load(tmp_path)


def test_a_head_that_is_promised_but_not_there_is_missed(cases: dict, tmp_path: Path) -> None:
    saved(cases["masked LM"][1], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if not name.startswith("cls.")},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(CutawayError, match=r"lacks cls\.predictions"):
        cutaway.load(tmp_path)


def test_a_classifiers_head_is_refused_by_name(tmp_path: Path) -> None:
    saved(built(BertForSequenceClassification, config(), 6), tmp_path)
    with pytest.raises(CutawayError, match=r"classifier\.(weight|bias)"):
        cutaway.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("position_embedding_type", "relative_key_query"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("hidden_act", "mish"),
        ("embedding_size", 12),
    ),
)
def test_settings_that_would_change_the_pass_are_refused_by_name(
    key: str, value: object, cases: dict, tmp_path: Path
) -> None:
    saved(cases["pooler"][1], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CutawayError, match=key):
        cutaway.load(tmp_path)


def test_padded_batches_of_transformers_are_our_unpadded_runs(cases: dict) -> None:
    """Right-padded as its users do it, and left-padded with positions from the mask: our packed batch is neither."""
    folder, reference = cases["masked LM"]
    model = cutaway.load(folder, engine="numpy", dtype="float64")
    texts = [np.array(prompt(71, length)) for length in (3, 70, 17)]
    ran = transformer(model.engine, model.spec, model.parameters, texts, rows=range(90))
    ours = np.split(model.engine.numpy(ran.logits), [3, 73])
    for left in (False, True):
        ids, mask = torch.zeros(3, 70, dtype=torch.long), torch.zeros(3, 70, dtype=torch.long)
        for row, text in enumerate(texts):
            here = slice(70 - len(text), 70) if left else slice(0, len(text))
            ids[row, here], mask[row, here] = torch.tensor(text), 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            padded = reference(ids, attention_mask=mask, position_ids=positions).logits
        for row, text in enumerate(texts):
            assert deviation(ours[row], padded[row][mask[row] == 1].numpy()) < EXACT
            assert np.array_equal(ours[row], model.trace(text).logits)


def test_an_encoder_without_a_head_gives_vectors_and_says_that_it_cannot_continue(cases: dict) -> None:
    model = cutaway.load(cases["pooler"][0])
    trace = model.trace([3, 1, 4])
    assert trace["layers.1.resid_post"].shape == (3, 24) and trace["pooler.out"].shape == (1, 24)
    for refused in (lambda: trace.next_tokens(3), lambda: trace.last_logits, lambda: model.generate([3, 1, 4])):
        with pytest.raises(CutawayError, match="is an encoder"):
            refused()
    with pytest.raises(CutawayError, match="logits"):
        model.trace([3, 1, 4], points=["logits"])


def test_a_masked_language_model_fills_in_and_says_that_it_cannot_continue(cases: dict) -> None:
    folder, reference = cases["masked LM"]
    model = cutaway.load(folder, engine="numpy", dtype="float64")
    ids = prompt(71, 9)
    best = int(np.argmax(model.trace(ids).logits[4]))
    assert best == int(np.argmax(shown(reference, ids)["logits"][4]))
    with pytest.raises(CutawayError, match=r"both directions and cannot continue"):
        model.generate(ids)
    with pytest.raises(CutawayError, match="none says what comes next"):
        model.trace(ids).next_tokens()


def test_types_are_one_known_kind_for_each_token(cases: dict) -> None:
    model = cutaway.load(cases["pooler"][0])
    assert np.array_equal(model.trace([3, 1, 4], types=[0, 0, 0])["embed.out"], model.trace([3, 1, 4])["embed.out"])
    assert not np.array_equal(
        model.trace([3, 1, 4], types=[0, 1, 1])["embed.out"][1:], model.trace([3, 1, 4])["embed.out"][1:]
    )
    for types, said in (
        ([0, 1], "each of the 3 tokens"),
        ([0, 1, 2], "2 at position 2"),
        ([0, -1, 0], "-1 at position 1"),
    ):
        with pytest.raises(CutawayError, match=said):
            model.trace([3, 1, 4], types=types)
    with pytest.raises(CutawayError, match="whole numbers"):
        model.trace([3, 1, 4], types=[0.0, 1.0, 1.0])
    with pytest.raises(CutawayError, match="tells no kinds"):
        cutaway.load("toy").trace([3, 1, 4], types=[0, 0, 0])


PUBLISHED = {  # bert-base-uncased, as it stands on the Hub
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}


@pytest.mark.parametrize(
    ("architecture", "total"),
    (("BertModel", 109_482_240), ("BertForMaskedLM", 109_514_298), ("BertForPreTraining", 110_104_890)),
)
def test_bert_base_counts_what_each_of_its_forms_has(architecture: str, total: int) -> None:
    """`BertForPreTraining` without the 1,538 parameters of its second head, which is left out."""
    spec = bert.spec_from_config(Config(PUBLISHED | {"architectures": [architecture]}, "config.json"), "bert-base")
    assert spec.count().total == total
    if architecture == "BertModel":
        assert spec == catalog_spec("bert-base")
