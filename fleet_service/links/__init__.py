"""Head-to-node I/O behind the runtime's NodeLink and Dialer protocols."""
