"""From token ids to the first residual stream (chapters 4 and 10)."""

import numpy as np

from cutaway.engines.protocol import Array, Engine
from cutaway.forward.norm import norm
from cutaway.forward.parameters import Parameters
from cutaway.forward.positions import sinusoidal
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import ModelSpec


def embedding(
    run: Run, spec: ModelSpec, parameters: Parameters, ids: np.ndarray, tap: Tap, types: np.ndarray | None = None
) -> Array:
    """ids `[T]` → H₀ `[T, d]`: one row of E per token, plus its position's row where positions are added.

    Vectors `[T, d]` in the place of ids are taken as what the look-up would have given.
    `types` `[T]` says which kind of sentence each token belongs to, in models that tell them apart; 0 by default.
    """
    engine = run.engine
    if ids.ndim == 1:
        tap("tokens", ids)
        x = tap("embed.tokens", engine.embed(parameters.embed_tokens, ids))  # equals one_hot(ids) E
    else:
        x = tap("embed.tokens", engine.array(ids))
    if spec.embed_scale != 1.0:
        x = x * spec.embed_scale
    if parameters.embed_types is not None:
        kinds = np.zeros(len(ids), dtype=np.intp) if types is None else types
        x = x + tap("embed.types", engine.embed(parameters.embed_types, kinds))
    if spec.positions is not None:
        x = x + tap("embed.positions", _positions(engine, spec, parameters, run.layout.positions))
    if spec.embed_norm is not None:
        x = tap("embed.norm", norm(engine, spec.embed_norm, parameters.embed_norm, x))
    return tap("embed.out", x)


def _positions(engine: Engine, spec: ModelSpec, parameters: Parameters, positions: np.ndarray) -> Array:
    if parameters.embed_positions is not None:
        return engine.embed(parameters.embed_positions, positions)
    return engine.array(sinusoidal(positions, spec.d_model))
