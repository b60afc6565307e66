"""Words that several captions share: the conditions of a measurement, names of operations and strategies."""

from __future__ import annotations

from hybridpar.artifacts.inputs import Study

_OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send_recv": "send and receive",
    "p2p": "send and receive",
}


def operation(name: str) -> str:
    """The usual spelling of a collective."""
    return _OPERATIONS.get(name, name.replace("_", " "))


def short(strategy: str) -> str:
    """A strategy's label shortened for axes: the default schedule is left out, DeepSpeed abbreviated."""
    return strategy.replace("-1f1b", "").replace("deepspeed-", "DS ")


def nothing(kind: str) -> str:
    """What stands in the place of a figure or table that the study has no runs for."""
    return f"No {kind} runs of this kind in this study."


def conditions(study: Study, *, times: bool = True) -> str:
    """Tier and testbed; for times on CPUs also what they cannot say."""
    source = study.provenance(study.finished["run_id"])
    first = f"Tier: {source.tier}; testbed: {source.testbed} ({hardware(study)})."
    if not times or not runs_on_cpu(study):
        return first
    return f"{first} Ranks share the processor's cores: these are not GPU times."


def hardware(study: Study) -> str:
    """Device and backend of the finished runs and, for CPUs, how many cores they shared: `CPU, gloo, 2 cores`."""
    if not runs_on_cpu(study):
        return "CUDA, NCCL"
    cores = sorted(int(count) for count in study.finished["cores"].dropna().unique())
    return "CPU, gloo" + (f", {' or '.join(map(str, cores))} cores" if cores else "")


def runs_on_cpu(study: Study) -> bool:
    """Whether the runs computed on CPUs."""
    return not study.finished["device"].astype(str).str.startswith("cuda").any()
