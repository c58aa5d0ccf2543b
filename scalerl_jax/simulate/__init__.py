"""A simulator of asynchronous RL: what a setting costs before a machine is paid for."""
