"""The torch engine: the reference's numbers on tensors, sums in float32 at least, parameters that can be replaced."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.blocks import BLOCKS
from cutaway.engines.layout import Segment
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Gain
from cutaway.engines.torch import attend, devices, held
from cutaway.engines.torch.engine import TorchEngine
from cutaway.engines.weights import Weight
from cutaway.forward.attention import pattern_blocks, scoring
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import Unwatched
from cutaway.spec import AttentionSpec, ModelSpec, parameter_shapes
from cutaway.trace.edits import Scale
from random_models import (
    GPT2,
    LLAMA,
    POST,
    everything,
    random_ids,
    random_model,
    random_parameters,
    random_weights,
    specs,
)

REFERENCE = NumpyEngine("float64")
ENGINE = TorchEngine("float64", "cpu")
HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
SPECS = {"gpt2": GPT2, "llama": LLAMA, "post-norm": POST}


def ordinary(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) * scale


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, over the largest value; cells that are not finite must be the same."""
    known = np.isfinite(expected)
    assert found.shape == expected.shape and np.array_equal(np.isfinite(found), known)
    return float(np.abs(found[known] - expected[known]).max(initial=0) / max(np.abs(expected[known]).max(initial=0), 1))


# Making one


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("torch:cpu", None, ("torch:cpu", "float32", torch.float32)),
        ("torch:cpu", "float64", ("torch:cpu", "float64", torch.float64)),
        ("torch:cpu", np.float32, ("torch:cpu", "float32", torch.float32)),
        ("torch:cpu", "bfloat16", ("torch:cpu", "bfloat16", torch.bfloat16)),
        ("torch:cpu", torch.bfloat16, ("torch:cpu", "bfloat16", torch.bfloat16)),
        ("torch:cpu", np.float16, ("torch:cpu", "float16", torch.float16)),
    ],
)
def test_the_engine_is_made_by_name_and_says_device_and_precision(name: str, dtype: Any, expected: tuple) -> None:
    made = make_engine(name, dtype)
    assert isinstance(made, TorchEngine)
    assert (made.name, made.dtype.name, made.torch_dtype) == expected
    assert made.dtype.itemsize == made.empty((3,)).element_size()


def test_without_a_device_it_takes_the_fastest_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_engine("torch").name == f"torch:{devices.devices()[0]}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.devices() == ["cuda", "cuda:1", "mps", "cpu"]
    assert [str(devices.device_of(name)) for name in (None, "cuda:0", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    with pytest.raises(CutawayError, match="no float64"):
        TorchEngine("float64", "mps")


def test_each_device_is_told_with_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.described()[-1] == f"cpu ({torch.get_num_threads()} threads)"
    card = mock.Mock(total_memory=150_000_000_000)
    card.name = "Some Card"
    monkeypatch.setattr(devices, "devices", lambda: ["cuda", "mps", "cpu"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert devices.described()[:2] == ["cuda (Some Card, 150.0 GB)", "mps (Apple's GPU)"]


@pytest.mark.parametrize(
    ("name", "dtype", "told"),
    [
        ("torch:tpu", None, "no device 'tpu' here; it has .*cpu"),
        ("torch:cuda:77", None, "no device 'cuda:77' here"),
        ("torch", "int8", "computes in float64, float32, bfloat16 or float16, not in 'int8'"),
        ("torch", "nonsense", "not in 'nonsense'"),
        ("numpy:cuda", None, "There is no engine 'numpy:cuda'"),
        ("torch cuda", None, "There is no engine 'torch cuda'"),
    ],
)
def test_what_it_cannot_be_is_refused_with_the_choices(name: str, dtype: Any, told: str) -> None:
    with pytest.raises(CutawayError, match=told):
        make_engine(name, dtype)


def test_where_torch_is_missing_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("cutaway.engines.torch.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CutawayError, match=r"pip install \"cutaway\[torch\]\""):
        make_engine("torch")


# What it computes


@given(specs(), st.integers(0, 99))
def test_whatever_a_spec_can_say_comes_out_as_on_the_reference_engine(spec: ModelSpec, seed: int) -> None:
    """Every point of the stages, and the logits of a pass that nobody looks into."""
    ids = random_ids(spec, 11, seed)
    expected = everything(REFERENCE, spec, random_parameters(spec, REFERENCE, seed), ids)
    parameters = random_parameters(spec, ENGINE, seed)
    found = everything(ENGINE, spec, parameters, ids)
    assert found.keys() == expected.keys()
    for point, value in found.items():
        value = ENGINE.numpy(value) if isinstance(value, torch.Tensor) else value
        assert off(value, expected[point]) < 1e-10, point
    unseen = transformer(ENGINE, spec, parameters, [ids], rows=range(11))
    [logits] = [value for point, value in expected.items() if point.name == "logits"]
    assert off(ENGINE.numpy(unseen.logits), logits) < 1e-10


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@HALVES
def test_norms_are_summed_in_float32_and_rounded_once(norm: str, dtype: str) -> None:
    """Squares of 300 are beyond float16, and sums of 4,096 squares beyond 8 bits."""
    engine = TorchEngine(dtype, "cpu")
    x, gain, bias = (engine.array(a) for a in (ordinary(3, 4096, scale=300) + 100, ordinary(4096), ordinary(4096)))
    exact = [engine.numpy(a).astype(np.float64) for a in (x, gain, bias)]
    expected = getattr(REFERENCE, norm)(exact[0], Gain(exact[1], exact[2]), 1e-6)
    found = engine.numpy(getattr(engine, norm)(x, Gain(gain, bias), 1e-6))
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(found, expected, rtol=1.01 * ulp, atol=1e-5)


@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1e200), ("float32", 1e30), ("bfloat16", 1e30)])
def test_a_row_too_large_to_norm_is_no_row_of_zeros(dtype: str, factor: float) -> None:
    """As in the other engines: its squares leave the precision, and x / infinity would be zeros."""
    engine = TorchEngine(dtype, "cpu")
    x, gain = ordinary(3, 40), Gain(engine.array(np.ones(40)))
    x[1] *= factor
    for normed in (engine.rms_norm(engine.array(x), gain, 1e-5), engine.layer_norm(engine.array(x), gain, 1e-5)):
        found = engine.numpy(normed)
        assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def test_the_squares_of_every_float16_fit_into_what_its_norms_are_summed_in() -> None:
    engine = TorchEngine("float16", "cpu")
    x, gain = engine.array(np.tile([65504.0, -65504.0], (1, 2048))), Gain(engine.array(np.ones(4096)))
    for normed in (engine.rms_norm(x, gain, 1e-5), engine.layer_norm(x, gain, 1e-5)):
        assert engine.numpy(normed).tolist() == [[1.0, -1.0] * 2048]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_with_such_a_row_is_refused(spec: ModelSpec, dtype: str) -> None:
    model = random_model(spec, engine=TorchEngine(dtype, "cpu"))
    with pytest.raises(CutawayError, match=r"computes no usable numbers with these edits: .* is nan at"):
        model.trace(random_ids(spec, 5), (), edits=[Scale("embed.out", 1e30)])


@HALVES
def test_softmax_is_summed_in_float32(dtype: str) -> None:
    engine = TorchEngine(dtype, "cpu")
    pattern = engine.softmax(engine.array(np.zeros((1, 1, 1024))))
    assert engine.numpy(pattern).tolist() == [[[2.0**-10] * 1024]]  # in 8 bits the sum would stop at 256


@pytest.mark.parametrize(("dtype", "within"), [("float32", 2e-6), ("bfloat16", 0.03), ("float16", 0.004)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_point_in_a_smaller_precision(spec: ModelSpec, dtype: str, within: float) -> None:
    engine, ids = TorchEngine(dtype, "cpu"), random_ids(spec, 70)
    expected = everything(REFERENCE, spec, random_parameters(spec, REFERENCE), ids)
    found = everything(engine, spec, random_parameters(spec, engine), ids)
    for point, value in expected.items():
        if point.name != "tokens":
            assert off(engine.numpy(found[point]), value) < within, point


def test_numbers_come_back_as_numpy_arrays_that_hold_them_exactly() -> None:
    for dtype, returned in (("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")):
        engine = TorchEngine(dtype, "cpu")
        values = engine.numpy(engine.array([[1.0, -2.5], [0.0, 2.0**-20]]).requires_grad_())
        assert values.dtype == returned and values.tolist() == [[1.0, -2.5], [0.0, 2.0**-20]]


def test_an_embedding_refuses_ids_that_are_not_there() -> None:
    for table in (Weight.of(ordinary(6, 4)), ENGINE.array(ordinary(6, 4))):
        assert np.array_equal(ENGINE.numpy(ENGINE.embed(table, np.array([5, 0]))), ordinary(6, 4)[[5, 0]])
        for outside in (-1, 6):
            with pytest.raises(CutawayError, match=f"Row {outside} was asked for; the weight has 6 rows"):
                ENGINE.embed(table, np.array([0, outside]))


def test_no_operation_writes_into_what_it_was_given() -> None:
    x = ENGINE.array(ordinary(2, 3, 5))
    before, first, last = x.clone(), np.array([0, 1, 2]), np.array([1, 4, 5])
    for made in (ENGINE.scale(x, 0.5), ENGINE.cap(x, 2.0), ENGINE.mask(x, first, last), ENGINE.softmax(x)):
        assert made is not x
    assert torch.equal(x, before)


# Fused attention


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize(
    "kind", [{}, {"window": 3}, {"window": 1}, {"chunk": 4}, {"causal": False}, {"window": 5, "chunk": 8}], ids=str
)
def test_fused_attention_says_what_the_stages_say(kind: dict, past: int, shared: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(attend, "ROWS", 4)  # several masks
    spec, segment = AttentionSpec(4, 4 // shared, 6, scale=0.7, **kind), Segment(0, 13, past)
    q = ENGINE.array(ordinary(4, 13, 6))
    k, v = ENGINE.array(ordinary(4 // shared, 13 + past, 6, seed=1)), ENGINE.array(ordinary(4 // shared, 13 + past, 5))
    z = ENGINE.empty((4, 13, 5))
    for rows, pattern in pattern_blocks(ENGINE, spec, q, k, segment, 0, Unwatched()):
        z[:, rows] = ENGINE.mix(pattern, v[:, : pattern.shape[-1]])
    found = ENGINE.attend(q, k, v, scoring(spec, segment, slice(0, 13)))
    assert found is not None
    assert off(found.numpy(), z.numpy()) < 1e-14


class Looking(Unwatched):
    """A tap that says it wants to see (or alter) these points."""

    def __init__(self, shown: set[str], altered: set[str]) -> None:
        self.shown, self.altered = frozenset(shown), frozenset(altered)


@pytest.mark.parametrize(
    ("shown", "altered", "calls"),
    [
        ((), (), 2),
        (("attn.z", "attn.q"), ("resid_post",), 2),
        (("attn.pattern",), (), 0),
        (("attn.dots",), (), 0),
        ((), ("attn.masked",), 0),
        ((), ("attn.scores",), 0),
    ],
)
def test_attention_is_fused_only_where_nobody_looks_at_or_alters_the_scores(
    shown: Any, altered: Any, calls: int
) -> None:
    parameters = random_parameters(LLAMA, ENGINE)
    with mock.patch("cutaway.engines.torch.engine.attend", side_effect=attend.attend) as fused:
        transformer(ENGINE, LLAMA, parameters, [random_ids(LLAMA, 5)], tap=Looking(set(shown), set(altered)))
    assert fused.call_count == calls


def test_an_engine_told_to_go_by_the_stages_does() -> None:
    engine = TorchEngine("float64", "cpu", fused=False)
    with mock.patch("cutaway.engines.torch.engine.attend") as fused:
        transformer(engine, LLAMA, random_parameters(LLAMA, engine), [random_ids(LLAMA, 5)])
    assert not fused.called


# The parameters


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_parameters_bear_the_names_and_shapes_of_the_spec(spec: ModelSpec) -> None:
    parameters = random_parameters(spec, ENGINE).held
    named = {name: tuple(value.shape) for name, value in parameters.named_parameters()}
    assert named == parameter_shapes(spec)
    assert not any(value.requires_grad for value in parameters.parameters())
    assert set(parameters.state_dict()) == set(named)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16", "Q8_0"])
def test_a_weight_is_unpacked_to_the_number_that_its_format_defines(kind: str, dtype: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(held, "UNPACKED", 100)  # a row at a time
    block = BLOCKS[kind]
    rows = np.random.default_rng(0).integers(0, 60, (5, 64 // block.weights * block.bytes), dtype=np.uint8)
    weight = Weight(kind, (5, 64), rows, np.array([4, 0, 1, 3, 2]))
    wanted = devices.precision_of(dtype)[1]
    found = held.unpacked(weight, wanted, torch.device("cpu"))
    assert torch.equal(found, torch.tensor(weight.dequantise(np.float64)).to(wanted))


def test_a_vector_that_is_not_finite_is_refused() -> None:
    weights = random_weights(LLAMA)
    broken = np.ones(12)
    broken[3] = np.nan
    weights["layers.1.mlp.norm.gain"] = Weight.of(broken)
    with pytest.raises(CutawayError, match=r"layers\.1\.mlp\.norm\.gain holds nan at index 3"):
        Parameters(LLAMA, weights, ENGINE)


def test_a_part_that_is_not_there_is_none_or_a_key_error() -> None:
    layer = random_parameters(LLAMA, ENGINE).layers[0]
    assert layer.get("attn.q_norm") is None and layer.get("nothing.at.all") is None
    with pytest.raises(KeyError, match=r"attn\.q_norm"):
        layer["attn.q_norm"]


@pytest.mark.parametrize("name", ["embed.tokens", "layers.1.attn.norm.gain", "layers.0.mlp.down.weight", "head.weight"])
def test_a_parameter_that_was_replaced_is_the_one_that_computes(name: str) -> None:
    parameters, ids = random_parameters(LLAMA, ENGINE), random_ids(LLAMA, 6)
    weights = random_weights(LLAMA)
    other = ordinary(*weights[name].shape, seed=7)
    owner, _, role = name.rpartition(".")
    setattr(parameters.held[owner], role, torch.nn.Parameter(ENGINE.array(other)))
    weights[name] = Weight.of(other)
    found = transformer(ENGINE, LLAMA, parameters, [ids]).logits
    assert torch.equal(found.detach(), transformer(ENGINE, LLAMA, Parameters(LLAMA, weights, ENGINE), [ids]).logits)


def test_each_layer_is_one_call_of_its_module() -> None:
    parameters, called = random_parameters(LLAMA, ENGINE), []
    for i, layer in enumerate(parameters.layers):
        layer.register_forward_hook(lambda module, given, out, i=i: called.append((i, tuple(out.shape))))
    transformer(ENGINE, LLAMA, parameters, [random_ids(LLAMA, 5)])
    assert called == [(0, (5, 12)), (1, (5, 12))]


def test_gradients_reach_every_parameter_and_agree_with_finite_differences() -> None:
    parameters, ids = random_parameters(GPT2, ENGINE), random_ids(GPT2, 9)
    parameters.held.requires_grad_(True)

    def loss() -> torch.Tensor:
        return torch.logsumexp(transformer(ENGINE, GPT2, parameters, [ids]).logits[0], 0)

    loss().backward()
    for name, value in parameters.held.named_parameters():
        direction = torch.tensor(ordinary(*value.shape, seed=1))
        slope = float((value.grad * direction).sum())
        with torch.no_grad():
            ends = []
            for step in (1e-5, -2e-5):
                value += step * direction
                ends.append(float(loss()))
            value += 1e-5 * direction
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8), name


SHARDED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from random_models import LLAMA, random_ids, random_parameters
from cutaway.engines.torch.engine import TorchEngine
from cutaway.forward.transformer import transformer
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
engine = TorchEngine("float32", "cpu")
whole, sharded = random_parameters(LLAMA, engine), random_parameters(LLAMA, engine)
ids = random_ids(LLAMA, 7)
mesh = init_device_mesh("cpu", (1,))
for part in sharded.layers:
    fully_shard(part.requires_grad_(True), mesh=mesh)
fully_shard(sharded.held.requires_grad_(True), mesh=mesh)
run = lambda root, parameters: transformer(engine, LLAMA, parameters, [ids]).logits
out = sharded.held.through(run, sharded)
assert torch.equal(out.detach(), whole.held.through(run, whole))
out.sum().backward()
whole.held.requires_grad_(True)
whole.held.through(run, whole).sum().backward()
for (name, one), (_, other) in zip(sharded.held.named_parameters(), whole.held.named_parameters(), strict=True):
    assert isinstance(one, DTensor) and not isinstance(other, DTensor), name
    torch.testing.assert_close(one.grad.full_tensor(), other.grad)
dist.destroy_process_group()
print("the same")
"""


def test_torchs_own_sharding_takes_the_modules_as_they_are(tmp_path: Any) -> None:
    """fully_shard swaps each layer's parameters for gathered ones around its call, and back."""
    code = SHARDED.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "meet")], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "the same", done.stderr[-2000:]
