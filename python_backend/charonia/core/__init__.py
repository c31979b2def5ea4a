"""Joins the planes: requests with text on one side, steps of an `Executor` on the other.

`EngineCore` does one step at a time and has no thread of its own; `EngineService` runs it in one.
"""
