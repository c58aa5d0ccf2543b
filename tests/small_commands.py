"""Every command in this process, and a folder of files that nobody should have made."""

import contextlib
import gzip
import io
import json
import os
import shlex
import shutil
import signal
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import small_run
from absl import flags, logging
from small_checkpoints import rewrite_state, save_run

from scalerl_jax import demonstrations, export, main, status, warmstart
from scalerl_jax.data import __main__ as data
from scalerl_jax.data import chat_process, judging
from scalerl_jax.evaluate import __main__ as evaluate
from scalerl_jax.learner.step import init_state
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params
from scalerl_jax.preflight import command as preflight
from scalerl_jax.process.ending import answer
from scalerl_jax.scaling import __main__ as scaling
from scalerl_jax.serve import __main__ as serve
from scalerl_jax.simulate import __main__ as simulate
from scalerl_jax.study import __main__ as study
from scalerl_jax.wiring.learning import make_adamw

TIMEOUT_S = 60
BASE = small_run.make_config().model.checkpoint
DEEP = "[" * 100_000 + "]" * 100_000
CURVE = "step,compute_chip_hours,pass_rate\n" + "".join(
    f"{10 * n},{0.01 * n},{0.3 + 0.5 * n / (n + 4):.3f}\n" for n in range(20)
)


def _main(*arguments):
    line = ["main", *arguments]
    known, argv = set(flags.FLAGS), sys.argv
    sys.argv = line  # ml_collections looks there
    try:
        main.main(main.parse_flags(line))
    finally:
        sys.argv = argv
        for name in set(flags.FLAGS) - known:  # each --config.name has become one
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()


COMMANDS = {
    "main": _main,
    "data": lambda *arguments: data.main(arguments),
    "evaluate": lambda *arguments: evaluate.run(["evaluate", *arguments]),
    "serve": lambda *arguments: serve.main(arguments),
    "scaling": lambda *arguments: scaling.main(arguments),
    "preflight": lambda *arguments: preflight.run(["preflight", *arguments]),
    "simulate": lambda *arguments: simulate.run(["simulate", *arguments]),
    "status": lambda *arguments: answer(lambda: status.main([*arguments])),
    "export": lambda *arguments: export.main(list(arguments)),
    "rewards": lambda *arguments: judging.main(arguments),
    "study": lambda *arguments: answer(lambda: study.main([*arguments])),
    "demonstrations": lambda *arguments: demonstrations.run(["made", *arguments]),
    "warmstart": lambda *arguments: warmstart.run(["warmstart", *arguments]),
}


def run(line):
    """The exit status of a command line, and the lines that it wrote to stderr."""
    status, _, said = outcome(line)
    return status, said.splitlines()


def outcome(line):
    """The exit status of a command line, and what it wrote to stdout and stderr."""
    name, *arguments = shlex.split(line)
    sys.modules.pop("config_config", None)  # ml_collections': of the file before
    stderr, stdout = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(TIMEOUT_S)
    allowed, chat_process.TIMEOUT_S = chat_process.TIMEOUT_S, 1.0
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                status = COMMANDS[name](*arguments)
    except SystemExit as end:
        status = end.code
    finally:
        signal.alarm(0)
        chat_process.TIMEOUT_S = allowed
        signal.signal(signal.SIGALRM, before)
        logging.use_absl_handler()
    return status or 0, stdout.getvalue(), stderr.getvalue()


class TooLong(BaseException):
    """Nothing that a command may catch."""


def _too_long(number, frame):
    raise TooLong(f"no answer after {TIMEOUT_S} s")


def _events(*records):
    """TensorBoard's framing, with checksums that nobody looks at."""
    return b"".join(
        struct.pack("<Q", len(record)) + b"\0" * 4 + record + b"\0" * 4
        for record in records
    )


def _checkpoint(name, *, config=None, generation=None, template=None, tokenizer=None):
    """The base checkpoint, with fields of its files changed; its weights are linked."""
    weights = "model.safetensors"
    shutil.copytree(BASE, name, ignore=shutil.ignore_patterns(weights))
    os.symlink(Path(BASE, weights), Path(name, weights))
    for file, changes in (
        ("config.json", config),
        ("generation_config.json", generation),
    ):
        values = json.loads(Path(name, file).read_text())
        Path(name, file).write_text(json.dumps(values | (changes or {})))
    if template is not None:
        Path(name, "chat_template.jinja").write_text(template)
    if tokenizer is not None:
        Path(name, "tokenizer.json").write_text(tokenizer)


def _safetensors(name, *, value):
    """The base checkpoint with one number in its weights replaced."""
    shutil.copytree(BASE, name)
    file = Path(name, "model.safetensors")
    content = bytearray(file.read_bytes())
    content[-4:] = np.float32(value).tobytes()
    file.write_bytes(content)


TEXTS = {
    # curves
    "curve.csv": CURVE,
    "empty.csv": "",
    "header.csv": "step,compute_chip_hours,pass_rate\n",
    "newlines.csv": "\n\n\n",
    "twice.csv": "x,pass_rate,pass_rate\n1,0.1,0.2\n2,0.2,0.3\n",
    "twice_spaced.csv": "x,pass_rate, pass_rate \n1,0.1,0.2\n2,0.2,0.3\n",
    "words.csv": "compute_chip_hours,pass_rate\na,b\nc,d\n",
    "ragged.csv": "compute_chip_hours,pass_rate\n1,0.5,3,4\n2,0.6\n",
    "quote.csv": 'compute_chip_hours,pass_rate\n1,"0.5\n2,0.6\n3,0.7\n',
    "cell.csv": "compute_chip_hours,pass_rate\n1," + "9" * 200_000 + "\n2,0.5\n",
    "cell.tsv": "compute_chip_hours\tpass_rate\n1\t" + "x" * 200_000 + "\n2\t0.5\n",
    "nul.csv": "compute_chip_hours,pass_rate\n1,0.\x005\n2,0.5\n",
    "huge.csv": "compute_chip_hours,pass_rate\n1e400,0.5\n2,0.5\n3,0.6\n",
    "negative.csv": "compute_chip_hours,pass_rate\n-1,0.5\n-2,0.5\n-3,0.6\n-4,0.7\n",
    "above_one.csv": "compute_chip_hours,pass_rate\n1,5\n2,50\n3,60\n4,70\n5,80\n",
    "nan.csv": "compute_chip_hours,pass_rate\n1,nan\n2,nan\n3,nan\n",
    "inf.csv": "compute_chip_hours,pass_rate\n1,inf\n2,0.5\n3,0.6\n4,0.6\n5,0.6\n",
    "one.csv": "compute_chip_hours,pass_rate\n1,0.5\n",
    "same.csv": "compute_chip_hours,pass_rate\n" + "1,0.5\n" * 9,
    "wide.csv": ",".join(f"c{n}" for n in range(9999)) + "\n" + "1," * 9998 + "1\n",
    "marks.csv": 'compute_chip_hours,pass_rate\n"1,5",0.5\n2.25,"0,6"\n',
    "step_huge.csv": "step,pass_rate\n1e308,0.1\n1e309,0.2\n5,0.3\n6,0.4\n7,0.5\n",
    "denormal.csv": "compute_chip_hours,pass_rate\n"
    + "".join(f"{n}e-320,0.{n}\n" for n in range(1, 9)),
    "sizes.csv": "compute_chip_hours,pass_rate,params\n"
    + "".join(f"{n},0.{n},0\n" for n in range(1, 9)),
    "separator.csv": "sep=\n1,2\n",
    "deep.jsonl": DEEP + "\n",
    "deep_object.jsonl": '{"a":' * 50_000 + "1" + "}" * 50_000 + "\n",
    "digits.jsonl": '{"compute_chip_hours": ' + "1" * 5000 + ', "pass_rate": 0.5}\n',
    "big.jsonl": '{"compute_chip_hours": 1' + "0" * 400 + ', "pass_rate": 0.5}\n' * 2,
    "big_steps.jsonl": "".join(
        f'{{"step": {n}{"0" * 400}, "compute_chip_hours": {n}, "pass_rate": 0.5}}\n'
        for n in range(1, 9)
    ),
    "list.jsonl": "[1, 2]\n",
    "number.jsonl": "5\n",
    "null.jsonl": "null\n",
    "torn.jsonl": '{"compute_chip_hours": 1, "pass',
    "empty.jsonl": "",
    "blank.jsonl": "\n \n\n",
    "nested_cells.jsonl": '{"compute_chip_hours": {"a": 1}, "pass_rate": [0.5]}\n' * 3,
    "bools.jsonl": '{"compute_chip_hours": true, "pass_rate": false}\n' * 5,
    "surrogate.jsonl": '{"compute_chip_hours": 1, "pass_rate": "\\ud800"}\n' * 5,
    "nan.jsonl": '{"compute_chip_hours": NaN, "pass_rate": Infinity}\n' * 5,
    "garbage.json": "not json",
    "deep.json": DEEP,
    "history.json": '{"log_history": 5}',
    "history_deep.json": '{"log_history": ' + DEEP + "}",
    "history_numbers.json": '{"log_history": [1, 2]}',
    "history_empty.json": '{"log_history": []}',
    "unknown.kind": "x",
    # data sets
    "nan_answer.jsonl": '{"question": "1+1", "answer": NaN}\n',
    "infinite_answer.jsonl": '{"question": "1+1", "answer": [1, Infinity]}\n',
    "true_answer.jsonl": '{"question": "1+1", "answer": true}\n',
    "huge_answer.jsonl": '{"question": "1+1", "answer": ' + "9" * 5000 + "}\n",
    "object_answer.jsonl": '{"question": "1+1", "answer": {"a": 1}}\n',
    "no_answer.jsonl": '{"question": "1+1"}\n',
    "no_question.jsonl": '{"answer": "2"}\n',
    "empty_question.jsonl": '{"question": " ", "answer": "2"}\n',
    "odd_verifier.jsonl": '{"question": "1+1", "answer": "2", "verifier": "os"}\n',
    "list_verifier.jsonl": '{"question": "1+1", "answer": "2", "verifier": ["os"]}\n',
    "number_system.jsonl": '{"question": "1+1", "answer": "2", "system": 5}\n',
    "bad_tests.jsonl": '{"question": "f", "tests": {"kind": "asserts"}}\n',
    "odd_tests.jsonl": '{"question": "f", "tests": {"kind": ["a"]}}\n',
    "tests_number.jsonl": '{"question": "f", "tests": 5}\n',
    "tests_deep.jsonl": json.dumps({"question": "f", "tests": DEEP}) + "\n",
    "messages.jsonl": '{"messages": [{"role": "user"}], "answer": "2"}\n',
    "messages_number.jsonl": '{"messages": [5], "answer": "2"}\n',
    "verl.jsonl": '{"prompt": "text", "reward_model": {"ground_truth": ""}}\n',
    "verl_number.jsonl": '{"prompt": [], "reward_model": 5}\n',
    "half.jsonl": '{"question": "\\ud800", "answer": "2"}\n',
    "array.jsonl": "[" + "[" * 99_999,
    "blanks.jsonl": json.dumps({"question": "1+1", "answer": " " * 100_000}) + "\n",
    "test_nests.jsonl": json.dumps(
        {"question": "f", "test": "def test_f():\n    assert " + "(" * 100_000}
    )
    + "\n",
    "bad_json.jsonl": '{"question": \n' * 20,
    "good.jsonl": '{"question": "1+1", "answer": "2"}\n{"question": "2+2", '
    '"answer": "4"}\n',
    # completions
    "no_completion.jsonl": '{"answer": "2"}\n',
    "completion_number.jsonl": '{"completion": 5, "answer": "2"}\n',
    "completion_nan.jsonl": '{"completion": "2", "answer": NaN}\n',
    "completion_tests.jsonl": '{"completion": "2", "tests": {"kind": "?"}}\n',
    # rollouts to read
    "rollouts_number.jsonl": "5\n",
    "rollouts_samples.jsonl": '{"samples": 5}\n',
    "rollouts_keys.jsonl": '{"samples": []}\n',
    "rollouts_later.jsonl": '{"prompt_id": 1}\n7\n',
    # rates and lengths
    "rates.json": '{"decode_s": [[1, 0.1], [256, 0.2]], "train_s": 1.0}',
    "rates_nan.json": '{"decode_s": [[1, 0.1]], "train_s": NaN}',
    "rates_odd.json": '{"decode_s": [[1, 0.1]], "nope": 1}',
    "rates_none.json": "{}",
    "rates_order.json": '{"decode_s": [[8, 0.1], [1, 0.2]]}',
    "rates_pairs.json": '{"decode_s": [1, 2]}',
    "rates_huge.json": '{"decode_s": [[1, 0.1]], "train_s": 1' + "0" * 400 + "}",
    "rates_text.json": '{"decode_s": [[1, 0.1]], "train_s": "1"}',
    "rates_zero.json": '{"decode_s": [[1, 0.1], [64, 0.0]]}',
    "lengths_negative.jsonl": "[5, -1]\n",
    # configs
    "syntax.py": "def get_config(:\n",
    "nul.py": "x = '\0'\n",
    "without.py": "x = 1\n",
    "raises.py": "def get_config():\n    raise RuntimeError('out of luck')\n",
    "divides.py": "def get_config():\n    return 1 / 0\n",
    "exits.py": "import sys\nsys.exit(7)\n",
    "imports.py": "import no_such_module_here\n",
    "attribute.py": "import scalerl_jax\nscalerl_jax.nothing\n",
    "key.py": "def get_config():\n    return {}['x']\n",
    "nothing.py": "def get_config():\n    pass\n",
    "number.py": "def get_config():\n    return 5\n",
    "dictionary.py": "def get_config():\n    return {'seed': 1}\n",
    "recursion.py": "def get_config():\n    return get_config()\n",
    "variable.py": "get_config = 5\n",
    "plain.py": (
        "from scalerl_jax import config\n\n\ndef get_config():\n"
        "    found = config.defaults()\n"
        "    found.model.architecture = 'tiny'\n    return found\n"
    ),
    "two.py": "def get_config(a, b):\n    return None\n",
    "warm.py": "from scalerl_jax.demonstrations import defaults as get_config\n",
    "config.txt": "seed = 1\n",
}


def make_files():
    """Write them all into the current directory."""
    for name, text in TEXTS.items():
        Path(name).write_text(text, encoding="utf-8")
    shutil.copy(small_run.ROOT / "configs" / "tiny.py", "tiny.py")
    Path("latin.csv").write_bytes("compute,pass_rate,größe\n1,2,3\n".encode("latin-1"))
    Path("utf16.csv").write_bytes(CURVE.encode("utf-16"))
    Path("binary.csv").write_bytes(bytes(range(256)) * 99)
    Path("binary.jsonl").write_bytes(b"\xff\xfd\x00" * 99)
    Path("binary.py").write_bytes(b"\xff\xfe\x00" * 99)
    Path("cut.jsonl").write_bytes(gzip.compress(b'{"question": 1}\n' * 999)[:40])
    Path("zip.jsonl").write_bytes(b"\x1f\x8b" + b"x" * 99)
    Path("fake.parquet").write_bytes(b"PAR1" + b"x" * 99)
    Path("events.out.tfevents.0.empty").write_bytes(b"")
    Path("events.out.tfevents.0.garbage").write_bytes(b"garbage" * 99)
    Path("events.out.tfevents.0.frames").write_bytes(_events(b"\xff" * 40))
    Path("events.out.tfevents.0.length").write_bytes(b"\xff" * 12)
    for folder in ("nothing", "folder.csv", "folder.jsonl", "events", "folder.py"):
        os.mkdir(folder)
    shutil.copy("events.out.tfevents.0.garbage", "events")
    os.mkfifo("pipe.jsonl")
    for name, text in (("deep", DEEP), ("list", "[]"), ("torn", "{"), ("null", "null")):
        os.mkdir(f"config_{name}")
        Path(f"config_{name}", "config.json").write_text(text)
    for name, text in (
        ("deep", DEEP),
        ("other", '{"config": {"nope": 1}}'),
        ("number", '{"config": 5}'),
    ):
        os.mkdir(f"run_{name}")
        Path(f"run_{name}", "config.json").write_text(text)
        Path(f"run_{name}", "metrics.jsonl").write_text('{"step": 1}\n')
    Path("fake.gguf").write_bytes(b"GGUF" + b"\xff" * 99)
    os.mkdir("other_files")
    Path("other_files", "thesis.tex").write_text("years of work")
    _make_checkpoints()


def _make_checkpoints():
    """The base checkpoint, spoilt in every way."""
    _checkpoint("layers", config={"num_hidden_layers": 10**9})
    _checkpoint("width", config={"hidden_size": 10**12})
    _checkpoint("negative", config={"vocab_size": -5})
    _checkpoint("odd_type", config={"model_type": ["qwen3"]})
    _checkpoint("odd_layers", config={"layer_types": 5})
    _checkpoint("odd_rope", config={"rope_scaling": 5})
    _checkpoint("odd_dtype", config={"torch_dtype": ["float32"]})
    _checkpoint("big_theta", config={"rope_theta": 10**400})
    _checkpoint("eos", generation={"eos_token_id": 10**6})
    _checkpoint("eos_negative", generation={"eos_token_id": -1})
    _checkpoint("eos_text", generation={"eos_token_id": "</s>"})
    _checkpoint("no_eos", generation={"eos_token_id": None})
    _checkpoint("tokenizer", tokenizer="{}")
    _checkpoint("tokenizer_deep", tokenizer=DEEP)
    _checkpoint("no_template")
    for name, template in {
        "syntax": "{% for %}",
        "loop": "{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}",
        "memory": "{{ 'x' * 10 ** 11 }}",
        "power": "{{ 9 ** 9 ** 9 }}",
        "padding": "{{ '%0999999999999d' % 1 }}",
        "text": "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
        "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "escape": "{{ ''.__class__.__mro__ }}",
        "refuses": "{{ raise_exception('not today') }}",
        "undefined": "{{ nothing.at.all }}",
        "exits": "{{ cycler.__init__.__globals__.os._exit(0) }}",
    }.items():
        _checkpoint(f"template_{name}", template=template)
    _run_of_nan()
    _safetensors("weights_nan", value=np.nan)
    _safetensors("weights_infinite", value=-np.inf)
    for name, size in (("cut", 500), ("header", 4), ("none", 0)):
        shutil.copytree(BASE, f"weights_{name}")
        file = Path(f"weights_{name}", "model.safetensors")
        file.write_bytes(file.read_bytes()[:size])
    shutil.copytree(BASE, "weights_deep")
    header = DEEP.encode()
    Path("weights_deep", "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header
    )
    shutil.copytree(BASE, "weights_odd")
    header = b'{"a": {"dtype": "F32", "shape": [-1, 1.5], "data_offsets": [0, 4]}}'
    Path("weights_odd", "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + b"\0" * 4
    )
    _make_names()


def _make_names():
    """Files that name files elsewhere, and terminal escapes in names."""
    for name, file in (("out", "../x"), ("root", "/etc/passwd"), ("nameless", "")):
        _checkpoint(f"index_{name}")
        os.unlink(f"index_{name}/model.safetensors")
        index = json.dumps({"weight_map": {"model.norm.weight": file}})
        Path(f"index_{name}", "model.safetensors.index.json").write_text(index)
    for name, file in (("out", "../x.arrow"), ("root", "/etc/passwd")):
        os.mkdir(f"saved_{name}")
        state = json.dumps({"_data_files": [{"filename": file}]})
        Path(f"saved_{name}", "state.json").write_text(state)


def _run_of_nan():
    """A run whose only checkpoint is as it was written, with a param that is NaN."""
    params = load_params(BASE, read_architecture(BASE), dtype=np.float32)
    save_run(Path("run_nan"), params)
    params["final_norm"] = params["final_norm"] * np.float32("nan")
    state = init_state(params, make_adamw(small_run.make_config()))
    (checkpoint,) = small_run.checkpoints(Path("run_nan"))
    rewrite_state(checkpoint.absolute(), state)
