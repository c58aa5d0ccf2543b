"""How a step of a run falls on chips: seconds, memory, and the best split of them."""
