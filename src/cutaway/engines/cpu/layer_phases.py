"""Writing a layer's spec down as phases of kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

from cutaway.engines.cpu import attend, elementwise
from cutaway.engines.cpu.phases import Phases
from cutaway.engines.cpu.processor import ACTIVATION_CODES
from cutaway.engines.cpu.program import Place, Task
from cutaway.spec import FeedForwardSpec, LayerSpec, NormSpec


class LayerPhases(Phases):
    """Those of a layer over segments of these lengths.

    Besides the places of all phases "cosines" and "sines" are set before a run, and of each segment, with its number,
    those that `StackProgram` sets.
    """

    def __init__(self, engine: Any, spec: LayerSpec, weights: Mapping[str, Any], lengths: Sequence[int]) -> None:
        super().__init__(engine, weights, sum(lengths))
        self.spec, self._lengths = spec, lengths
        self.order.append("resid_pre")
        self._write()

    def _write(self) -> None:
        spec, d_model = self.spec, self._d_out("attn.o")
        read = self._before("attn", Place("x"), d_model)
        gathered = self._given("attn", self._attention(read), d_model)
        if spec.parallel:
            processed_read = read if spec.shared_norm else self._before("mlp", Place("x"), d_model)
            processed = self._given("mlp", self._feed_forward(processed_read), d_model)
            both = self._buffer("stream and attention", d_model, point=False)
            self._add(Place("x"), gathered, both, self._rows * d_model)
            self._add(both, processed, self._buffer("resid_post", d_model), self._rows * d_model)
            return
        middle = self._after("attn", Place("x"), gathered, "resid_mid", d_model)
        processed = self._given("mlp", self._feed_forward(self._before("mlp", middle, d_model)), d_model)
        self._after("mlp", middle, processed, "resid_post", d_model)

    def _before(self, part: str, x: Place, width: int) -> Place:
        if self.spec.norm is None or self.spec.placement == "post":
            return x
        return self._norm(self.spec.norm, f"{part}.norm", x, f"{part}.norm", self._rows, width)

    def _given(self, part: str, raw: Place, width: int) -> Place:
        if self.spec.out_norm is not None:
            return self._norm(self.spec.out_norm, f"{part}.out_norm", raw, f"{part}.out", self._rows, width)
        self.order.append(f"{part}.out")
        self.same_as[f"{part}.out"] = f"{part}.raw"
        return raw

    def _after(self, part: str, x: Place, out: Place, name: str, width: int) -> Place:
        pre = self.spec.norm is None or self.spec.placement == "pre"
        total = self._buffer(name if pre else f"{part}.sum", width)
        self._add(x, out, total, self._rows * width)
        if pre or self.spec.norm is None:
            return total
        return self._norm(self.spec.norm, f"{part}.norm", total, name, self._rows, width)

    def _attention(self, read: Place) -> Place:
        spec, rows = self.spec.attention, self._rows
        heads, kv_heads, wide, value_wide = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.value_width
        q, k, v = self._products(read, {"attn.q": heads, "attn.k": kv_heads, "attn.v": kv_heads})
        if spec.qk_norm is not None and not spec.norm_after_rotary:
            q, k = self._normed(spec.qk_norm, q, k)
        if spec.rotary is not None:
            pairs, adjacent = spec.rotary.dims // 2, int(spec.rotary.pairing == "adjacent")
            turned = []
            for name, source, count in (("attn.q_rot", q, heads), ("attn.k_rot", k, kv_heads)):
                target = self._buffer(name, count, wide)
                steps = (4 * wide, 4 * wide * count)  # from head to head and from row to row, in bytes
                self._do("rotate", source, *steps, Place("cosines"), Place("sines"), target, *steps, count, rows, wide,
                         pairs, adjacent)  # fmt: skip
                turned.append(target)
            q, k = turned
        if spec.qk_norm is not None and spec.norm_after_rotary:
            q, k = self._normed(spec.qk_norm, q, k)
        z = Place("attn.z")
        dots, weights, mixes, row = [], [], [], 0
        for index, length in enumerate(self._lengths):

            def at(name: str, index: int = index) -> Place:
                return Place(f"{name} {index}")

            for new, head, source, width in (
                ("new key", "key head", k, wide),
                ("new value", "value head", v, value_wide),
            ):
                step = 4 * width * kv_heads
                self._do("rotate", source + row * step, 4 * width, step, 0, 0, at(new), at(head), 4 * width,
                         kv_heads, length, width, 0, 0)  # fmt: skip
            q_step, z_step = 4 * wide * heads, 4 * value_wide * heads
            kernels = attend.kernels()
            sizes = (heads, kv_heads, length, at("seen"))
            dots.append(Task(kernels["dots"], (q + row * q_step, 4 * wide, q_step, at("keys"), at("key head"), 4 * wide,
                                               at("scores"), *sizes, wide, at("start")), at("dots parts")))  # fmt: skip
            weights.append(Task(kernels["weights"], (at("scores"), heads, length, at("seen"), at("start"), at("first"),
                                                     at("last"), at("growth"), float(spec.score_scale),
                                                     float(spec.cap or 0.0)), at("rows parts")))  # fmt: skip
            mixes.append(Task(kernels["mix"], (at("scores"), at("values"), at("value head"), 4 * value_wide,
                                               z + row * z_step, 4 * value_wide, z_step, *sizes, value_wide,
                                               at("start")), at("mix parts")))  # fmt: skip
            row += length
        self.phases += [dots, weights, mixes]
        self.order.append("attn.pattern")
        self._buffer("attn.z", heads, value_wide)
        return self._products(z, {"attn.o": None}, {"attn.o": "attn.raw"})[0]

    def _normed(self, norm: NormSpec, q: Place, k: Place) -> tuple[Place, Place]:
        """Queries and keys, each head's row by itself."""
        spec, rows = self.spec.attention, self._rows
        named = (("q", q, spec.n_heads), ("k", k, spec.n_kv_heads))
        normed = [
            self._norm(norm, f"attn.{name}_norm", source, f"attn.{name}_normed", rows * count, spec.d_head, count)
            for name, source, count in named
        ]
        return normed[0], normed[1]

    def _feed_forward(self, read: Place) -> Place:
        spec = self.spec.feed_forward
        assert isinstance(spec, FeedForwardSpec)  # `at_one_go` has seen to it
        names = ("mlp.gate", "mlp.up") if spec.gated else ("mlp.up",)
        first, *rest = self._products(read, dict.fromkeys(names))
        act = self._buffer("mlp.act", spec.d_ff)
        n = self._rows * spec.d_ff
        code, up = ACTIVATION_CODES[spec.activation], rest[0] if rest else 0
        self._do("activation", first, up, act, n, code, parts=elementwise.parts_of(n))
        return self._products(act, {"mlp.down": None}, {"mlp.down": "mlp.raw"})[0]
