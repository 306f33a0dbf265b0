"""One cluster for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.processes import NoCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes; the tests are skipped where they cannot be had."""
    # A short name: paths of sockets have an upper length.
    made = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    try:
        made.up()
    except NoCluster as error:
        pytest.skip(f"no Slurm here: {error}")
    yield made
    made.down()
