"""The page about slices says what the code does."""

import re
from pathlib import Path

from scalerl_jax.machines.partition import split_slice
from scalerl_jax.machines.processes import deal
from scalerl_jax.machines.slices import parse_slice

PAGE = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text()
SHOWN = {  # slice -> its split, and the roles of the table
    "v5p:4x4x4": ((32, 8, 4), ("learner 0", "learner 7", "replica 0", "replica 7")),
    "v6e:2x4": ((4, 2, 2), ("learner 0", "replica 0", "replica 1")),
}


def rows():
    for text, (asked, shown) in SHOWN.items():
        slice = parse_slice(text)
        names = ("learner_chips", "generators", "generator_chips")
        split = split_slice(slice, **dict(zip(names, asked, strict=True)))
        addresses = [f"10.0.0.{worker}" for worker in range(slice.num_hosts)]
        roles = {
            f"{role.name} {role.rank if role.name == 'learner' else role.number}": role
            for host in deal(slice, split, addresses=addresses)
            for role in host.roles
        }
        for name in shown:
            told = roles[name].process.own_environment()
            yield (text, name, str(roles[name].process.worker), told)


def test_the_table_of_environments_is_what_the_roles_get():
    head, *lines = PAGE[PAGE.index("| slice | role |") :].split("\n\n")[0].splitlines()
    names = re.findall(r"`(TPU_\w+|CLOUD_\w+)`", head)
    expected = []
    for text, role, worker, told in rows():
        cells = [told[name] for name in names]
        # Eight addresses make a table wide.
        first, *others = cells[-1].split(",")
        cells[-1] = f"{first} and {len(others)} more" if others else first
        expected.append(f"| `{text}` | {role} | {worker} | {' | '.join(cells)} |")
    assert lines[1:] == expected, "\n".join(["write:", *expected])


def test_the_code_of_the_page_works():
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found = {}
    exec(code.replace("print(", "told = ("), found)
    assert found["told"]["TPU_PROCESS_BOUNDS"] == "1,2,4"
