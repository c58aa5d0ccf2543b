"""Things that README and docs/ name exist, and their numbers are the configs'."""

import dataclasses
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from scalerl_jax import config as config_lib

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for kind in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(kind))
}
README, OBJECTIVE = PAGES["README.md"], PAGES["docs/objective.md"]
MOST_BYTES = 9000  # of README, so that it is read
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
    text = "\n".join(PAGES.values())
    names = set(re.findall(r"`(?:--config\.)?([a-z_]+\.[a-z0-9_*]+)(?:=[^`]*)?`", text))
    names = {name for name in names if not name.endswith(".json")}
    return sorted(name for name in names if name.split(".")[0] in SECTIONS)


def test_the_docs_name_settings():
    assert len(named_settings()) > 60


@pytest.mark.parametrize("setting", named_settings())
def test_a_setting_in_the_docs_exists(setting):
    section, name = setting.split(".")
    if name in ("*", "py"):
        assert section in SECTIONS
    else:
        value_of(setting)


def test_the_paper_index_has_the_papers_of_all_settings_and_formulas():
    cited = set()
    for package in "config algo objective learner controller batching scaling".split():
        for path in (ROOT / "scalerl_jax" / package).glob("*.py"):
            cited |= set(re.findall(r"\b\d{4}\.\d{5}\b", path.read_text()))
    index = PAGES["docs/papers.md"]
    assert len(cited) > 20 and not {each for each in cited if each not in index}
    for name in re.findall(r"`([\w/]*test_\w+\.py)`", index):
        assert (ROOT / "tests" / name).is_file(), name


def paper_rows():
    table = OBJECTIVE.split("## From the paper to the settings")[1].split("\n\n")[1]
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
def test_the_recipe_has_the_numbers_of_the_table(settings, values):
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


def test_the_readme_is_short():
    assert len(README.encode()) <= MOST_BYTES


def test_the_readme_has_every_recipe():
    recipes = {path.stem for path in (ROOT / "configs" / "recipes").glob("*.py")}
    named = README.split("## Recipes")[1].split("\n\n")[2]
    assert set(re.findall(r"`(\w+)`", named)) == recipes


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    links = re.findall(r"\]\(([^):]+)\)", PAGES[page])
    folders = "scalerl_jax|tests|benchmarks|configs|notebooks|docs"
    named = re.findall(rf"`((?:{folders})/[\w/.-]*)`", PAGES[page])
    at = (ROOT / page).parent
    missing = [link for link in links if not (at / link.split("#")[0]).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_targets_that_a_page_names_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)", PAGES[page])) <= set(targets)


def test_the_readme_leads_to_every_page():
    """By itself, or by a page that it leads to."""
    reached, found = set(), {"README.md"}
    while found:
        page = found.pop()
        reached.add(page)
        folder = Path(page).parent
        links = re.findall(r"\]\(((?:[\w-]+/)?[\w-]+\.md)\)", PAGES[page])
        found |= {str(folder / link) for link in links} & PAGES.keys() - reached
    assert {page for page in PAGES if page.startswith("docs/")} <= reached


def test_the_tests_of_what_is_promised_exist():
    table = PAGES["docs/reliability.md"]
    files = re.findall(r"`([\w/]+\.py)`((?:[:,;]? (?:`test_\w+`|\w+=\w+))+)", table)
    assert len(files) > 8
    for file, names in files:
        source = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in source, (file, name)
    assert len(re.findall(r"`test_\w+`", table)) == sum(
        names.count("`test_") for _, names in files
    )


def test_configs_in_the_docs_commands_exist():
    configs = set(re.findall(r"configs/[a-z0-9_/]+\.py", "".join(PAGES.values())))
    assert {"configs/tiny.py", "configs/8b.py"} <= configs
    assert all((ROOT / config).is_file() for config in configs)


def test_contributors_are_told_the_layers_that_are_checked():
    """A line of pyproject.toml is a layer; what stands in one is independent."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    expected = " > ".join(layer.replace(" | ", ", ") for layer in layers)
    text = " ".join(PAGES["CONTRIBUTING.md"].split())
    assert f"Imports go downwards only: {expected}. " in text
