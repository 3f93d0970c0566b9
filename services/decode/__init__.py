"""The decode service: takes KV in, steps all running requests together, streams tokens."""
