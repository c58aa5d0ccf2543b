"""What the tokens of small policies spell."""

from scalerl_jax.data.detokenizer import Spelling, make_marker

# Of 13 tokens, two of which end a completion: many pairs spell "</t>" or a part of it.
PIECES = ("<", "</", "t", "", ">", ">x", "/t", "a", "</t", "t>", "b<", "", "t>\n")


def spelling_of(pieces):
    """The spelling in which id u is `pieces[u]`, text or bytes."""
    later = [each.encode() if isinstance(each, str) else each for each in pieces]
    return Spelling(later=later, first=later)


def marker_of(text, pieces):
    """A marker in such a spelling."""
    return make_marker(text, spelling_of(pieces), vocabulary=len(pieces))


LETTERS = spelling_of("abcdefghijklm")
