"""OpenAI's requests and answers.

requests     the fields of requests               answers   the fields of answers
completions  /v1/completions                      answering sends answers, whole or as a stream
chat         /v1/chat/completions                 logprobs  log-probabilities
tokens       /tokenize and /detokenize
"""
