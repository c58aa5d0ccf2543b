"""Every number that a run writes, with its unit and meaning.

`python -m scalerl_jax.run.metric_table` prints docs/metrics.md (`make metrics-table`).
A part in capitals stands for names of the run: `pass_rate/TASK`.  The tests look up
every number of every run that they make.
"""

import itertools
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

from scalerl_jax.run.directory import EVALS_FILE, METRICS_FILE

_NAME = re.compile(r"[A-Z]+(?=/|$|_share)")


class Metric(NamedTuple):
    """A number of a row."""

    name: str
    unit: str  # "": a plain number
    meaning: str


def _metrics(text: str) -> tuple[Metric, ...]:
    """Return the metrics of a table: name | unit | meaning, a line for each."""
    lines = (line for line in text.strip().splitlines() if line)
    return tuple(Metric(*(part.strip() for part in line.split("|"))) for line in lines)


# By heading: rows of metrics.jsonl, one for each optimizer step.
STEPS: dict[str, tuple[Metric, ...]] = {
    "Objective": _metrics(
        """
step | optimizer steps | the step that the row is of, from 1
loss | | loss of the batch, regularisers included
grad_norm | | norm of the gradient before clipping
grad_cosine | | its cosine with Adam's mean of those before; 0: there is none
entropy | nats | mean entropy of the policy at the trained tokens
train/tokens | tokens | trained tokens of the batch
train/rows | rows | of the step, in a warm start
train/epoch | passes | passes over the batch, or over a warm start's rows, before it
train/learning_rate | | learning rate of the step
train/skipped_steps | optimizer steps | steps skipped since the start of this process
ratio/mean | | mean importance ratio of the trained tokens
ratio/max | | largest importance ratio
ratio/capped_share | share | tokens whose ratio, or whose sequence's, is above the cap
ratio/clipped_share | share | tokens with an advantage that a clip leaves no gradient
ratio/effective_sample_size | share | (sum ratio)^2 / (tokens * sum ratio^2)
mismatch/mean_abs | nats | mean difference of sampler and learner at equal version
mismatch/max_abs | nats | largest such difference
mismatch/kl | nats | KL divergence of the two, estimated at the sampled tokens
mismatch/tokens | tokens | tokens that these three are over
kl/mean | nats | mean estimate of the KL to the reference
teacher/kl | nats | mean of log policy - log teacher at the policy's tokens
proximal/mean_abs | nats | mean difference of sampler and policy at the window's start
proximal/capped_share | share | tokens whose correction for it is truncated
value/loss | | loss of the critic
value/grad_norm | | norm of its gradient before clipping
value/grad_cosine | | likewise, of the critic
value/mean | | mean value
value/clipped_share | share | tokens whose value the clip bounds
value/explained_variance | share | variance of returns that old values explain
experts/max_load | | largest load of an expert; 1: all are chosen equally
experts/mean_max_load | | largest load in a layer, mean over layers
experts/dead | experts | experts of all layers that no token of the batch chose
"""
    ),
    "Rewards and completions": _metrics(
        """
reward/mean | | mean reward of the judged rollouts
reward/NAME | | mean of one part of the reward
reward/NAME/unjudged_share | share | rollouts without a value of this part
pass_rate/mean | share | mean pass rate of the groups
pass_rate/TASK | share | the same over the prompts of one task
group/zero_variance_share | share | groups whose rewards are all equal
group/generated | groups | groups that the batch was made of, refills included
group/with_variance | groups | those with different rewards
completion/mean_tokens | tokens | mean length of a completion
completion/max_tokens | tokens | longest completion
completion/limit_tokens | tokens | limit of the newest completions
completion/cut_off_share | share | completions that ended at the limit, without EOS
completion/interrupted_share | share | completions whose thinking was ended
episode/mean_turns | turns | sampled turns of an episode
episode/sampled_share | share | tokens of episodes that the policy sampled
"""
    ),
    "Verdicts": _metrics(
        """
verifier/no_answer_share | share | rollouts without an answer
verifier/unparsable_share | share | rollouts whose answer cannot be read
verifier/too_costly_share | share | rollouts whose answer takes too long to judge
verifier/timeout_share | share | rollouts without a verdict in time
verifier/error_share | share | rollouts whose verifier failed
verifier/bad_reward_share | share | rollouts whose reward is no finite number
verifier/bad_observation_share | share | episodes with an observation of no use
verifier/no_end_share | share | episodes that their environment did not end
verifier/unjudged_share | share | rollouts without a verdict (`reward.unjudged`)
verifier/restarts | processes | verifier processes that were replaced
"""
    ),
    "Staleness and queue": _metrics(
        """
staleness/mean | optimizer steps | mean staleness of the groups
staleness/max | optimizer steps | largest staleness
staleness/in_flight_mean | optimizer steps | its part until the last token was sampled
staleness/in_flight_max | optimizer steps | largest such part
staleness/queued_mean | optimizer steps | its part after that
staleness/queued_max | optimizer steps | largest such part
queue/buffered | groups | finished groups that wait
queue/running | groups | groups that are sampled or judged
queue/dropped | groups | groups given up since the start
queue/bad_groups | groups | groups refused since the start, and sampled again
data/retired_prompts | prompts | prompts that are not sampled again
data/open_tasks | tasks | levels that are open; with `data.next_task_at`
"""
    ),
    "Time and throughput": _metrics(
        """
time/step_s | s | from the row before to this one
time/wait_s | s | the loop's wait for groups, since the row before
time/annotate_s | s | scores of windows, such as the reference's, since the row before
time/train_s | s | the optimizer step
throughput/generated_tokens_per_s | tokens/s | tokens sampled since the row before
throughput/trained_tokens_per_s | tokens/s | tokens of rows over `time/train_s`
idle/POOL_share | share | time since the row before in which the pool was idle
"""
    ),
    "Compute, since the run began": _metrics(
        """
compute/charged_chip_hours | chip-hours | all but startup and evaluation
compute/startup_chip_s | chip-s | loading and compiling
compute/generate_chip_s | chip-s | sampling that led to gradients
compute/wasted_chip_s | chip-s | sampling that led to none
compute/train_chip_s | chip-s | optimizer steps
compute/publish_chip_s | chip-s | weights on their way to generators
compute/verify_chip_s | chip-s | wait for verdicts while nothing else ran
compute/eval_chip_s | chip-s | evaluations
compute/checkpoint_chip_s | chip-s | wait for checkpoints
compute/idle_chip_s | chip-s | nothing
compute/lost_chip_s | chip-s | work that a kill undid
compute/generated_tokens | tokens | sampled
compute/wasted_tokens | tokens | sampled without leading to a gradient
compute/train_tokens | tokens | trained
compute/lost_tokens | tokens | sampled, and lost with a kill
compute/train_flops | FLOPs | of the learner
compute/generate_flops | FLOPs | of the sampler
compute/teacher_flops | FLOPs | of the teacher
compute/asked_teacher_tokens | tokens | scored by the endpoint of a teacher
compute/lost_flops | FLOPs | lost with a kill
"""
    ),
    "Sampler, since the process began": _metrics(
        """
sampler/calls | calls | calls of the decoder
sampler/chunks | calls | calls of prefill
sampler/prefilled_tokens | tokens | prompt tokens put into the cache
sampler/prefix_hit_tokens | tokens | tokens of prompts and turns found in the cache
sampler/prefill_context | tokens | sum of tokens attended to in prefill
sampler/prefixes_dropped | prompts | cached prompts made again
sampler/suspended | sequences | sequences that gave their pages back for a while
sampler/recomputed_tokens | tokens | tokens cached again under new params
sampler/failed | sequences | sequences whose logits were not finite
sampler/generated_tokens | tokens | sampled
sampler/generated_context | tokens | sum of tokens attended to by sampled ones
sampler/wasted_tokens | tokens | sampled, and part of no completion
sampler/pages_in_use | pages | pages of the cache in use
sampler/peak_pages | pages | most pages in use
sampler/tokens_held | tokens | tokens in the cache
sampler/peak_tokens_held | tokens | most tokens in the cache
"""
    ),
    "Several processes": _metrics(
        """
replicas/up | replicas | replicas that work
replicas/oldest_version | version | oldest version that one samples with
replicas/lost | replicas | replicas lost since the start
replicas/left | replicas | replicas that left in order
replicas/reissued | groups | groups begun again elsewhere
replicas/late | groups | groups refused for coming after another took their place
replicas/refused | versions | publications that a replica refused
learner/restarts | restarts | restarts of the learner's processes
learner/batch_bytes | bytes | sent to and from learner processes so far
learner/kept_bytes | bytes | batches since the last checkpoint, in the controller
publish/bytes | bytes | of the last publication
publish/seconds | s | of the last publication
publish/changed_share | share | weights that the last publication changed
"""
    ),
}
# Rows of evals.jsonl, one for each evaluation.
EVALS = _metrics(
    """
step | optimizer steps | steps before the evaluation
policy_version | optimizer steps | the same
compute_chip_hours | chip-hours | `compute/charged_chip_hours` at that step
train_tokens | tokens | trained until then
generated_tokens | tokens | sampled until then
train_flops | FLOPs | of the learner until then
pass_rate | share | mean pass rate of the held-out prompts
pass_rate_se | share | its standard error over prompts; null for fewer than two
pass_rate/TASK | share | the same over the prompts of one task
prompt_pass_rates | share | pass rate of each prompt, a list in a fixed order
reward_mean | | mean reward of the judged samples
reward/NAME | | mean of one part of the reward
reward/NAME/unjudged_share | share | samples without a value of this part
num_prompts | prompts | prompts with a judged sample
samples_per_prompt | samples | completions of each prompt
cut_off_share | share | samples that ended at the limit, without EOS
interrupted_share | share | samples whose thinking was ended
no_answer_share | share | samples without an answer
unjudged_share | share | samples without a verdict
too_costly_share | share | samples whose answer takes too long to judge
unjudged_prompts | prompts | prompts without a judged sample
mean_completion_tokens | tokens | mean length of a completion
mean_turns | turns | sampled turns of an episode
mismatch/mean_abs | nats | mean difference of sampler and learner at equal version
mismatch/max_abs | nats | largest such difference
mismatch/kl | nats | KL divergence of the two, estimated at the sampled tokens
mismatch/tokens | tokens | tokens that these three are over
"""
)
# Numbers for TensorBoard alone: `scaling.live`, or `scalerl watch`.
LIVE = _metrics(
    """
scaling/actual | share | pass rate of the last evaluation
scaling/predicted | share | what the evaluations before it foretold
scaling/predicted_low | share | lower end of its band
scaling/predicted_high | share | upper end of its band
scaling/alarm | 0 or 1 | whether an alarm was raised
scaling/forecast | share | pass rate foretold at the end of the run
scaling/forecast_low | share | lower end of its band
scaling/forecast_high | share | upper end of its band
scaling/identified | 0 or 1 | whether the fit identifies A
scaling/A | share | asymptote of the fit
scaling/A_low | share | lower end of its interval
scaling/A_high | share | upper end of its interval
scaling/B | | exponent of the fit
scaling/C_mid | as the x axis | midpoint of the fit
"""
)

# All metrics of a file.
TABLES = {METRICS_FILE: tuple(itertools.chain(*STEPS.values())), EVALS_FILE: EVALS}

_HEAD = """# Metrics

Made by `make metrics-table` from `scalerl_jax/run/metric_table.py`.  [Exact
meanings](terms.md) has the words.  A share is from 0 to 1.  A name in capitals stands
for names of the run.  What has no meaning in a run is not in its rows: `kl/mean`
without a reference, `value/...` without a critic, `experts/...` without a mixture,
`replicas/...` without Ray.

TensorBoard and Weights & Biases have the same names, those of `evals.jsonl` behind
`eval/`.  TensorBoard shows five of them again under `Run/`, and four histograms of each
batch: `completion/tokens`, `reward`, `staleness` and `pass_rate/of_prompts`.
"""


def find(name: str, file: str) -> Metric | None:
    """Return the metric of this name in a file of a run; None: it is in no table."""
    for metric in TABLES[file]:
        pattern = _NAME.sub(".+", re.escape(metric.name))
        if re.fullmatch(pattern, name):
            return metric
    return None


def metrics_page() -> str:
    """Return docs/metrics.md."""
    page = f"{_HEAD}\n## A step: {METRICS_FILE}\n"
    for heading, metrics in STEPS.items():
        page += f"\n### {heading}\n\n{_table(metrics)}"
    page += f"\n## An evaluation: {EVALS_FILE}\n\n{_table(EVALS)}"
    said = "Written beside a run by [`scaling.live` or `scalerl watch`](scaling.md)."
    return f"{page}\n## A live fit: TensorBoard\n\n{said}\n\n{_table(LIVE)}"


def _table(metrics: Iterable[Metric]) -> str:
    rows = [("name", "unit", "what it is"), ("---",) * 3]
    rows += [(f"`{each.name}`", each.unit, each.meaning) for each in metrics]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
