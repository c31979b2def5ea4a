"""OpenAI's requests and answers.

fields       reads and checks a request           requests  the fields of requests
serving      sends answers                        answers   the fields of answers
completions  /v1/completions                      logprobs  log-probabilities
chat         /v1/chat/completions                 tokens    /tokenize and /detokenize
"""
