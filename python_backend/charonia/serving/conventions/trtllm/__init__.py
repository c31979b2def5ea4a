"""TensorRT-LLM's convention over the same scheduler: models that its clients know.

The models are proxies and hold no state of their own: `facade` turns their requests into the
scheduler's and its answers into theirs, `text` is what goes around `tensorrt_llm` where clients
tokenize in models of their own. Which tensors there are says `tables`.
"""
