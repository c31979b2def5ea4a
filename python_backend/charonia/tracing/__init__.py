"""Traces of requests: what a request waited for and what was computed for it, as spans.

    traceparent.py     the context that a request comes with
    endpoint.py        the address of a collector
    request_trace.py   what happened to one request
    exporter.py        sends it as spans by OTLP; needs the opentelemetry packages

Only requests that come with a sampled context are traced. Triton and the gateway decide about that.
"""
