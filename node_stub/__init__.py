"""A node to test and demonstrate with: the node's side of fleet.v1 over an engine that can be foretold."""
