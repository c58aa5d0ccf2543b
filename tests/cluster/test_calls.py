"""Whatever Ray raises for a call is the loss of a role, unless it is the role's own."""

import ast
import inspect
import threading

import pytest
import small_run

ray = pytest.importorskip("ray")
from ray.exceptions import RayError, RayTaskError  # noqa: E402

from scalerl_jax.cluster.calls import RoleLost, calling, cause_of, why_lost  # noqa: E402


def kinds_below(kind):
    below = {each for child in kind.__subclasses__() for each in kinds_below(child)}
    return below | {kind}


# All that the installed Ray has; its own dual classes of a task's error apart.
KINDS = sorted(
    (
        each
        for each in kinds_below(RayError)
        if each.__module__ == "ray.exceptions" and not issubclass(each, RayTaskError)
    ),
    key=lambda each: each.__name__,
)


def make(kind):
    """One of a kind, its arguments made up."""
    try:
        signature = inspect.signature(kind.__init__)
    except (TypeError, ValueError):
        return kind()
    needed = [
        each
        for each in list(signature.parameters.values())[1:]
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if needed and needed[0].name == "cause":  # of a task that was made for its error
        return kind(ValueError("why"))
    values = [
        bytes(16) if "bytes" in str(each.annotation) else "00" * 28 for each in needed
    ]
    try:
        return kind(*values)
    except AttributeError:  # it takes a message of Ray's own
        return kind.__new__(kind, "why")


def of_task(cause):
    """As the one who called gets it: both a RayTaskError and the cause's class."""
    error = RayTaskError("call", "Traceback", cause, proctitle="a", pid=1, ip="b")
    return error.as_instanceof_cause()


def test_the_list_is_that_of_the_installed_ray():
    public = {
        each
        for each in vars(ray.exceptions).values()
        if inspect.isclass(each) and issubclass(each, RayError)
    }
    assert public - {RayTaskError} <= set(KINDS)
    assert len(KINDS) > 30


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
def test_an_error_of_rays_is_the_loss_of_the_role(kind):
    with pytest.raises(RoleLost, match=r"^rank 1 on b: ") as lost:
        with calling("rank 1 on b"):
            raise make(kind)
    assert "\n" not in str(lost.value)
    assert len(str(lost.value)) < 400
    if kind is RayError:  # alone, Ray puts it in another one's place: see below
        return
    with pytest.raises(RoleLost, match=kind.__name__):
        with calling("rank 1 on b"):
            raise of_task(make(kind))


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError, KeyError])
def test_what_the_role_itself_raises_is_no_loss(kind):
    own = kind("why")
    with pytest.raises(kind) as raised:
        with calling("rank 1 on b"):
            raise of_task(own)
    assert raised.value is own
    assert cause_of(of_task(own)) is own


def test_nor_is_an_exception_that_cannot_be_pickled():
    class OwnError(Exception):
        lock = property(lambda self: threading.Lock())

        def __reduce__(self):
            return threading.Lock, (self.lock,)

    with pytest.raises(RuntimeError, match="OwnError isn't serializable"):
        with calling("rank 1 on b"):
            raise RayTaskError("call", "Traceback", OwnError("why"), "a", 1, "b")


def test_only_one_module_tells_rays_errors_apart():
    """Elsewhere none is named but the class of all, and that of a wait's end."""
    named = set()
    for path in (small_run.ROOT / "scalerl_jax" / "cluster").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "ray.exceptions":
                named |= {(path.stem, each.name) for each in node.names}
    others = {name for file, name in named if file != "calls"}
    assert others <= {"RayError", "GetTimeoutError"}
    assert ("calls", "RayTaskError") in named


def test_why_there_is_no_answer_is_one_line():
    assert why_lost(of_task(ValueError("why\nand where"))) == "ValueError: why"
    memory = ray.exceptions.OutOfMemoryError("killed\nby the monitor")
    assert why_lost(memory) == "OutOfMemoryError: killed"
