"""The shipped configs on the TPUs they are for, as a Markdown table on stdout:

python -m scalerl_jax.preflight.table
"""

import json
import subprocess
import sys

CASES = (
    ("8b", "v5p:4x4x4"),
    ("8b", "v5e:8x8"),
    ("8b", "v5e:16x16"),
    ("8b", "v6e:8x8"),
    ("8b_32k", "v5p:4x4x4"),
    ("8b_32k", "v6e:8x8"),
    ("32b", "v5p:4x4x8"),
)
HEADER = (
    "| config | topology | learner + sampler devices | fits | limit | train step "
    "| prefill | decode | step, at least | binds |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def row(config: str, answer: dict) -> str:
    """One line; memory in GiB of the fullest device."""
    programs, devices = answer["programs"], answer["devices"]
    memory = " | ".join(
        f"{programs[name]['peak_bytes'] / 2**30:.1f}"
        for name in ("train_step", "prefill", "decode")
    )
    step = programs["train_step"]
    return (
        f"| `{config}.py` | {answer['topology']} | {devices['learner']} + "
        f"{devices['sampler']} | {'yes' if answer['fits'] else 'no'} | "
        f"{answer['hbm_limit_bytes'] / 2**30:.2f} | {memory} | "
        f"{step['roofline_seconds']:.0f} s | "
        f"{step['programs']['accumulate']['roofline']['bound_by']} |\n"
    )


def main() -> int:
    """0 if everything fits."""
    sys.stdout.write(HEADER)
    status = 0
    for config, topology in CASES:
        command = [sys.executable, "-m", "scalerl_jax.preflight", "--json"]
        done = subprocess.run(
            [*command, f"--config=configs/{config}.py", f"--topology={topology}"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.stdout:
            sys.stdout.write(row(config, json.loads(done.stdout)))
            sys.stdout.flush()
        status = max(status, done.returncode)
    return status


if __name__ == "__main__":
    sys.exit(main())
