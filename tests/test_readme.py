"""Things that README names exist, and its recipe's numbers are those of the config."""

import dataclasses
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.config import listing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SECTIONS = {field.name for field in dataclasses.fields(config_lib.Config)}


def recipe():
    config = runpy.run_path(str(ROOT / "configs" / "8b.py"))["get_config"]()
    return config_lib.resolve(config)


def value_of(setting):
    value = recipe()
    for part in setting.split("."):
        value = getattr(value, part)
    return value


def named_settings():
    names = set(
        re.findall(r"`(?:--config\.)?([a-z_]+\.[a-z0-9_*]+)(?:=[^`]*)?`", README)
    )
    names = {name for name in names if not name.endswith(".json")}
    return sorted(name for name in names if name.split(".")[0] in SECTIONS)


def test_the_readme_names_settings():
    assert len(named_settings()) > 20


@pytest.mark.parametrize("setting", named_settings())
def test_a_setting_in_the_readme_exists(setting):
    section, name = setting.split(".")
    if name in ("*", "py"):
        assert section in SECTIONS
    else:
        value_of(setting)


def paper_rows():
    table = README.split("## From the paper to the settings")[1].split("\n\n")[1]
    rows = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    pairs = [(re.findall(r"`([^`]+)`", row[1]), row[2].strip()) for row in rows]
    return [
        (settings, values)
        for settings, values in pairs
        if all(name.split(".")[0] in SECTIONS for name in settings)
        and not any(name.endswith("*") for name in settings)
        and "k" not in values.split(", ")  # any k
    ]


@pytest.mark.parametrize("settings, values", paper_rows())
def test_the_recipe_has_the_numbers_of_the_readmes_table(settings, values):
    shown = [value.strip("` ") for value in values.split(",")]
    assert len(shown) == len(settings)
    for setting, text in zip(settings, shown, strict=True):
        value = value_of(setting)
        if isinstance(value, bool):
            assert text == ("on" if value else "off")
        elif isinstance(value, str):
            assert text == value
        else:
            assert float(text) == value


def test_files_that_the_readme_links_to_exist():
    links = re.findall(r"\]\(([^):]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link.split("#")[0]).exists()]
    assert not missing


def test_the_tests_of_what_is_promised_exist():
    table = (ROOT / "docs" / "reliability.md").read_text()
    files = re.findall(r"`([\w/]+\.py)`((?:[:,;]? (?:`test_\w+`|\w+=\w+))+)", table)
    assert len(files) > 8
    for file, names in files:
        source = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in source, (file, name)
    assert len(re.findall(r"`test_\w+`", table)) == sum(
        names.count("`test_") for _, names in files
    )


def test_configs_in_the_readmes_commands_exist():
    configs = set(re.findall(r"configs/[a-z0-9_/]+\.py", README))
    assert {"configs/tiny.py", "configs/8b.py"} <= configs
    assert all((ROOT / config).is_file() for config in configs)


def test_the_readme_has_the_layers_that_are_checked():
    """A line of pyproject.toml is a layer; what stands in one is independent."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    expected = " > ".join(layer.replace(" | ", ", ") for layer in layers)
    text = " ".join(README.split())
    assert f"Imports go downwards only: {expected}. " in text


def test_the_readmes_table_of_sections_is_the_codes():
    assert f"\n{listing.section_table()}\n" in README
