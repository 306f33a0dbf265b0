"""The one place that knows TensorBoard: event files in `<run>/tensorboard/`, one for each attempt."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.metrics import Metric
from kvmap.tracking.bounded import Bounded
from kvmap.tracking.headline import headline, tags_of
from kvmap.tracking.mirror import Identity, flat

FOLDER = "tensorboard"
_PNG_SIZE = slice(16, 24)  # width and height, in the chunk every PNG begins with


class TensorboardMirror:
    """Scalars by their keys, tables and facts as text, figures as images, settings for the HParams page.

    The step is the number of the attempt: what an earlier attempt measured stays beside what this one does.

    Args:
        run: Which run, and which attempt of it.
        config: What the run was asked to do.
        seconds: Longest time any one call may take, and the calls after `hurry` together.
    """

    def __init__(self, run: Identity, config: Mapping[str, Any], *, seconds: float = 30.0) -> None:
        self._identity = run
        self._calls = Bounded("TensorBoard", seconds)
        self._writer: Any = None
        self._calls.call("start", lambda: self._start(config))

    def _start(self, config: Mapping[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._identity.directory / FOLDER))
        settings = dict(_leaves("", config)) | {"study": self._identity.study}
        self._add(hparams_pb(settings, trial_id=self._identity.name))
        self._text("run", f"{self._identity.name}\n\n{', '.join(tags_of(config))}")
        self._writer.flush()

    def log(self, metrics: Mapping[str, Metric]) -> None:
        """Values under their keys, evidence under `<key>.n` and `<key>.standard_error`."""
        self._calls.call("log", lambda: self._scalars(flat(metrics)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """A table, in Markdown."""
        self._calls.call("table", lambda: self._text(f"tables/{name}", _markdown(columns, rows)))

    def figure(self, name: str, path: Path) -> None:
        """A PNG that lies on disk, as it is."""

        def send() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            data = path.read_bytes()
            width, height = struct.unpack(">II", data[_PNG_SIZE])
            image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=data)
            self._add(Summary(value=[Summary.Value(tag=f"figures/{name}", image=image)]))

        self._calls.call("figure", send)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Facts learnt after the start, as text."""

        def send() -> None:
            for name, value in facts.items():
                self._text(f"facts/{name}", f"```json\n{json.dumps(value, indent=1, default=str)}\n```")

        self._calls.call("note", send)

    def results(
        self,
        metrics: Mapping[str, Metric],
        arms: tuple[Sequence[str], Sequence[Mapping[str, Any]]] | None,
        usage: Mapping[str, float],
    ) -> None:
        """Headline numbers and what the run used, as scalars; `arms` is among the tables."""
        del arms
        numbers = headline(metrics) | {f"usage/{name}": value for name, value in usage.items()}
        self._calls.call("results", lambda: self._scalars(numbers))

    def hurry(self) -> None:
        """From now on all calls together get the time of one."""
        self._calls.hurry()

    def finish(self, exit_code: int) -> None:
        """Says how it ended and closes the file."""

        def end() -> None:
            from tensorboard.plugins.hparams.api_pb2 import Status
            from tensorboard.plugins.hparams.summary import session_end_pb

            done = Status.Value("STATUS_FAILURE" if exit_code else "STATUS_SUCCESS")
            self._add(session_end_pb(done))
            self._writer.close()

        self._calls.call("finish", end)

    def _scalars(self, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items()]
        self._add(Summary(value=values))
        self._writer.flush()

    def _text(self, tag: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = create_summary_metadata(display_name=tag, description="")
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _add(self, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=self._identity.attempt, summary=summary))


def _leaves(above: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name, as a type the HParams page knows."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{above}.{key}" if above else str(key), item)
    elif isinstance(value, bool | int | float | str):
        yield above, value
    else:
        yield above, str(value)


def _markdown(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        texts = ("" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
        return f"| {' | '.join(texts)} |"

    body = [line([row.get(column) for column in columns]) for row in rows]
    return "\n".join([line(columns), line(["---"] * len(columns)), *body]) if columns else "(no rows)"
