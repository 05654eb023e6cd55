"""What all tests share: the toy, and how hypothesis runs."""

import pytest
from hypothesis import HealthCheck, settings

import cutaway
from cutaway.model import Model

# No deadline: a test never fails on time. The same examples every time, so that a red run can be repeated.
settings.register_profile(
    "cutaway", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cutaway")


@pytest.fixture(scope="session")
def toy() -> Model:
    """The shipped ten-token model on the reference engine, in float64."""
    return cutaway.load("toy", engine="numpy", dtype="float64")
