"""Adapters that run other projects' models on pagedkern. Each is imported by name and needs that project installed."""
