"""Every setting of the gateway, with its default, its range and what it means."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Mode: TypeAlias = Literal["auto", "handoff", "reprefill"]
Publishing: TypeAlias = Literal["every_answer", "on_hand_off"]
Measure: TypeAlias = Literal["mean", "first", "entropy", "off"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine can reach."""
    return host in LOOPBACK or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _sound_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    return pattern


def _plain_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+", url.rstrip("/")):
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT, without a path")
    return url.rstrip("/")


Pattern: TypeAlias = Annotated[str, AfterValidator(_sound_pattern)]
Url: TypeAlias = Annotated[str, AfterValidator(_plain_url)]


class _Group(BaseModel):
    """Unknown names are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineSettings(_Group):
    """Where an engine is."""

    url: Url = Field(description="http://HOST:PORT")
    model: str | None = Field(
        default=None, description="the name it is served by; null: the first that the engine lists"
    )
    api_key_env: str | None = Field(default=None, description="environment variable that holds its API key")


class ServerSettings(_Group):
    """Where the gateway listens, and who may ask."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8080, ge=0, le=65535, description="0: any that is free")
    expose: bool = Field(
        default=False, description="listen on an address that is not loopback; asks for an API key"
    )
    api_key_env: str = Field(
        default="KVMAP_GATEWAY_API_KEY", description="environment variable with the key clients must send"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Host headers taken besides loopback names and `host`; '*' for any"
    )
    drain_seconds: float = Field(default=30.0, ge=0, le=3600, description="for answers under way at shutdown")


class RuleSettings(_Group):
    """When a request goes to the target before the source has answered; any that holds does it."""

    from_turn: int | None = Field(
        default=None, ge=1, description="from this user turn of a conversation, 1 the first"
    )
    tools: bool = Field(default=False, description="when the request brings tools")
    system_pattern: Pattern | None = Field(default=None, description="found in a system or developer message")
    pattern: Pattern | None = Field(
        default=None, description="found in the user's last message, or in the prompt"
    )
    prompt_tokens: int | None = Field(
        default=None, ge=1, description="when the prompt has at least as many tokens"
    )


class ConfidenceSettings(_Group):
    """When an answer of the source is withheld and the target answers in its place."""

    measure: Measure = Field(
        default="mean", description="mean or first token's probability, exp(-mean entropy), or off"
    )
    threshold: float = Field(default=0.5, ge=0, le=1, description="a confidence below it is low")
    first_tokens: int = Field(
        default=8, ge=1, le=1024, description="of a stream are judged before the first one is sent"
    )
    top: int = Field(default=5, ge=2, le=20, description="alternatives a token, for entropy")


class HandOffSettings(_Group):
    """How the target comes by the context."""

    mode: Mode = Field(
        default="auto", description="handoff: from the source's cache; reprefill: by itself; auto"
    )
    min_tokens: int = Field(default=256, ge=1, description="a shorter context is not worth a hand-off")
    publish: Publishing = Field(
        default="every_answer", description="the source publishes its answers, or on_hand_off what it reads"
    )
    overlap: bool = Field(default=True, description="the target takes while the source still reads")
    wait_seconds: float = Field(
        default=60.0, ge=0, le=600, description="the target waits for a cache being written"
    )
    grace_seconds: float = Field(
        default=10.0, ge=0, le=60, description="and for the source to begin, while it reads"
    )
    require: str | None = Field(
        default=None, description="verdict a mapper must have, as the engine names it: go"
    )


class SessionSettings(_Group):
    """What is remembered of conversations, and how much of it."""

    max_sessions: int = Field(
        default=1000, ge=1, le=1_000_000, description="the least recently used one goes first"
    )
    ttl_seconds: float = Field(default=3600.0, gt=0, description="of a session nobody has used")
    max_bytes: int = Field(
        default=4 << 30, ge=0, description="of caches published for one session; beyond it none are"
    )
    stay_turns: int | None = Field(
        default=None, ge=0, description="answers the target gives after the one it took over with; null: all"
    )


class LimitSettings(_Group):
    """What a request may ask for."""

    body_bytes: int = Field(default=4 << 20, ge=1024, description="of a request's body")
    messages: int = Field(default=1000, ge=1, description="of a conversation")
    max_tokens: int = Field(default=4096, ge=1, description="of an answer")
    choices: int = Field(default=4, ge=1, le=128, description="n, answers to one prompt")
    in_flight: int = Field(default=64, ge=1, le=10_000, description="requests at a time; more get 429")


class TimeoutSettings(_Group):
    """Seconds before an engine is given up."""

    connect: float = Field(default=5.0, gt=0, description="to connect")
    first_token: float = Field(
        default=120.0, gt=0, description="to a stream's first event, or to read a prompt"
    )
    between_tokens: float = Field(default=60.0, gt=0, description="between two events of a stream")
    total: float = Field(default=600.0, gt=0, description="for a whole answer")


class Settings(_Group):
    """All of them; the names are those of the JSON file."""

    source: EngineSettings
    target: EngineSettings
    model: str = Field(
        default="kvmap", min_length=1, description="name under which the two are offered as one"
    )
    server: ServerSettings = ServerSettings()
    rules: RuleSettings = RuleSettings()
    confidence: ConfidenceSettings = ConfidenceSettings()
    handoff: HandOffSettings = HandOffSettings()
    sessions: SessionSettings = SessionSettings()
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.source.url == self.target.url:
            raise ValueError(f"source.url and target.url are both {self.source.url}: expected two engines")
        if self.sessions.max_sessions < self.limits.in_flight:
            raise ValueError(
                f"sessions.max_sessions={self.sessions.max_sessions}: expected at least limits.in_flight="
                f"{self.limits.in_flight}, so that a session in use is never forgotten"
            )
        return self
