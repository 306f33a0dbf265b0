"""A cascade one can watch: a conversation that starts on the source and goes on on the target.

`python -m kvmap.demo` reads lines (`commands.py`), asks a `Session` (`session.py`: who answers, from whose
cache; `settings.py`: when the conversation is handed over; `handing.py`: the hand-off through its gate;
`answering.py`: an answer and its probability) and writes the `events.py` that come of it, as text or as JSON
(`writing.py`). `opening.py` composes the configuration as `kvmap.run` does and finds or fits the mapper;
`wording.py` puts questions as the shipped world's models were taught them.
"""

from __future__ import annotations
