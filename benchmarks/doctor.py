"""Calibrate the doctor on a corpus of healthy runs and planted faults.

    python -m benchmarks.doctor make --half writing [--only NAME…] [--limit-minutes 30]
    python -m benchmarks.doctor judge --half writing
    python -m benchmarks.doctor others --half writing

Rules are written on one half of seeds and kinds, and judged on the other, which is made after the
commit that froze them.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.doctor_corpus.beside import beside
from benchmarks.doctor_corpus.judging import check_order, commit_of_rules, judge
from benchmarks.doctor_corpus.keeping import pack, restore_build
from benchmarks.doctor_corpus.making import BUILD, make
from benchmarks.doctor_corpus.page import DATA, PAGE, save, write
from benchmarks.doctor_corpus.table import HALVES, jobs


def main() -> None:
    args = _arguments().parse_args()
    args.do(args)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=__doc__)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make", help="make the runs that are missing")
    making.add_argument("--half", choices=HALVES, required=True)
    making.add_argument("--only", nargs="*", default=(), help="parts of kind, setup or trainer")
    making.add_argument("--seeds", nargs="*", type=int, help="of the half; all by default")
    making.add_argument("--limit-minutes", type=float, default=600.0)
    making.add_argument("--peers", default=".venv-peers/bin/python", help="Python of the peers")
    making.set_defaults(do=_make)
    judging = commands.add_parser("judge", help="pack the runs, diagnose them, write the table")
    judging.add_argument("--half", choices=HALVES, required=True)
    judging.set_defaults(do=_judge)
    others = commands.add_parser("others", help="the same logs through other tools")
    others.add_argument("--half", choices=HALVES, required=True)
    others.add_argument("--python", default=".venv-doctors/bin/python", help="of `make doctors`")
    others.set_defaults(do=_others)
    return parser


def _make(args: argparse.Namespace) -> None:
    chosen = [
        job
        for job in jobs(args.half)
        if (not args.only or any(part in job.path for part in args.only))
        and (not args.seeds or job.seed in args.seeds)
    ]
    restore_build(args.half)
    failed = make(chosen, args.half, args.peers, args.limit_minutes)
    raise SystemExit(1 if failed else 0)


def _judge(args: argparse.Namespace) -> None:
    if (BUILD / args.half).exists():
        file = pack(args.half)
        print(f"{file}: {file.stat().st_size:,} bytes")
    judged, seconds = judge(args.half)
    rules = commit_of_rules()
    if args.half == "judged":
        check_order(judged, rules)
    write(args.half, judged, seconds, rules)
    print(PAGE.read_text())


def _others(args: argparse.Namespace) -> None:
    judged, _ = judge(args.half)
    data = json.loads(DATA.read_text())
    data[args.half]["others"] = beside(args.half, args.python, judged)
    save(data)
    print(json.dumps(data[args.half]["others"], indent=1))


if __name__ == "__main__":
    main()
