"""A simulated engine on the real wire: for load, faults and machines with no engine."""
