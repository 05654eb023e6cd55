"""What must hold between the points of one layer's feed-forward, or of its experts (chapters 11 and 13.5)."""

import numpy as np

from cutaway.spec import ExpertsSpec, FeedForwardSpec, RouterSpec
from cutaway.trace.verification.check import ACTIVATIONS, Inside, deviation, largest, product, sigmoid, softmax


def widening(here: Inside) -> float | None:
    """up, gate, and what the down projection reads."""
    spec = here.spec.feed_forward
    if not isinstance(spec, FeedForwardSpec):
        return None
    x, up, act = here.read_by("mlp"), here["mlp.up"], ACTIVATIONS[spec.activation]
    off = deviation(up, product(x, here.weights["mlp.up"]))
    if not spec.gated:
        return largest(off, deviation(here["mlp.act"], act(up)))
    gate = here["mlp.gate"]
    off = largest(off, deviation(gate, product(x, here.weights["mlp.gate"])))
    return largest(off, deviation(here["mlp.act"], act(gate) * up))


def down(here: Inside) -> float | None:
    if isinstance(here.spec.feed_forward, ExpertsSpec):
        return None
    return deviation(here["mlp.raw"], product(here["mlp.act"], here.weights["mlp.down"]))


def routing(here: Inside) -> float | None:
    """Router logits and scores; no expert outside the choice scores above one inside it; gates are chosen scores."""
    spec = here.spec.feed_forward
    if not isinstance(spec, ExpertsSpec):
        return None
    router = spec.router
    logits, chosen = here["moe.router_logits"], here["moe.chosen"].astype(np.intp)
    off = deviation(logits, product(here.read_by("mlp"), here.weights["moe.router"]))
    scores = sigmoid(logits) if router.scores == "sigmoid" else softmax(logits)
    off = largest(off, deviation(here["moe.scores"], scores))
    off = largest(off, _not_the_best(here, router, chosen))
    gates = np.take_along_axis(here["moe.scores"], chosen, axis=-1)
    if router.renormalise:
        gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)
    return largest(off, deviation(here["moe.gates"], gates * router.scale))


def _not_the_best(here: Inside, router: RouterSpec, chosen: np.ndarray) -> float:
    """How far the chosen experts' scores are from the best that could be had, token by token.

    In the precision of the pass: of two groups that are worth the same but for rounding, either may win.
    """
    scores = here.trace[f"layers.{here.index}.moe.scores"]
    ranked = scores + here.weights["moe.correction"] if router.correction else scores
    best = np.empty(chosen.shape)
    for row, own in enumerate(ranked):
        groups = own.reshape(router.n_groups, -1)
        worth = [np.sort(group)[-2:].sum() if router.group_best == "two" else group.max() for group in groups]
        winners = sorted(range(router.n_groups), key=lambda group: (-worth[group], group))[: router.top_groups]
        best[row] = np.sort(groups[winners].ravel())[::-1][: router.n_active]
    return deviation(np.take_along_axis(ranked, chosen, axis=-1), best)


def blend(here: Inside) -> float | None:
    spec = here.spec.feed_forward
    if not isinstance(spec, ExpertsSpec):
        return None
    given = here["moe.expert_out"]
    mixed = given.sum(1) if spec.router.gate_input else (given * here["moe.gates"][:, :, None]).sum(1)
    return deviation(here["mlp.raw"], mixed if spec.shared is None else mixed + here["moe.shared_out"])
