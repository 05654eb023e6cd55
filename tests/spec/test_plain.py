"""A spec is written as plain data, and read back as it was."""

import json

import pytest
from hypothesis import given

from cutaway.errors import CutawayError
from cutaway.spec.plain import spec_from_json, spec_to_json
from random_models import specs


@given(specs())
def test_every_spec_is_written_as_plain_data_and_read_back(spec):
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_record_of_another_version_is_refused():
    with pytest.raises(CutawayError, match="describes a 'SpectralSpec'"):
        spec_from_json({"record": "SpectralSpec"})
    with pytest.raises(CutawayError, match="NormSpec is of another version"):
        spec_from_json({"record": "NormSpec", "kind": "rms", "eps": 1e-6, "colour": 3})
