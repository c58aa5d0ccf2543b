"""What `conftest` makes of every function and dataclass of the array packages.

Arguments and results are checked against their annotations: types, dtypes, and shapes,
in which one name is one size throughout a call.
"""

import functools

from beartype import BeartypeConf, beartype

_CONF = BeartypeConf(is_pep484_tower=True)  # an int is a float, as type checkers say


def checked(function):
    """Check every call of a function, but not what a tree is made of.

    `jax.tree.map` makes trees of the same class whose leaves are shardings, shapes,
    rows of the arrays, or NumPy's.
    """
    check = beartype(function, conf=_CONF)
    if function.__name__ != "__init__":
        return check

    @functools.wraps(function)
    def check_unless_tree(itself, *args, **kwargs):
        if not hasattr(itself, "_flax_dataclass"):
            check(itself, *args, **kwargs)

    return check_unless_tree
