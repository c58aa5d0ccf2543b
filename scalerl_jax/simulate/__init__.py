"""A simulator of asynchronous RL: costs of settings before machines are paid for."""
