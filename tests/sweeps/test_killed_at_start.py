"""A job killed after it has taken its turn and before it has a run.json: nobody runs it, and at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kvmap.sweeps.register import Register
from kvmap.sweeps.states import read_state

HOLDER = """
import sys, time
from pathlib import Path
from kvmap.sweeps.register import Register

lock = Register(Path(sys.argv[1])).lock("a")
assert lock.try_acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_it_is_missing_as_soon_as_its_process_is_gone(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    register = Register(tmp_path)
    assert read_state(register, "a").status == "running"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert register.lock_path("a").exists()
    assert read_state(register, "a").status == "missing"
