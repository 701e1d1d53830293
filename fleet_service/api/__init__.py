"""The gRPC edge: servicers, converters, errors, interceptors."""
