"""Settings from a JSON file, with the command line's on top, and all that is wrong with them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.serving.gateway.settings import LOOPBACK, ServerSettings, Settings, is_loopback


class SettingsMistaken(KvmapError):
    """One or more settings are wrong; the message has a line for each."""

    def __init__(self, mistakes: list[str]) -> None:
        """Args: the mistakes, in the words of `read_settings`."""
        self.mistakes = mistakes
        super().__init__("\n".join(mistakes))


def read_settings(file: Path | None, given: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Every setting: the file's, over them those given, defaults for the rest.

    Args:
        file: JSON of the form of `Settings`; None: none.
        given: by dotted name, as `server.port`; text is taken for numbers too.
        environment: where API keys are.

    Raises:
        SettingsMistaken: all mistakes, each with its name, the value got, what was expected and the remedy.
    """
    values, mistakes = _file_values(file)
    for name, value in given.items():
        group, _, field = name.rpartition(".")
        place = values.setdefault(group, {}) if group else values
        if isinstance(place, dict):
            place[field] = value
    mistakes += _exposure(values.get("server"), environment)
    mistakes += _missing_keys(values, environment)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        mistakes = [_words(detail) for detail in error.errors(include_url=False)] + mistakes
    if mistakes:
        raise SettingsMistaken(mistakes)
    return settings


def fields(model: type[BaseModel] = Settings, above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted name, default and description of every setting; the default is `...` where there is none."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{above}{name}.")
        else:
            default = ... if field.is_required() else field.default
            yield f"{above}{name}", default, field.description or ""


def _file_values(file: Path | None) -> tuple[dict[str, Any], list[str]]:
    if file is None:
        return {}, []
    try:
        values = read_json(file)
    except KvmapError as error:
        return {}, [f"--config: {error}"]
    except OSError as error:
        return {}, [f"--config {file}: {error.strerror}; expected a JSON file"]
    if not isinstance(values, dict):
        return {}, [f"--config {file}: expected an object of settings, got a {type(values).__name__}"]
    return values, []


def _exposure(server: Any, environment: Mapping[str, str]) -> list[str]:
    """What is missing where the gateway is to listen beyond this machine."""
    if not isinstance(server, Mapping):
        return []
    host = server.get("host", "127.0.0.1")
    if not isinstance(host, str) or is_loopback(host):
        return []
    mistakes = []
    if str(server.get("expose", False)).lower() not in ("true", "1"):
        mistakes.append(
            f"server.host={host}: others can reach it; expected a loopback address ({', '.join(LOOPBACK)}), "
            "or expose=true (--expose) where that is meant"
        )
    name = server.get("api_key_env", ServerSettings().api_key_env)
    if isinstance(name, str) and not environment.get(name):
        mistakes.append(f"server.host={host}: others can reach it; put an API key for them into ${name}")
    return mistakes


def _missing_keys(values: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    return [
        f"{role}.api_key_env={name}: there is no such environment variable, or it is empty; set it, or leave "
        "this out for an engine without a key"
        for role in ("source", "target")
        if isinstance(group := values.get(role), Mapping)
        and isinstance(name := group.get("api_key_env"), str)
        and not environment.get(name)
    ]


def _words(detail: Any) -> str:
    """One of pydantic's findings in a line: name, value, what is wrong."""
    place = tuple(str(part) for part in detail["loc"])
    name, value = ".".join(place), detail["input"]
    if detail["type"] == "missing":
        flag = f" (--{name.replace('.', '-')})" if name in ("source.url", "target.url") else ""
        return f"{name}: missing; expected {_described(name)}{flag}"
    if detail["type"] == "extra_forbidden":
        known = [known for known, *_ in fields()]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name}: there is no such setting{hint}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    shown = f"={value!r}" if name and not isinstance(value, dict) else ""
    return f"{name}{shown}: {message[:1].lower()}{message[1:]}" if name else message


def _described(name: str) -> str:
    text = {known: description for known, _, description in fields()}.get(name, "")
    if not text:
        return "an object with a url"
    return f"the address of the engine, {text}" if name.endswith(".url") else text
