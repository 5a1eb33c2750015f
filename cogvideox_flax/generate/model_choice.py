"""Which model runs, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelChoice:
    """Which model runs, and how. It is known before JAX is imported, and other processes are told it.

    where, revision, transformer, variant: as `hub.find` takes them.
    model_id: `where`, as a run remembers it.
    dtype: None: the model's own.
    mesh: as --mesh, over the devices of a process or of its group; None: one device.
    """

    where: str | None
    model_id: str
    revision: str | None = None
    transformer: str | None = None
    variant: str | None = None
    dtype: str | None = None
    mesh: str | None = None

    @property
    def which(self) -> dict[str, Any]:
        return {"revision": self.revision, "transformer": self.transformer, "variant": self.variant}
