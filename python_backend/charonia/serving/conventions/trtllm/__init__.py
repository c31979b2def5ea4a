"""TensorRT-LLM's convention for the same scheduler: the models that its clients know.

The models are proxies without state. `facade` translates requests and answers. `text` has the
models that tokenize and detokenize around `tensorrt_llm`. `tables` lists the tensors.
"""
