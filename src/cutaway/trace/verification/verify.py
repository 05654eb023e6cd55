"""Does this model, on this engine, compute what it says? The identities of a trace, and those between passes."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Array, Engine
from cutaway.engines.weights import Weight
from cutaway.forward.cache import KVCache
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import ROW_BLOCKS, Point, Tap, points_of
from cutaway.spec import ModelSpec
from cutaway.trace.capture.plan import make_plan
from cutaway.trace.capture.recorder import Recorder
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace
from cutaway.trace.verification.check import Check, deviation
from cutaway.trace.verification.identities import identities

# Cached against whole, whose products BLAS may round differently: relative to the largest logit.
CACHED_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}
VERIFIED_TOKENS = 90  # one whole block of rows, one that is padded


def verification_ids(spec: ModelSpec) -> tuple[int, ...]:
    """A fixed run of ids, long enough for full blocks and left-over rows."""
    length = min(VERIFIED_TOKENS, spec.n_max or VERIFIED_TOKENS)
    return tuple((7 * i * i + 3 * i) % spec.vocab_size for i in range(length))


def verify(engine: Engine, spec: ModelSpec, parameters: Parameters, ids: Sequence[int]) -> Iterator[Check]:
    """Run the model on `ids` in several ways and yield one check after another."""
    sequence = np.asarray(ids)
    layout = Layout.of([len(sequence)])
    plan = make_plan(spec, points_of(spec))
    watcher = Recorder(engine, layout, points_of(spec))  # everything, also what a trace would work out later

    def run(sequences: Sequence[np.ndarray], tap: Tap | None = None) -> np.ndarray:
        """What comes out for the only sequence, or the second: its last logits or, without a head, its stream."""
        ran = transformer(engine, spec, parameters, sequences, tap=tap)
        which = 0 if len(sequences) == 1 else 1
        if ran.logits is not None:
            return engine.numpy(ran.logits)[which]
        segment = ran.layout.segments[which]
        return engine.numpy(ran.final)[segment.start : segment.stop]

    plain = run([sequence])
    watched = run([sequence], watcher)
    same = partial(_bits if getattr(engine, "bitwise", True) else _rounding, engine)
    yield same("looking changes nothing", watched, plain)

    patched = run([sequence], _Patch(engine, watcher))
    yield same("values patched in from the same pass change nothing", patched, plain)

    prompt = Prompt(tuple(int(i) for i in sequence), (), "")
    worked_out = Trace(engine, spec, parameters, prompt, plan, layout, {p: watcher.kept[p] for p in plan.kept}, plain)
    yield _same_when_worked_out(engine, spec, watcher, worked_out)
    values = dict(watcher.kept)
    if not spec.headless:  # the watched pass worked out the last row only
        values[Point("logits")] = worked_out.logits
    trace = Trace(engine, spec, parameters, prompt, plan, layout, values, plain)
    yield from identities(trace, _as_numpy(engine, spec, parameters))

    company = [sequence[: max(1, len(sequence) // 3)], sequence, sequence[:1]]
    yield same("company changes nothing", run(company), plain)
    if spec.causal:
        yield _cached(engine, spec, parameters, sequence, worked_out.logits)


def _bits(engine: Engine, name: str, found: np.ndarray, expected: np.ndarray) -> Check:
    off = 0.0 if np.array_equal(found, expected) else deviation(found, expected) or np.inf
    return Check(f"{name}, bit for bit", off, 0.0)


def _rounding(engine: Engine, name: str, found: np.ndarray, expected: np.ndarray) -> Check:
    """For an engine that rounds differently with the company of a row, and with what is looked at."""
    return Check(f"{name} but the rounding", deviation(found, expected), CACHED_TOLERANCE[engine.dtype.name])


def _as_numpy(engine: Engine, spec: ModelSpec, parameters: Parameters) -> Parameters:
    """The numbers that are computed with, where an engine holds them in a form of its own."""
    if not hasattr(engine, "hold"):
        return parameters
    held = {name: Weight.of(engine.numpy(parameters.held[name])) for name in parameters.stored}
    return Parameters(spec, held, NumpyEngine("float64"))


class _Patch:
    """A tap that puts a copy of what an earlier pass computed in the place of every value."""

    def __init__(self, engine: Engine, source: Recorder, layer: int | None = None) -> None:
        self._engine, self._source, self._layer = engine, source, layer
        self.shown: frozenset[str] = frozenset()
        self.altered = source.names(layer)

    def __call__(self, name: str, value: Array) -> Array:
        kept = self._source.kept.get(Point(name, self._layer))
        return value if kept is None or name == "tokens" else self._engine.copy(kept)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        kept = self._source.kept[Point(name, self._layer)][segment]
        return self._engine.copy(kept[:, start : start + value.shape[1], : value.shape[2]])

    def at(self, layer: int) -> "_Patch":
        return _Patch(self._engine, self._source, layer)


def _same_when_worked_out(engine: Engine, spec: ModelSpec, watcher: Recorder, trace: Trace) -> Check:
    """T × T points made on access, against those that the pass itself made."""
    worst = Check("patterns worked out on access are those of the pass, bit for bit", 0.0, 0.0)
    for i in range(spec.n_layers):
        for name in ROW_BLOCKS:
            point = Point(name, i)
            used, later = engine.numpy(watcher.kept[point][0]), trace[point]
            made = np.ones_like(used, dtype=bool)
            if name in ("attn.dots", "attn.scores"):
                made = ~np.isnan(used)  # the pass leaves out dots that no query may use
            if not np.array_equal(used[made], later[made]):
                finite = made & np.isfinite(used) & np.isfinite(later)
                off = deviation(later[finite], used[finite]) if finite.any() else np.inf
                if (off or np.inf) > worst.deviation:
                    worst = Check(worst.name, off or np.inf, 0.0, f"layer {i}")
    return worst


def _cached(engine: Engine, spec: ModelSpec, parameters: Parameters, sequence: np.ndarray, whole: np.ndarray) -> Check:
    """The prompt in one pass and the rest token by token, against one pass over everything."""
    start = max(1, len(sequence) * 2 // 3)
    cache = KVCache(spec, engine)
    pieces = [sequence[:start], *(sequence[t : t + 1] for t in range(start, len(sequence)))]
    off = []
    for piece in pieces:
        row = engine.numpy(transformer(engine, spec, parameters, [cache.due(piece)], caches=[cache]).logits)[-1]
        expected = whole[cache.length - 1]
        if not cache.settled(len(sequence)):  # a rotary scaling that looks at the length: hold it against as many
            alone = transformer(engine, spec, parameters, [sequence[: cache.length]])
            expected = engine.numpy(alone.logits)[-1]
        off.append(deviation(row, expected))
    worst = int(np.argmax(off))
    tolerance = CACHED_TOLERANCE[engine.dtype.name]
    return Check("cached decoding = the whole pass", off[worst], tolerance, f"position {start - 1 + worst}")
