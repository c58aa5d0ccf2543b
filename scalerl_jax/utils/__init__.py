"""Clocks, files and signals: what any part may use and no part of the method."""
