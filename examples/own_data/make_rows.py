"""Questions in three forms: JSON lines, Parquet, and verl's Parquet.

python examples/own_data/make_rows.py runs/rows
"""

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def make_questions(count: int) -> list[tuple[str, str]]:
    """Return sums and their answers, in the words of the tiny policy's training."""
    random.seed(0)
    pairs = [(random.randint(1, 99), random.randint(1, 99)) for _ in range(count)]
    ask = "State the final answer to the following arithmetic problem: {} + {} ="
    return [(ask.format(a, b), str(a + b)) for a, b in pairs]


def main() -> None:
    """Write the three files into the directory of the command line."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    rows = make_questions(400)
    lines = [json.dumps({"question": ask, "answer": answer}) for ask, answer in rows]
    (directory / "sums.jsonl").write_text("\n".join(lines) + "\n")
    plain = [{"problem": ask, "solution": answer} for ask, answer in rows]
    pq.write_table(pa.Table.from_pylist(plain), directory / "sums.parquet")
    verl = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": ask}],
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
        for ask, answer in rows
    ]
    pq.write_table(pa.Table.from_pylist(verl), directory / "verl.parquet")


if __name__ == "__main__":
    main()
