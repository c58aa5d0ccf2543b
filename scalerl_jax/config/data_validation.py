"""What of the prompts' settings cannot work together, as far as names alone say it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl_jax.config import Config


def validate_data(config: "Config") -> None:
    """Refuse what can give no prompts, or of which a part would do nothing.

    Which tasks and data sets there are, and how much they hold, is seen when they are
    opened.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    _validate_sets(config)
    _validate_weights(config)
    _validate_templates(config)
    _validate_order(config)
    num_prompts, train_prompts = config.batch.num_prompts, config.data.train_prompts
    if train_prompts and num_prompts > train_prompts:
        raise ValueError(
            f"batch.num_prompts = {num_prompts} is more than data.train_prompts = "
            f"{train_prompts}; lower the first or raise the second"
        )


def _validate_sets(config: "Config") -> None:
    sets = config.eval.sets
    if len(set(sets)) < len(sets):
        raise ValueError(f"eval.sets = {sets} must hold each set once")


def _validate_weights(config: "Config") -> None:
    tasks, weights = config.data.tasks, config.data.task_weights
    if not weights:
        return
    if len(weights) != len(tasks):
        raise ValueError(
            f"data.task_weights = {weights} are {len(weights)} shares of the "
            f"{len(tasks)} tasks in data.tasks = {tasks}; give one for each, or none"
        )
    if min(weights) <= 0:
        raise ValueError(
            f"data.task_weights = {weights} must be above 0; leave a task that is not "
            f"to be drawn out of data.tasks"
        )


def _validate_templates(config: "Config") -> None:
    data = config.data
    if data.template == "chat":
        return
    for setting, value, default in (
        ("system_prompt", data.system_prompt, ""),
        ("user_template", data.user_template, "{question}"),
        ("enable_thinking", data.enable_thinking, True),
    ):
        if value != default:
            raise ValueError(
                f"data.{setting} = {value!r} is not read with data.template = "
                f"{data.template!r}; set data.template = 'chat', or leave it "
                f"{default!r}"
            )


def _validate_order(config: "Config") -> None:
    data = config.data
    if data.order == "shuffled" and data.difficulty:
        raise ValueError(
            f"data.difficulty = {data.difficulty!r} is not read with data.order = "
            f"'shuffled'; choose another order, or leave it empty"
        )
    if (data.order == "progressive") != bool(data.open_steps):
        raise ValueError(
            f"data.open_steps = {data.open_steps} with data.order = {data.order!r}: "
            f"the steps until every prompt is open must be above 0 with 'progressive', "
            f"and 0 without"
        )
    if data.order != "shuffled" and not data.difficulty:
        raise ValueError(
            f"data.order = {data.order!r} needs data.difficulty, a file of pass rates: "
            f"python -m scalerl_jax.data difficulty --config=CONFIG --samples=8 "
            f"--out=difficulty.jsonl makes one for the prompts of a config; or set it "
            f"to 'measured', and the first epoch is shuffled, the later ones go by "
            f"what the run has measured"
        )
    if not 0.0 < data.open_share <= 1.0:
        raise ValueError(
            f"data.open_share = {data.open_share} must be above 0 and at most 1"
        )
    opened = round(data.open_share * data.train_prompts)
    few = data.train_prompts and opened < config.batch.num_prompts
    if data.order == "progressive" and few:
        raise ValueError(
            f"data.open_share * data.train_prompts = {opened} prompts at the start are "
            f"fewer than batch.num_prompts = {config.batch.num_prompts}; raise one of "
            f"the first two or lower the third"
        )
