"""Spans, logs and metrics: their names, and how they are set up."""
