"""What prefill and decode workers have in common: identity, the step thread, the process, KV control messages."""
