"""The log of a run has all its lines, and is a regular file of its user's."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from launch.base.errors import ResourceError
from launch.supervise.screen import Screen


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "training.log")
    with pytest.raises(ResourceError, match="leads to no regular file of yours"):
        Screen(tmp_path / "training.log")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_another_users_file_is_refused(tmp_path):
    theirs, shared = tmp_path / "theirs", tmp_path / "shared"
    theirs.write_text("theirs")
    os.chown(theirs, 1001, 1001)
    shared.mkdir()
    (shared / "training.log").symlink_to(theirs)
    with pytest.raises(ResourceError, match="leads to no regular file of yours"):
        Screen(shared / "training.log")
    shared.chmod(0o1777)
    os.lchown(shared / "training.log", 1001, 1001)
    with pytest.raises(ResourceError, match="belongs to user 1001"):
        Screen(shared / "training.log")
    assert theirs.read_text() == "theirs"


def test_lines_from_before_there_is_a_log_stand_in_it_once_and_first(tmp_path):
    screen, shown = Screen(stream=(stream := io.StringIO())), ["planning", "starting"]
    for line in shown:
        screen.say(line)
    screen.say("a question", log=False)
    for name in ("run.log", "all.log"):
        screen.log_to(tmp_path / name)
    screen.say("training")
    assert stream.getvalue().splitlines() == [*shown, "a question", "training"]
    assert (tmp_path / "run.log").read_text().splitlines() == [*shown, "training"]
    assert (tmp_path / "all.log").read_text().splitlines() == ["training"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_counts_of_rows_move_one_bar_and_stand_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(tmp_path / "run.log", stream=(stream := Terminal()))
    lines = [f"tokenising a.jsonl: {rows} of 9 rows, ETA 0:00:01" for rows in (3, 9)]
    screen.say(*lines)
    screen.stop()
    assert "tokenising a.jsonl" in stream.getvalue() and lines[0] not in stream.getvalue()
    assert (tmp_path / "run.log").read_text().splitlines() == lines
