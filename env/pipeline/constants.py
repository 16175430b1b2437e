"""Every number of the pipeline world, each with its source: "paper" is FlexPipe (arXiv 2510.11938), "ours" is chosen.

Read by the rest of env/pipeline and by models/pipeline. The paper gives no value for most coefficients of its
equations; what it leaves open is ours and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

STAGES: Final = (4, 8, 16, 32)  # paper, Table 2
SEGMENTS: Final = 32  # the finest stage is a segment of the model; weights and host copies are counted in segments
GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Granularity:
    """A row of the paper's Table 2: OPT-66B cut into so many stages, sequence length 4096, A100."""

    stages: int
    load_s: float  # from storage
    compute_s: float  # of one stage
    communication_s: float  # of all hops of a pass; 2.1 ms each
    most_requests: int  # in one batch

    @property
    def pass_s(self) -> float:
        """Seconds of one batch of one request through an idle pipeline."""
        return self.stages * self.compute_s + self.communication_s


TABLE_2: Final = (
    Granularity(4, 47.14, 0.06994, 0.0063, 128),
    Granularity(8, 13.05, 0.03663, 0.0147, 256),
    Granularity(16, 9.19, 0.01867, 0.0315, 512),
    Granularity(32, 5.43, 0.00967, 0.0651, 1024),
)


@dataclass(frozen=True, slots=True)
class PipelineConstants:
    """What the world is made of.

    Equation (1) of the paper, T = [rho^S / (S! (1 - rho))] (CV_a^2 + CV_s^2) / 2 + sum lambda_i / (mu_i - lambda_i), is
    *not* the simulator and cannot be: with Table 2 at 10 passes/s a CV from 0.5 to 8 moves 32 stages from 3.426 to
    3.426 and 4 stages from 9.31 to 10.37, so that burstiness does nothing and more stages always win; and its second
    sum is a number of jobs, not a time. The world is made of discrete events instead.
    """

    granularities: tuple[Granularity, ...] = TABLE_2
    hop_s: float = 0.0021  # paper, Table 2: communication / (stages - 1), the same in every row
    # Equation (3): compute(b) = compute(b_base) * (1 + batch_slope * log(b / b_base)). Ours: b_base 1, natural
    # logarithm, slope 1: the steepest at which a batch never takes longer than its requests one by one.
    batch_slope: float = 1.0
    is_serial: bool = False  # ours: True lets a batch hold one request; the world least kind to coarse stages
    weights_bytes: float = 120.0 * GIGA  # paper, Table 2
    kv_bytes_per_token: float = 2.0 * 64 * 9216 * 2  # OPT-66B: K and V, 64 layers, width 9216, 2 bytes
    gpu_bytes: float = 80.0 * GIGA  # A100
    kv_reserve_bytes: float = 40.0 * GIGA  # ours: room for KV over all stages of a replica, a share of it on each
    gpus: int = 82  # paper, section 9
    servers: int = 42  # paper, section 9
    # Shares of a GPU's memory that other models hold, as points (share of GPUs, used memory) of a quantile function.
    # Paper: 8.7 % of GPUs have over 85 % free; median 28.78 %, 95th percentile 99.1 % used. Its mean is then 43.7 %,
    # the paper's is 43.48 %.
    used_quantiles: tuple[tuple[float, float], ...] = ((0, 0.05), (0.087, 0.15), (0.5, 0.2878), (0.95, 0.991), (1, 1.0))
    shared_from: float = 0.15  # paper: a GPU with more than 85 % free memory counts as whole, others are shared
    churn_s: float = 600.0  # ours: how long other models stay; GPUs that hold no stage are drawn anew
    # Equation (9): gamma(CV) = gamma_0 (1 + alpha CV^2), how much longer a stage computes on a shared GPU.
    sharing_base: float = 0.02  # ours
    sharing_slope: float = 0.05  # ours
    sharing_most: float = 0.3  # ours: unbounded as printed, 100 % at CV 28
    link_bytes_per_s: float = 12.5 * GIGA  # paper, section 9: 100 Gbps
    host_bytes_per_s: float = 25.0 * GIGA  # ours: PCIe 4.0 x16 as it is reached
    start_s: float = 1.0  # ours: a process on a GPU that had none; Table 2's load times contain it
    pause_s: float = 0.025  # ours, measured: the tail of the KV at a switch took 11 to 25 ms on two CPU cores
    host_keep_s: float = 600.0  # ours: how long host memory keeps weights that no GPU of the server holds
    reclaim_s: float = 300.0  # paper: reclamation windows of five minutes
    # Equation (13): which server is asked first.
    affinity_recency: float = 1.0  # ours, w_t
    affinity_gpus: float = 0.1  # ours, w_g
    affinity_decay_per_s: float = 1 / 300.0  # ours, lambda
    decision_s: float = 1.0  # ours: one decision
    objective_s: float = 1.0  # ours: 3.5 unloaded passes of four stages
    gpu_weight: float = 0.02  # ours: missed requests that a GPU second is worth
    move_weight: float = 1.0  # ours: missed requests that a second of a link is worth
    most_replicas: int = 24  # 82 GPUs hold at most 20 replicas of four stages

    def __post_init__(self) -> None:
        if not 0.0 <= self.batch_slope <= 1.0:
            raise ValueError(f"batch_slope {self.batch_slope}; expected 0..1, else a batch can lose to single requests")

    def of(self, stages: int) -> Granularity:
        """Return the row of Table 2; raise ValueError for a number of stages that has none."""
        for each in self.granularities:
            if each.stages == stages:
                return each
        raise ValueError(f"{stages} stages; expected one of {', '.join(str(g.stages) for g in self.granularities)}")

    def most_in_batch(self, stages: int) -> int:
        """Return how many requests a batch holds."""
        return 1 if self.is_serial else self.of(stages).most_requests

    def batch_factor(self, requests: int) -> float:
        """Return how much longer a batch computes than one request, equation (3)."""
        return 1.0 + self.batch_slope * math.log(requests)

    def sharing_penalty(self, variation: float) -> float:
        """Return how much longer, as a share, a stage computes on a GPU with other models, equation (9)."""
        return min(self.sharing_base * (1.0 + self.sharing_slope * variation**2), self.sharing_most)

    def stage_bytes(self, stages: int) -> float:
        """Return the weights of one stage."""
        return self.weights_bytes / stages

    def needed_bytes(self, stages: int) -> float:
        """Return what one stage needs of a GPU's memory."""
        return (self.weights_bytes + self.kv_reserve_bytes) / stages

    def cost(self, missed: int, gpu_s: float, moved_bytes: float) -> float:
        """Return what is to be made small, in missed requests; the environment's reward is its negative."""
        return missed + self.gpu_weight * gpu_s + self.move_weight * moved_bytes / self.link_bytes_per_s

    def warm_load_s(self, stages: int) -> float:
        """Return the seconds to load a stage whose weights lie in its server's memory."""
        return self.start_s + self.stage_bytes(stages) / self.host_bytes_per_s
