"""What autograd keeps for the backward pass, tensor by tensor, and its peak over a step, in closed form. No torch here.

These are the tensors of `hybridpar.models` as torch's CPU operators save them: RMSNorm in parts (a fused one keeps its
input and one number a token), SwiGLU and gated norms with their intermediate results, softmax(qk^T)v without scores.
Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count the same way for GPT's layer.

Symbols: b sequences of a micro-batch, S tokens of a rank's sequence, T = b*S, T' = T/t with sequence parallelism, else
T; t tp, n cp ranks; d hidden, e bytes of a number, u bytes of a statistic (at least 4); of a rank: H heads, K key/value
heads, f ffn_hidden, V vocab, J Mamba heads of width P, G groups; h head_dim, N state, C chunk, Q chunks of each of B
sequences or pieces of one, R choices of experts (T * top_k) that leave and R' that arrive, X experts.

The peak is found by walking through the order of passes (`hybridpar.theory.schedule`): a forward pass adds what it
keeps; a backward pass makes anew what was given up, piece by piece from the end, and lets go of both. Where it comes in
two parts, all but the loss, and what was made anew, is held until the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybridpar.mesh import RankGrid
from hybridpar.parallel.sharding import layers_of_stage, part, stages_of
from hybridpar.segments import segments_per_rank
from hybridpar.specs import RunSpec
from hybridpar.theory.coverage import check_training
from hybridpar.theory.parameters import BYTES
from hybridpar.theory.routing import arriving_choices
from hybridpar.theory.schedule import Action, Kind, actions_of_rank

LOSS = "loss"
AFTER_EXPERTS = ("router", "answers", "balance")
_INDEX = 8  # bytes of a token's or a choice's number


@dataclass(frozen=True)
class Piece:
    """A stretch of a forward pass: bytes `kept` by tensor, and those made `again` before its backward pass."""

    name: str
    kept: Mapping[str, int] = field(default_factory=dict)
    again: Mapping[str, int] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        """`layer 3` of `layer 3 router`."""
        return " ".join(self.name.split()[:2])

    @property
    def kept_bytes(self) -> int:
        """Sum over tensors."""
        return sum(self.kept.values())

    @property
    def again_bytes(self) -> int:
        """Sum over tensors."""
        return sum(self.again.values())


def peak_activations(run: RunSpec, rank: int) -> int:
    """The most bytes that `rank` keeps for the backward pass at one time of a step.

    Raises:
        NotCoveredError: see `hybridpar.theory.coverage`.
    """
    check_training(run)
    place = RankGrid.of(run.strategy).coordinate(rank)
    pieces = {stage: pieces_of_stage(run, rank, stage) for stage in stages_of(run.strategy, place.pp)}
    held = _Held({}, {stage: _whole_batches(run, stage) for stage in pieces})
    peak = 0
    for action in actions_of_rank(run, place.pp):
        key, of_stage = (action.stage, action.micro_batch), pieces[action.stage]
        match _what_runs(action):
            case "F":
                held.passes[key] = sum(piece.kept_bytes for piece in of_stage)
                peak = max(peak, held.bytes())
            case "B":
                del held.passes[key]
                peak = max(peak, *held.during_backward(action.stage, of_stage))
            case "I":
                held.passes[key] = sum(piece.kept_bytes + piece.again_bytes for piece in of_stage)
                peak = max(peak, held.bytes())
                held.passes[key] = _needed_for_weights(of_stage)
            case "W":
                del held.passes[key]
    return peak


def _what_runs(action: Action) -> Kind | None:
    """Nobody asks for the gradients of tokens: the first stage does nothing in I, and all of it in W."""
    if action.stage == 0 and action.kind in ("I", "W"):
        return "B" if action.kind == "W" else None
    return action.kind


def _needed_for_weights(pieces: Sequence[Piece]) -> int:
    """Bytes that the second part of a backward pass still needs, made again or not: all but what lies after the last
    matrix product with a weight. That is the loss; or, where a stage ends with experts, what was done with their
    answers."""
    *others, last = pieces
    if last.name == LOSS:
        return sum(piece.kept_bytes + piece.again_bytes for piece in others)
    after = tuple(f"{last.layer} {name}" for name in AFTER_EXPERTS)
    return sum(
        size
        for piece in pieces
        for name, size in (*piece.kept.items(), *piece.again.items())
        if not f"{piece.name} {name}".startswith(after)  # `layer 3 router choices`, of one piece or of several
    )


Batches = Mapping[str, int]


@dataclass
class _Held:
    """Bytes of each pass that has not come back, and the `batches` of which a stage's passes keep views."""

    passes: dict[tuple[int, int], int]
    batches: Mapping[int, Batches]

    def bytes(self, more: Batches | None = None) -> int:
        """All of it, and what else is kept of whole batches."""
        whole = dict(more or {})
        for stage, _ in self.passes:
            whole |= self.batches[stage]
        return sum(self.passes.values()) + sum(whole.values())

    def during_backward(self, stage: int, pieces: Sequence[Piece]) -> Iterator[int]:
        """At each piece of a pass that comes back: what is kept up to there, and that piece's own again."""
        own, before = dict(self.batches[stage]), 0
        for piece in pieces:
            before += piece.kept_bytes
            is_loss = piece.name == LOSS
            yield self.bytes({name: size for name, size in own.items() if is_loss or name != "targets"}) + (
                before + piece.again_bytes
            )


def _whole_batches(run: RunSpec, stage: int) -> Batches:
    """Numbers of tokens that are views of the rank's whole batch, and keep all of it as long as one is kept."""
    if run.strategy.tp > 1:
        return {}
    size = run.micro_batches * run.workload.micro_batch * run.workload.seq_len // run.strategy.cp * _INDEX
    ends = (("tokens", stage == 0), ("targets", stage == run.strategy.stages - 1))
    return {name: size for name, there in ends if there}


def pieces_of_stage(run: RunSpec, rank: int, stage: int) -> list[Piece]:
    """What one micro-batch leaves behind on a stage, in the order of the forward pass."""
    forms = _Forms(run, rank)
    pieces = [Piece("embedding", forms.embedding())] if stage == 0 else []
    for layer in layers_of_stage(run.model, run.strategy, stage):
        pieces += forms.layer(run.model.layer_kinds[layer], f"layer {layer}")
    if stage == run.strategy.stages - 1:
        pieces += [Piece("head", forms.head()), Piece(LOSS, forms.loss())]
    return pieces


Sizes = dict[str, int]


class _Forms:
    def __init__(self, run: RunSpec, rank: int) -> None:
        model, strategy, workload = run.model, run.strategy, run.workload
        self.run, self.model, self.strategy = run, model, strategy
        self.place = RankGrid.of(strategy).coordinate(rank)
        self.e = BYTES[workload.precision]
        self.u = max(4, self.e)
        self.is_short = self.u != self.e  # statistics are copies in another format
        self.b, self.s = workload.micro_batch, workload.seq_len // strategy.cp
        self.t = self.b * self.s
        self.t_sp = self.t // strategy.tp if strategy.sp else self.t
        self.d = model.hidden

    # Ends of the model

    def embedding(self) -> Sizes:
        """Tokens, where they are not a view of the whole batch, and which of them are another rank's."""
        return {"tokens": self.t * _INDEX, "absent": self.t} if self.strategy.tp > 1 else {}

    def head(self) -> Sizes:
        """The last norm and the input of the logits."""
        return self.norm("norm") | {"head input": self.t * self.d * self.e}

    def loss(self) -> Sizes:
        """Probabilities of a rank's slice of the vocabulary."""
        probabilities = {"probabilities": self.t * self._columns(self.model.vocab) * self.u}
        if self.strategy.tp > 1:
            return probabilities | {"targets": self.t * _INDEX, "absent": self.t}
        return probabilities | {"weight of all tokens": self.u}

    def norm(self, name: str) -> Sizes:
        """RMSNorm: input, normalised input, and one number a token."""
        wide = self.t_sp * self.d * self.u
        return {f"{name} input": wide, f"{name} scale": self.t_sp * self.u, f"{name} normalised": wide}

    # Layers

    def layer(self, kind: str, name: str) -> list[Piece]:
        """One layer under the strategy's recomputation."""
        pieces = self._mamba2() if kind == "M" else self._attention(kind)
        match self.strategy.recompute:
            case "full":
                made = {f"{piece.name} {key}": size for piece in pieces for key, size in _all(piece).items()}
                if not self.is_short:
                    del made[f"{pieces[0].name} norm input"]  # it is what was kept
                return [Piece(name, {"input": self.t_sp * self.d * self.e}, made)]
            case "selective":
                return [Piece(f"{name} {piece.name}", piece.kept, piece.again) for piece in pieces]
            case _:
                return [Piece(f"{name} {piece.name}", _all(piece)) for piece in pieces]

    def _attention(self, kind: str) -> list[Piece]:
        """`again`: what selective recomputation gives up."""
        wo_input, core = self._core()
        rotation = 4 * self.s * self.model.head_dim * self.e
        start = self.norm("norm") | {"input": self.t * self.d * self.e, "cosines and sines": rotation}
        mlp = self._mlp if kind == "A" else self._moe
        return [
            Piece("attention", start),
            core,
            Piece("projection", wo_input),
            Piece("mlp", self.norm("norm") | {"input": self.t * self.d * self.e}),
            *mlp(),
        ]

    def _core(self) -> tuple[Sizes, Piece]:
        """What the output projection keeps, and softmax(qk^T)v itself."""
        model, n = self.model, self.strategy.cp
        heads, kv_heads = model.heads // self.strategy.tp, max(1, model.kv_heads // self.strategy.tp)
        row = self.t * model.head_dim * self.e  # of one head
        statistics = self.t * heads * self.u
        apart = {"input": heads * row}
        if n == 1:
            qkv = {"q": heads * row, "k": kv_heads * row, "v": kv_heads * row}
            if self.strategy.recompute == "selective":
                return apart, Piece("core", qkv, {"output": heads * row, "log-sum-exp": statistics})
            return {}, Piece("core", qkv | {"output": heads * row, "log-sum-exp": statistics})
        if self.strategy.cp_kind == "ring":
            qkv = {"q": heads * row, "k": kv_heads * row, "v": kv_heads * row}
            return {}, Piece("core", qkv | {"output": heads * row, "log-sum-exp": statistics})
        repeated = kv_heads * n // _gcd(n, kv_heads)
        arrived = {"q, k, v of all tokens": (heads + 2 * repeated) * row}
        return apart, Piece("core", arrived, {"output": heads * row, "log-sum-exp": statistics})

    def _mlp(self) -> list[Piece]:
        return self._swiglu("swiglu", self.t, self._columns(self.model.ffn_hidden))

    def _swiglu(self, name: str, tokens: int, width: int) -> list[Piece]:
        each = tokens * width * self.e
        gate = Piece(name, {"gate": each, "up": each}, {"silu": each})
        return [gate, Piece(f"{name} end", {"product": each})]

    def _moe(self) -> list[Piece]:
        """Router, experts under an even load with nothing dropped, shared experts, balance."""
        model = self.model
        leaving = self.t * model.top_k
        arriving = arriving_choices(self.run, self.place, leaving)
        router = {"probabilities": self.t * model.experts * self.u, "choices": leaving * _INDEX}
        if model.top_k > 1:
            router |= {"sums of weights": self.t * self.u, "raw weights": leaving * self.u}
        if model.capacity_factor:
            router["kept"] = leaving
        inner = arriving * self._columns(model.ffn_hidden) * self.e
        experts = {
            "order": leaving * _INDEX,
            "tokens": arriving * self.d * self.e,
            "gate, up, silu, product": 4 * inner,
        }
        if self.strategy.ep > 1:
            experts["order of visitors"] = arriving * _INDEX
        answers = {"order": leaving * _INDEX, "answers": leaving * self.d * self.e, "weights": leaving * self.e}
        if self.strategy.ep > 1:
            answers["order of visitors"] = arriving * _INDEX
        pieces = [Piece("router", router), Piece("experts", experts), Piece("answers", answers)]
        if model.shared_experts:
            pieces += self._swiglu("shared", self.t, self._columns(model.ffn_hidden * model.shared_experts))
        return [*pieces, Piece("balance", {"shares": model.experts * self.u} if model.aux_loss else {})]

    def _mamba2(self) -> list[Piece]:
        forms = _Mamba2(self)
        return [
            Piece("start", self.norm("norm") | {"input": self.t * self.d * self.e} | forms.convolutions()),
            forms.scan(),
            Piece("gate", forms.gate()),
        ]

    def _columns(self, width: int) -> int:
        span = part(width, self.strategy.tp, self.place.tp)
        return span.stop - span.start


class _Mamba2:
    def __init__(self, forms: _Forms) -> None:
        model, strategy = forms.model, forms.strategy
        self.forms, self.e, self.u = forms, forms.e, forms.u
        self.inner, self.heads = model.ssm_inner // strategy.tp, model.ssm_heads // strategy.tp
        self.shares_norm = model.ssm_groups % strategy.tp != 0
        self.groups = model.ssm_groups if self.shares_norm else model.ssm_groups // strategy.tp
        self.state = model.ssm_state
        self.pieces = segments_per_rank(model, strategy)
        self.sequences, self.length = forms.b * self.pieces, forms.s // self.pieces
        self.chunk = min(model.ssm_chunk, self.length) if strategy.cp > 1 else model.ssm_chunk
        self.chunks = -(-self.length // self.chunk)
        self.slots = self.sequences * self.chunks * self.chunk  # tokens, with those that fill the last chunk up
        self.is_padded = self.slots > forms.t
        self.shared = 2 * self.groups * self.state  # columns of B and C

    def convolutions(self) -> Sizes:
        """Inputs with the tokens before them, and results before SiLU; dt before softplus; exp(A_log)."""
        channels, before = self.inner + self.shared, self.forms.model.ssm_conv - 1
        saved = {
            "inputs of convolutions": self.sequences * (self.length + before) * channels * self.e,
            "convolutions": self.forms.t * channels * self.e,
            "raw dt": self.forms.t * self.heads * self.u,
            "exp(A_log)": self.heads * self.u,
        }
        return saved | ({"order of tails": self.pieces * _INDEX} if self.forms.strategy.cp > 1 else {})

    def scan(self) -> Piece:
        """The SSD; selective recomputation keeps its arguments."""
        t, u = self.forms.t, self.u
        x, dt, b_and_c = t * self.inner, t * self.heads, t * self.shared
        own, again = {"-exp(A_log)": self.heads * u}, self._within() | self._across()
        moved = self.chunks > 1 and (self.sequences > 1 or self.groups > 1)  # B and C, from channels to groups
        twice = 2 if self.chunks > 1 or self.forms.strategy.cp > 1 else 1
        if self.forms.strategy.recompute == "selective":
            own |= {"x": x * u, "dt": dt * u, "B and C": b_and_c * u}
            if self.is_padded:
                again |= {"padded x": self.slots * self.inner * u, "padded dt": self.slots * self.heads * u}
            if moved:
                again["B and C by groups"] = twice * self.slots * self.shared * u
            elif self.is_padded:
                again["padded B and C"] = self.slots * self.shared * u
        else:
            own |= {"dt": self.slots * self.heads * u}
            own["B and C"] = (twice if moved else 1) * self.slots * self.shared * u
            if self.is_padded or self.forms.is_short:
                own["x"] = self.slots * self.inner * u
        return Piece("ssd", own, again)

    def _within(self) -> Sizes:
        square = self.sequences * self.chunks * self.chunk**2 * self.u
        return {
            "future": self.chunk**2,
            "decay within chunks": self.heads * square,
            "C B^T": self.groups * square,
            "scores": self.heads * square,
            "x dt by heads": self.slots * self.inner * self.u,
        }

    def _across(self) -> Sizes:
        u, wide, narrow = self.u, self.slots * self.inner, self.slots * self.heads
        states = self.sequences * self.chunks * self.state * self.inner
        passes_on = self.chunks > 1 or self.forms.strategy.cp > 1
        saved = {"states before chunks": states * u, "decay from the start": narrow * u, "from states": wide * u}
        if passes_on:
            saved |= {"decay to the end": narrow * u, "decayed x dt": wide * u}
            if self.chunks > 1 and (self.sequences > 1 or self.heads > 1):
                saved["x dt"] = wide * u  # else it is what lies by heads
        if self.chunks > 1:
            saved |= self._recurrence()
        if self.forms.strategy.cp > 1:
            saved |= self._carried(states)
        return saved

    def _recurrence(self) -> Sizes:
        borders = self.chunks - 1
        each = self.state * self.inner * self.sequences * self.u
        one_head = self.heads == self.groups
        copied = not one_head or (self.sequences > 1 and self.groups > 1)
        return {
            "future of chunks": borders**2,
            "decay over chunks": self.sequences * self.heads * borders**2 * self.u,
            "added by chunks": (borders if copied else self.chunks) * each,
        }

    def _carried(self, states: int) -> Sizes:
        """The state before a rank's pieces, out of all pieces of the sequence."""
        u, n = self.u, self.forms.strategy.cp
        borders = self.sequences * self.chunks
        of_sequence, everywhere = n * self.pieces, n * self.sequences * (self.state + 1) * self.inner
        return {
            "decay of chunks": borders * self.heads * u,
            "decay of chunks by channel": borders * self.inner * u,
            "states from zero": states * u,
            "decay of pieces": self.sequences * self.inner * u,
            "states of pieces": (of_sequence - 1) * self.forms.b * self.state * self.inner * u,
            "pieces of all ranks": everywhere * u if of_sequence > 2 else 0,
            "order of pieces": self.pieces * _INDEX,
            "decay until chunks": (2 * borders - self.sequences) * self.inner * u,
            "state before": self.sequences * self.state * self.inner * u,
        }

    def gate(self) -> Sizes:
        """Gated norm and output projection."""
        forms, wide, narrow = self.forms, self.forms.t * self.inner * self.u, self.forms.t * self.inner * self.e
        is_kept = forms.strategy.recompute == "selective" and not forms.is_short  # it is the scan's argument
        saved = {
            "x of D x": 0 if is_kept else narrow,
            "y": wide,
            "z": wide,
            "silu(z)": wide,
            "gated": wide,
            "output input": narrow,
        }
        if not self.shares_norm:
            return saved | {"scale": forms.t * self.groups * self.u, "normalised": narrow}
        whole = forms.t_sp * (forms.d + self.groups) * self.u
        saved |= {"projected and squares": whole, "scale": forms.t_sp * self.groups * self.u}
        return saved | ({"gated, short": narrow} if forms.is_short else {})


def _all(piece: Piece) -> Sizes:
    return {**piece.kept, **piece.again}


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def tensors(pieces: Iterable[Piece]) -> Iterator[tuple[str, int]]:
    """Every tensor that is kept, by piece and name."""
    for piece in pieces:
        yield from ((f"{piece.name}: {name}", size) for name, size in piece.kept.items())
