"""What trains: the one interface behind which torch and DeepSpeed, and every layout, look alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridpar.checkpoints import PastStep


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: mean loss over the global batch (nats per token), and the global norm before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Parts:
    """The tensors this rank holds between steps, by category (plain local tensors). `host` is kept in main memory,
    beside a device."""

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    optimizer: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    host: tuple[Tensor, ...] = ()


class Engine(Protocol):
    """A model laid out over ranks with its optimizer. All methods are collective."""

    def step(self, tokens: Tensor, targets: Tensor) -> StepResult:
        """Train on this replica's share of the global batch, (m*b, S) int64 each; equal on its tp, pp and cp ranks."""
        ...

    def parts(self) -> Parts:
        """What this rank holds now."""
        ...

    def dense_parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, by its name in the one-device model; on every rank."""
        ...

    def keep_gradients(self) -> None:
        """From now on keep what `dense_gradients` needs, if the engine would free it within a step."""
        ...

    def dense_gradients(self) -> dict[str, Tensor]:
        """Every gradient of the last step as the optimizer used it (clipped), whole; on every rank. Wants
        `keep_gradients` called before the step."""
        ...


@runtime_checkable
class Resumable(Engine, Protocol):
    """An engine whose state can be kept and taken up again."""

    def save(self, folder: Path, step: int, past: Sequence[PastStep]) -> Path:
        """Write parameters and optimizer state after `step` steps as a checkpoint in `folder`, and tell which."""
        ...

    def load(self, path: Path) -> int:
        """Go on from a checkpoint of any layout; the number of steps behind it.

        Raises:
            CheckpointError: it is not whole, or of another model, precision or optimizer.
        """
        ...
