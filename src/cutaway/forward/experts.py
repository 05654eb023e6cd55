"""A mixture of experts in the place of the feed-forward: a router sends each token to a few of them (chapter 13.5)."""

from collections.abc import Mapping

import numpy as np

from cutaway.engines.layout import Layout, RowBlock
from cutaway.engines.protocol import Array, Engine
from cutaway.forward.feedforward import perceptron
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import ExpertsSpec, RouterSpec


def experts(run: Run, spec: ExpertsSpec, weights: Mapping, x: Array, tap: Tap) -> Array:
    """Σ gate · expert(x) over each token's chosen experts, plus the shared one: `[T, d]` → `[T, d]`."""
    engine, router = run.engine, spec.router
    routed = tap("moe.router_logits", engine.linear(x, weights["moe.router"], run.layout))  # [T, E]
    scores = tap("moe.scores", _scores(engine, router, routed))
    correction = engine.numpy(weights["moe.correction"]) if router.correction else None
    logits = engine.numpy(routed)
    chosen = tap("moe.chosen", choose(router, engine.numpy(scores), correction, logits))  # [T, k]
    gates = tap("moe.gates", _gates(router, scores[np.arange(len(x))[:, None], chosen]))  # [T, k]
    given = engine.empty((*chosen.shape, x.shape[-1]))  # [T, k, d]
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        read = x[rows] * gates[rows, places][:, None] if router.gate_input else x[rows]
        # Row by row, so that a token gets the same from its expert whoever else is sent there.
        alone = Layout((), (RowBlock(0, len(rows)),))
        given[rows, places] = perceptron(engine, spec.expert, weights, f"moe.experts.{expert}", read, alone)
    given = tap("moe.expert_out", given)
    mixed = given.sum(1) if router.gate_input else (given * gates[:, :, None]).sum(1)
    if spec.shared is not None:
        mixed = mixed + tap("moe.shared_out", perceptron(engine, spec.shared, weights, "moe.shared", x, run.layout))
    return tap("mlp.raw", mixed)


def choose(router: RouterSpec, scores: np.ndarray, correction: np.ndarray | None, logits: np.ndarray) -> np.ndarray:
    """The experts of each token, `[T, E]` scores → `[T, k]` numbers, best first.

    Among equal scores the higher logit comes first (large logits have the same sigmoid, 1, to the last bit), then the
    lower number. A group that lost is out of the running altogether, also where every biased score in the others
    is negative.
    """
    biased = scores if correction is None else scores + correction
    if router.n_groups > 1:
        grouped = biased.reshape(len(biased), router.n_groups, -1)
        best = np.sort(grouped, axis=-1)[:, :, -2 if router.group_best == "two" else -1 :].sum(-1)  # [T, groups]
        lost = np.argsort(-best, axis=-1, kind="stable")[:, router.top_groups :]
        grouped = grouped.copy()
        grouped[np.arange(len(biased))[:, None], lost] = -np.inf
        biased = grouped.reshape(biased.shape)
    return np.lexsort((-logits, -biased), axis=-1)[:, : router.n_active].copy()  # what is kept is k wide, not E


def _scores(engine: Engine, router: RouterSpec, logits: Array) -> Array:
    if router.scores == "sigmoid":
        return engine.activate(logits, "sigmoid")
    return engine.softmax(engine.copy(logits)[None])[0]


def _gates(router: RouterSpec, chosen: Array) -> Array:
    """The unbiased scores of the chosen experts, made into weights."""
    if router.renormalise:
        chosen = chosen / (chosen.sum(-1)[:, None] + 1e-20)
    return chosen if router.scale == 1.0 else chosen * router.scale
