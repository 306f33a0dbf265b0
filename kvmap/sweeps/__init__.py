"""Sweeps: which job is which, who runs it, what was submitted, and how far it got.

A job is known by the hash of its configuration (`identity.py`). A study's register (`register.py`) says where
the run of each identity lies; a job takes its turn there (`turn.py`) and runs, resumes or skips. What was
submitted is written down at the start (`submission.py`, `code.py`) and compared by every job. `states.py` and
`summary.py` read how far a study got, `command.py` prints it, and `resubmit.py` starts points again.
"""
