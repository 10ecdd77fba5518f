"""Engines: how tensors get to clients and back."""
