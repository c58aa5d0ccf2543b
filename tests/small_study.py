"""The record of a study, as `study run` checks it and then writes it."""

from scalerl_jax.study.runs import next_record, write_record


def keep_record(study, root, machines=None):
    """Write the record of a study; return the warnings."""
    record, warnings = next_record(study, root, machines)
    write_record(root, record)
    return warnings
