"""One module per gRPC service: thin renderers on the neutral core."""
