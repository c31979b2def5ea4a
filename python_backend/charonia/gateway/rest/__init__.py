"""A plain REST API beside OpenAI's.

requests  the fields of requests     generate  /v1/generate: one prompt
answers   the fields of answers      batch     /v1/batch: several requests at once
status    /v1/health and /v1/metrics
"""
