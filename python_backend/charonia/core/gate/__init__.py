"""Admission control, limits of tenants, and degradation under load."""
