"""Load tests: what is sent and when, clients, measurements, reports; one module a subcommand."""
