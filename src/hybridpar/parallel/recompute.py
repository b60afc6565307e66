"""Activation recomputation: keep less in the forward pass, run parts of it again in the backward pass.

full        a block keeps its input and runs its forward again
selective   a block keeps what its matrix products with weights give, and runs again what is large and cheap next to
            them: softmax(q k^T) v, silu(gate) * up, and the SSD of Mamba-2 (after Korthikanti et al. 2022,
            arXiv 2205.05198, section 5). Ring attention keeps no scores to begin with, and is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from hybridpar.models.block import AttentionBlock, MambaBlock
from hybridpar.models.lm import LanguageModel
from hybridpar.models.mlp import SwiGLU


def recompute_blocks(lm: LanguageModel) -> None:
    """Wrap every block's forward; in place.

    Its collectives run again too, but for one that ends a block whose backward does not need its result (the last
    all-reduce of an MLP): torch stops a recomputation once everything that was saved is there.
    """
    for block in lm.blocks.values():
        block.forward = _again(block.forward)


def recompute_selectively(lm: LanguageModel) -> None:
    """Wrap what is cheap in every block; in place, before anything else is put around it."""
    for block in lm.blocks.values():
        if isinstance(block, AttentionBlock):
            block.attention.core = _again(block.attention.core)
        if isinstance(block, MambaBlock):
            block.mamba.scan = _again(block.mamba.scan)
        for module in block.modules():
            if isinstance(module, SwiGLU):
                module.product = _again(module.product)


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    # Nothing in the models is random, so no generator state is kept.
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
