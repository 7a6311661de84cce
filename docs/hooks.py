"""Runs the commands that the pages show, so that no number or picture in them can be out of date.

* A fenced block of language `keel` holds one command a line. It becomes the command and its output;
  with `--plot generated/NAME.png` also the picture, which lands in `docs/generated`.
* `{{ keel explain kl 0.8,0.2 0.7,0.3 | kl_nats | .4f }}` in the text becomes that number; a key
  may be dotted.
* `{{ metrics }}` becomes the registry of metrics, `{{ rules }}` the doctor's rules,
  `{{ dialects }}` the names of settings in other frameworks, `{{ changelog }}` the project's
  changelog, `{{ walk_through }}` the notebook of `examples` with the outputs that it holds.
* `<!-- commands … -->` and `<!-- python … -->` say how `tests/documentation` runs what a page
  shows: they are left out.
* A picture becomes a link to its file, and may be wider than a small screen.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import posixpath
import re
import shlex
from pathlib import Path
from typing import Any

from keel.cli import main

DOCS = Path(__file__).parent
PICTURES = DOCS / "generated"
BLOCK = re.compile(r"^```keel\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!-- (?:commands|python)\n.*?^-->\n", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r'<img [^>]*?src="([^"]+)"[^>]*>')
CHANGELOG = "{{ changelog }}"
WALK_THROUGH = "{{ walk_through }}"
NOTEBOOK = DOCS.parent / "examples" / "walk_through.ipynb"
INLINE = re.compile(r"\{\{ *keel (.+?) *\| *([\w.]+) *\| *([^ }]+) *\}\}")


def run(command: str) -> str:
    """The output of `keel …`; a command that fails fails the build."""
    args = shlex.split(command)[1:]
    if "--plot" in args:
        place = args.index("--plot") + 1
        args[place] = str(DOCS / args[place])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            status = main(args)
        except SystemExit as stop:  # `--help` of a command
            status = stop.code or 0
    if status != 0:
        raise RuntimeError(f"`{command}` ended with status {status}")
    lines = output.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines if not line.startswith("Picture: "))


def picture_of(command: str) -> str | None:
    args = shlex.split(command)
    return args[args.index("--plot") + 1] if "--plot" in args else None


def cells() -> list[dict[str, Any]]:
    """Return the cells of the notebook."""
    read: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return read


def notebook(here: str) -> str:
    """Return the notebook and the outputs in it as Markdown, for a page in this folder."""
    parts = []
    for cell in cells():
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                place = posixpath.relpath(f"generated/{cell['id']}.png", here or ".")
                parts.append(f"![What the lines above draw]({place})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts)


def draw_notebook() -> None:
    """Write the pictures in the notebook beside those of the commands."""
    for cell in cells():
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                (PICTURES / f"{cell['id']}.png").write_bytes(base64.b64decode(picture))


def on_pre_build(config: Any) -> None:
    """Draw every picture before mkdocs collects its files."""
    PICTURES.mkdir(exist_ok=True)
    draw_notebook()
    excluded = config["exclude_docs"]
    for page in sorted(DOCS.rglob("*.md")):
        if excluded and excluded.match_file(page.relative_to(DOCS).as_posix()):
            continue
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for command in filter(picture_of, block.splitlines()):
                run(command)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace commands by their output."""
    here = posixpath.dirname(page.file.src_uri)

    def block(match: re.Match[str]) -> str:
        parts = []
        for command in match[1].strip().splitlines():
            shown = re.sub(r" --plot \S+", "", command)
            parts.append(f"```text\n$ {shown}\n\n{run(command)}\n```")
            if picture := picture_of(command):
                parts.append(f"![{shown}]({posixpath.relpath(picture, here or '.')})")
        return "\n\n".join(parts)

    def inline(match: re.Match[str]) -> str:
        value = json.loads(run(f"keel {match[1]} --json"))
        for key in match[2].split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return format(value, match[3]).replace("-", "−")

    if CHANGELOG in markdown:  # its links lead from the project's root
        text = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
        markdown = markdown.replace(CHANGELOG, text.replace("](docs/", "]("))
    if WALK_THROUGH in markdown:
        markdown = markdown.replace(WALK_THROUGH, notebook(here))
    if "{{ metrics }}" in markdown:
        from keel.tracking.metrics import documentation

        markdown = markdown.replace("{{ metrics }}", documentation())
    if "{{ rules }}" in markdown or "{{ dialects }}" in markdown:
        from keel.doctor import tables

        markdown = markdown.replace("{{ rules }}", tables.documentation())
        markdown = markdown.replace("{{ dialects }}", tables.settings_documentation())
    return INLINE.sub(inline, BLOCK.sub(block, COMMENT.sub("", markdown)))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Make every picture a link to its file."""
    return IMAGE.sub(r'<a class="picture" href="\1">\g<0></a>', html)
