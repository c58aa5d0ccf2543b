"""Studies: runs of one base with other settings, compared over seeds."""
