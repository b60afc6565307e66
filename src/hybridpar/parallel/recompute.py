"""Full activation recomputation: a block keeps its input and runs its forward again in the backward pass."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from hybridpar.models.lm import LanguageModel


def recompute_blocks(lm: LanguageModel) -> None:
    """Wrap every block's forward; in place. Its collectives run again too, as in Megatron-LM."""
    for block in lm.blocks.values():
        # Nothing in the models is random, so no generator state is kept.
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = again
