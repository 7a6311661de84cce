"""The commands and examples that README, CONTRIBUTING and the documentation show, in their order.

Commands are the lines of a fenced block without a language, lines of any other block that begin
with `keel`, `make` or `python`, and such code in the text. How they are run stands in `USUAL`, and
in comments of a page that no reader sees; a comment holds for what comes after it, one rule a line:

    <!-- commands
    keel train        | --total-steps 64         commands that begin so get these flags as well
    keel tune         | slow --trials 1          and run with the slow tests only
    keel bench        | parsed: needs a peer     the arguments are parsed, the command is not run
    curl              | not run: needs a server  nothing is done
    runs/NAME         | runs/first               text of commands and examples is replaced
                      | keel train CartPole-v1   run here, and not shown
    yaml              | plan.yaml                YAML blocks are written into this file
    -->

The longest prefix that fits a command counts, and of equals the last. Without a rule a command is
run as it stands: one that cannot be run has to say so. `<!-- python … -->` is an example that no
reader sees. What a page writes is there for its later steps, and for no other page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("keel", "make", "python", "pip", "curl", "git", "cd", "source")
HISTORY = ("changelog.md",)
"""Pages that tell what was: their commands are those of older versions."""
USUAL = """
keel train | --total-steps 64 --rollout-steps 16 --envs.num 2 --region.minibatch 32 \
             --evaluation.episodes 1
keel train Breakout | --total-steps 16 --rollout-steps 8 --envs.num 1 --region.minibatch 8 \
                      --evaluation.episodes 1 --evaluation.max-episode-steps 20
keel train language | --total-steps 8 --sample.prompts 2 --sample.group 2 --evaluation.prompts 2 \
                      --model.hidden 32 --model.layers 1 --model.heads 2 --no-control \
                      --warmup.examples 8 --warmup.epochs 1 --warmup.minibatch 4
keel evaluate | --episodes 1
keel demos record | --episodes 1
keel land | --maps 1
keel serving headroom | --seeds 2 --requests 40
keel serving judge | --seeds 2 --requests 40
keel ablate | --dry-run
keel tune | slow --trials 1 --total-steps 64
keel case | parsed: minutes; tests/learning/test_cases.py runs every case, shortened
keel bench | parsed: needs the environment of the peers
keel route | parsed: serves until it is stopped
"""
"""How commands are run where their page says nothing else: as they stand, but small."""
BLOCK = re.compile(r"^( *)```([^\n`]*)\n(.*?)^ *```[ \t]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!-- (commands|python)\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\{\{ *(keel .+?) *\| *([\w.]+) *\|[^}]*\}\}")
SPAN = re.compile(r"(?<!`)`((?:keel|make|python -m) [^`]+)`(?!`)")
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
TOKEN = re.compile(
    "|".join(f"(?P<{name}>{pattern.pattern})" for name, pattern in (
        ("comment", COMMENT), ("block", BLOCK), ("number", NUMBER), ("span", SPAN),
    )),
    re.MULTILINE | re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One line of a comment: what it applies to, and how it changes that."""

    what: str
    how: str

    @property
    def is_for_commands(self) -> bool:
        """Return whether it says how a command is run, and is no replacement."""
        return re.match(r"--|slow\b|parsed:|not run:", self.how) is not None


@dataclass(frozen=True)
class Step:
    """One thing a page asks for: a command, an example in Python, or a file.

    Attributes:
        kind: `command`, `name` (of a command, in the text), `number` (a value that the page
            computes), `python`, `yaml`.
        text: As a reader sees it.
        line: Where in the page.
        rules: The usual ones, and those of the comments before it.
    """

    kind: str
    text: str
    line: int
    rules: tuple[Rule, ...] = field(default=(), repr=False)


def pages() -> list[Path]:
    """Return every page whose commands are checked: parts that pages include are read with them."""
    docs = ROOT / "docs"
    included = docs / "data"
    chapters = [
        page
        for page in sorted(docs.rglob("*.md"))
        if included not in page.parents and page.name not in HISTORY
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *chapters]


def read_page(page: Path) -> str:
    """Return the text of a page with what it includes."""
    text = page.read_text(encoding="utf-8")
    return SNIPPET.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), text)


def steps(text: str) -> Iterator[Step]:
    """Yield what a page asks for, from top to bottom."""
    rules = tuple(_rules(USUAL))
    for match in TOKEN.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        comment = COMMENT.fullmatch(match["comment"] or "")
        if comment is None:
            for kind, code, below in _pieces(match):
                yield Step(kind, code, line + below, rules)
        elif comment[1] == "python":
            yield Step("python", comment[2], line, rules)
        else:
            new = _rules(comment[2])
            rules += tuple(rule for rule in new if rule.what)
            yield from (Step("command", rule.how, line, rules) for rule in new if not rule.what)


def _rules(text: str) -> list[Rule]:
    lines = [line for line in text.replace("\\\n", "").splitlines() if line.strip()]
    for line in lines:
        if "|" not in line:
            raise ValueError(f"a rule for commands needs a `|`: {line}")
    return [Rule(*(" ".join(part.split()) for part in line.split("|", 1))) for line in lines]


def _pieces(match: re.Match[str]) -> Iterator[tuple[str, str, int]]:
    """Yield kind, code and line within the match."""
    if match["span"]:
        words = [word for word in match["span"].strip("`").split() if word != "…"]
        if words[0] == "keel" and len(words) == 2 and not words[1].startswith("-"):
            yield "name", words[1], 0
        else:
            yield "command", " ".join(words), 0
    elif match["number"]:
        number = NUMBER.fullmatch(match["number"])
        assert number is not None
        yield "number", f"{number[1]} --json | {number[2]}", 0
    else:
        block = BLOCK.fullmatch(match["block"])
        assert block is not None
        language, body = block[2].strip(), block[3]
        if language in ("python", "yaml"):
            yield language, body, 0
        else:
            yield from _commands(language, body)


def _commands(language: str, body: str) -> Iterator[tuple[str, str, int]]:
    """Yield the command lines of a block: all of one without a language, or those with a prompt."""
    prompts = re.search(r"^\$ ", body, re.MULTILINE) is not None
    for below, line in enumerate(body.splitlines(), start=1):
        if prompts:
            is_command = line.startswith("$ ")
        else:
            program = line.strip().split(" ")[0]
            is_command = language == "" or program in PROGRAMS
        if is_command and line.strip():
            yield "command", line.removeprefix("$ ").strip(), below
