"""Transports: how pieces travel between two processes. `base` is the contract, each other module one implementation."""
