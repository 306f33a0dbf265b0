from __future__ import annotations

import logging
import sys

import pytest

from kvmap.progress import HideProgress, track


class TestProgress:
    def test_gives_every_item_and_says_when_it_is_done(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "kvmap")
        assert list(track(range(5), description="calibrate")) == [0, 1, 2, 3, 4]
        assert list(track((item for item in "ab"), description="read")) == ["a", "b"]
        assert "calibrate: 5 done in" in caplog.messages[0]
        assert "read: 2 done in" in caplog.messages[1]

    def test_says_how_far_and_how_long_to_go(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(0, 1000, 6))
        monkeypatch.setattr("kvmap.progress.time.monotonic", lambda: float(next(clock)))
        caplog.set_level(logging.INFO, "kvmap")
        list(track(range(5), description="fit"))
        assert caplog.messages[0] == "fit: 2 of 5 (40 %), 18 s to go"
        assert len(caplog.messages) == 3

    def test_draws_one_display_for_nested_loops_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        line = logging.LogRecord("kvmap.progress", logging.INFO, "", 0, "fit", (), None)
        pairs = []
        for outer in track(range(2), description="layers"):
            for inner in track(range(2), description="heads"):
                pairs.append((outer, inner))
                assert not HideProgress().filter(line)
        assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert HideProgress().filter(line)
