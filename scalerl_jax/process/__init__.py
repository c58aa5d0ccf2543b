"""This process: signals, threads, environment, what it prints and how it ends."""
