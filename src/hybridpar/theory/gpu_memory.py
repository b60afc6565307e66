"""What a rank of a GPU framework holds at its peak in training, in closed form. No torch here.

`hybridpar.theory.activations` says what this project's own operators keep, to the byte. Here are other people's
programs: bf16 mixed precision, kernels as in Megatron-LM, nanotron or torchtitan (a `Recipe`), blocks as in GPT or
Llama (a `Variant`). Allocator fragmentation, CUDA's context, NCCL's and cuBLAS's buffers are left out.

Symbols (Korthikanti et al. 2022, arXiv 2205.05198, table 1): s tokens of a sequence on a rank (its 1/c under context
parallelism), b sequences of a micro-batch, h hidden, a heads, L layers, v vocabulary, t tensor-parallel, p pipeline, m
micro-batches of a replica; further q = a*head_dim, k = kv_heads*head_dim, f ffn_hidden, d dp*cp ranks, V stages a rank,
r place in the pipeline. Bytes throughout.

Parameters of a rank (counted by `hybridpar.theory.parameters`), bytes each: Megatron 2 bf16 weight + 4 fp32 gradient +
12 fp32 weight and Adam's two moments = 18, with its distributed optimizer 6 + 12/d (Rajbhandari et al. 2020, arXiv
1910.02054, section 3.1; Megatron-LM, megatron/training/theoretical_memory_usage.py).

Activations of a layer (Korthikanti et al. 2022, section 4.1, equation 1, term by term; table 2 for parallelism):

    whole on each rank without, 1/t with sequence parallelism: inputs of both norms 4sbh, of both column-parallel
        matrices 4sbh, masks of both dropouts 2sbh
    1/t:  q, k, v 2sb(q+2k), input of the output projection 2sbq; GELU 4sbf, SwiGLU 6sbf (fused) or 8sbf (its
        SiLU kept too)
    attention, 1/t: 5as^2b where scores are stored (2as^2b without dropout), 4asb where fused (FlashAttention, Dao et
        al. 2022, arXiv 2205.14135, section 3.1), nothing under selective recomputation
    full recomputation: the layer's input 2sbh (1/t with sequence parallelism), and one layer while it runs again

    For GPT (q = k = h, f = 4h) these are sbh(10 + 24/t + 5as/(ht)), sbh/t (34 + 5as/h), sbh(10 + 24/t), 34sbh/t, 2sbh.

Experts, K a token of X, on an even load: their inputs and outputs 4Ksbh, 6Ksbf/t inside, router 8sbX; shared ones as an
MLP of their width. Ends: embedding 8sb of token numbers and its dropout's mask sbh for each micro-batch in flight; last
stage 4sbh (final norm, head) and logits sbv/t of `logit` bytes each (section 4.3).

In flight on place r (section 4.2.3; Narayanan et al. 2021, arXiv 2104.04473, section 2.2): 1F1B min(m, p-r), GPipe m,
interleaved min(m*V, (V-1)p + 2(p-1-r) + 1) parts of 1/V of a rank's layers, which on r=0 is 1 + (p-1)/(pV) times p.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hybridpar.mesh import Coordinate
from hybridpar.parallel.sharding import layers_of_stage, stages_of
from hybridpar.specs import ModelSpec, RunSpec, Strategy
from hybridpar.theory.parameters import held_parameters
from hybridpar.theory.state import units_of

Mlp = Literal["swiglu", "gelu"]
GPU_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Variant:
    """How a decoder departs from this project's `ModelSpec`, which describes Llama."""

    mlp: Mlp = "swiglu"
    norm_vectors: int = 1  # RMSNorm has a scale, LayerNorm a shift too
    biases: bool = False
    dropout: bool = False
    positions: int = 0  # rows of a table of learned positions
    fused_attention: bool = True


LLAMA = Variant()
# GPT-3 as in Megatron-LM: two matrices in the MLP, biases, LayerNorm, dropout, learned positions (not counted here)
GPT = Variant(mlp="gelu", norm_vectors=2, biases=True, dropout=True, fused_attention=False)


@dataclass(frozen=True)
class Recipe:
    """What a framework keeps: bytes of a parameter by kind, and what its kernels leave behind.

    `passing` are gradients in the model's precision, alive from a backward pass until they are added up; `buckets`
    those that DistributedDataParallel copies where nothing is sharded; `gathered` a weight that ZeRO-3 has gathered;
    `mlp_saved` and `mlp_backward` bytes for each of a SwiGLU's inner numbers, kept and at most alive in its backward
    pass; `logit` for each logit at the loss; `gather_buffers` whole hidden states kept for sequence parallelism.
    """

    name: str
    weights: int = 2
    gradients: int = 4
    optimizer: int = 12
    passing: int = 0
    buckets: int = 0
    gathered: int = 2
    mlp_saved: int = 6
    mlp_backward: int = 6
    logit: int = 6
    gather_buffers: int = 1


# Weight gradients are added in the product's own kernel; SwiGLU is one kernel; the loss keeps fp32 softmax beside bf16
# logits or their gradient; one buffer for gathered hidden states (megatron/core: tensor_parallel/layers.py,
# tensor_parallel/cross_entropy.py, fusions/fused_bias_swiglu.py).
MEGATRON = Recipe("megatron")
# Gradients stay in bf16 until the pass is over and are then added in fp32 (optim/gradient_accumulator.py); DDP, without
# gradients as views of its buckets, only where nothing is sharded (trainer.py); SwiGLU in separate operators (models/
# llama.py); logits cast to fp32 and their softmax (parallel/tensor_parallel/functional.py); two buffers (same).
NANOTRON = Recipe("nanotron", passing=2, buckets=2, mlp_saved=8, mlp_backward=8, logit=8, gather_buffers=2)
# FSDP2 shards fp32 weights, reduces gradients to fp32 and has Adam's moments in fp32; weights are gathered in bf16; the
# loss casts logits to fp32 and keeps their logarithm of the softmax (torchtitan: parallelize_llama.py, train.py, 2024).
FSDP2 = Recipe("fsdp2", weights=4, gradients=4, optimizer=8, mlp_saved=8, mlp_backward=8, logit=10, gather_buffers=0)
# DeepSpeed's fp16: gradients stay fp16, the fp32 copies are the optimizer's (Rajbhandari et al. 2020, section 3.1)
DEEPSPEED_FP16 = Recipe("deepspeed-fp16", gradients=2, gather_buffers=0)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one rank at its peak. `transient` is what is alive only then: logits, gradients inside a layer or on
    their way, a layer that runs again."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int
    transient: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.gathered + self.buffers + self.activations + self.transient


@dataclass(frozen=True)
class Elements:
    """Parameters of a rank: of layers and ends, of experts; of its largest layer and of its ends (ZeRO-3)."""

    dense: int
    experts: int
    largest_block: int
    ends: int


def peak_of_run(run: RunSpec, variant: Variant = LLAMA, recipe: Recipe = MEGATRON) -> GpuMemory:
    """The rank that holds most.

    Raises:
        ValueError: see `memory_of_place`.
    """
    places = (memory_of_place(run, place, variant, recipe) for place in range(run.strategy.pp))
    return max(places, key=lambda memory: memory.total)


def memory_of_place(run: RunSpec, place: int, variant: Variant = LLAMA, recipe: Recipe = MEGATRON) -> GpuMemory:
    """The first tp, cp and dp rank on one place of the pipeline.

    Raises:
        ValueError: no such place; Mamba-2 layers, a schedule, offloading or parameters in something else than bf16, for
            which there is no form here.
    """
    _check(run, place)
    return _Place(run, place, variant, recipe).memory()


def bytes_per_parameter(recipe: Recipe, zero: int, ranks: int) -> float:
    """Weights, gradients and optimizer, those sharded over `ranks` (ZeRO 0 to 3) divided by them."""
    kept = recipe.weights / (ranks if zero >= 3 else 1), recipe.gradients / (ranks if zero >= 2 else 1)
    return sum(kept) + recipe.optimizer / (ranks if zero >= 1 else 1)


@lru_cache(maxsize=4096)
def elements_of_place(model: ModelSpec, strategy: Strategy, place: int, variant: Variant = LLAMA) -> Elements:
    """Parameters that the first rank on a place of the pipeline computes with."""
    held = held_parameters(model, strategy, Coordinate(pp=place, dp=0, cp=0, tp=0))
    kept = [one for one in held if variant.mlp == "swiglu" or "w_gate" not in one.name]
    extra = {unit: _extra(unit, model, strategy, variant) for unit in units_of(kept)}
    sizes = {unit: sum(one.elements for one in members) + extra[unit] for unit, members in units_of(kept).items()}
    experts = sum(size for unit, size in sizes.items() if unit.endswith(" experts"))
    blocks: Counter[str] = Counter()
    for unit, size in sizes.items():
        blocks[unit.removesuffix(" experts")] += size
    ends = sum(size for unit, size in blocks.items() if unit.startswith("root"))
    largest = max((size for unit, size in blocks.items() if not unit.startswith("root")), default=0)
    return Elements(sum(sizes.values()) - experts, experts, largest, ends)


def _extra(unit: str, model: ModelSpec, strategy: Strategy, variant: Variant) -> int:
    """What a variant has beyond a Llama's matrices and scales, in one unit: biases, shifts, positions."""
    shift = (variant.norm_vectors - 1) * model.hidden
    if unit.startswith("root"):
        stage = int(unit.split()[1])
        first, last = stage == 0, stage == strategy.stages - 1
        return first * variant.positions * model.hidden + last * shift
    if unit.endswith(" experts"):
        return 0
    split = model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim + model.ffn_hidden
    return 2 * shift + variant.biases * (-(-split // strategy.tp) + 2 * model.hidden)


def layer_activations(
    model: ModelSpec,
    kind: str,
    tokens: int,
    strategy: Strategy,
    variant: Variant = LLAMA,
    recipe: Recipe = MEGATRON,
    *,
    context: int,
    recompute: str | None = None,
) -> float:
    """Bytes that one layer of one micro-batch keeps for the backward pass.

    Args:
        kind: A attention and MLP, E attention and experts.
        tokens: s*b on the rank.
        context: s, tokens of a sequence on the rank (for stored scores).
        recompute: none, selective or full, if it is not the strategy's.
    """
    h, t = model.hidden, strategy.tp
    shared = t if strategy.sp else 1
    recompute = strategy.recompute if recompute is None else recompute
    if recompute == "full":
        return 2 * tokens * h / shared
    queries, keys = model.heads * model.head_dim, max(model.kv_heads, t) * model.head_dim
    whole = tokens * h * (8 + 2 * variant.dropout) / shared
    attention = tokens * (4 * queries + 4 * keys) / t
    if recompute == "none":
        attention += _scores(model, tokens, context, variant) / t
    return whole + attention + _feed_forward(model, kind, tokens, strategy, variant, recipe)


def _scores(model: ModelSpec, tokens: int, context: int, variant: Variant) -> int:
    if variant.fused_attention:
        return 4 * model.heads * tokens
    return (5 if variant.dropout else 2) * model.heads * tokens * context


def _feed_forward(
    model: ModelSpec, kind: str, tokens: int, strategy: Strategy, variant: Variant, recipe: Recipe
) -> float:
    inner = 4 if variant.mlp == "gelu" else recipe.mlp_saved
    if kind == "A":
        return tokens * inner * model.ffn_hidden / strategy.tp
    routed = tokens * model.top_k * (4 * model.hidden + inner * model.ffn_hidden / strategy.tp)
    shared = tokens * inner * model.shared_experts * model.ffn_hidden / strategy.tp
    return routed + shared + 8 * tokens * model.experts


def in_flight(schedule: str, p: int, place: int, m: int, virtual: int = 1) -> float:
    """Micro-batches, in units of a rank's whole layers, that a place of the pipeline keeps activations of at most.

    Raises:
        ValueError: a schedule that has no form here.
    """
    if p == 1:
        return 1
    match schedule:
        case "gpipe":
            return m
        case "1f1b" | "zero-bubble":  # ZB-H1 holds as much as 1F1B (Qi et al. 2023, arXiv 2401.10241, section 2.1)
            return min(m, p - place)
        case "interleaved":
            return min(m * virtual, (virtual - 1) * p + 2 * (p - 1 - place) + 1) / virtual
        case _:
            raise ValueError(f"schedule={schedule!r} has no form here; legal: {', '.join(GPU_SCHEDULES)}")


def _check(run: RunSpec, place: int) -> None:
    strategy = run.strategy
    if not 0 <= place < strategy.pp:
        raise ValueError(f"place={place} is not in the pipeline; legal: 0 to {strategy.pp - 1}")
    if "M" in run.model.pattern:
        raise ValueError("Mamba-2 layers have no form here")
    if run.workload.phase != "train" or run.workload.precision != "bf16":
        what = f"phase={run.workload.phase}, precision={run.workload.precision}"
        raise ValueError(f"{what}: the forms are those of training in bf16")
    if strategy.offload != "none":
        raise ValueError(f"offload={strategy.offload} has no form here")
    if strategy.zero_group:
        raise ValueError(f"zero_group={strategy.zero_group} has no form here")


class _Place:
    def __init__(self, run: RunSpec, place: int, variant: Variant, recipe: Recipe) -> None:
        self.run, self.place, self.variant, self.recipe = run, place, variant, recipe
        self.model, self.strategy = run.model, run.strategy
        self.context = -(-run.workload.seq_len // run.strategy.cp)
        self.tokens = run.workload.micro_batch * self.context
        self.stages = stages_of(run.strategy, place)
        self.elements = elements_of_place(run.model, _layout(run.strategy), place, variant)
        self.shared = self.strategy.tp if self.strategy.sp else 1

    def memory(self) -> GpuMemory:
        zero, recipe = self.strategy.zero, self.recipe
        flying = in_flight(
            self.strategy.schedule, self.strategy.pp, self.place, self.run.micro_batches, self.strategy.virtual
        )
        layers, once = self._layers(), self._ends(flying)
        # A backward pass begins with everything kept; at its end what it kept is gone and its gradients are there.
        begin = flying * layers + once + self._working()
        end = max(0.0, flying - 1) * layers + recipe.passing * self._count(0)
        kept = flying * layers + once if begin >= end else max(0.0, flying - 1) * layers
        return GpuMemory(
            weights=self._bytes(recipe.weights, zero >= 3),
            gradients=self._bytes(recipe.gradients, zero >= 2),
            optimizer=self._bytes(recipe.optimizer, zero >= 1),
            gathered=self._gathered(),
            buffers=self._buffers(),
            activations=round(kept),
            transient=round(max(begin, end) - kept),
        )

    def _count(self, sharded: int) -> float:
        """Parameters, those of experts shared by fewer ranks."""
        ranks = self.strategy.dp * self.strategy.cp
        if not sharded:
            return self.elements.dense + self.elements.experts
        return self.elements.dense / ranks + self.elements.experts / (ranks / self.strategy.ep)

    def _bytes(self, each: int, sharded: bool) -> int:
        return round(each * self._count(sharded))

    def _gathered(self) -> int:
        """ZeRO-3: the ends and two layers, one in use and one on its way."""
        if self.strategy.zero < 3:
            return 0
        return self.recipe.gathered * (self.elements.ends + 2 * self.elements.largest_block)

    def _buffers(self) -> int:
        gathers = self.recipe.gather_buffers * 2 * self.tokens * self.model.hidden if self.shared > 1 else 0
        unsharded = self.strategy.zero == 0 and self.strategy.dp > 1
        return gathers + unsharded * round(self.recipe.buckets * self._count(0))

    def _kinds(self) -> str:
        kinds = self.model.layer_kinds
        return "".join(
            kinds[layer] for stage in self.stages for layer in layers_of_stage(self.model, self.strategy, stage)
        )

    def _layer(self, kind: str, recompute: str | None = None) -> float:
        return layer_activations(
            self.model,
            kind,
            self.tokens,
            self.strategy,
            self.variant,
            self.recipe,
            context=self.context,
            recompute=recompute,
        )

    def _layers(self) -> float:
        counts = Counter(self._kinds())
        return sum(count * self._layer(kind) for kind, count in counts.items())

    def _ends(self, flying: float) -> float:
        """Of the embedding for each micro-batch in flight; of the head's input for one."""
        first = 0 in self.stages
        last = self.strategy.stages - 1 in self.stages
        embedding = self.tokens * (8 + self.variant.dropout * self.model.hidden / self.shared)
        return first * flying * embedding + last * 4 * self.tokens * self.model.hidden / self.shared

    def _working(self) -> float:
        """Logits at the loss, or what the backward pass of a layer has alive besides what was kept: the larger."""
        last = self.strategy.stages - 1 in self.stages
        logits = last * self.recipe.logit * self.tokens * self.model.vocab / self.strategy.tp
        kinds = set(self._kinds())
        inside = max((self._inside(kind) for kind in kinds), default=0.0)
        return max(logits, inside)

    def _inside(self, kind: str) -> float:
        each = 4 if self.variant.mlp == "gelu" else self.recipe.mlp_backward
        width = self.model.ffn_hidden * (1 if kind == "A" else self.model.top_k)
        gradients = each * self.tokens * width / self.strategy.tp
        again = self._layer(kind, "none") if self.strategy.recompute == "full" else 0.0
        scores = 0.0
        if self.strategy.recompute == "selective":
            scores = _scores(self.model, self.tokens, self.context, self.variant) / self.strategy.tp
        return max(gradients, scores) + again


def _layout(strategy: Strategy) -> Strategy:
    """Only what decides which parameters are where, so that runs that differ in the rest share a count."""
    kept = ("tp", "pp", "ep", "schedule", "virtual", "stage_layers")
    return Strategy(**{name: getattr(strategy, name) for name in kept}, dp=strategy.ep)
