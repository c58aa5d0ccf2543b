"""One command for all: `scalerl`, of which `python -m scalerl_jax` is another form."""

import gc
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import small_run

import scalerl_jax
from scalerl_jax import __main__ as command
from scalerl_jax import demo, doctor
from scalerl_jax.data import judging
from scalerl_jax.evaluate import __main__ as evaluate
from scalerl_jax.process.common_flags import QUIET, rewritten
from scalerl_jax.process.completion import script, words_of
from scalerl_jax.run.directory import local_directory
from scalerl_jax.run.progress import Progress
from scalerl_jax.scaling import __main__ as cli


def ended(capfd, monkeypatch, *words):
    """Status, and what was written, of `scalerl WORDS` in this process."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/scalerl", *words])
    for module, _ in command.COMMANDS.values():  # runpy warns of what is there already
        monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)
    for module in ("demo", "doctor", "export", "status", "warmstart"):
        monkeypatch.delitem(sys.modules, f"scalerl_jax.{module}", raising=False)
    status = 0
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        command.main()
    except SystemExit as end:
        status = end.code or 0
    finally:  # `end_at_signals` would end the tests with the next signal
        if (woken := signal.set_wakeup_fd(-1)) != -1:
            os.close(woken)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status, *capfd.readouterr()


def test_a_command_looks_for_garbage_rarely(capfd, monkeypatch):
    before = gc.get_threshold()
    gc.set_threshold(700)
    try:
        assert ended(capfd, monkeypatch, "status", "--help")[0] == 0
        assert gc.get_threshold()[0] == 50_000
    finally:
        gc.set_threshold(*before)


def test_every_command_is_a_module_that_can_be_run():
    for module, _ in command.COMMANDS.values():
        found = util.find_spec(module)
        if found.submodule_search_locations:
            found = util.find_spec(f"{module}.__main__")
        assert 'if __name__ == "__main__":' in Path(found.origin).read_text(), module


def test_modules_of_several_commands_have_all_of_theirs():
    theirs = {
        name
        for name, (module, _) in command.COMMANDS.items()
        if module == "scalerl_jax.scaling"
    }
    assert theirs == set(cli.COMMANDS)
    assert judging.make_parser().prog == "python -m scalerl_jax.environments"


def test_scripts_that_judge_by_the_former_name_still_do(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "\\\\boxed{7}", "answer": "7"}\n')
    line = [sys.executable, "-m", "scalerl_jax.rewards", "judge", rows, "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "correct"


def test_the_installed_script_is_this_command():
    script = Path(sys.executable).parent / "scalerl"
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.stdout.startswith("usage: scalerl COMMAND"), done.stderr


def test_without_a_command_all_are_listed(capfd, monkeypatch):
    status, said, _ = ended(capfd, monkeypatch)
    assert status == 0 and said.startswith("usage: scalerl COMMAND")
    rows = [line for line in said.splitlines() if re.match(r"  \w", line)]
    assert [row.split()[0] for row in rows] == [*command.COMMANDS]


@pytest.mark.parametrize("asked", ["--help", "-h", "help"])
@pytest.mark.parametrize("name", [each for each in command.COMMANDS if each != "train"])
def test_every_command_has_help(capfd, monkeypatch, name, asked):
    words = ("help", name) if asked == "help" else (name, asked)
    status, said, error = ended(capfd, monkeypatch, *words)
    assert status == 0 and error == ""
    assert len(said.splitlines()) > 5
    assert "__main__:" not in said and "--undefok" not in said


def test_the_version_is_that_of_the_package(capfd, monkeypatch):
    status, said, _ = ended(capfd, monkeypatch, "--version")
    assert (status, said) == (0, f"scalerl {scalerl_jax.__version__}\n")


@pytest.mark.parametrize("name", ["evaluate", "simulate", "warmstart"])
def test_a_setting_without_a_config_says_what_is_missing(capfd, monkeypatch, name):
    status, _, error = ended(capfd, monkeypatch, name, "--config.seed=3")
    assert status == 2 and error.count("\n") == 1
    assert "--config.seed changes a setting" in error
    assert "--config=configs/tiny.py" in error


def test_an_unknown_command_is_told_the_nearest(capfd, monkeypatch):
    status, _, error = ended(capfd, monkeypatch, "exprot")
    assert status == 2
    assert error == (
        "error: scalerl has no command 'exprot'; did you mean export?; "
        "scalerl --help lists all\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--out=x"], "--checkpoint; scalerl export --help"),
        (["fit", "nothing_here"], "error: nothing_here: no such file"),
        (["fit"], "PATH; scalerl fit --help lists the flags"),
        (["judge"], "FILE; scalerl judge --help"),
        (["judge", "x", "--reward=y"], "--reward=y; scalerl judge --help"),
        (["data", "inspect"], "--dataset; scalerl data inspect --help"),
        (["train", "runs/a", "--workdir=b"], "runs/a and --workdir=b are two; leave"),
        (["export", "a", "--checkpoint", "b"], "a and --checkpoint are two; leave one"),
    ],
)
def test_mistakes_are_said_in_the_words_that_were_typed(
    capfd, monkeypatch, words, said
):
    status, _, error = ended(capfd, monkeypatch, *words)
    assert status == 2 and said in error and error.count("\n") == 1


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    "words, flag",
    [
        ("export --checkpoint=x", "--out"),
        ("export --checkpoint=x --adapter", "--out"),
        ("study status smoke", "--root"),
        ("study export smoke", "--out"),
        ("evaluate --config=tiny", "--out"),
        ("evaluate --rollouts=x.jsonl", "--out"),
    ],
)
def test_a_bucket_is_not_taken_for_a_directory_here(
    capfd, monkeypatch, tmp_path, words, flag
):
    monkeypatch.chdir(tmp_path)
    if words.startswith("evaluate --config"):
        words += f" --checkpoint={small_run.ROOT / 'scalerl_jax/assets/tiny_base'}"
    line = [*words.split(), f"{flag}=gs://b/x"]
    if words.startswith("evaluate"):  # as a program it would log to this test's stderr
        status, error = evaluate.run(line), capfd.readouterr().err
    else:
        status, _, error = ended(capfd, monkeypatch, *line)
    assert status == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {flag}=gs://") and "is in a bucket" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_config_of_another_type_is_one_line(capfd, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def get_config():\n    return {}\n")
    status = evaluate.run(["evaluate", f"--config={file}", "--checkpoint=x"])
    error = capfd.readouterr().err
    assert status == 2 and error.count("\n") == 1
    assert "it must return an ml_collections.ConfigDict" in error


def test_the_demo_of_a_bucket_is_fitted_where_its_files_are(monkeypatch, capsys):
    ran = []

    def done(words, **_):
        ran.append(words[3:])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(demo.subprocess, "run", done)
    assert demo.main(["--workdir=gs://b/x"]) == 0
    here = str(local_directory("gs://b/x"))
    assert ran == [["train", "--config=tiny", "--workdir=gs://b/x"], ["fit", here]]
    assert f"the curve is in {here}/fit.png" in capsys.readouterr().out


def test_training_is_a_command_too():
    done = small_run.start(
        "-m", "scalerl_jax", "train", "--config=configs/tiny.py", "--describe"
    )
    said, error = done.communicate(timeout=300)
    assert done.returncode == 0, error
    assert said.startswith("The objective")


def completion(shell):
    """A shell's script, of few words."""
    says = {name: text for name, (_, text) in command.COMMANDS.items()}
    words = {name: ["--config", "--workdir"] for name in says}
    words |= {"fit": ["--law", "--model-size"], "data": ["inspect", "list"]}
    return script(shell, says, words, ["tiny", "recipes/dapo", "recipes/grpo"])


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["de"], "demo"),
        (["comple"], "completion"),
        (["help", "extra"], "extrapolate"),
        (["fit", "--mod"], "--model-size"),
        (["data", "ins"], "inspect"),
        (["train", "--config", "=", "recipes/da"], "recipes/dapo"),  # as bash cuts it
        (["train", "--config=recipes/da"], "--config=recipes/dapo"),  # and zsh does not
        (["train", "--workdir", "=", "own_f"], "own_folder"),
    ],
)
def test_a_shell_completes_commands_flags_configs_and_files(tmp_path, typed, found):
    (tmp_path / "own_folder").mkdir()
    asked = f"COMP_WORDS=(scalerl {' '.join(typed)}); COMP_CWORD={len(typed)}"
    text = f"{completion('bash')}\n{asked}\n_scalerl\necho ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (found, "")


# Typed up to a Tab, and the line that it makes of it.
LINES = {
    "de": "demo",
    "comple": "completion",
    "help extra": "help extrapolate",
    "fit --mod": "fit --model-size",
    "data ins": "data inspect",
    "train --config recipes/da": "train --config recipes/dapo",
    "train --config=recipes/da": "train --config=recipes/dapo",
    "train --workdir=own_f": "train --workdir=own_folder/",
    "fit own_f": "fit own_folder/",
}


def needs_shell(name):
    return pytest.mark.skipif(not shutil.which(name), reason=f"needs {name}")


@needs_shell("fish")
def test_fish_completes_lines(tmp_path):
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "script").write_text(completion("fish"))
    asked = "\n".join(f"complete -C 'scalerl {typed}'" for typed in LINES)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source script\n{asked}"],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert (found, done.stderr) == ([line.split()[-1] for line in LINES.values()], "")


@needs_shell("zsh")
def test_zsh_completes_lines_that_are_typed(tmp_path):
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "script").write_text(completion("zsh"))
    lines = ["autoload -Uz compinit && compinit -u; source ./script"]
    lines += ['scalerl() { print -r -- "ran:$*:" }']
    lines += [f"scalerl {typed}\t" for typed in LINES]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-f", "-i"],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TERM": "dumb"},
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    try:
        os.write(terminal, "\r".join([*lines, "exit", ""]).encode())
        while piece := os.read(terminal, 10_000):
            said += piece
    except OSError:  # as the other end of a terminal is closed
        pass
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    found = re.findall(rb"ran:([^$*:\r\n]+):", said)
    lines = [line.rstrip("/") for line in LINES.values()]  # a Return takes it away
    assert [each.decode().strip() for each in found] == lines, said


def test_the_words_of_a_command_are_those_of_its_help():
    words = words_of(["data", "status"])
    assert {"list", "inspect", "prepare"} <= set(words["data"])
    assert words["status"] == ["--help", "--json", "--quiet"]


def test_values_of_a_flag_are_no_words_of_a_command():
    assert all(word.startswith("--") for word in words_of(["judge"])["judge"])


def test_the_doctor_tells_what_fails_and_the_way_out(capfd, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "x"))
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no bubblewrap
    status, said, _ = ended(capfd, monkeypatch, "doctor", "--json")
    found = {each["name"]: each for each in json.loads(said)["findings"]}
    assert status == 0 and json.loads(said)["works"]
    assert found["compile cache"]["state"] == "missing"
    way_out = "set JAX_COMPILATION_CACHE_DIR to another directory, or unset it"
    assert way_out in found["compile cache"]["said"]
    assert found["sandbox"]["state"] == "missing"
    assert "install bubblewrap" in found["sandbox"]["said"]
    assert found["package"]["said"].startswith(f"scalerl_jax {scalerl_jax.__version__}")
    assert found["devices"]["state"] == "ok"


def test_the_doctor_looks_into_no_bucket_and_names_the_platforms_of_jax(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/programs")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("jax.devices", raises_like_jax)
    found = {each.name: each for each in doctor.find()}
    assert found["compile cache"].state == "ok"
    assert found["compile cache"].said.startswith("gs://bucket/programs: a bucket")
    assert found["devices"].state == "fails"
    assert "AssertionError; unset JAX_PLATFORMS = 'cuda'" in found["devices"].said


def raises_like_jax():
    raise AssertionError


@pytest.mark.parametrize(
    "said, meant, quiet",
    [
        ("status runs/x -q", "status runs/x", True),
        ("status --workdir=runs/x --json", "status runs/x --json", False),
        ("train r --process-id=3", "train --workdir=r --process_id=3", False),
        ("export runs/x --out=a_b", "export --checkpoint=runs/x --out=a_b", False),
        (
            "serve --workdir=x --max-samples 3",
            "serve --checkpoint=x --max_samples 3",
            0,
        ),
        ("evaluate --samples 16 runs/x", "evaluate --samples 16 runs/x", False),
        ("data difficulty --num-prompts=9", "data difficulty --num_prompts=9", False),
        ("data inspect --max_bad-rows=9", "data inspect --max-bad-rows=9", False),
        ("fit runs/x --model_size=n_params", "fit runs/x --model-size=n_params", False),
        ("train --config.a.b_c=3 --quiet", "train --config.a.b_c=3", True),
        ("launch supervise -- cat -q --a_b", "launch supervise -- cat -q --a_b", False),
    ],
)
def test_flags_are_the_same_for_every_command(said, meant, quiet):
    name, *words = said.split()
    _, *expected = meant.split()
    assert rewritten(name, words) == (expected, quiet)


def test_a_quiet_command_shows_warnings_and_its_answer_alone(monkeypatch, capsys):
    def shown():
        with Progress() as progress:
            with progress.bar("compiling"):
                progress.program(1, 3)
            progress.note("verifier processes: 1")
            progress.note("warning: optimizer step skipped")
            with progress.bar("train", total=2):
                progress.show({"reward": "1"}, done=1)
        return capsys.readouterr().err.splitlines()

    assert len(shown()) > 3
    monkeypatch.setenv(QUIET, "1")
    assert shown() == ["warning: optimizer step skipped"]
