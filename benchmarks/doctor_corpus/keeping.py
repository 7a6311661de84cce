"""The logs of a half in one small file: numbers to seven digits, what no rule reads left out."""

from __future__ import annotations

import io
import json
import lzma
import math
import re
import shutil
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.doctor_corpus.making import BUILD, RESULT, ROOT
from keel.doctor.reading import needed_names
from keel.tracking.directory import METRICS

CORPUS = ROOT / "docs" / "data" / "doctor" / "corpus"
KEPT = {
    METRICS,
    "config.yaml",
    "environment.json",
    "state.json",
    "last.json",
    "progress.csv",
    "callback.jsonl",
    "settings.json",
    "log.jsonl",
    "trainer_state.json",
    "args.json",
    RESULT,
}
"""Names of the files that are kept of a run."""
_FLOAT = re.compile(r"-?\d+\.\d{7,}(?:[eE][-+]?\d+)?")


def pack(half: str) -> Path:
    """Pack all runs of a half that were made, and return the file.

    Args:
        half: Name of the half.
    """
    source, target = BUILD / half, CORPUS / f"{half}.tar.xz"
    target.parent.mkdir(parents=True, exist_ok=True)
    wanted = set(needed_names())
    made = sorted(path.parent for path in source.rglob(RESULT))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for folder in made:
            for file in sorted(path for path in folder.rglob("*") if path.name in KEPT):
                data = _compact(file, wanted).encode()
                entry = tarfile.TarInfo(str(file.relative_to(source)))
                entry.size = len(data)  # its time stays 0: equal runs make equal files
                archive.addfile(entry, io.BytesIO(data))
    target.write_bytes(lzma.compress(content.getvalue(), preset=9))
    return target


@contextmanager
def unpacked(half: str) -> Iterator[list[Path]]:
    """Unpack a half, and yield the folders of its runs for as long as the block lasts.

    Args:
        half: Name of the half.
    """
    with TemporaryDirectory(prefix="keel-corpus-") as scratch:
        with tarfile.open(CORPUS / f"{half}.tar.xz") as archive:
            archive.extractall(scratch, filter="data")
        yield sorted(path.parent for path in Path(scratch).rglob(RESULT))


def restore_build(half: str) -> None:
    """Put packed runs back to where runs are made, so that they are not made again.

    Args:
        half: Name of the half.
    """
    if not (CORPUS / f"{half}.tar.xz").exists():
        return
    with unpacked(half) as folders:
        for folder in folders:
            job = json.loads((folder / RESULT).read_text())
            path = Path(job["trainer"], job["kind"], job["setup"], f"seed-{job['seed']}")
            target = BUILD / half / path
            if not (target / RESULT).exists():
                shutil.copytree(folder, target, dirs_exist_ok=True)


def _compact(file: Path, wanted: Collection[str]) -> str:
    text = file.read_text()
    if file.name == METRICS:
        return "".join(_line(line, wanted) for line in text.splitlines())
    if file.suffix in (".jsonl", ".csv") or file.name == "trainer_state.json":
        return _FLOAT.sub(lambda match: f"{float(match[0]):.7g}", text)
    return text


def _line(line: str, wanted: Collection[str]) -> str:
    """Return a line of Keel's metrics without its checksum and what no rule reads."""
    row = json.loads(line)
    kept = {k: _rounded(v) for k, v in row.items() if _is_wanted(k, wanted)}
    return json.dumps({"step": row["step"], **kept}, allow_nan=False) + "\n"


def _is_wanted(name: str, wanted: Collection[str]) -> bool:
    return name in wanted or name.rpartition("/")[0] in wanted or name.startswith("env/")


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.7g}")
    return value
