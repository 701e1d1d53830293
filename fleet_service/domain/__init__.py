"""Pure decisions: no I/O, no clock, no randomness; time and random numbers come in as arguments."""
