"""Redis: membership, the admission line, and the embedded server. The only package that speaks to Redis."""
