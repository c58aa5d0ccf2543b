"""This process: signals, threads, environment, output and exit status."""
