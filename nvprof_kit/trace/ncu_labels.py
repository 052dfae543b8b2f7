"""The metrics behind the labels of ncu's details page, 2020 to 2025."""

from __future__ import annotations

_PEAK = ".avg.pct_of_peak_sustained_elapsed"

_LABELS: dict[tuple[str, str], str] = {
    ("Duration", "ns"): "gpu__time_duration.sum",
    ("SM Frequency", "hz"): "sm__cycles_elapsed.avg.per_second",
    ("DRAM Frequency", "hz"): "dram__cycles_elapsed.avg.per_second",
    ("Elapsed Cycles", "cycle"): "sm__cycles_elapsed.max",
    ("SM Active Cycles", "cycle"): "sm__cycles_active.avg",
    ("Compute (SM) Throughput", "%"): f"sm__throughput{_PEAK}",
    ("Compute (SM) [%]", "%"): f"sm__throughput{_PEAK}",
    ("SOL SM", "%"): f"sm__throughput{_PEAK}",
    ("Memory Throughput", "%"): f"gpu__compute_memory_throughput{_PEAK}",
    ("Memory [%]", "%"): f"gpu__compute_memory_throughput{_PEAK}",
    ("SOL Memory", "%"): f"gpu__compute_memory_throughput{_PEAK}",
    ("DRAM Throughput", "%"): f"gpu__dram_throughput{_PEAK}",
    ("SOL DRAM", "%"): f"gpu__dram_throughput{_PEAK}",
    ("L2 Cache Throughput", "%"): f"lts__throughput{_PEAK}",
    ("SOL L2 Cache", "%"): f"lts__throughput{_PEAK}",
    ("L1/TEX Cache Throughput", "%"): "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ("SOL L1/TEX Cache", "%"): "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ("Memory Throughput", "byte/s"): "dram__bytes.sum.per_second",
    ("L1/TEX Hit Rate", "%"): "l1tex__t_sector_hit_rate.pct",
    ("L2 Hit Rate", "%"): "lts__t_sector_hit_rate.pct",
    ("Achieved Occupancy", "%"): "sm__warps_active.avg.pct_of_peak_sustained_active",
    ("Theoretical Occupancy", "%"): "sm__maximum_warps_per_active_cycle_pct",
    ("Registers Per Thread", "register/thread"): "launch__registers_per_thread",
    ("Static Shared Memory Per Block", "byte/block"): "launch__shared_mem_per_block_static",
    ("Dynamic Shared Memory Per Block", "byte/block"): "launch__shared_mem_per_block_dynamic",
    ("Waves Per SM", ""): "launch__waves_per_multiprocessor",
    ("Executed Ipc Active", "inst/cycle"): "sm__inst_executed.avg.per_cycle_active",
}


def metric_name(label: str, unit: str) -> str:
    """The metric's full name by its label on the details page and its base unit; another label stays as it is."""
    return _LABELS.get((label, unit), label)
