import pickle

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from ray.exceptions import RayTaskError

from minirl.ray_launcher import ForeignError, errors_that_travel, translated
from rl_core.errors import ManifestMismatchError

UNREADABLE = StrictDataclassFieldValidationError(field="rms_norm_eps", cause=TypeError("a string"))


def test_an_error_that_cannot_be_read_elsewhere_is_told_in_its_own_words():
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(UNREADABLE))  # why it has to be translated where it is raised
    with pytest.raises(ForeignError) as caught, errors_that_travel():
        raise UNREADABLE
    arrived = pickle.loads(pickle.dumps(caught.value))
    told = translated(RayTaskError("invoke", "trace", arrived), "actor rank 0")
    assert isinstance(told, ForeignError)
    line = "actor rank 0: StrictDataclassFieldValidationError: "
    assert str(told).startswith(line)
    assert "rms_norm_eps" in str(told)
    assert "\n" not in str(told)


def test_an_error_of_ours_arrives_as_it_was_raised():
    with pytest.raises(ManifestMismatchError) as caught, errors_that_travel():
        raise ManifestMismatchError("e1.s3: two tensors fewer")
    told = translated(RayTaskError("invoke", "trace", caught.value), "actor rank 0")
    assert told is caught.value
