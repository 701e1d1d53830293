"""`python -m node_stub` is `fleet-node`."""

from node_stub.cli import main

main()
