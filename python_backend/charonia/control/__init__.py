"""The control plane: which tokens of which request are computed in the next step, and where.

Standard library only: no torch, no threads, no clock (time is an argument). `Scheduler` is its
one public machine; everything else in here is a part of it.
"""

from charonia.control.limits import Limits
from charonia.control.request import Request, Update
from charonia.control.scheduler import Scheduler
from charonia.control.stats import SchedulerStats

__all__ = ["Limits", "Request", "Scheduler", "SchedulerStats", "Update"]
