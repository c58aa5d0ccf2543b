"""A ledger whose clock moves only when told to."""

from scalerl_jax.run.ledger import Ledger


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def started(clock, **pools):
    ledger = Ledger(pools=pools, chip="abacus", clock=clock)
    ledger.start()
    return ledger


def chip_seconds(ledger):
    report = ledger.report()
    return {
        name.removeprefix("compute/").removesuffix("_chip_s"): value
        for name, value in report.items()
        if name.endswith("_chip_s") and value
    }
