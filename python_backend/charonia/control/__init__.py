"""The control plane: which tokens of which request are computed in the next step, and where.

Standard library only: no torch, no threads, no clock (time is an argument). `Scheduler` is its
one public machine; everything else in here is a part of it.
"""

from charonia.control.cache import CacheEvents, Tiers
from charonia.control.depth import AdaptiveDepth, FixedDepth
from charonia.control.drafter import Drafter
from charonia.control.limits import Limits
from charonia.control.ngram import NgramDrafter
from charonia.control.peak_memory import PeakMemory
from charonia.control.policies import Late, Policy
from charonia.control.prefix_sharing import PrefixSharing
from charonia.control.prompt_budget import PromptBudget
from charonia.control.relief import NO_RELIEF, Relief
from charonia.control.request import Group, Request, Update
from charonia.control.scheduler import Scheduler
from charonia.control.speculation import Speculation
from charonia.control.stats import DraftCounts, SchedulerStats
from charonia.control.step_cost import CostCurve
from charonia.control.step_size import StepSize
from charonia.control.suffix import SuffixDrafter

__all__ = [
    "NO_RELIEF",
    "AdaptiveDepth",
    "CacheEvents",
    "CostCurve",
    "DraftCounts",
    "Drafter",
    "FixedDepth",
    "Group",
    "Late",
    "Limits",
    "NgramDrafter",
    "PeakMemory",
    "Policy",
    "PrefixSharing",
    "PromptBudget",
    "Relief",
    "Request",
    "Scheduler",
    "SchedulerStats",
    "Speculation",
    "StepSize",
    "SuffixDrafter",
    "Tiers",
    "Update",
]
