"""`Basis`: which inputs of a simulation were measured, and which were assumed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.planning.rates import EXPECTED
from scalerl_jax.simulate.lengths import SimulatedLengths
from scalerl_jax.simulate.rates import HOSTS_S, Rates


@dataclasses.dataclass(frozen=True)
class Basis:
    """Phrases that describe measured and assumed inputs, for text and JSON."""

    measured: list[str]
    assumed: list[str]

    def text(self) -> str:
        """Return the phrases as lines of text."""
        lines = []
        for kind, said in dataclasses.asdict(self).items():
            lines += [f"{kind}:", *(f"  - {each}" for each in said or ["nothing"])]
        return "\n".join(lines) + "\n"


def basis_of(
    said: Mapping[str, Any], rates: Rates | None, lengths: SimulatedLengths
) -> Basis:
    """Return the basis of a simulation.

    Args:
        said: the command's flags.
        rates: those of a file; None: closed forms.
        lengths: those of completions.
    """
    found = Basis([], [])
    _of_machine(said, rates, found)
    _of_lengths(said, lengths, found)
    share = said["zero_variance"]
    found.assumed.append(
        f"prompts of {said['prompt_tokens']:,.0f} tokens (--prompt_tokens), "
        f"{share:.0%} of the groups without a gradient (--zero_variance)"
    )
    for who in ("replica", "learner"):
        hours, start = said[f"{who}_mtbf_h"], said[f"{who}_start_s"]
        lost = f"lost every {hours:g} h and back after {start:g} s"
        found.assumed.append(f"a {who} is {lost if hours else 'never lost'}")
    return found


def _of_machine(said: Mapping[str, Any], rates: Rates | None, found: Basis) -> None:
    if rates is None:
        hosts = ", ".join(f"{name} {each:g} s" for name, each in HOSTS_S.items())
        found.assumed.append(
            f"seconds of {said['topology']} by closed forms, none measured on a TPU: a "
            f"train step at {EXPECTED.flops:.0%} of the peak, decoding at "
            f"{EXPECTED.bandwidth:.0%} of the memory's bandwidth, "
            f"{1e6 * EXPECTED.collective_s:.2g} us a collective; {hosts}"
        )
        return
    fields = dataclasses.fields(Rates)
    absent = [each.name for each in fields if getattr(rates, each.name) == 0]
    there = [each.name for each in fields if each.name not in absent]
    found.measured.append(f"{', '.join(there)}, as {said['rates']} says")
    if absent:
        found.assumed.append(f"0 s for rates that it omits: {', '.join(absent)}")


def _of_lengths(
    said: Mapping[str, Any], lengths: SimulatedLengths, found: Basis
) -> None:
    between = f"{lengths.alike:.0%} of their variance between prompts (--alike)"
    drift = (
        f"a mean that changes by the same factor each step, to {lengths.drift:g} times "
        f"its start (--drift)"
    )
    law = (
        f"completions of {lengths.mean_tokens:,.0f} tokens on average, 99th percentile "
        f"{lengths.tail:.3g} times the median"
    )
    if lengths.measured:
        found.measured.append(f"lengths of completions, in {said['lengths']}")
        found.assumed.append(f"lengths with {drift}")
    elif said["lengths"]:
        run = Path(said["lengths"])
        found.measured.append(f"{law}, in the run {run}")
        found.assumed.append(f"lengths with {between} and {drift}")
    else:
        found.assumed.append(f"{law} (--mean_tokens, --tail), {between}, and {drift}")
