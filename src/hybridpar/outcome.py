"""How a run ended: ok, oom, infeasible, timeout or crash, with a reason in words and evidence."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

OutcomeKind = Literal["ok", "oom", "infeasible", "timeout", "crash"]
OUTCOMES: tuple[OutcomeKind, ...] = get_args(OutcomeKind)

# Worth another try: the machine may have been at fault. The others end the same way every time.
RETRIED: frozenset[OutcomeKind] = frozenset({"timeout", "crash"})


class Outcome(BaseModel):
    """The end of one run. `reason` is one sentence; `evidence` what supports it (signal, last lines, stacks)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: OutcomeKind
    reason: str = ""
    evidence: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _only_ok_needs_no_reason(self) -> Outcome:
        if self.kind != "ok" and not self.reason.strip():
            raise ValueError(f"outcome {self.kind} needs a reason")
        return self
