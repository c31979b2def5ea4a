"""A discrete-event simulator that is the scheduler.

The real control plane, from the limits at the door to the plan of each step, runs on a virtual
clock against an engine of which nothing is real but the time of its steps.
"""
