"""Pages of the site beside those of docs/: linked sources, commands, Python.

mkdocs calls the functions `on_...` (mkdocs.yml names this file).  A link from a page to
a file outside docs/ becomes a link to a page of the site with that file's text, so the
site needs no address of a repository.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from scalerl_jax.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PICTURES = (".png", ".svg")
WITH_LINKS = (".md", ".ipynb")
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".toml": "toml"}
API = ("algo", "contract", "environments", "run", "scaling")
SUBCOMMANDS = {"data": ("list", "prepare", "inspect", "difficulty")}
LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WORKER = "iframe-worker.js"  # see third_party/iframe_worker/README.md
# What a page loads by itself: scripts, styles and pictures.
FETCHED = re.compile(
    r"""<(?:script|link|img)\b[^>]*\b(?:src|href)=["']?(https?://[^"' >]+)"""
)
BADGE = re.compile(r"!\[([^\]]+)\]\(https?://[^)\s]+\)")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    pages = dict(sources(texts_of(files)))
    pages["reference/commands.md"] = commands_page()
    pages |= {f"api/{name}.md": api_page(name) for name in API}
    pages[f"site/{WORKER}"] = ROOT / "third_party" / "iframe_worker" / WORKER
    for place, content in pages.items():
        if isinstance(content, Path):
            files.append(File.generated(config, place, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, place, content=content))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that fetches something from another site."""
    if found := FETCHED.search(output):
        raise RuntimeError(f"{page.file.src_uri} fetches {found[1]}; serve a copy")
    return output


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at the pages of the site."""
    here = page.file.src_uri
    if (at := origin(here)) is None:
        return markdown

    def point(found: re.Match[str]) -> str:
        target = resolved(at, found["path"])
        if target is None:
            return found[0]
        to = posixpath.relpath(place_of(target), posixpath.dirname(here) or ".")
        return f"{found['before']}{to}{found['anchor'] or ''}"

    return LINK.sub(point, markdown)


# -- files outside docs/ ---------------------------------------------------------------


def texts_of(files: Files) -> dict[str, str]:
    """Return the pages of docs/ by their paths in the repository."""
    return {
        f"docs/{file.src_uri}": Path(file.abs_src_path or "").read_text()
        for file in files.documentation_pages()
    }


def sources(texts: dict[str, str]) -> Iterator[tuple[str, str | Path]]:
    """Yield a page, or a picture, for each file that these texts link to, and so on."""
    waiting = [target for at, text in texts.items() for target in linked(at, text)]
    waiting += ALWAYS
    seen = set()
    while waiting:
        target = waiting.pop()
        if target in seen or target.startswith("docs/"):
            continue
        seen.add(target)
        file = ROOT / target
        if file.suffix in PICTURES:
            yield place_of(target), file
            continue
        page = source_page(target)
        yield place_of(target), HIDDEN + page
        if file.suffix in WITH_LINKS:
            waiting += linked(target, page)


def linked(at: str, text: str) -> list[str]:
    """Return the files of the repository that a page links to."""
    found = [resolved(at, link["path"]) for link in LINK.finditer(FENCE.sub("", text))]
    return [each for each in found if each is not None]


def resolved(at: str, path: str) -> str | None:
    """Return the path in the repository of a link in the page `at`; None: no file."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(at), path))
    if target.startswith("..") or not (ROOT / target).exists():
        return None
    readme = f"{target}/README.md"
    return readme if (ROOT / readme).is_file() else target


def place_of(target: str) -> str:
    """Return where a file of the repository is in the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    plain = target.endswith((".md", *PICTURES))
    return f"source/{target}" if plain else f"source/{target}.md"


def origin(place: str) -> str | None:
    """Return the file of the repository that a page of the site shows."""
    if not place.startswith("source/"):
        return f"docs/{place}"
    path = place.removeprefix("source/")
    if path.endswith(".ipynb.md"):
        path = path.removesuffix(".md")
    return path if (ROOT / path).exists() else None


def source_page(target: str) -> str:
    """Return the page of a file or folder."""
    file = ROOT / target
    if file.suffix == ".md":
        return file.read_text()
    title = f"# {target}\n\n"
    if file.is_dir():
        return title + "".join(f"- `{each.name}`\n" for each in sorted(file.iterdir()))
    if file.suffix == ".ipynb":
        cells = json.loads(file.read_text())["cells"]
        return title + "\n\n".join(map(cell_text, cells))
    return (
        f"{title}~~~~{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n~~~~\n"
    )


def cell_text(cell: dict[str, Any]) -> str:
    """Return a notebook's cell as Markdown, without outputs; badges become words."""
    text = BADGE.sub(r"\1", "".join(cell["source"]))
    return f"~~~~python\n{text}\n~~~~" if cell["cell_type"] == "code" else f"#{text}"


# -- commands and Python ---------------------------------------------------------------


def commands_page() -> str:
    """Return the help of every command, as the command prints it."""
    names = [(name,) for name in COMMANDS]
    names += [(name, each) for name, more in SUBCOMMANDS.items() for each in more]
    names.sort()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list(pool.map(help_of, names))
    sections = [
        f"## scalerl {' '.join(words)}\n\n~~~~text\n{text}\n~~~~\n"
        for words, text in zip(names, texts, strict=True)
    ]
    return (
        "# Commands\n\nWhat `scalerl COMMAND --help` prints. The settings of a run, "
        "which `scalerl train --help` lists too, are in [settings](../settings.md).\n\n"
        + "\n".join(sections)
    )


def help_of(words: tuple[str, ...]) -> str:
    """Return what a command prints with --help; of `train` without the settings."""
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax", *words, "--help"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "88", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"scalerl {' '.join(words)} --help: {done.stderr}")
    text = done.stdout.replace("python -m scalerl_jax.", "scalerl ").strip()
    return text.split("\n\nA whole run.")[0] if words == ("train",) else text


def api_page(name: str) -> str:
    """Return the reference of a module, or of all public modules of a package."""
    place = ROOT / "scalerl_jax" / name
    modules = [f"scalerl_jax.{name}"]
    modules += [
        f"scalerl_jax.{name}.{file.stem}"
        for file in sorted(place.glob("*.py"))
        if not file.stem.startswith("_")
    ]
    blocks = "\n\n".join(f"::: {module}" for module in modules)
    return f"# scalerl_jax.{name}\n\n{blocks}\n"
