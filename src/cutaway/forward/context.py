"""The length that a model was made for: past it nothing fails, and nothing was learned."""

import warnings

from cutaway.spec import DynamicScaling, ModelSpec


def warn_beyond_context(spec: ModelSpec, before: int, after: int, stacklevel: int = 3) -> None:
    """A UserWarning where a sequence grows from `before` to `after` tokens and so past `spec.context_length`.

    Rotary angles and distances exist for any position, so such a pass runs; only learned positions end
    (`spec.n_max`, which is refused before). Angles that are stretched with the length of the text are there to go
    past it, so those models are not warned of. The warning points at the caller of whoever calls this.
    """
    stretched = any(isinstance(rotary.scaling, DynamicScaling) for rotary in spec.rotaries)
    limit = None if stretched else spec.context_length
    if limit is not None and before <= limit < after:
        warnings.warn(
            f"{after:,} tokens are more than the {limit:,} that {spec.name} was made for: it still computes, but "
            "positions that far were not trained, so do not rely on what it says there.",
            UserWarning,
            stacklevel=stacklevel,
        )
