"""What needs JetStream is collected only where the extra is installed."""

import importlib.util


def _has_jetstream():
    # Without it this folder is what `import jetstream` finds: look for a part of it.
    try:
        return importlib.util.find_spec("jetstream.engine") is not None
    except ModuleNotFoundError:
        return False


collect_ignore = [] if _has_jetstream() else ["test_driver.py", "test_engine.py"]
