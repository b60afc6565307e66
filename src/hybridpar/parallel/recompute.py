"""Full activation recomputation: a block keeps its input and runs its forward again in the backward pass."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from hybridpar.models.lm import LanguageModel


def recompute_blocks(lm: LanguageModel) -> None:
    """Wrap every block's forward; in place.

    Its collectives run again too, but for one that ends a block whose backward does not need its result (the last
    all-reduce of an MLP): torch stops a recomputation once everything that was saved is there.
    """
    for block in lm.blocks.values():
        # Nothing in the models is random, so no generator state is kept.
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = again
