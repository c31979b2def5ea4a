"""Joins the planes: requests with text on one side, steps of an `Executor` on the other.

`EngineCore` is one step at a time and has no thread; `EngineService` runs it in one.
"""
