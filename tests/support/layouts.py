"""The layouts under test, by the names used in reports."""

from __future__ import annotations

from miniverl_dist.config.cluster import ParallelConfig

TWO_RANKS = {
    "DP2": ParallelConfig(),
    "TP2": ParallelConfig(tensor=2),
    "TP2+SP": ParallelConfig(tensor=2, sequence=True),
    "PP2": ParallelConfig(pipeline=2),
    "CP2": ParallelConfig(context=2),
    "EP2": ParallelConfig(expert=2),
}
FOUR_RANKS = {
    "TP2+SP+PP2": ParallelConfig(tensor=2, sequence=True, pipeline=2),
    "TP2+SP+CP2": ParallelConfig(tensor=2, sequence=True, context=2),
    "TP2+SP+EP2": ParallelConfig(tensor=2, sequence=True, expert=2),
    "PP2+EP2+DP2": ParallelConfig(pipeline=2, expert=2),
    "TP2+SP+ETP2+EP2": ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=2),
    "TP2+SP+CP2+EP4": ParallelConfig(tensor=2, sequence=True, context=2, expert=4),
}
WORLDS = ((2, TWO_RANKS), (4, FOUR_RANKS))
