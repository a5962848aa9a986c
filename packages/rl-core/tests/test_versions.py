import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError, StaleVersionError
from rl_core.versions import PolicyVersion, VersionStore

numbers = st.integers(0, 10**6)
versions = st.builds(PolicyVersion, numbers, numbers)


@given(versions)
def test_text_round_trips(version):
    assert PolicyVersion.parse(str(version)) == version


@given(st.text())
def test_only_its_own_text_is_a_version(text):
    try:
        version = PolicyVersion.parse(text)
    except ValueError as error:
        assert "e<epoch>.s<step>" in str(error) or "int" in str(error)  # noqa: PT017
    else:
        assert str(version) == text


@pytest.mark.parametrize("text", ["e1.s-1", "e01.s0", "e1.s0 ", "E1.s0", "e1s0", "e1.s1٣", ""])
def test_almost_versions_are_refused(text):
    with pytest.raises(ValueError, match="not a policy version"):
        PolicyVersion.parse(text)


@given(versions, versions)
def test_order_is_epoch_then_step(left, right):
    assert (left < right) == ((left.epoch, left.step) < (right.epoch, right.step))
    assert left < left.next_step() < left.next_epoch()


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (0, -1)])
def test_negative_parts_are_refused(epoch, step):
    with pytest.raises(ValueError, match="negative"):
        PolicyVersion(epoch, step)


@given(st.lists(versions, max_size=20))
def test_a_store_never_goes_back(tmp_path_factory, attempts):
    path = tmp_path_factory.mktemp("store") / "version.json"
    highest = None
    for version in attempts:
        store = VersionStore(path)  # a process that was just started
        assert store.current == highest
        if highest is None or version > highest:
            store.record(version)
            highest = version
        else:
            with pytest.raises(StaleVersionError, match=str(version)):
                store.record(version)
        assert store.current == highest
    assert VersionStore(path).current == highest


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_crash_before_the_rename_keeps_the_old_version(tmp_path, monkeypatch, call):
    path = tmp_path / "version.json"
    store = VersionStore(path)
    store.record(PolicyVersion(1, 5))

    def crash(*_):
        raise OSError("power cut")

    target = (type(path), "replace") if call == "replace" else (os, "fsync")
    with monkeypatch.context() as patch:
        patch.setattr(*target, crash)
        with pytest.raises(OSError, match="power cut"):
            store.record(PolicyVersion(1, 6))
    assert store.current == PolicyVersion(1, 5)
    assert VersionStore(path).current == PolicyVersion(1, 5)
    store.record(PolicyVersion(1, 6))
    assert VersionStore(path).current == PolicyVersion(1, 6)


def test_a_torn_staging_file_is_not_read(tmp_path):
    path = tmp_path / "version.json"
    VersionStore(path).record(PolicyVersion(1, 5))
    path.with_suffix(".tmp").write_text('{"vers')
    store = VersionStore(path)
    store.record(PolicyVersion(2, 5))
    assert VersionStore(path).current == PolicyVersion(2, 5)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 3}', '{"version": "latest"}'])
def test_a_damaged_file_is_an_error_and_not_a_new_run(tmp_path, content):
    path = tmp_path / "version.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"version\.json"):
        VersionStore(path)
