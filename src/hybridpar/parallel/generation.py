"""Inference under tp, pp, dp, cp and ep: prompts are filled in, then tokens are decoded greedily, one a sequence.

Every rank keeps the caches of its own layers, heads and tokens. The sequences of a replica go through in groups of
workload.micro_batch, which is what keeps the stages of a pipeline busy at once. After each pass the last stage chooses
the next tokens, and hands them to the first.

Symbols: b sequences of a group, S tokens of the prompt on this rank, d hidden, V vocab, t tp ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.cache import LayerCache
from hybridpar.models.lm import LanguageModel
from hybridpar.models.precision import DTYPES
from hybridpar.parallel.collectives import gathered_without_gradient
from hybridpar.parallel.context import Context
from hybridpar.parallel.sharding import part
from hybridpar.specs import RunSpec


class Generator:
    """One rank of a served model; built by `hybridpar.parallel.apply.build_generator`. All methods are collective."""

    def __init__(self, run: RunSpec, mesh: ProcessMesh, lm: LanguageModel, context: Context | None) -> None:
        self._run, self._mesh, self._lm, self._context = run, mesh, lm, context
        self._is_first = mesh.coordinate.pp == 0
        self._is_last = mesh.coordinate.pp == run.strategy.pp - 1
        self._caches: list[dict[str, LayerCache]] = []
        self._next: list[Tensor] = []  # chosen tokens (b, 1) a group, where the last stage is
        self._in_flight: list[tuple[dist.Work | None, Tensor]] = []
        self._keeps_logits = False
        self._logits: list[Tensor] = []

    @torch.no_grad()
    def prefill(self, prompts: Tensor) -> None:
        """Fill fresh caches with prompts (B/dp, tokens), equal on the tp, pp and cp ranks of a replica, and choose
        the first token after each."""
        capacity = prompts.shape[1] + self._run.workload.steps
        groups = prompts.chunk(self._run.micro_batches)
        self._caches = [self._lm.new_caches(capacity) for _ in groups]
        self._next, self._logits = [], []
        if self._context is not None:
            groups = tuple(self._context.tokens_of_rank(group) for group in groups)
        self._pass_through(groups, groups[0].shape[1])

    @torch.no_grad()
    def decode(self) -> None:
        """Append the chosen token to each sequence, and choose the next one."""
        chosen, self._next = self._next, []
        self._pass_through(chosen, 1)

    def chosen(self) -> Tensor | None:
        """The tokens chosen last, (B/dp,), where the last stage is."""
        return torch.cat(self._next).squeeze(-1) if self._is_last else None

    def wait(self) -> None:
        """Until everything that was sent has arrived."""
        if self._is_first and not self._is_last and not self._next:
            self._next = [self._received_tokens() for _ in self._caches]
        for work, _ in self._in_flight:
            if work is not None:
                work.wait()
        self._in_flight = []

    def keep_logits(self) -> None:
        """From now on keep the logits that tokens are chosen from, for checks."""
        self._keeps_logits = True

    def logits(self) -> Tensor | None:
        """Kept logits, (passes, B/dp, V), since the last prefill; whole on the last stage."""
        if not self._is_last:
            return None
        count = len(self._caches)
        passes = [self._logits[first : first + count] for first in range(0, len(self._logits), count)]
        return torch.stack([torch.cat(groups) for groups in passes])

    def cache_tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and states that this rank holds."""
        return tuple(t for caches in self._caches for cache in caches.values() for t in cache.tensors())

    def parameter_tensors(self) -> tuple[Tensor, ...]:
        """Parameters that this rank holds."""
        return tuple(p.detach() for p in self._lm.parameters())

    def _pass_through(self, tokens: Sequence[Tensor], length: int) -> None:
        """One pass of all groups through this rank's stage."""
        for index, caches in enumerate(self._caches):
            if self._is_first:
                x = tokens[index] if tokens else self._received_tokens()
            else:
                x = self._received_hidden(length)
            x = self._lm.hidden_states(x, caches)
            if not self._is_last:
                self._send(x, self._mesh.coordinate.pp + 1)
                continue
            self._next.append(self._choose(self._lm.logits(self._last_token(x))))
            if not self._is_first:
                self._send(self._next[-1], 0)

    def _last_token(self, x: Tensor) -> Tensor:
        """Hidden state of each sequence's last token, (b, 1, d), on all cp ranks."""
        last = x[:, -1:].contiguous()
        if self._context is None or x.shape[1] == 1:  # a token after the prompt lies on all cp ranks
            return last
        holder, _ = self._context.order[-1]
        dist.broadcast(last, group=self._context.group, group_src=holder)
        return last

    def _choose(self, logits: Tensor) -> Tensor:
        """The most likely token, the first of several: logits (b, 1, V/t) -> (b, 1) int64, on all tp ranks."""
        logits = logits.squeeze(1)
        if self._keeps_logits:
            self._logits.append(self._whole(logits))
        best, index = logits.max(-1, keepdim=True)
        if self._run.strategy.tp == 1:
            return index
        first = part(self._run.model.vocab, self._run.strategy.tp, self._mesh.coordinate.tp).start
        # float64 holds every logit and every token number exactly
        mine = torch.cat((best.double(), (index + first).double()), dim=-1)
        everywhere = gathered_without_gradient(mine, self._mesh.group("tp"))
        winner = everywhere[..., 0].argmax(0)
        return everywhere[..., 1].gather(0, winner.unsqueeze(0)).long().transpose(0, 1)

    def _whole(self, logits: Tensor) -> Tensor:
        tp = self._run.strategy.tp
        if tp == 1:
            return logits
        widest = part(self._run.model.vocab, tp, 0)
        padded = torch.nn.functional.pad(logits, (0, widest.stop - logits.shape[-1]))
        with meter().paused():
            everywhere = gathered_without_gradient(padded, self._mesh.group("tp"))
        spans = (part(self._run.model.vocab, tp, rank) for rank in range(tp))
        return torch.cat([everywhere[rank, :, : s.stop - s.start] for rank, s in enumerate(spans)], dim=-1)

    def _send(self, x: Tensor, stage: int) -> None:
        x = x.contiguous()
        self._in_flight.append((dist.isend(x, group=self._mesh.group("pp"), group_dst=stage), x))

    def _received_hidden(self, length: int) -> Tensor:
        model, workload = self._run.model, self._run.workload
        x = torch.empty(
            workload.micro_batch, length, model.hidden, dtype=DTYPES[workload.precision], device=self._mesh.device
        )
        dist.recv(x, group=self._mesh.group("pp"), group_src=self._mesh.coordinate.pp - 1)
        return x

    def _received_tokens(self) -> Tensor:
        tokens = torch.empty(self._run.workload.micro_batch, 1, dtype=torch.int64, device=self._mesh.device)
        dist.recv(tokens, group=self._mesh.group("pp"), group_src=self._run.strategy.pp - 1)
        return tokens
