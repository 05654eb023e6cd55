"""Every point that a model may have: its shape in symbols, its meaning, its reason, its chapter, its address.

Symbols: V vocabulary, d model width, H query heads, H_kv key/value heads, T tokens, S keys seen (T, where nothing
is cached).
"""

from dataclasses import dataclass

LECTURE = "Inside the Transformer: The Complete Forward Pass"  # whose chapters are meant wherever one is named


@dataclass(frozen=True)
class PointInfo:
    """What stands at a point: symbolic shape, what it is, why it is there, and LECTURE's chapter that explains it."""

    shape: tuple[str, ...]
    meaning: str
    reason: str
    chapter: str


_STREAM = ("T", "d")
_LEFT = ("V",)  # a distribution over the vocabulary, 0 for what is out of the draw
_SCORES = ("H", "T", "S")

POINTS: dict[str, PointInfo] = {
    "tokens": PointInfo(("T",), "the ids of the tokens", "a token id is a name, a row number of the embedding", "2"),
    "embed.tokens": PointInfo(
        _STREAM,
        "one row of the embedding matrix per token",
        "turns a name into numbers that can be computed with",
        "4",
    ),
    "embed.positions": PointInfo(
        _STREAM,
        "the position vector of each token",
        "attention alone cannot tell one order from another",
        "10.4",
    ),
    "embed.types": PointInfo(
        _STREAM, "the vector of each token's sentence kind", "tells the sentences of a pair apart", "4"
    ),
    "embed.norm": PointInfo(
        _STREAM,
        "token and position vectors together, normed",
        "gives the first layer rows of a standard size",
        "12.2",
    ),
    "embed.out": PointInfo(_STREAM, "the first residual stream", "what the layers read and add to", "4"),
    "resid_pre": PointInfo(_STREAM, "the residual stream that enters the layer", "carries all layers so far", "12.1"),
    "attn.norm": PointInfo(
        _STREAM, "the stream, normed, as attention reads it", "keeps every depth on one scale", "12.2"
    ),
    "attn.q_latent": PointInfo(
        ("T", "q_rank"), "queries squeezed into a latent, normed", "fewer weights for the same heads", "13.5"
    ),
    "attn.q": PointInfo(("H", "T", "d_head"), "queries: what each token looks for", "one side of the match", "7.2"),
    "attn.kv_latent": PointInfo(
        ("T", "kv_rank"), "keys and values squeezed into a latent, normed", "all that the cache keeps of them", "15.3"
    ),
    "attn.k_shared": PointInfo(
        ("T", "d_rope"), "the part of the key that all heads share, before it turns", "carries the position", "10.4"
    ),
    "attn.k": PointInfo(("H_kv", "T", "d_head"), "keys: what each token offers", "the other side of the match", "7.2"),
    "attn.v": PointInfo(
        ("H_kv", "T", "d_head"), "values: what each token passes on", "the payload of attention", "7.2"
    ),
    "attn.q_normed": PointInfo(
        ("H", "T", "d_head"), "queries, each head's brought to a standard size", "keeps the scores in bounds", "12.2"
    ),
    "attn.k_normed": PointInfo(
        ("H_kv", "T", "d_head"), "keys, each head's brought to a standard size", "keeps the scores in bounds", "12.2"
    ),
    "attn.q_rot": PointInfo(
        ("H", "T", "d_head"),
        "queries turned by their position",
        "makes q·k depend on the distance t − s",
        "10.4",
    ),
    "attn.k_rot": PointInfo(
        ("H_kv", "T", "d_head"),
        "keys turned by their position",
        "makes q·k depend on the distance t − s",
        "10.4",
    ),
    "attn.dots": PointInfo(_SCORES, "QKᵀ: every query against every key", "how well each pair matches", "7.3"),
    "attn.scores": PointInfo(_SCORES, "the dot products times 1/√d_head", "keeps the softmax from saturating", "7.4"),
    "attn.masked": PointInfo(_SCORES, "the scores with −∞ on what may not be seen", "no token reads its future", "8.2"),
    "attn.pattern": PointInfo(_SCORES, "softmax of each row: who listens to whom", "weights that sum to 1", "7.3"),
    "attn.z": PointInfo(
        ("H", "T", "d_head"), "each head's mix of values", "what the head carries to each token", "7.3"
    ),
    "attn.head_out": PointInfo(
        ("H", "T", "d"),
        "each head's part of the output, through its slice of W_O",
        "tells the heads apart",
        "9.1",
    ),
    "attn.raw": PointInfo(_STREAM, "the heads joined by W_O", "mixes what the heads found", "9.1"),
    "attn.out": PointInfo(_STREAM, "what attention adds to the stream", "attention gathers", "12.1"),
    "attn.sum": PointInfo(_STREAM, "stream plus attention, before the norm", "post-norm models norm the sum", "12.2"),
    "resid_mid": PointInfo(_STREAM, "the stream between attention and feed-forward", "what the FFN reads", "12.3"),
    "mlp.norm": PointInfo(_STREAM, "the stream, normed, as the FFN reads it", "keeps every depth on one scale", "12.2"),
    "mlp.gate": PointInfo(("T", "d_ff"), "the gate's projection", "decides how much of each neuron passes", "13.5"),
    "mlp.up": PointInfo(("T", "d_ff"), "the projection up to the wide layer", "the keys of a per-token memory", "11.3"),
    "mlp.act": PointInfo(
        ("T", "d_ff"), "the neurons, as the down projection reads them", "which memories fire", "11.3"
    ),
    "moe.router_logits": PointInfo(("T", "E"), "the router's score of every expert", "who should work on this", "13.5"),
    "moe.scores": PointInfo(("T", "E"), "softmax or sigmoid of the router's logits", "comparable weights", "13.5"),
    "moe.chosen": PointInfo(("T", "k"), "the experts that each token is sent to", "only these are computed", "13.5"),
    "moe.gates": PointInfo(("T", "k"), "how much each chosen expert counts", "blends them by their scores", "13.5"),
    "moe.expert_out": PointInfo(("T", "k", "d"), "what each chosen expert gives", "before it is weighed", "13.5"),
    "moe.shared_out": PointInfo(_STREAM, "what the shared expert gives", "knowledge that every token needs", "13.5"),
    "mlp.raw": PointInfo(
        _STREAM, "the projection back down, or the blend of the experts", "what the neurons stand for", "11.3"
    ),
    "mlp.out": PointInfo(_STREAM, "what the feed-forward adds to the stream", "the feed-forward processes", "12.1"),
    "mlp.sum": PointInfo(_STREAM, "stream plus feed-forward, before the norm", "post-norm models norm the sum", "12.2"),
    "resid_post": PointInfo(_STREAM, "the residual stream that leaves the layer", "the next layer reads it", "12.3"),
    "final.norm": PointInfo(_STREAM, "the last stream, normed", "what the head reads", "13.1"),
    "pooler.out": PointInfo(("1", "d"), "a tanh layer on the first token", "one vector for the whole text", "13"),
    "logits": PointInfo(("T", "V"), "one score per vocabulary entry", "the next token's odds, before softmax", "13.1"),
    "sample.repetition_penalty": PointInfo(
        _LEFT, "what is left when what stands in the text was made less likely", "breaks loops", "14.1"
    ),
    "sample.presence_penalty": PointInfo(
        _LEFT, "what is left when what was said was made less likely, once", "asks for something new", "14.1"
    ),
    "sample.frequency_penalty": PointInfo(
        _LEFT, "what is left when what was said was made less likely, as often", "breaks loops", "14.1"
    ),
    "sample.logit_bias": PointInfo(
        _LEFT, "what is left when chosen tokens were favoured or banned", "a wish of the caller's", "14.1"
    ),
    "sample.temperature": PointInfo(
        _LEFT, "softmax of the logits divided by T", "how peaked the distribution is", "14.2"
    ),
    "sample.top_k": PointInfo(_LEFT, "the k likeliest, made to sum to 1 again", "cuts the long tail off", "14.3"),
    "sample.top_p": PointInfo(
        _LEFT, "the likeliest that reach p together", "cuts the tail off where the model is sure", "14.3"
    ),
    "sample.min_p": PointInfo(
        _LEFT, "what is at least so many times as likely as the likeliest", "a bar that follows the peak", "14.3"
    ),
    "sample.typical_p": PointInfo(
        _LEFT, "those whose surprise is nearest to the entropy", "neither the obvious nor the absurd", "14.3"
    ),
    "sample.draw": PointInfo(
        ("3",),
        "the number drawn from [0, 1) and the two ends of the interval that it fell in",
        "where chance comes in",
        "14.4",
    ),
    "sample.token": PointInfo(("1",), "the id that was chosen", "the next pass reads it", "15.1"),
}

GLOBAL_FIRST = ("tokens", "embed.tokens", "embed.types", "embed.positions", "embed.norm", "embed.out")
GLOBAL_LAST = ("final.norm", "pooler.out", "logits")
OF_CHOICE = tuple(name for name in POINTS if name.startswith("sample."))  # of a generation's steps, after the pass
IN_LAYER = tuple(name for name in POINTS if name not in GLOBAL_FIRST + GLOBAL_LAST + OF_CHOICE)


@dataclass(frozen=True)
class Point:
    """One address: a name and, for what stands in a layer, its layer. `str(point)` is `layers.3.attn.pattern`."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def info(self) -> PointInfo:
        return POINTS[self.name]


# From q kᵀ to weights, each made from the one before; block by block of query rows, T × T in all.
ROW_BLOCKS = ("attn.dots", "attn.scores", "attn.masked", "attn.pattern")
