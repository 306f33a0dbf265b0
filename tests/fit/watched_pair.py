"""A pair that fails where both models are in memory."""

from __future__ import annotations

from kvmap.models.pair import ModelPair, ModelSpec


class WatchedPair(ModelPair):
    """Fails where both models are in memory, and keeps the order in which they were loaded."""

    def __init__(self, *specs: ModelSpec) -> None:
        super().__init__(*specs)
        self.order: list[str] = []

    def _load(self, side):
        model = super()._load(side)
        assert len(self._loaded) == 1, "source and target are in memory together"
        if self.order[-1:] != [side]:
            self.order.append(side)
        return model
