"""Every family on the cpu engine, by fused layers and by stages: the same bits, and the reference engine's numbers.

That the reference computes what `transformers` computes is tested beside this.
"""

from pathlib import Path

import numpy as np
import pytest
from compared import prompt
from test_torch_families import MODELS, SINGLE, largest_deviation

import cutaway
from both_ways import assert_both_ways_agree, can_fuse
from cutaway.checkpoints.load import load_checkpoint
from cutaway.checkpoints.sources import locate
from cutaway.spec import ModelSpec

SOME = 9  # rows of a pass that is compared with the reference


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_the_same_bits_by_fused_layers_and_by_stages(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    checkpoint = load_checkpoint(locate(tmp_path))
    spec, weights = checkpoint.spec, checkpoint.weights

    def texts(*lengths: int) -> list[np.ndarray]:
        return [np.array(prompt(spec.vocab_size, length, seed)) for seed, length in enumerate(lengths)]

    assert_both_ways_agree(spec, weights, [texts(2), texts(20, 1, 7)], None)
    if spec.causal:
        assert_both_ways_agree(spec, weights, [texts(40, 3), texts(1, 1), texts(5, 2)], [0, 1])
    assert_as_the_reference(tmp_path)


def assert_as_the_reference(folder: Path) -> None:
    """A few rows on the cpu engine, fused wherever a layer can be: every point within rounding of float64."""
    reference = cutaway.load(folder, engine="numpy", dtype="float64")
    ids = prompt(reference.spec.vocab_size, SOME)
    found = cutaway.load(folder, engine="cpu").trace(ids, ["*"])
    assert found.fused_layers == fusable(reference.spec)
    off = largest_deviation(found, reference.trace(ids, ["*"]))
    assert max(off.values()) < SINGLE, {point: value for point, value in off.items() if not value < SINGLE}


def fusable(spec: ModelSpec) -> set[int]:
    return {i for i, layer in enumerate(spec.layers) if can_fuse(layer)}
