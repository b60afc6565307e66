"""The language model: embedding, blocks, norm, head; whole, or any run of its layers.

Symbols: b batch, S tokens, d hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hybridpar.models.block import build_block
from hybridpar.models.cache import LayerCache
from hybridpar.models.norm import RMSNorm
from hybridpar.specs import ModelSpec


class LanguageModel(nn.Module):
    """Decoder-only model. `embed`, or `norm` and `head`, may be set to None and blocks dropped: what is left maps
    whatever it is given (tokens or hidden states) to whatever it can (hidden states or logits).

    Blocks are keyed by their index in the whole model, so that a parameter has one name wherever it lives.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(model.vocab, model.hidden)
        self.blocks = nn.ModuleDict({str(i): build_block(kind, model) for i, kind in enumerate(model.layer_kinds)})
        self.norm: nn.Module | None = RMSNorm(model.hidden, model.norm_eps)
        self.head: nn.Module | None = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, caches: Mapping[str, LayerCache] | None = None) -> Tensor:
        """Tokens (b, S) (hidden states (b, S, d) without embed) -> logits (b, S, V) (hidden states without head).

        With caches, one a block, the tokens follow those that are in the caches, and join them.
        """
        return self.logits(self.hidden_states(x, caches))

    def hidden_states(self, x: Tensor, caches: Mapping[str, LayerCache] | None = None) -> Tensor:
        """Everything before the final norm; see `forward`."""
        if self.embed is not None:
            x = self.embed(x)
        for key, block in self.blocks.items():
            x = block(x) if caches is None else block(x, caches[key])
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (b, S, d) -> logits (b, S, V), or what can be done of it."""
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)

    def new_caches(self, capacity: int) -> dict[str, LayerCache]:
        """Empty caches of all blocks for up to `capacity` tokens."""
        return {key: block.new_cache(capacity) for key, block in self.blocks.items()}  # type: ignore[operator]
