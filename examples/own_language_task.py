"""A language task that reads its own JSONL, and PPO on it.

python own_language_task.py [COMPLETIONS]
"""

import json
import sys
from pathlib import Path

import keel
from keel.apps.language import Example

LINES = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


class Questions:
    """Prompts and answers of a file, one JSON object a line; right is what equals the answer."""

    name, max_new_tokens, stop = "questions", 4, None

    def __init__(self, path: str = "questions.jsonl") -> None:
        self.lines = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def example(self, rng):
        line = self.lines[rng.integers(len(self.lines))]
        return Example(line["prompt"], line["answer"], line)

    def verify(self, example, completion: str) -> float:
        return float(completion == example.answer)


if __name__ == "__main__":
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_280
    run = keel.train("language", task=Questions, total_steps=steps, control=False,
                     warmup={"examples": 64, "epochs": 20}, evaluation={"prompts": 10})  # fmt: skip
    print(run, "solved:", run.metrics["rollout/success"][-1])
