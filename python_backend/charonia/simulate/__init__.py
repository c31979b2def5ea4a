"""A discrete-event simulator that runs the real scheduler.

The real control plane, from admission to the plan of each step, runs on a virtual
clock. The engine is simulated: only the time of its steps is real.
"""
