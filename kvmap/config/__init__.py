"""The configuration: `schema.py` says what there is, `validation.py` judges it (with `mapper_rules.py` and
`evaluation_rules.py`), `hydra.py` hands it to Hydra.

None of them knows torch, nor what the settings are used for: `kvmap.stages` is where they end.
"""

from __future__ import annotations

from kvmap.config.hydra import (
    checkout_root,
    composed_defaults,
    config_path,
    outputs_root,
    register,
    start_token,
)
from kvmap.config.judging import unknown_keys
from kvmap.config.schema import (
    STAGES,
    Config,
    ModelConfig,
    TextConfig,
)
from kvmap.config.validation import ConfigError, validate

__all__ = [
    "STAGES",
    "Config",
    "ConfigError",
    "ModelConfig",
    "TextConfig",
    "checkout_root",
    "composed_defaults",
    "config_path",
    "outputs_root",
    "register",
    "start_token",
    "unknown_keys",
    "validate",
]
