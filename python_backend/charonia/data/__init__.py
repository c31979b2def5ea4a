"""The data plane: weights, KV pages, one step's tensors, sampling.

Owns everything that touches a tensor. `runner.Runner` is its only entry point: it takes a StepPlan,
checks it (`plan_check`), computes it (`model`, with the operations of `ops`, on the pages of
`kv_store`, with the indices of `step_tensors`), samples (`sampling`) and returns a StepResult. Must
not know policy, prefix hashes, text or Triton: the plan says what is computed, and in which blocks.
"""
