"""Settings of a generation that cannot be are refused at the call, with the value and what would be right."""

import pytest

import cutaway
from cutaway import CutawayError


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": "3"}, "max_tokens is '3'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": -1}, "The temperature is -1"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_p": "0.9"}, "top_p is '0.9'; it must be a number"),
        ({"min_p": True}, "min_p is True; it must be a number"),
        ({"top_k": True}, "top_k is True; it must be a whole number"),
        ({"stop": 1}, "stop is 1; it must be a text or several"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"min_p": 2}, "min_p is 2"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(setting, says):
    with pytest.raises(CutawayError, match=says):
        cutaway.load("toy").stream("<BOS> dragon drinks", **setting)
