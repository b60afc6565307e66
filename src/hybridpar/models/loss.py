"""Next-token cross entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from hybridpar.models.norm import statistics_dtype


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood over all tokens, in at least float32.

    Args:
        logits: (b, S, V).
        targets: (b, S), int64.

    Returns:
        scalar, nats per token.
    """
    return functional.cross_entropy(logits.flatten(0, 1).to(statistics_dtype(logits)), targets.flatten())
