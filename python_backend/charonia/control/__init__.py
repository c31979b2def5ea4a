"""The control plane: which tokens of which request are computed in the next step, and where.

Standard library only: no torch, no threads, no clock (time is an argument). `Scheduler` is its
only public state machine; everything else in here is a part of it.
"""

from charonia.control.cache import CacheEvents, KVPool, Tiers
from charonia.control.drafts.depth import AdaptiveDepth, FixedDepth
from charonia.control.drafts.drafter import Drafter
from charonia.control.drafts.ngram import NgramDrafter
from charonia.control.drafts.speculation import Speculation
from charonia.control.drafts.suffix import SuffixDrafter
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.estimators.step_cost import CostCurve
from charonia.control.policies import Late, Policy
from charonia.control.scheduling.load_shedding import NO_SHEDDING, LoadShedding
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.scheduling.prompt_budget import PromptBudget
from charonia.control.scheduling.scheduler import Scheduler
from charonia.control.scheduling.step_size import StepSize
from charonia.control.state.limits import Limits
from charonia.control.state.request import Group, Request, StepObserver, Update
from charonia.control.state.stats import DraftCounts, SchedulerStats

__all__ = [
    "NO_SHEDDING",
    "AdaptiveDepth",
    "CacheEvents",
    "CostCurve",
    "DraftCounts",
    "Drafter",
    "FixedDepth",
    "Group",
    "KVPool",
    "Late",
    "Limits",
    "LoadShedding",
    "NgramDrafter",
    "PeakMemory",
    "Policy",
    "PrefixSharing",
    "PromptBudget",
    "Request",
    "Scheduler",
    "SchedulerStats",
    "Speculation",
    "StepObserver",
    "StepSize",
    "SuffixDrafter",
    "Tiers",
    "Update",
]
