"""The checker of words finds refused forms, and nothing in plain sentences."""

from words import findings, main

BAD = '''"""What a run is told of."""

LIMIT = 8  # so
# many tokens


def take(queue):
    """Take the groups,

    or None if nobody
    has one.
    """
    return queue.take("nobody is told in vain")  # whoever waits
'''
GOOD = '''"""The settings of a run; `nobody` is a name in code."""

LIMIT = 8  # tokens
# A value that is None, and a user's word in an error, are no prose.


def take(queue):
    """Take the groups; there is none at the end of the run."""
    return queue.take("nobody is told in vain")
'''
PAGE = """# A page

Files that lie in `so many` folders: nobody
knows.

<!-- needs whoever -->
```sh
echo nobody is told in vain
```
"""


def test_forms_are_found_in_comments_and_docstrings_with_their_lines():
    found = [(line, form) for line, form, _ in findings(BAD)]
    assert found == [
        (1, "What"),
        (1, "is told of"),
        (3, "so many"),
        (10, "nobody"),
        (13, "whoever"),
    ]


def test_plain_sentences_code_and_strings_pass():
    assert findings(GOOD) == []


def test_forms_are_found_on_a_page_outside_of_its_code():
    found = [(line, form) for line, form, _ in findings(PAGE, markdown=True)]
    assert found == [(3, "Files that lie"), (3, "nobody"), (4, "knows")]


def test_a_file_is_printed_with_line_form_and_replacement(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Nothing.\n\nThe state as it was.\n")
    assert main([str(page)]) == 1
    said = capsys.readouterr().out
    assert "page.md:3: 'as it was': unchanged (one word says it)\n" in said
    page.write_text("The state unchanged.\n")
    assert main([str(page)]) == 0
    assert capsys.readouterr().out == ""
