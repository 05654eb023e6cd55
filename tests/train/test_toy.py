"""The toy model: the shipped weights, the facts they must show, and the training that makes them."""

import json
import sys
from importlib.resources import files

import numpy as np
import pytest

from cutaway.data import TOY_TOKENS
from cutaway.errors import CutawayError
from cutaway.train import toy
from cutaway.train.toy_language import encode, prefix_targets

NAMES = {
    "embed.tokens": (10, 6),
    "embed.positions": (128, 6),
    **{
        f"layers.{i}.{name}": shape
        for i in range(3)
        for name, shape in {
            "attn.norm.gain": (6,),
            "attn.norm.bias": (6,),
            "attn.q.weight": (6, 6),
            "attn.k.weight": (6, 6),
            "attn.v.weight": (6, 6),
            "attn.o.weight": (6, 6),
            "mlp.norm.gain": (6,),
            "mlp.norm.bias": (6,),
            "mlp.up.weight": (24, 6),
            "mlp.up.bias": (24,),
            "mlp.down.weight": (6, 24),
            "mlp.down.bias": (6,),
        }.items()
    },
}


def read(path) -> dict[str, np.ndarray]:
    with path.open("rb") as file, np.load(file) as arrays:
        return dict(arrays)


@pytest.fixture
def shipped() -> dict[str, np.ndarray]:
    return read(files("cutaway.data") / "toy.npz")


@pytest.fixture(scope="module")
def trained() -> dict[str, np.ndarray]:
    # 3,000 steps reach the facts too; 8,000 only polish.
    return toy.train(seed=2, steps=3000)


def test_the_vocabulary_is_the_ten_words_of_the_course():
    words = "<BOS> wizard mixes glowing potion dragon drinks fire troll smashes"
    assert " ".join(TOY_TOKENS) == words


def test_the_shipped_file_holds_2286_numbers_under_our_names(shipped):
    assert {name: value.shape for name, value in shipped.items()} == NAMES
    assert {value.dtype for value in shipped.values()} == {np.dtype("float32")}
    assert sum(value.size for value in shipped.values()) == 10 * 6 + 128 * 6 + 3 * (12 * 36 + 9 * 6) == 2286


def test_the_shipped_file_is_under_20_kilobytes():
    assert len((files("cutaway.data") / "toy.npz").read_bytes()) < 20_000


def test_the_shipped_weights_show_every_fact(shipped):
    broken = [fact for fact in toy.check_facts(shipped) if not fact.holds]
    assert broken == []


def test_a_nucleus_boundary_is_never_close_enough_for_rounding_to_move_it(shipped):
    total = np.sort(toy.next_distribution(shipped, [0, 5, 6]))[::-1].cumsum()
    for kept, threshold in ((3, 0.9), (5, 0.95), (8, 0.99)):
        assert total[kept - 2] < threshold - 1e-3
        assert total[kept - 1] > threshold + 1e-3


def test_training_from_another_seed_reaches_every_fact(trained):
    broken = [fact for fact in toy.check_facts(trained) if not fact.holds]
    assert broken == []


def test_training_ends_close_to_the_language_after_every_beginning(trained):
    ids, share, target = prefix_targets()
    for b, t in zip(*np.nonzero(share), strict=True):
        found = toy.next_distribution(trained, ids[b, : t + 1])
        assert np.abs(found - target[b, t]).max() < 0.1
    assert float(toy.distance(toy.exact(trained))) < 0.005


def test_untrained_weights_break_the_facts():
    facts = toy.check_facts(toy.train(seed=0, steps=1))
    assert not any(fact.holds for fact in facts if fact.name.startswith(("first", "kept", "greedy")))


def test_a_later_token_never_changes_an_earlier_prediction(shipped):
    import torch

    weights = toy.exact(shipped)
    one = toy.logits(weights, torch.tensor([encode("dragon drinks potion")]))
    other = toy.logits(weights, torch.tensor([encode("dragon drinks troll")]))
    assert torch.equal(one[:, :3], other[:, :3])
    assert not torch.equal(one[:, 3], other[:, 3])


def test_the_target_after_dragon_drinks_is_what_the_weights_say():
    ids, share, target = prefix_targets()
    place = target[0, 2]
    assert list(ids[0, :3]) == [0, 5, 6]
    assert share.sum() == pytest.approx(1)
    assert {TOY_TOKENS[i]: round(p, 3) for i, p in enumerate(place) if p} == {
        "potion": 0.62,
        "fire": 0.16,
        "glowing": 0.135,
        "troll": 0.022,
        "wizard": 0.02,
        "smashes": 0.016,
        "dragon": 0.014,
        "mixes": 0.013,
    }


def test_the_same_seed_writes_the_same_file(tmp_path):
    for name in ("a.npz", "b.npz"):
        assert toy.main(["--seed", "3", "--steps", "20", "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert {name: value.shape for name, value in read(tmp_path / "a.npz").items()} == NAMES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_check_ends_with_1_and_writes_nothing_when_a_fact_is_broken(tmp_path, capsys):
    out = tmp_path / "toy.npz"
    assert toy.main(["--steps", "1", "--out", str(out), "--check", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 2286
    assert report["written"] is None
    assert not all(fact["holds"] for fact in report["facts"])
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--steps", "0"], "at least 1 step"),
        (["--seed", "-1"], "-1"),
        (["--out", "no/such/folder/toy.npz"], "no/such/folder/toy.npz"),
        (["--out", "."], "must name a file"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(arguments, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert toy.main(["--steps", "1", *arguments]) == 2
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_torch_the_command_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert toy.main(["--out", str(tmp_path / "toy.npz")]) == 2
    assert "python -m pip install 'cutaway[train]'" in capsys.readouterr().err


def test_an_unknown_word_is_refused_by_name():
    with pytest.raises(CutawayError, match="unicorn"):
        encode("dragon drinks unicorn")
