from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tracking.wandb_service import Service, service


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr("kvmap.tracking.wandb_files.SETTLE_SECONDS", 1.0)
    with service(monkeypatch) as found:
        yield found
