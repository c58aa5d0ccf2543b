"""Loading a tokenizer, and every way in which its files can be wrong."""

import json

import pytest
from tokenizers import Tokenizer, models

from scalerl_jax.data.tokenizer import (
    load_tokenizer,
    read_special_tokens,
)


@pytest.fixture
def directory(tmp_path):
    """Letters a to d and two special tokens."""
    vocabulary = {"<pad>": 0, "<stop>": 1, "a": 2, "b": 3, "c": 4, "d": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(["<pad>", "<stop>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"eos_token_id": 1})
    return tmp_path


def write(directory, name, value):
    (directory / name).write_text(value if type(value) is str else json.dumps(value))


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_directory_or_its_file_can_be_named(directory, name):
    tokenizer = load_tokenizer(directory / name)
    assert tokenizer.encode("badc") == [3, 2, 5, 4]
    assert tokenizer.vocab_size == 6
    assert tokenizer.eos_ids == (1,)


def test_special_tokens_are_shown_only_when_asked_for(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("a<stop>b") == [2, 1, 3]
    assert "<stop>" not in tokenizer.decode([2, 1])
    assert tokenizer.decode([2]).strip() == "a"
    assert "<stop>" in tokenizer.decode_all([2, 1])


def test_a_text_is_neither_padded_nor_cut_as_the_file_says(directory):
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_padding(length=10**9, pad_token="<pad>")
    backend.enable_truncation(max_length=1)
    backend.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(directory).encode("badc") == [3, 2, 5, 4]


def test_encoding_adds_no_special_token(directory):
    tokenizer = load_tokenizer(directory)
    text = "abcd"
    assert len(tokenizer.encode(text)) == 4
    assert tokenizer.decode(tokenizer.encode(text)).replace(" ", "") == text


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        pytest.param({"eos_token_id": [4, 5]}, {"eos_token_id": 1}, (4, 5), id="list"),
        pytest.param({"eos_token_id": 4}, {"eos_token_id": 1}, (4,), id="number"),
        pytest.param({"eos_token_id": 0}, {"eos_token_id": 1}, (0,), id="zero"),
        pytest.param({}, {"eos_token_id": 1}, (1,), id="absent, then config.json"),
        pytest.param({"eos_token_id": None}, {"eos_token_id": 1}, (1,), id="null"),
        pytest.param({"eos_token_id": []}, {"eos_token_id": 1}, (1,), id="empty list"),
    ],
)
def test_eos_comes_from_the_generation_config_first(
    directory, generation, config, expected
):
    write(directory, "generation_config.json", generation)
    write(directory, "config.json", config)
    assert load_tokenizer(directory).eos_ids == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        pytest.param(
            "tokenizer.json",
            "{}",
            r"tokenizer\.json is not a",
            id="{}",
        ),
        pytest.param("tokenizer.json", "x", r"tokenizer\.json is not a", id="x"),
        pytest.param("config.json", "{", r"config\.json is not valid JSON", id="torn"),
        pytest.param("config.json", "[1]", r"must hold a JSON object", id="a list"),
        pytest.param(
            "config.json", {}, r"no eos_token_id in .* never end", id="no EOS"
        ),
        pytest.param(
            "config.json", {"eos_token_id": []}, r"no eos_token_id in", id="empty"
        ),
        pytest.param(
            "config.json",
            {"eos_token_id": "</s>"},
            r"eos_token_id = '</s>' .*config\.json",
            id="text",
        ),
        pytest.param(
            "config.json",
            {"eos_token_id": [1, None]},
            r"eos_token_id = \[1, None\]",
            id="null in a list",
        ),
    ],
)
def test_a_malformed_file_is_named(directory, name, content, message):
    write(directory, name, content)
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*" + message):
        load_tokenizer(directory)


def test_a_binary_config_is_refused(directory):
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_tokenizer(directory)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*tokenizer\.json; name a"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"no file .*other\.json; name a"):
        load_tokenizer(tmp_path / "other.json")


def test_where_no_file_names_an_end_the_usual_tokens_are_it(directory):
    write(directory, "config.json", {})
    file = directory / "tokenizer.json"
    content = file.read_text().replace("<stop>", "</s>")
    file.write_text(content)
    assert load_tokenizer(directory).eos_ids == (1,)
    # A word of the vocabulary that is spelled as an end is none beside an added token.
    file.write_text(content.replace('"d"', '"<eos>"'))
    assert load_tokenizer(directory).eos_ids == (1,)


def test_a_bare_tokenizer_is_enough_to_look_at_texts(directory):
    (directory / "config.json").unlink()
    tokenizer = load_tokenizer(directory / "tokenizer.json", must_end=False)
    assert tokenizer.eos_ids == () and tokenizer.encode("ab") == [2, 3]


@pytest.mark.parametrize("outside", [-1, 6, [1, 10**6]])
def test_an_end_outside_the_vocabulary_is_refused(directory, outside):
    write(directory, "config.json", {"eos_token_id": outside})
    with pytest.raises(ValueError, match=r"config\.json: the tokenizer has no token"):
        load_tokenizer(directory)


def test_without_any_config_a_completion_could_never_end(directory):
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no eos_token_id .* could never end"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    "generation, config, eos_token, expected",
    [
        # Qwen3: both, and <|im_end|> is the tokenizer's.
        ([3, 2], 3, "c", (3, 2, 4)),
        ([3, 2], 3, "b", (3, 2)),  # named twice
        # SmolLM2 before its generation_config.json: a base model's config.json.
        (None, 1, "c", (1, 4)),
        # Llama 3: a list, of which the end of a turn is one.
        ([1, 2, 4], [1, 2, 4], "c", (1, 2, 4)),
        (None, None, "c", (4,)),
        (1, None, {"content": "c", "special": True}, (1, 4)),  # an older directory
        (1, None, "<|im_end|>", (1,)),  # several tokens, so nothing to stop at
        (1, None, None, (1,)),
    ],
)
def test_the_end_of_a_turn_that_only_the_tokenizer_names_ends_a_completion(
    directory, generation, config, eos_token, expected
):
    write(directory, "generation_config.json", {"eos_token_id": generation})
    write(directory, "config.json", {"eos_token_id": config})
    write(directory, "tokenizer_config.json", {"eos_token": eos_token})
    assert load_tokenizer(directory).eos_ids == expected


def test_special_tokens_of_an_older_directory_count(directory):
    write(directory, "tokenizer_config.json", {"eos_token": "a", "bos_token": "a"})
    write(directory, "special_tokens_map.json", {"eos_token": {"content": "d"}})
    assert read_special_tokens(directory) == {"eos_token": "d", "bos_token": "a"}
    assert load_tokenizer(directory).eos_ids == (1, 5)


def test_the_tags_of_a_thinking_are_shown_where_they_are_special(directory):
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("[THINK]a[/THINK]b<stop>")
    assert ids == [6, 2, 7, 3, 1]
    assert tokenizer.decode(ids).replace(" ", "") == "[THINK]a[/THINK]b"
