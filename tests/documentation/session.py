"""Run what one page shows, in a folder of its own, from top to bottom."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro

from keel.cli import COMMANDS, main

from .pages import ROOT, Rule, Step

FLAGS = re.compile(r"(?P<slow>slow)? *(?P<flags>--.*)?")
SKIP = re.compile(r"(?P<how>parsed|not run): *(?P<reason>\S.*)")


class Parsed(BaseException):
    """Stop of a command once its arguments are understood.

    No `Exception`: the command line would report it as an unexpected error.
    """


@dataclass(frozen=True)
class Plan:
    """How a command is run: `run`, `slow`, `parsed` or `not run`, and the command itself."""

    how: str
    command: str


def plan(step: Step) -> Plan:
    """Return how a step is run by the rules of its page."""
    command = replace(step)
    fitting = [rule for rule in step.rules if _fits(rule, step.text)]
    if not fitting or "--help" in command:
        return Plan("run", command)
    how = max(enumerate(fitting), key=lambda pair: (len(pair[1].what), pair[0]))[1].how
    if skipped := SKIP.fullmatch(how):
        return Plan(skipped["how"], command)
    added = FLAGS.fullmatch(how)
    if added is None:
        raise ValueError(f"line {step.line}: neither flags nor a way to run a command: {how!r}")
    return Plan(added["slow"] or "run", f"{_bare(command)} {added['flags'] or ''}".strip())


def _fits(rule: Rule, command: str) -> bool:
    return rule.is_for_commands and f"{command} ".startswith(f"{rule.what} ")


def replace(step: Step) -> str:
    """Return the text of a step with the page's placeholders filled in."""
    text = step.text
    for rule in sorted(step.rules, key=lambda rule: -len(rule.what)):
        if not rule.is_for_commands and rule.what != "yaml":
            text = re.sub(rf"(?<!\w){re.escape(rule.what)}(?!\w)", lambda _, r=rule: r.how, text)
    return text


def _bare(command: str) -> str:
    """Return a line without the comment behind it."""
    return re.sub(r"\s+#\s.*$", "", command)


@dataclass
class Session:
    """Runner of the steps of one page.

    Args:
        folder: Where runs and files are left.
        monkeypatch: Enters the folder, and stops commands that are only parsed.
        output: Where commands print to.
    """

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    output: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "documentation"}
        self.done: set[str] = set()
        self.monkeypatch.chdir(self.folder)
        self.monkeypatch.syspath_prepend(str(self.folder))  # as `python -m` has it
        (self.folder / "generated").mkdir()

    def close(self) -> None:
        """Forget the modules that the page wrote: another page may have one of the same name."""
        folder = str(self.folder)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(folder):
                del sys.modules[name]

    def run(self, step: Step, slow: bool) -> None:
        """Run one step, unless it is slow and slow ones are not asked for.

        Raises:
            AssertionError: The step failed.
        """
        if step.kind == "python":
            exec(compile(replace(step), f"line {step.line}", "exec"), self.names)
        elif step.kind == "yaml":
            self._write(step)
        elif step.kind == "number":
            self._number(step)
        elif step.kind == "name":
            assert step.text in COMMANDS, f"line {step.line}: no such command: {step.text}"
        else:
            planned = plan(step)
            wanted = planned.how != "not run" and (slow or planned.how != "slow")
            if wanted and planned.command not in self.done:
                self._command(step, planned)
            self.done.add(planned.command)

    def _write(self, step: Step) -> None:
        names = [rule.how for rule in step.rules if rule.what == "yaml"]
        assert names, f"line {step.line}: a YAML block that nothing reads: add `yaml | FILE`"
        Path(names[-1]).write_text(replace(step), encoding="utf-8")

    def _number(self, step: Step) -> None:
        command, _, key = step.text.rpartition(" | ")
        self.output.readouterr()
        self._keel(step, command)
        value = json.loads(self.output.readouterr().out)
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert isinstance(value, int | float), f"line {step.line}: {key} is no number"

    def _command(self, step: Step, planned: Plan) -> None:
        program = planned.command.split(" ")[0]
        if program == "make":
            self._make(step, planned.command)
        elif planned.command.startswith("python -m benchmarks"):
            self._benchmark(step, planned.command)
        elif program == "keel" and planned.how == "parsed":
            self._parse(step, planned.command)
        elif program == "keel":
            self._keel(step, planned.command)
        else:
            raise AssertionError(f"line {step.line}: neither run nor marked `not run`: {step.text}")

    def _keel(self, step: Step, command: str) -> None:
        words = shlex.split(command, comments=True)[1:]
        try:
            status = main(words)
        except SystemExit as stop:  # `--help`, and arguments that tyro does not know
            status = stop.code
        if status:
            captured = self.output.readouterr()
            raise AssertionError(
                f"line {step.line}: `{command}` ended with status {status}\n"
                f"{captured.out[-1_000:]}{captured.err[-1_000:]}"
            )

    def _parse(self, step: Step, command: str) -> None:
        parse = tyro.cli

        def stop(*args: Any, **options: Any) -> None:
            parse(*args, **options)
            raise Parsed

        with self.monkeypatch.context() as patch, contextlib.suppress(Parsed):
            patch.setattr(tyro, "cli", stop)
            self._keel(step, command)
            raise AssertionError(f"line {step.line}: {command}: its arguments were not parsed")

    def _make(self, step: Step, command: str) -> None:
        """Let make say what it would do: the targets exist."""
        words = shlex.split(command, comments=True)
        done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"line {step.line}: {command}: {done.stderr}"

    def _benchmark(self, step: Step, command: str) -> None:
        """Let a benchmark parse its arguments: they measure for minutes to hours."""
        words = shlex.split(command, comments=True)[2:]
        parse = argparse.ArgumentParser.parse_args

        def stop(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
            parse(parser, *args, **options)
            raise Parsed

        module = importlib.import_module(words[0])
        with self.monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
            patch.setattr(sys, "argv", words)
            with pytest.raises((Parsed, SystemExit)) as stopped:
                module.main()
        status = getattr(
            stopped.value, "code", 0
        )  # argparse ends `--help` and bad arguments itself
        assert not status, f"line {step.line}: {command}: status {status}"
