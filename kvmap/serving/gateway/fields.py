"""Which fields of a request are taken, and how large they may be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from kvmap.serving.gateway.refusals import Refusal, mistaken
from kvmap.serving.gateway.settings import LimitSettings

Kind: TypeAlias = Literal["chat", "completion"]

_OF_BOTH = {
    *("model", "stream", "stream_options", "n", "seed", "stop", "max_tokens", "logprobs", "response_format"),
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ),
    *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias"),
    *("allowed_token_ids", "bad_words", "structured_outputs"),
    *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "cache_salt"),
}
_OF_A_CHAT = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs"),
    *("reasoning_effort", "include_reasoning", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
}
#: fields that an engine is given as they come
TAKEN: dict[Kind, frozenset[str]] = {
    "chat": frozenset(_OF_BOTH | _OF_A_CHAT),
    "completion": frozenset(_OF_BOTH | {"prompt", "echo", "suffix"}),
}
#: fields that clients send for the service they know, and that mean nothing here; `kvmap` is the gateway's
PASSED_OVER = frozenset(
    {
        *("kvmap", "user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
#: fields that engines know and no client may set, with the reason
WITHHELD = {
    "kv_transfer_params": "caches are named by the gateway alone; ask for a hand-off with kvmap.mode",
    "ec_transfer_params": "caches are named by the gateway alone",
    "vllm_xargs": "extensions of an engine are not for clients",
    "request_id": "requests are numbered by the gateway",
    "session_id": "sessions are named by kvmap.session",
    "prompt_embeds": "prompts are text or token ids",
    "chat_template": "the engines' own chat template is used",
    "mm_processor_kwargs": "prompts are text",
    "media_io_kwargs": "prompts are text",
}


def checked(kind: Kind, body: Any, limits: LimitSettings) -> dict[str, Any]:
    """The fields of a request that an engine is given.

    Raises:
        Refusal: 400, for a field that is unknown, withheld, of a wrong type or too large.
    """
    if not isinstance(body, dict):
        raise Refusal(400, "the body: expected a JSON object", "invalid_json")
    for name in body:
        _known(kind, name)
    if kind == "chat":
        _messages(body.get("messages"), limits)
    else:
        _prompt(body.get("prompt"))
    for name in ("max_tokens", "max_completion_tokens"):
        whole_number(body, name, 1, limits.max_tokens)
    whole_number(body, "n", 1, limits.choices)
    whole_number(body, "top_logprobs", 0, 20)
    if kind == "completion":
        whole_number(body, "logprobs", 0, 20)
    _flags(kind, body)
    return {name: value for name, value in body.items() if name in TAKEN[kind]}


def _known(kind: Kind, name: str) -> None:
    if name in WITHHELD:
        raise mistaken(name, f"not taken from clients: {WITHHELD[name]}", "field_not_allowed")
    if name not in TAKEN[kind] | PASSED_OVER:
        near = difflib.get_close_matches(name, TAKEN[kind] | PASSED_OVER, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise mistaken(name[:80], f"no such field of a {kind}{hint}", "unknown_field")


def _flags(kind: Kind, body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("stream"), bool | None):
        raise mistaken("stream", "expected true or false")
    if not isinstance(body.get("model"), str | None):
        raise mistaken("model", "expected the name of a model, see /v1/models")
    if kind == "chat" and not isinstance(body.get("logprobs"), bool | None):
        raise mistaken("logprobs", "expected true or false")
    for name in ("stream_options", "chat_template_kwargs", "response_format"):
        if not isinstance(body.get(name), dict | None):
            raise mistaken(name, "expected an object")
    if "chat_template" in (body.get("chat_template_kwargs") or {}):
        raise mistaken("chat_template_kwargs.chat_template", WITHHELD["chat_template"], "field_not_allowed")
    if not isinstance(body.get("tools"), list | None):
        raise mistaken("tools", "expected a list")


def whole_number(body: Mapping[str, Any], name: str, least: int, most: int) -> None:
    """Check a field that may be left out.

    Raises:
        Refusal: 400, it is there and no whole number in that range.
    """
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise mistaken(name, f"expected a whole number, {least} to {most}, got {str(value)[:40]}")


def _messages(messages: Any, limits: LimitSettings) -> None:
    if not isinstance(messages, list) or not messages:
        raise mistaken("messages", "expected a list with at least one message")
    if len(messages) > limits.messages:
        raise mistaken(
            "messages", f"{len(messages)} of them, more than the {limits.messages} taken", "too_many"
        )
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise mistaken(where, "expected an object with a role")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise mistaken(f"{where}.content", "expected a text, or a list of parts")
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str) or part != {"type": "text", "text": text}:
                raise mistaken(f"{where}.content", "expected parts of type text only; prompts are text")


def _prompt(prompt: Any) -> None:
    if isinstance(prompt, str) and prompt:
        return
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in prompt):
            return
        if len(prompt) == 1 and not isinstance(prompt[0], int):
            return _prompt(prompt[0])
        if all(isinstance(each, str | list) for each in prompt):
            raise mistaken("prompt", f"{len(prompt)} prompts in one request; send each by itself")
    raise mistaken("prompt", "expected a text or a list of token ids, not empty")


def text_of(content: Any) -> str:
    """The text of a message's content, parts joined by line ends."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return ""


def texts_of(messages: Sequence[Mapping[str, Any]], *roles: str) -> list[str]:
    """The texts of all messages of some roles, in order."""
    return [text_of(message.get("content")) for message in messages if message["role"] in roles]
