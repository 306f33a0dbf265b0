"""What a diagnosis can be asked for."""

from __future__ import annotations

from collections.abc import Iterator

from kvmap.config.judging import unknown_name
from kvmap.config.schema import DIAGNOSTIC_TEXTS, Config


def diagnostics_mistakes(cfg: Config) -> Iterator[str]:
    """Mistakes of `diagnostics`, beside those of its plain names and ranges."""
    texts, share = cfg.diagnostics.texts, cfg.diagnostics.rare_share
    for text in texts:
        if text not in DIAGNOSTIC_TEXTS:
            yield unknown_name("diagnostics.texts", text, DIAGNOSTIC_TEXTS)
    if len(set(texts)) < len(texts):
        yield f"diagnostics.texts={list(texts)}: a name stands twice; name each once"
    if not 0 <= share < 1:
        yield (
            f"diagnostics.rare_share={share}: expected a share of calibration tokens, from 0 and below 1; "
            "0.05 calls the least frequent ids that make up a twentieth of them rare"
        )
