"""What the tests of the lecture's statements share: its prompt, and a model without positions."""

from cutaway.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec

PROMPT = "<BOS> dragon drinks"


def plain_spec(n_layers: int, causal: bool, vocab_size: int = 12) -> ModelSpec:
    """A model that is told nothing about positions."""
    layer = LayerSpec(
        AttentionSpec(2, 2, 4, causal=causal), FeedForwardSpec(16, "gelu", bias=True), NormSpec("layer", 1e-5, True)
    )
    return ModelSpec("without-positions", vocab_size, 8, (layer,) * n_layers)
