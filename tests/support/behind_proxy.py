"""An environment that names a proxy which nobody can reach."""

BEHIND_PROXY = {
    **dict.fromkeys(("http_proxy", "HTTP_PROXY", "grpc_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "example.com"),
}
"""Variables that name a proxy, as companies do for calls to elsewhere. Nobody listens there."""
