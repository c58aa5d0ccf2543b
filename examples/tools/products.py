"""An environment of one tool: products, for a policy that asks for them.

scalerl train --config=tools --config.environment=examples/tools/products.py:make
"""

from scalerl_jax.environments.tools import Tool, Tools


def multiply(expression: str) -> str:
    """Return a product; what a ValueError says is the policy's to read."""
    factors = expression.split("*")
    if len(factors) < 2 or not all(each.strip().isdecimal() for each in factors):
        raise ValueError("write whole numbers with * between them")
    product = 1
    for each in factors:
        product *= int(each)
    return str(product)


def score(prompt: str, completion: str, reference: str) -> float:
    """Return 1.0 for the right product behind the thinking, else 0.0."""
    return float(completion.rpartition("</think>")[2].strip() == str(reference))


def make() -> Tools:
    """Make the environment of one episode."""
    # The base policy of configs/tools.py was warm-started with a tool of this name.
    tool = Tool("calculator", "expression", "The product of whole numbers.", multiply)
    return Tools([tool], judge=score)
