"""Real clusters that scale models are made of: numbers and where each is from. Pure.

Sources: `hardware.csv` and `collective_bench.csv` are the files of data/published, named with their row; rates of
devices are the largest bf16 matrix product measured there, not the vendor's peak. What is in neither says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RealCluster:
    """One kind of device and its links.

    Attributes:
        name: as in REAL_CLUSTERS.
        flops_per_s: of a device in bf16 [FLOP/s].
        intra_bytes_s: a device's link to the others of its node, each direction [B/s].
        nic_bytes_s: of one network adapter, each direction [B/s].
        nic_per_device: each device has an adapter of its own; else the node has one.
        memory_bytes: of a device [B].
        intra_latency_s: of the smallest message measured inside a node [s].
        inter_latency_s: the same between two nodes [s].
        hardware_row: in hardware.csv.
        latency_row: accelerator in collective_bench.csv, source_id vidur_net, op send_recv, 2048 bytes.
        sources: for each field, where it is from.
    """

    name: str
    flops_per_s: float
    intra_bytes_s: float
    nic_bytes_s: float
    nic_per_device: bool
    memory_bytes: float
    intra_latency_s: float
    inter_latency_s: float
    hardware_row: str
    latency_row: str
    sources: Mapping[str, str]

    def uplink_bytes_s(self, devices_per_node: int) -> float:
        """What a node of so many devices sends to others at most [B/s]."""
        return self.nic_bytes_s * (devices_per_node if self.nic_per_device else 1)


def _hardware(row: str, column: str) -> str:
    return f"hardware.csv, row {row}, {column}"


def _bench(row: str, nodes: int) -> str:
    return f"collective_bench.csv, vidur_net, {row}, send_recv of 2048 bytes, {nodes} node{'s' if nodes > 1 else ''}"


def _nvidia(
    name: str, row: str, rates: tuple[float, float, float, float], latency_row: str, latencies: tuple[float, float]
) -> RealCluster:
    tflops, intra_gb_s, nic_gbps, memory_gb = rates
    return RealCluster(
        name=name,
        flops_per_s=tflops * 1e12,
        intra_bytes_s=intra_gb_s * 1e9,
        nic_bytes_s=nic_gbps * 1e9 / 8,
        nic_per_device=True,
        memory_bytes=memory_gb * 1e9,
        intra_latency_s=latencies[0],
        inter_latency_s=latencies[1],
        hardware_row=row,
        latency_row=latency_row,
        sources={
            "flops_per_s": _hardware(row, "measured_mamf_bf16_tflops"),
            "intra_bytes_s": _hardware(row, "intra_link_gb_s_per_dir"),
            "nic_bytes_s": _hardware(row, "typical_nic_gbps_per_device"),
            "memory_bytes": _hardware(row, "hbm_gb"),
            "intra_latency_s": _bench(latency_row, 1),
            "inter_latency_s": _bench(latency_row, 2),
        },
    )


_PCIE = RealCluster(
    name="a100-pcie-ethernet",
    flops_per_s=252.9e12,
    intra_bytes_s=31e9,
    nic_bytes_s=12.5e9,
    nic_per_device=False,
    memory_bytes=80e9,
    intra_latency_s=4e-6,
    inter_latency_s=12e-6,
    hardware_row="A100-PCIe",
    latency_row="A100-80G PCIe",
    sources={
        "flops_per_s": _hardware("A100-PCIe", "measured_mamf_bf16_tflops"),
        "intra_bytes_s": _hardware("A100-PCIe", "intra_link_gb_s_per_dir"),
        "nic_bytes_s": "assumption: one port of 100 Gbit/s Ethernet in each node; in no file",
        "memory_bytes": _hardware("A100-PCIe", "hbm_gb"),
        "intra_latency_s": _bench("A100-80G PCIe", 1) + " (a pair that an NVLink bridge joins)",
        "inter_latency_s": _bench("A100-80G PCIe", 2),
    },
)

_TPU = RealCluster(
    name="tpu-v7x-like",
    flops_per_s=1912.8e12,
    intra_bytes_s=100e9,
    nic_bytes_s=100e9,
    nic_per_device=True,
    memory_bytes=192e9,
    intra_latency_s=5e-6,
    inter_latency_s=5e-6,
    hardware_row="TPU v7x (Ironwood)",
    latency_row="",
    sources={
        "flops_per_s": _hardware("TPU v7x (Ironwood)", "measured_mamf_bf16_tflops"),
        "intra_bytes_s": _hardware("TPU v7x (Ironwood)", "intra_p2p_gb_s_per_dir") + ": one axis of the torus",
        "nic_bytes_s": "assumption: as inside; chips of a pod are joined by the same links. The torus itself, in which "
        "the axes do not share links, is not modelled",
        "memory_bytes": "assumption: 192 GB; in no file",
        "intra_latency_s": "assumption: as NVLink's; in no file",
        "inter_latency_s": "assumption: as NVLink's; in no file",
    },
)

REAL_CLUSTERS: Mapping[str, RealCluster] = {
    cluster.name: cluster
    for cluster in (
        _nvidia("h100-nvlink-ib", "H100-80G SXM", (794.5, 450, 400, 80), "H100-80G", (5e-6, 17e-6)),
        _nvidia("a100-nvlink-ib", "A100-80G SXM", (271.2, 300, 200, 80), "A100-80G", (8e-6, 24e-6)),
        _PCIE,
        _TPU,
    )
}
