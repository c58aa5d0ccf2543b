"""What the tokens of small policies spell."""

from scalerl_jax.data.detokenizer import Detokenizer, make_marker

# Of 13 tokens, two of which end a completion: many pairs spell "</t>" or a part of it.
PIECES = ("<", "</", "t", "", ">", ">x", "/t", "a", "</t", "t>", "b<", "", "t>\n")


def detokenizer_of(pieces):
    """The detokenizer by which id u is `pieces[u]`, text or bytes."""
    later = [each.encode() if isinstance(each, str) else each for each in pieces]
    return Detokenizer(later=later, first=later)


def marker_of(text, pieces):
    """A marker in such a tokenizer."""
    return make_marker(text, detokenizer_of(pieces), vocabulary=len(pieces))


LETTERS = detokenizer_of("abcdefghijklm")
