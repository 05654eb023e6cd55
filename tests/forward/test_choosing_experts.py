"""Which experts a token goes to: the same as by a plain sort of what is in the running, group by group."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cutaway.forward.experts import choose
from cutaway.spec import RouterSpec


def by_sorting(router: RouterSpec, biased: list[float], logits: list[float]) -> list[int]:
    size = len(biased) // router.n_groups
    groups = [range(start, start + size) for start in range(0, len(biased), size)]
    counted = 2 if router.group_best == "two" else 1
    worth = [sum(sorted((biased[e] for e in group), reverse=True)[:counted]) for group in groups]
    winners = sorted(range(router.n_groups), key=lambda g: (-worth[g], g))[: router.top_groups]
    running = [e for g in winners for e in groups[g]] if router.n_groups > 1 else list(range(len(biased)))
    return sorted(running, key=lambda e: (-biased[e], -logits[e], e))[: router.n_active]


@given(st.data())
def test_choosing_is_sorting_within_the_winning_groups(data: st.DataObject) -> None:
    n_groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    top_groups = data.draw(st.integers(1, n_groups))
    router = RouterSpec(
        data.draw(st.integers(1, top_groups * size)),
        "sigmoid",
        n_groups=n_groups,
        top_groups=top_groups,
        group_best=data.draw(st.sampled_from(("one", "two"))),
        correction=data.draw(st.booleans()),
    )
    rows = data.draw(st.integers(1, 3))
    # Quarters add up exactly, and there are few of them: ties are common.
    quarters = st.integers(-8, 8).map(lambda n: n / 4)
    number = st.lists(quarters, min_size=n_groups * size, max_size=n_groups * size)
    scores, logits = (np.array(data.draw(st.lists(number, min_size=rows, max_size=rows))) for _ in range(2))
    correction = np.array(data.draw(number)) if router.correction else None
    biased = scores if correction is None else scores + correction
    expected = [by_sorting(router, *both) for both in zip(biased.tolist(), logits.tolist(), strict=True)]
    assert choose(router, scores, correction, logits).tolist() == expected
