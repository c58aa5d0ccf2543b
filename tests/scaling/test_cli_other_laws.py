"""The laws over several runs, from the command line, on made-up runs of known law."""

import json

import numpy as np
import pytest

from scalerl_jax.scaling.__main__ import main

INTERCEPTS = {0.5e9: 0.0640, 1.5e9: 0.2074, 7e9: 0.7045, 32e9: 1.5359}


@pytest.fixture
def sizes(tmp_path):
    """Tan et al.'s constants of the base models over FLOPs, 40 evaluations each."""
    lines = ["size,flops,pass_rate"]
    for size, intercept in INTERCEPTS.items():
        slope = 0.13304 / (1 + 13.78e9 / size)
        for flops in np.geomspace(1e18, 1e20, 40):
            error = 10 ** (intercept - slope * np.log10(flops))
            lines.append(f"{size},{flops},{1 - error}")
    file = tmp_path / "sizes.csv"
    file.write_text("\n".join(lines))
    return [str(file), "--x=flops", "--group=size", "--model-size=size"]


@pytest.fixture
def models(tmp_path):
    """Chinchilla's constants (Hoffmann et al., section 3.3), one row per model."""
    lines = ["params,tokens,loss,by_size"]
    for size in np.geomspace(4e7, 1.6e10, 6):
        for tokens in np.geomspace(2e8, 5e11, 6):
            loss = 1.69 + 406.4 / size**0.34 + 410.7 / tokens**0.28
            lines.append(f"{size},{tokens},{loss},{(8.8e13 / size) ** 0.076}")
    file = tmp_path / "models.csv"
    file.write_text("\n".join(lines))
    return [str(file), "--x=tokens", "--y=loss", "--model-size=params"]


def found(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tans_law_is_fitted_by_its_name_or_by_the_model_sizes(sizes, capsys):
    for law in ([], ["--law=tan"]):
        parameters = found(capsys, "fit", *sizes, *law)["parameters"]
        assert parameters["k_max"]["value"] == pytest.approx(0.13304, rel=0.02)
    assert found(capsys, "fit", *sizes, "--law=tan_plateau")["law"] == "tan_plateau"
    assert main(["fit", *sizes]) == 0
    assert "over flops, 4 model sizes" in capsys.readouterr().out


def test_tans_two_protocols_are_tested(sizes, capsys):
    intra, inter, late = found(capsys, "extrapolate", *sizes)["tests"]
    assert (intra["num_fitted"], intra["num_held_out"]) == (4 * 25, 4 * 15)
    assert inter["protocol"] == "inter-model" and inter["intercept_from"] == 40
    assert (late["intercept_from"], late["num_held_out"]) == (25, 15)
    assert late["mean_absolute_error"] < 1e-3
    assert main(["extrapolate", *sizes, "--num-first=10"]) == 0
    assert "inter-model" in capsys.readouterr().out


def test_laws_of_loss_get_their_constants_back(models, capsys):
    values = found(capsys, "fit", *models, "--law=chinchilla")["parameters"]
    expected = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
    for name, value in expected.items():
        assert values[name]["value"] == pytest.approx(value, rel=1e-3)
    assert found(capsys, "fit", *models, "--law=kaplan")["law"] == "kaplan"
    one = [models[0], "--x=params", "--y=by_size", "--law=kaplan_one"]
    values = found(capsys, "fit", *one)["parameters"]
    assert values["alpha"]["value"] == pytest.approx(0.076, rel=1e-3)


def test_flops_are_spent_as_chinchilla_says(models, capsys):
    """6 N D = C, and dL/dN = dL/dD where both cost the same."""
    record = found(capsys, "plan", *models, "--flops=5.76e23")
    (spent,) = record["allocations"]
    size, tokens = spent["model_size"], spent["tokens"]
    assert 6 * size * tokens == pytest.approx(5.76e23)
    by_size = 0.34 * 406.4 / size**0.34  # N dL/dN
    assert by_size == pytest.approx(0.28 * 410.7 / tokens**0.28, rel=1e-2)
    assert spent["beyond_data"] and tokens > 5e11  # of the largest model
    assert main(["plan", *models, "--flops=1e21", "--flops=1e24"]) == 0
    inside, beyond = capsys.readouterr().out.splitlines()[-2:]
    assert inside.startswith("1e+21 FLOPs: N = ") and "beyond" not in inside
    assert beyond.endswith(", beyond the models that were fitted")


@pytest.mark.parametrize(
    "command, flags, message",
    [
        pytest.param(
            "fit", ["--law=chinchilla"], "name them with --model-size", id="size"
        ),
        pytest.param("fit", ["--law=tan"], "with --model-size", id="tan"),
        pytest.param(
            "fit", ["--law=power", "--model-size=params"], "is of one run", id="one"
        ),
        pytest.param(
            "fit",
            ["--law=kaplan", "--model-size=n"],
            "choose --model-size from: params",
            id="column",
        ),
        pytest.param("plan", ["--budget=1e6"], "--rollouts-per-prompt", id="sweep"),
    ],
)
def test_what_is_missing_is_asked_for(models, capsys, command, flags, message):
    assert main([command, *models[:3], *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_an_unknown_law_is_answered_with_the_known_ones(models, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", models[0], "--law=linear"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert all(law in said for law in ("sigmoid", "error_power", "tan", "chinchilla"))


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--law=kaplan", "--group=params"], "--group: leave it out; --where"),
        (["--law=chinchilla", "--out=x.png", "--r0=0.2"], "--r0, --out: leave it"),
        (["--law=kaplan_one", "--one-minus"], "--one-minus: leave it out"),
    ],
)
def test_a_law_of_loss_refuses_what_it_does_not_read(models, flags, named, capsys):
    assert main(["fit", *models, *flags]) == 2
    said = capsys.readouterr().err
    assert f"of loss, fitted to all rows, does not read {named}" in said
    assert said.count("\n") == 1


def test_a_plan_of_flops_refuses_groups(models, capsys):
    assert main(["plan", *models, "--flops=1e21", "--group=params"]) == 2
    assert "does not read --group" in capsys.readouterr().err


def test_a_law_over_sizes_takes_groups_and_refuses_what_is_of_one_run(sizes, capsys):
    assert main(["fit", *sizes, "--pool", "--weighted"]) == 2
    said = capsys.readouterr().err
    assert "over model sizes does not read --weighted, --pool: leave it out\n" in said
    assert main(["extrapolate", *sizes, "--out=x.svg"]) == 2


def test_what_x_is_called_is_said_of_a_law_of_loss(models, capsys):
    assert main(["fit", *models, "--law=kaplan", "--x-name=words"]) == 0
    assert "loss loss over words" in capsys.readouterr().out
