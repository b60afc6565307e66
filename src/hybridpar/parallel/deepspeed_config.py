"""A RunSpec as DeepSpeed's configuration. No torch here.

Keys as documented at DeepSpeed's configuration reference, version 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridpar.specs import RunSpec

# AutoTP knows the layers of models in transformers by name; ours are named here.
_SPLIT: Mapping[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attention\.w[qkv]\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.mlp\.w_(gate|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(attention\.wo|mlp\.w_down)\.weight$"], "partition_type": "row"},
    ],
}

# DeepSpeed prints its timers every so many steps; never is what we want.
_NEVER = 10**9


def deepspeed_config(run: RunSpec) -> dict[str, Any]:
    """The configuration of one run; what it leaves out keeps DeepSpeed's default."""
    config: dict[str, Any] = {
        "train_batch_size": run.workload.global_batch,
        "train_micro_batch_size_per_gpu": run.workload.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "gradient_clipping": run.workload.grad_clip,
        # torch's own AdamW and SGD, the same that the torch engine uses
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
    if run.strategy.zero:
        config["zero_optimization"] = {
            "stage": run.strategy.zero,
            "overlap_comm": run.strategy.overlap,
            **_offload(run.strategy.offload),
        }
    if run.workload.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if run.strategy.tp > 1:
        config["tensor_parallel"] = {"autotp_size": run.strategy.tp, "partition_config": _SPLIT}
    return config


def _offload(offload: str) -> dict[str, Any]:
    """What lives in host memory; parameters there take their optimizer with them."""
    kinds = {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[offload]
    return {f"offload_{kind}": {"device": "cpu"} for kind in kinds}
