"""gRPC as every service uses it: servers, channels, statuses, converters to and from the protos."""
