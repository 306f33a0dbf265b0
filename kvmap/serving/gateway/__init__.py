"""An OpenAI-compatible gateway over two engines: a small source answers, a large target takes over.

`python -m kvmap.serving.gateway` (`__main__.py`, `serving.py`) opens an application (`app.py`, with
`admission.py` before it) over two engines (`engine.py`, whose streams `events.py` takes apart).

A request is judged (`fields.py`: what is taken; `asked.py`: what it says of the cascade) and routed
(`rules.py`, `routing.py`); `cascade.py` asks the engines in turn, whole (`whole.py`) or as a stream
(`streaming.py`), until one has answered. `confidence.py` says how sure the source is, `handing_over.py` has
its cache published and taken, `source_reads.py` has it read first or meanwhile, `outcomes.py` reads what
came of that. `sessions.py` remembers who answers a conversation, `estimate.py` how long a prefill takes,
`report.py` what is told of an answer, and `counting.py` all of them together. `settings.py` has every
setting, `reading_settings.py` where they come from.

This package alone knows fastapi, uvicorn, httpx and prometheus_client; importing it loads none of them.
"""

from __future__ import annotations
