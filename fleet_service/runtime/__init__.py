"""The story in async code: nodes, sessions, generations. No grpc and no protobuf."""
