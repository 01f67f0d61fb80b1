"""The state folder is private, belongs to one supervisor, and never repeats an incarnation."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from bridge.supervisor.errors import UsageError
from bridge.supervisor.state import StateFolder


def test_a_folder_for_one_run_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    state = StateFolder.open(None)
    assert state.path.parent == tmp_path and stat.S_IMODE(state.path.stat().st_mode) == 0o700
    state.next_incarnation(1)
    state.close()
    assert not state.path.exists()


def test_a_named_folder_stays_and_counts_on(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = StateFolder.open(path)
    assert [state.next_incarnation(1), state.next_incarnation(1), state.next_incarnation(2)] == [1, 2, 1]
    state.close()
    again = StateFolder.open(path)
    assert again.next_incarnation(1) == 3
    again.close()


def test_two_supervisors_cannot_share_it(tmp_path: Path) -> None:
    state = StateFolder.open(tmp_path / "state")
    with pytest.raises(UsageError, match="another supervisor"):
        StateFolder.open(tmp_path / "state")
    state.close()


def test_slots_have_short_addresses_in_it(tmp_path: Path) -> None:
    state = StateFolder.open(tmp_path / "s")
    assert state.slot(2) == (f"ipc://{tmp_path}/s/i2", f"ipc://{tmp_path}/s/o2")
    state.close()


def test_a_path_too_long_for_its_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"107.*--state-dir"):
        StateFolder.open(tmp_path / ("x" * 100))


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(UsageError, match="0700"):
        StateFolder.open(tmp_path / "open")


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    StateFolder.open(tmp_path / "state").close()
    (tmp_path / "state/version").write_text("99")
    with pytest.raises(UsageError, match="version '99'"):
        StateFolder.open(tmp_path / "state")
