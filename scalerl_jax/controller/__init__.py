"""The controller's books: orders, queue, pacing, and the contract with other roles."""
