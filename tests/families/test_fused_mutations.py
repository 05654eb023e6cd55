"""Constants changed on purpose, in the stages or in the fused layer: the suite's own checks notice each of them.

What a kernel has compiled in is changed before it is compiled, into a folder of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_families
from cases import GPT2, LLAMA
from compared import prompt
from numba.extending import register_jitable
from torch_reference import Case, Made

from both_ways import assert_both_ways_agree
from cutaway.checkpoints.load import load_checkpoint
from cutaway.checkpoints.sources import locate
from cutaway.engines.cpu import attend, compiling, elementwise, layer_phases, phases
from cutaway.engines.cpu.code import attend as attend_code
from cutaway.engines.cpu.code import elementwise as elementwise_code
from cutaway.engines.cpu.code.arithmetic import everywhere, exponential, fused, over, plus, times
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.cpu.kernel import Kernel
from cutaway.engines.cpu.program import Task
from cutaway.engines.protocol import Scoring
from cutaway.spec import NormSpec

CHANGED = 1.001  # by a thousandth
Change = Callable[[pytest.MonkeyPatch], None]


def wrong_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both ways at once: GELU's slope, a thousandth steeper."""

    @register_jitable
    def gelu(x):  # type: ignore[no-untyped-def]
        one = everywhere(np.float32(1))
        inner = fused(times(times(x, x), x), everywhere(np.float32(0.044715)), x)
        return over(x, plus(one, exponential(times(inner, everywhere(np.float32(-1.5957691 * CHANGED))))))

    monkeypatch.setattr(elementwise_code, "_gelu_tanh", gelu)


def key_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fused layer's attention: each row sees the key after its last, where there is one."""
    weigh = attend_code._weigh

    @register_jitable
    def weigh_more(row, width, first, last, scale, growth, cap):  # type: ignore[no-untyped-def]
        weigh(row, width, first, last + 1, scale, growth, cap)

    monkeypatch.setattr(attend_code, "_weigh", weigh_more)


def fused_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fused layer: every norm's eps, half as large again."""
    norm = phases.Phases._norm

    def with_another(self: Any, spec: NormSpec, *rest: Any) -> Any:
        return norm(self, replace(spec, eps=spec.eps * 1.5), *rest)

    monkeypatch.setattr(phases.Phases, "_norm", with_another)


def fused_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fused layer: the scale of the scores."""

    def task(kernel: Any, arguments: tuple[Any, ...], parts: Any = 1) -> Task:
        if kernel is attend.kernels()["weights"]:
            arguments = (*arguments[:8], arguments[8] * CHANGED, arguments[9])
        return Task(kernel, arguments, parts)

    monkeypatch.setattr(layer_phases, "Task", task)


def staged_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the stages: every norm's eps, half as large again."""
    norm = CpuEngine._norm
    monkeypatch.setattr(CpuEngine, "_norm", lambda self, x, gain, eps, centre: norm(self, x, gain, 1.5 * eps, centre))


def staged_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the stages, and where scores are worked out afterwards: the scale of the scores."""
    square = CpuEngine.square

    def with_another(self: Any, point: str, q: Any, keys: Any, scoring: Scoring, begun: Any = None) -> Any:
        return square(self, point, q, keys, replace(scoring, scale=scoring.scale * CHANGED), begun)

    monkeypatch.setattr(CpuEngine, "scale", lambda self, dots, factor: dots * np.float32(factor * CHANGED))
    monkeypatch.setattr(CpuEngine, "square", with_another)


CASES = {"gpt2": GPT2[6], "llama": LLAMA[7]}  # their eps is large enough to be felt; both have the GELU by tanh


def compiled_anew(module: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This kernel of a module as the module is now, compiled into a folder of its own."""
    kernels = module.kernels()
    usual = kernels[name]
    monkeypatch.setattr(compiling, "kernel_folder", lambda: folder)
    changed = Kernel(*usual._code[:1], usual._pack.__self__.format)
    assert changed.address != usual.address
    assert list(folder.glob("*.kernel"))
    monkeypatch.setattr(module, "kernels", lambda: {**kernels, name: changed})


def both_ways(case: Case, made: Made) -> None:
    checkpoint = load_checkpoint(locate(made(case)[0]))
    texts = [[np.array(prompt(checkpoint.spec.vocab_size, length))] for length in (20, 1, 5)]
    assert_both_ways_agree(checkpoint.spec, checkpoint.weights, texts, [0])


def as_transformers(case: Case, made: Made) -> None:
    test_families.test_the_cpu_engine_computes_the_same_in_single_precision(case, made)


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("change", [fused_eps, fused_scale, staged_eps, staged_scale])
def test_a_constant_that_is_changed_in_one_way_alone_is_noticed_twice(
    change: Change, family: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a difference between the two ways, and as one from `transformers`."""
    change(monkeypatch)
    with pytest.raises(AssertionError, match=r"layers\.0\.attn"):
        both_ways(CASES[family], made)
    with pytest.raises(AssertionError, match=r"layers\.0\.attn"):
        as_transformers(CASES[family], made)


def test_a_mask_of_the_fused_layer_that_shows_a_key_too_many_is_noticed_twice(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_too_many(monkeypatch)
    compiled_anew(attend, "weights", tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=r"layers\.0\.attn"):
        both_ways(CASES["llama"], made)
    with pytest.raises(AssertionError, match=r"layers\.0\.attn"):
        as_transformers(CASES["llama"], made)


@pytest.mark.parametrize("family", CASES)
def test_a_constant_that_is_wrong_in_both_ways_is_noticed_beside_transformers(
    family: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_gelu(monkeypatch)
    compiled_anew(elementwise, "activation", tmp_path, monkeypatch)
    both_ways(CASES[family], made)
    with pytest.raises(AssertionError, match=r"mlp\.act"):
        as_transformers(CASES[family], made)


@pytest.mark.parametrize("family", CASES)
def test_nothing_is_noticed_where_nothing_was_changed(family: str, made: Made) -> None:
    both_ways(CASES[family], made)
    as_transformers(CASES[family], made)
