"""Errors cross from a job's process to the one that waits for it."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from kvmap.config import ConfigError
from kvmap.errors import KvmapError, UnknownName
from kvmap.files import StorageError

ERRORS = [
    KvmapError("a message"),
    UnknownName("mapper", "liner", ["linear", "raw"]),
    ConfigError(["one mistake", "another"]),
    StorageError(Path("/full/disk"), OSError(errno.ENOSPC, "No space left on device")),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error: KvmapError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
