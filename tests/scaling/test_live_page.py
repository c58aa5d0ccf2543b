"""The page that follows runs: what it is told as they grow, and whom it answers."""

import contextlib
import http.client
import json
import re
import threading
from importlib import resources

import numpy as np
import pytest

from scalerl_jax.scaling.__main__ import main
from scalerl_jax.scaling.live import Watch
from scalerl_jax.scaling.live_page import find_runs, open_page
from scalerl_jax.scaling.records import CurveError

SPITEFUL = "</script><script>alert(1)</script>\x1b[2J"


def grow(folder, first, last):
    """Append the evaluations and steps from `first` to `last` of a run of 20 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"config": {"train": {"num_steps": 20}}}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "evals.jsonl").open("a") as evals:
        with (folder / "metrics.jsonl").open("a") as metrics:
            for step in range(first, last + 1):
                hours = float(step)
                rate = 0.2 + 0.6 / (1 + (4 / max(hours, 1e-9)) ** 2)
                row = {"step": step, "compute_chip_hours": hours, "pass_rate": rate}
                # At step 7 a single prompt was judged.
                row |= {"pass_rate_se": None if step == 7 else 0.01}
                evals.write(json.dumps(row) + "\n")
                if step:
                    row = {"step": step, "compute/charged_chip_hours": hours}
                    row |= {"staleness/mean": step / 4, "entropy": None}
                    row |= {"replicas/lost": int(step > 12), "grad_norm": 1.0}
                    metrics.write(json.dumps(row) + "\n")
    rollout = {"step": last, "task": "sums", "prompt": SPITEFUL, "completion": "3"}
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout | {"reference": "3", "status": "correct"}) + "\n")


@pytest.fixture
def served(tmp_path):
    """A page on two runs, its server, and a function that asks it."""
    grow(tmp_path / "a", 0, 2)
    (tmp_path / "b").mkdir()  # has not begun

    def find():
        paths = [tmp_path / "a", tmp_path / "b"]
        return {name: Watch(path=path) for name, path in find_runs(paths).items()}

    with open_page(find, port=0, every_s=0.05) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            with contextlib.closing(connection):
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                return answer, answer.read()

        yield tmp_path, server, ask
        server.shutdown()
        thread.join()


def test_a_page_follows_a_run_as_it_grows(served):
    folder, server, ask = served
    answer, body = ask("/runs.json")
    first = {run["name"]: run for run in json.loads(body)["runs"]}
    assert first["a"]["step"] == 2 and "4 are needed" in first["a"]["waiting"]
    assert first["b"]["step"] == 0 and first["b"]["waiting"]
    tag = answer.headers["ETag"]
    again, nothing = ask("/runs.json", **{"If-None-Match": tag})
    assert (again.status, nothing) == (304, b"")
    grow(folder / "a", 3, 16)
    server.board.refresh()
    answer, body = ask("/runs.json", **{"If-None-Match": tag})
    assert answer.status == 200
    run = next(run for run in json.loads(body)["runs"] if run["name"] == "a")
    assert (run["step"], run["num_steps"], len(run["points"])) == (16, 20, 16)
    assert run["training"]["staleness/mean"] == [step / 4 for step in range(1, 17)]
    assert run["training"]["x"][-1] == run["points"][-1][0] == 16.0
    assert run["failures"] == [["replicas lost", 1]]
    assert run["law"].startswith("A 0.8") and run["forecast"]["x"] == 20.0
    x, middle, low, high = np.array(run["curve"]).T
    assert x[0] == 1.0 and x[-1] == pytest.approx(20.0)
    law = 0.2 + 0.6 / (1 + (4 / x) ** 2)
    np.testing.assert_allclose(middle, law, atol=0.002)
    assert np.all((low <= middle) & (middle <= high))
    (rollout,) = run["rollouts"]  # of the last evaluation, though it has no more
    assert rollout["prompt"] == SPITEFUL  # as text, which the page keeps so


def test_rows_of_no_use_and_a_fit_that_fails_leave_a_page_that_goes_on(
    served, monkeypatch
):
    folder, server, ask = served
    monkeypatch.setattr(Watch, "look", lambda self: 1 / 0)
    with (folder / "a" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"entropy": 1.0}\n{"step": null}\n{"step": 1e999}\n')
    grow(folder / "b", 0, 2)
    server.board.refresh()
    runs = {run["name"]: run for run in json.loads(ask("/runs.json")[1])["runs"]}
    assert [runs[name]["step"] for name in "ab"] == [2, 2]
    assert "it cannot be fitted: ZeroDivisionError" in runs["a"]["waiting"]


def test_a_file_that_can_be_read_no_longer_is_told_beside_the_fit(served):
    folder, server, ask = served
    grow(folder / "a", 3, 12)
    server.board.refresh()
    whole = (folder / "a" / "evals.jsonl").read_text()
    for text, told in ((whole + '{"step": 13, \n{}\n', "not valid JSON"), (whole, "")):
        (folder / "a" / "evals.jsonl").write_text(text)
        server.board.refresh()
        run = json.loads(ask("/runs.json")[1])["runs"][0]
        assert "A 0.8" in run["law"]
        assert told in "".join(run["notes"]) and len(run["notes"]) == bool(told)


def test_only_browsers_that_were_sent_here_are_answered(served):
    _, server, ask = served
    assert server.server_address[0] == "127.0.0.1"
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1@evil.example"):
        answer, body = ask("/runs.json", Host=host)
        assert answer.status == 403 and b"points" not in body
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080"):
        assert ask("/", Host=host)[0].status == 200
    for path in ("/../etc/passwd", "/a/config.json", "/runs.json/"):
        assert ask(path)[0].status == 404
    assert ask("/runs.json", method="POST")[0].status == 501
    policy = ask("/")[0].headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_the_page_needs_nothing_from_elsewhere_and_takes_texts_as_text():
    page = (resources.files("scalerl_jax") / "assets/scaling/live.html").read_text()
    assert set(re.findall(r"https?://[^\"')\s]+", page)) == {
        "http://www.w3.org/2000/svg"
    }
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", page
    )


def test_a_study_is_all_its_runs(tmp_path):
    (tmp_path / "study.json").write_text(json.dumps({"arms": {"low": {}, "high": {}}}))
    with pytest.raises(CurveError, match="no run of this study has begun"):
        find_runs([tmp_path])
    for name in ("low/seed0", "low/seed1", "high/seed0", "other/seed0"):
        grow(tmp_path / name, 0, 1)
    assert list(find_runs([tmp_path])) == ["low/seed0", "low/seed1", "high/seed0"]
    (tmp_path / "study.json").unlink()
    alone = find_runs([tmp_path, tmp_path / "low" / "seed0"])
    assert len(alone) == 5 and list(alone)[2:4] == ["low/seed1", "other/seed0"]


def test_runs_of_a_study_that_begin_later_come_to_the_page(tmp_path):
    (tmp_path / "study.json").write_text(json.dumps({"arms": {"low": {}, "high": {}}}))
    grow(tmp_path / "high/seed0", 0, 1)

    def find():
        return {name: Watch(path=path) for name, path in find_runs([tmp_path]).items()}

    with open_page(find, port=0, every_s=1000.0) as server:
        board = server.board
        grow(tmp_path / "low/seed0", 0, 1)
        board.refresh()
        # After those that are there, whose colours are by their place.
        both = ["high/seed0", "low/seed0"]
        assert [run["name"] for run in json.loads(board.body)["runs"]] == both
        # The same name for another run: of another study, say.
        moved = tmp_path / "elsewhere"
        server.board._find = lambda: {"low/seed0": Watch(path=moved)}
        grow(moved, 0, 3)
        board.refresh()
        (run,) = json.loads(board.body)["runs"]
        assert run["step"] == 3
        server.board._find = find
        board.refresh()
        (tmp_path / "study.json").write_text("half a")
        board.refresh()
        assert {run["name"] for run in json.loads(board.body)["runs"]} == {*both}


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--port=99999"], "a port from 0"),
        (["--port=8080", "--once"], "--port does not read --once"),
        ([".", "--once"], "--port=8080 shows several"),
    ],
)
def test_flags_that_do_not_go_together_are_named(tmp_path, capsys, flags, said):
    grow(tmp_path, 0, 2)
    try:
        status = main(["watch", str(tmp_path), *flags])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(served, tmp_path, capsys):
    _, server, _ = served
    assert main(["watch", str(tmp_path / "a"), f"--port={server.server_port}"]) == 2
    assert f"--port={server.server_port} cannot be used" in capsys.readouterr().err
