"""Slower tiers of the KV cache: host memory, and files that outlive the server."""

from charonia.data.kv_tiers.tiers import KVTiers, make_tiers

__all__ = ["KVTiers", "make_tiers"]
