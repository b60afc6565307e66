"""What a run is: model x workload x strategy x cluster, frozen, validated and hashed.

Nothing here imports torch. A spec that is *malformed* (unknown key, wrong type, a value outside its
range) raises `SpecError` with one sentence per fault. A spec that is well-formed but *illegal* on its
mesh (heads that do not divide by tp, say) is no error: `hybridpar.legality` lists the violated
constraints, and the run becomes a row with outcome `infeasible`.

Symbols (used throughout the package, after the reference paper arXiv 2602.09109):
    L layers, d hidden, H heads, K kv_heads, h head_dim, f ffn_hidden, V vocab,
    N ssm_state, P ssm_head_dim, G ssm_groups, E ssm_expand, C ssm_chunk,
    S seq_len, B global_batch, b micro_batch, m micro-batches per replica.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridpar.presets import CLUSTERS, MODELS

# Bumped by hand when the meaning of a finished run changes (model maths, training loop, metering).
# It is hashed into every run_id, so plots, prose and docs never rerun a job, and such a change does.
TRAINING_CODE_VERSION = 3

Family = Literal["transformer", "mamba2", "hybrid", "moe"]
Phase = Literal["train", "prefill", "decode"]
Precision = Literal["fp64", "fp32", "bf16", "fp8"]
Optimizer = Literal["adamw", "sgd"]
EngineName = Literal["torch", "deepspeed"]
ZeroStage = Literal[0, 1, 2, 3]
ContextParallelKind = Literal["ring", "ulysses"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
Launcher = Literal["forked", "torchrun"]
DeviceKind = Literal["auto", "cpu", "cuda"]

# Kinds of layers, by the letter that model.pattern uses.
KINDS = ("A", "E", "M")

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class SpecError(ValueError):
    """A malformed spec; `faults` holds one sentence per violated constraint."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


def _round_up(value: float, multiple: int) -> int:
    return int(-(-value // multiple) * multiple)


class ModelSpec(_Frozen):
    """An architecture. Fields that a family does not use are zero (or empty)."""

    name: str = Field("custom", description="label in tables and figures")
    family: Family = Field(description="kind of network")
    layers: Positive = Field(description="L, number of blocks")
    hidden: Positive = Field(description="d, width of the residual stream")
    vocab: Positive = Field(256, description="V, number of tokens (256: bytes)")
    heads: NonNegative = Field(0, description="H, attention query heads")
    kv_heads: NonNegative = Field(0, description="K, attention key/value heads (GQA)")
    head_dim: NonNegative = Field(0, description="h, width of one attention head")
    ffn_hidden: NonNegative = Field(0, description="f, inner width of the SwiGLU MLP")
    rope_theta: Annotated[float, Field(gt=0)] = Field(10000.0, description="base of RoPE")
    ssm_state: NonNegative = Field(0, description="N, Mamba-2 state size")
    ssm_head_dim: NonNegative = Field(0, description="P, width of one Mamba-2 head")
    ssm_groups: NonNegative = Field(0, description="G, groups sharing B and C (and one norm)")
    ssm_expand: NonNegative = Field(0, description="E, inner width over hidden")
    ssm_conv: NonNegative = Field(0, description="width of the causal convolution")
    ssm_chunk: NonNegative = Field(0, description="C, tokens per SSD chunk")
    pattern: str = Field(
        "", description="one letter a layer, repeated: A attention+MLP, E attention+experts, M Mamba-2"
    )
    experts: NonNegative = Field(0, description="routed experts, each ffn_hidden wide inside")
    top_k: NonNegative = Field(0, description="experts a token is routed to")
    shared_experts: NonNegative = Field(0, description="experts every token passes")
    capacity_factor: Annotated[float, Field(ge=0)] = Field(
        0.0, description="places of an expert over its even share of a sequence; 0: as many as asked for (dropless)"
    )
    aux_loss: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the load-balancing loss")
    tied_embeddings: bool = Field(False, description="head shares the embedding's weight")
    norm_eps: Annotated[float, Field(gt=0)] = Field(1e-5, description="epsilon of RMSNorm")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        filled = dict(given)
        preset = filled.pop("preset", None)
        if preset is not None:
            filled = {**_preset("model.preset", preset, MODELS), "name": preset, **filled}
        hf_config = filled.pop("hf_config", None)
        if hf_config is not None:
            filled = {**_from_hugging_face(hf_config), **filled}
        return _with_model_defaults(filled)

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        faults = [
            f"model.{name}={getattr(self, name)} must be at least 1 for family={self.family}"
            for name in _required_dimensions(self)
            if getattr(self, name) < 1
        ]
        if set(self.pattern) - set(KINDS):
            faults.append(f"model.pattern={self.pattern!r} may hold only the letters {', '.join(KINDS)}")
        elif not _belongs(self.pattern, self.family):
            faults.append(
                f"model.pattern={self.pattern!r} is no model.family={self.family}; legal: {_PATTERNS[self.family]}"
            )
        faults += [
            f"model.{name}={getattr(self, name)} is not used by model.pattern={self.pattern!r}; legal: 0"
            for name in _unused_dimensions(self)
            if getattr(self, name)
        ]
        if self.pattern and self.layers % len(self.pattern):
            faults.append(
                f"model.layers={self.layers} is not a multiple of the length of "
                f"model.pattern={self.pattern!r} ({len(self.pattern)})"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            faults.append(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                f"legal: {_divisors_text(self.heads)}"
            )
        if self.head_dim % 2:
            faults.append(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.ssm_head_dim and self.ssm_inner % self.ssm_head_dim:
            faults.append(
                f"model.ssm_head_dim={self.ssm_head_dim} does not divide ssm_expand*hidden="
                f"{self.ssm_inner}; legal: {_divisors_text(self.ssm_inner)}"
            )
        elif self.ssm_groups and self.ssm_heads % self.ssm_groups:
            faults.append(
                f"model.ssm_groups={self.ssm_groups} does not divide the {self.ssm_heads} Mamba "
                f"heads; legal: {_divisors_text(self.ssm_heads)}"
            )
        if self.top_k > self.experts:
            faults.append(f"model.top_k={self.top_k} exceeds model.experts={self.experts}")
        if faults:
            raise SpecError(faults)
        return self

    @property
    def ssm_inner(self) -> int:
        """E*d, inner width of a Mamba-2 block."""
        return self.ssm_expand * self.hidden

    @property
    def ssm_heads(self) -> int:
        """E*d/P, number of Mamba-2 heads."""
        return self.ssm_inner // self.ssm_head_dim if self.ssm_head_dim else 0

    @property
    def layer_kinds(self) -> str:
        """One letter for each of the L layers: `A` attention + MLP, `E` attention + experts, `M` Mamba-2."""
        return self.pattern * (self.layers // len(self.pattern))


_PATTERNS: Mapping[str, str] = {
    "transformer": "A alone",
    "mamba2": "M alone",
    "hybrid": "M with A, E or both",
    "moe": "E, or E with A",
}
# Dimensions of the kinds of layers, by the letters that use them: first those that must be there.
_DIMENSIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "AE": (("heads", "kv_heads", "head_dim", "ffn_hidden"), ()),
    "M": (("ssm_state", "ssm_head_dim", "ssm_groups", "ssm_expand", "ssm_conv", "ssm_chunk"), ()),
    "E": (("experts", "top_k"), ("shared_experts", "capacity_factor", "aux_loss")),
}


def _belongs(pattern: str, family: str) -> bool:
    kinds = set(pattern)
    match family:
        case "transformer":
            return kinds == {"A"}
        case "mamba2":
            return kinds == {"M"}
        case "moe":
            return "E" in kinds and "M" not in kinds
        case _:
            return "M" in kinds and len(kinds) > 1


def _from_hugging_face(path: Any) -> dict[str, Any]:
    from hybridpar.hf_config import load_hf_config  # which needs SpecError from here

    if not isinstance(path, str) or not path:
        raise SpecError([f"model.hf_config={path!r} is not legal; legal: a config.json, or a folder that holds one"])
    place = Path(path)
    return {"name": place.parent.name if place.name == "config.json" else place.stem, **load_hf_config(place)}


def _required_dimensions(model: ModelSpec) -> tuple[str, ...]:
    groups = (needed for letters, (needed, _) in _DIMENSIONS.items() if set(letters) & set(model.pattern))
    return tuple(name for group in groups for name in group)


def _unused_dimensions(model: ModelSpec) -> tuple[str, ...]:
    groups = (needed + more for letters, (needed, more) in _DIMENSIONS.items() if not set(letters) & set(model.pattern))
    return tuple(name for group in groups for name in group)


def _with_model_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a family needs and the spec leaves out; values given are never changed."""
    family, hidden = given.get("family"), given.get("hidden")
    if not isinstance(family, str) or not isinstance(hidden, int) or hidden < 1:
        return given
    defaults: dict[str, Any] = {"pattern": {"transformer": "A", "moe": "E", "mamba2": "M"}.get(family, "MA")}
    pattern = given.get("pattern", defaults["pattern"])
    if isinstance(pattern, str) and set(pattern) & set("AE"):
        heads = given.get("heads", max(1, hidden // 64))
        if isinstance(heads, int) and heads >= 1:
            defaults |= {"heads": heads, "kv_heads": heads, "head_dim": max(1, hidden // heads)}
        defaults["ffn_hidden"] = _round_up(8 * hidden / 3, 16)
    if isinstance(pattern, str) and "M" in pattern:
        defaults |= {
            "ssm_state": 64,
            "ssm_head_dim": min(64, hidden),
            "ssm_groups": 1,
            "ssm_expand": 2,
            "ssm_conv": 4,
            "ssm_chunk": 64,
        }
    if isinstance(pattern, str) and "E" in pattern:
        experts = given.get("experts", 8)
        defaults |= {"experts": 8, "top_k": min(2, experts) if isinstance(experts, int) else 2, "aux_loss": 0.01}
    return defaults | given


class WorkloadSpec(_Frozen):
    """What is computed: the phase, its batch and its precision."""

    phase: Phase = Field("train", description="train, prefill or decode")
    seq_len: Positive = Field(128, description="S, tokens per sequence (of a prompt, in inference)")
    global_batch: Positive = Field(8, description="B, sequences per optimizer step (served at once, in inference)")
    micro_batch: Positive = Field(1, description="b, sequences per forward pass of one replica")
    steps: Positive = Field(4, description="optimizer steps, prefills or decoded tokens, warm-up included")
    warmup_steps: NonNegative = Field(1, description="first steps left out of every timing")
    precision: Precision = Field("fp32", description="number format of parameters and compute")
    optimizer: Optimizer = Field("adamw", description="optimizer")
    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-3, description="constant step size")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.01, description="decoupled decay")
    grad_clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest global gradient norm; 0 switches clipping off"
    )
    checkpoint_every: NonNegative = Field(
        0, description="optimizer steps between checkpoints in the run's folder, where a retry goes on; 0: none"
    )
    start_from: str = Field("", description="a checkpoint (a folder step-<N>) of the same model to start from")
    data: str = Field("shakespeare", description="corpus name, or a path to a UTF-8 text file")

    @model_validator(mode="after")
    def _check(self) -> WorkloadSpec:
        if self.warmup_steps >= self.steps:
            raise SpecError(
                [
                    f"workload.warmup_steps={self.warmup_steps} leaves no step to measure; "
                    f"legal: 0 to {self.steps - 1} (below workload.steps={self.steps})"
                ]
            )
        return self


class Strategy(_Frozen):
    """How the work is split. Degrees left out are 1; the number of devices is dp*tp*pp*cp."""

    engine: EngineName = Field("torch", description="what trains: torch-native or DeepSpeed")
    dp: Positive = Field(1, description="data replicas, in all")
    tp: Positive = Field(1, description="tensor-parallel degree")
    pp: Positive = Field(1, description="pipeline stages over devices")
    cp: Positive = Field(1, description="context-parallel degree")
    ep: Positive = Field(1, description="expert-parallel degree, inside dp")
    zero: ZeroStage = Field(
        0,
        description="0 DDP; 1 optimizer sharded; 2 gradients too (torch: FSDP2 kept unsharded "
        "between forward and backward); 3 parameters too (torch: FSDP2 resharding)",
    )
    zero_group: NonNegative = Field(
        0, description="ranks that one copy of what FSDP2 shards is spread over (HSDP); 0: all of dp*cp"
    )
    sp: bool = Field(False, description="Megatron sequence parallelism, over the tp ranks")
    cp_kind: ContextParallelKind = Field("ring", description="how attention crosses cp ranks")
    schedule: Schedule = Field("1f1b", description="order of micro-batches in the pipeline")
    virtual: Positive = Field(
        1, description="pipeline stages held by one device (left out: 2 where the schedule needs several)"
    )
    stage_layers: Annotated[tuple[NonNegative, ...], Field(strict=False)] = Field(
        (), description="layers of each of the pp*virtual stages; left out: as even as can be"
    )
    recompute: Recompute = Field("none", description="activations recomputed in the backward")
    offload: Offload = Field("none", description="what lives in host memory")
    overlap: bool = Field(
        True,
        description="communicate while computing: gradients during the backward, keys and values of ring attention",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_virtual(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "virtual" in given or given.get("pp", 1) == 1:
            return given
        several = given.get("schedule") in ("interleaved", "zb-v", "dualpipe-v")
        return {**given, "virtual": 2} if several else given

    @property
    def stages(self) -> int:
        """Pipeline stages, pp*virtual."""
        return self.pp * self.virtual

    @property
    def devices(self) -> int:
        """Number of ranks, dp*tp*pp*cp (ep lies inside dp)."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def label(self) -> str:
        """Short name for tables and axes, e.g. `dp2-tp2-sp` or `deepspeed-dp4-zero3`."""
        degrees = [f"{axis}{n}" for axis in ("dp", "tp", "pp", "cp", "ep") if (n := getattr(self, axis)) > 1]
        options = [f"zero{self.zero}"] if self.zero else []
        options += [f"group{self.zero_group}"] if self.zero_group else []
        options += ["sp"] if self.sp else []
        options += [self.cp_kind] if self.cp > 1 else []
        options += [self.schedule] if self.pp > 1 else []
        options += [f"v{self.virtual}"] if self.virtual > 1 else []
        options += ["layers" + "+".join(map(str, self.stage_layers))] if self.stage_layers else []
        options += [f"recompute-{self.recompute}"] if self.recompute != "none" else []
        options += [f"offload-{self.offload}"] if self.offload != "none" else []
        options += [] if self.overlap else ["no-overlap"]
        name = "-".join((degrees or ["one-device"]) + options)
        return name if self.engine == "torch" else f"{self.engine}-{name}"


class ClusterSpec(_Frozen):
    """Where it runs and under which limits."""

    name: str = Field("local", description="label of the testbed in tables and figures")
    nodes: Positive = Field(1, description="machines")
    devices_per_node: NonNegative = Field(0, description="devices a machine; 0: as many as asked")
    device: DeviceKind = Field("auto", description="auto takes CUDA where it exists")
    threads_per_rank: Positive = Field(1, description="CPU threads of one rank's kernels")
    launcher: Launcher = Field("forked", description="forked from a warm parent, or torchrun")
    deadline_s: Annotated[float, Field(gt=0)] = Field(
        300.0, description="wall time after which a run is ended and recorded as timeout"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "preset" not in given:
            return given
        filled = dict(given)
        preset = filled.pop("preset")
        return {**_preset("cluster.preset", preset, CLUSTERS), "name": preset, **filled}


class RunSpec(_Frozen):
    """The whole truth of one run."""

    model: ModelSpec
    workload: WorkloadSpec = WorkloadSpec()
    strategy: Strategy = Strategy()
    cluster: ClusterSpec = ClusterSpec()
    seed: NonNegative = Field(0, description="seed of parameters and of the order of the data")
    repeat: NonNegative = Field(0, description="which repetition of the same run this is")

    @property
    def run_id(self) -> str:
        """Sixteen hex digits that name the run: a hash of the spec and the training code version."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:16]

    def canonical_json(self) -> str:
        """The text that is hashed: sorted keys, no spaces, with the training code's version."""
        content = {"training_code_version": TRAINING_CODE_VERSION, **self.model_dump()}
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    @property
    def micro_batches(self) -> int:
        """m = B / (dp*b), micro-batches a replica passes per optimizer step."""
        return self.workload.global_batch // (self.strategy.dp * self.workload.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step over all replicas: B*S, or B where a step decodes one token a sequence."""
        return self.workload.global_batch * (1 if self.workload.phase == "decode" else self.workload.seq_len)


def _preset(field: str, name: Any, presets: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if isinstance(name, str) and name in presets:
        return presets[name]
    raise SpecError([f"{field}={name!r} is unknown{_nearest(str(name), presets)}; legal: {', '.join(presets)}"])


def parse_run_spec(content: Any) -> RunSpec:
    """Turn plain data (parsed YAML or JSON) into a RunSpec.

    Raises:
        SpecError: with one sentence per fault, naming the field, the value and what is legal.
    """
    if not isinstance(content, Mapping):
        raise SpecError([f"a run spec is a mapping with the keys {', '.join(RunSpec.model_fields)}, not {content!r}"])
    try:
        return RunSpec.model_validate(_integral_floats(content))
    except ValidationError as error:
        raise SpecError(sentences(error, RunSpec)) from None


def load_run_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a YAML (or JSON) file and apply `key.path=value` overrides.

    Raises:
        SpecError: the file cannot be read or parsed, or the spec in it is malformed.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise SpecError(
            [f"{path} holds {content!r}; a run spec is a mapping with the keys {', '.join(RunSpec.model_fields)}"]
        )
    merged: dict[str, Any] = copy.deepcopy(dict(content))
    for override in overrides:
        _apply_override(merged, override)
    return parse_run_spec(merged)


def read_yaml(path: Path) -> Any:
    """Parse one YAML file.

    Raises:
        SpecError: naming the file and, for a syntax fault, the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([f"{path} cannot be read: {_reason(error)}"]) from None
    try:
        content = yaml.safe_load(text)
        json.dumps(content, default=str)  # refuses an alias that holds itself
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise SpecError([f"{path} is not valid YAML{where}: {getattr(error, 'problem', None) or error}"]) from None
    return content


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise SpecError([f"override {override!r} is not of the form key=value, e.g. strategy.dp=2"])
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError([f"override {override!r}: the value is not valid YAML"]) from None
    *parents, leaf = key.strip().split(".")
    node = content
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else node
    if not isinstance(node, dict):
        raise SpecError([f"override {override!r}: {'.'.join(parents)} is not a mapping"])
    node[leaf] = value


def _integral_floats(content: Any) -> Any:
    """Let `1e-3` written as text by YAML 1.1 (which wants `1.0e-3`) pass as the number it is."""
    if isinstance(content, Mapping):
        return {key: _integral_floats(value) for key, value in content.items()}
    if isinstance(content, str) and _is_plain_exponent(content):
        return float(content)
    return content


def _is_plain_exponent(text: str) -> bool:
    mantissa, separator, exponent = text.lower().partition("e")
    return bool(separator) and mantissa.isdigit() and exponent.lstrip("+-").isdigit()


def _nearest(word: str, legal: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(word, list(legal), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _divisors_text(n: int) -> str:
    return ", ".join(str(k) for k in range(1, n + 1) if n % k == 0) if n <= 4096 else f"a divisor of {n}"


def sentences(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One sentence per fault of a pydantic error: field, value, what is legal."""
    return [sentence for fault in error.errors() for sentence in _sentence(fault, root)]


def _sentence(fault: Any, root: type[BaseModel]) -> list[str]:
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return list(cause.faults)
    location = [str(part) for part in fault["loc"]]
    field = ".".join(location) or "the spec"
    value = fault.get("input")
    match fault["type"]:
        case "extra_forbidden":
            fields = _fields_at(root, location[:-1])
            return [f"{field} is not a known key{_nearest(location[-1], fields)}; legal: {', '.join(fields)}"]
        case "missing":
            return [f"{field} is missing: {_description(root, location)}"]
        case "literal_error":
            return [f"{field}={value!r} is not legal; legal: {fault['ctx']['expected']}"]
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            return [f"{field}={value!r} is not legal; {fault['msg'].replace('Input should', 'it must')}"]
        case "model_type" | "model_attributes_type" | "dict_type":
            return [f"{field}={value!r} must be a mapping with the keys {', '.join(_fields_at(root, location))}"]
        case _:
            return [f"{field}={value!r} is not legal; {fault['msg'].replace('Input should', 'it must')}"]


def _fields_at(root: type[BaseModel], location: Sequence[str]) -> list[str]:
    model = _model_at(root, location)
    if model is None:
        return []
    presets = ["preset"] if model in (ModelSpec, ClusterSpec) else []
    presets += ["hf_config"] if model is ModelSpec else []
    return presets + list(model.model_fields)


def _description(root: type[BaseModel], location: Sequence[str]) -> str:
    parent = _model_at(root, location[:-1])
    info = parent.model_fields[location[-1]] if parent else None
    description = info.description if info else None
    return description or f"a mapping with the keys {', '.join(_fields_at(root, location))}"


def _model_at(root: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    """The model that describes the mapping at `location`, through lists by their index; None where there is none."""
    node: Any = root
    for part in location:
        if get_origin(node) is list:
            node = get_args(node)[0]
        elif isinstance(node, type) and issubclass(node, BaseModel) and part in node.model_fields:
            node = node.model_fields[part].annotation
        else:
            return None
    return node if isinstance(node, type) and issubclass(node, BaseModel) else None
