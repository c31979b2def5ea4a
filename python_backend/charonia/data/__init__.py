"""The data plane: weights, KV pages, one step's tensors, sampling.

Owns everything that touches a tensor. `runner.Runner` is its only entrance: it takes a StepPlan,
checks it (`plan_check`), computes it (`model`, over the seam of `ops`, on the pages of `kv_store`,
with the indices of `step_tensors`), samples (`sampling`) and answers with a StepResult. Must not
know policy, prefix hashes, text, or Triton: what to compute, and in which blocks, is the plan's.
"""
