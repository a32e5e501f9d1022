"""plot_tok_time: which files belong together, what is in them, and one figure of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdi.cli import launch
from mdi.errors import UsageError
from mdi.metrics import RunMetrics, SampleMetrics, write_tokens_csv
from mdi_tools.plots import plot_time_over_tokens
from mdi_tools.token_times import find_runs, parse_name, read_token_times


def write_run(
    folder: Path, n_nodes: int, model: str = "org/Nano Llama", n_samples: int = 3, n_tokens: int = 40
) -> Path:
    """A run's file as a starter writes it; more nodes are faster."""
    from mdi.metrics import NodeMetrics

    nodes = [NodeMetrics(f"n{i}", (i, i + 1), 0, 0.0, 0.0, 0.0, 0, 0) for i in range(n_nodes)]
    times = [0.5 + 0.1 * i / n_nodes for i in range(n_tokens)]
    samples = [SampleMetrics.from_times("p", "t", range(n_tokens), (1,), "length", times) for _ in range(n_samples)]
    return write_tokens_csv(folder, RunMetrics.from_parts(model, samples, nodes, times[-1]))


def test_what_a_starter_writes_is_found_and_read(tmp_path: Path) -> None:
    for n_nodes in (3, 1, 2):
        write_run(tmp_path, n_nodes)
    write_run(tmp_path, 2, model="org/Nano Llama-2")
    write_run(tmp_path, 2, n_samples=4)
    (tmp_path / "times.csv").write_text("timestamp,n_samples,n_layers,context_size,gen_time\n")
    runs = find_runs(tmp_path, ["org/Nano Llama"], 3)
    assert [run.n_nodes for run in runs] == [1, 2, 3] and {run.model for run in runs} == {"org-Nano-Llama"}
    points = read_token_times(runs[0].path)
    assert len(points) == 120 and points[0] == (0.5, 1) and points[-1] == (4.4, 120)


def test_files_of_the_earlier_system_have_no_header(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("0.5,1\n0.75,2.0\n\n")
    assert read_token_times(tmp_path / "old.csv") == [(0.5, 1), (0.75, 2)]
    assert parse_name(tmp_path / "old.csv") is None


def test_files_of_the_first_version_are_drawn(tmp_path: Path) -> None:
    """Its rows begin with two zeros, and end with the number of tokens and the whole time; no line of names."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for n_nodes in (1, 2, 3):
        rows = ["0,0", *(f"{0.5 * k / n_nodes + 1e-6},{k}" for k in range(900)), f"{450.0 / n_nodes + 1e-6},900"]
        (logs / f"tokens_time_samples_{n_nodes}nodes_NanoLlama_3samples.csv").write_text("\n".join(rows) + "\n")
    out = tmp_path / "figure.png"
    assert launch("plot-tok-time", ["NanoLlama", "--logs", str(logs), "-nt", "--out", str(out)]) == 0
    assert out.stat().st_size > 1000
    found = [
        parse_name(Path(f"tokens_time_samples_{name}.csv"))
        for name in ("mdi_gpt2-xl_4samples_3nodes", "standalonegpt2-xl_4samples", "standalone_gpt2-xl_4samples")
    ]
    assert [(run.n_nodes, run.model, run.n_samples) for run in found if run] == [(n, "gpt2-xl", 4) for n in (3, 1, 1)]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("time_s,tokens\n", "empty"),
        ("time_s,tokens\n1,1\nx,2\n", "value"),
        ("1,1\n0.5,2\n", "value"),
        ("1,2\n2,1\n", "value"),
        ("1\n", "value"),
        ("inf,1\n", "value"),
        ("1,inf\n", "value"),
        ("-1,1\n", "value"),
        ("\xff", "unreadable"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: str, code: str) -> None:
    path = tmp_path / "f.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        read_token_times(path)
    assert caught.value.code == code
    with pytest.raises(UsageError):
        read_token_times(tmp_path / "none.csv")


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        find_runs(tmp_path / "none", ["m"], 3)
    with pytest.raises(UsageError) as caught:
        find_runs(tmp_path, ["m"], 3)
    assert caught.value.code == "missing"
    write_run(tmp_path, 1)
    with pytest.raises(UsageError) as caught:
        find_runs(tmp_path, ["m"], 3)
    assert caught.value.code == "missing"


def test_the_command_draws_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n_nodes in (1, 2, 3, 4, 5, 6):
        write_run(tmp_path / "logs", n_nodes)
    model = tmp_path / "NanoLlama"
    model.mkdir()
    (model / "model_config.yaml").write_text("n_layer: 2\nname: org/Nano Llama\n")
    flags = ["--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "img" / "f.png")]
    assert launch("plot-tok-time", [str(model), *flags]) == 0
    out = capsys.readouterr().out
    assert "1 node: 120 tokens in 4.40 s, 27.27 tokens/s" in out and "6 nodes: 120 tokens" in out
    assert (tmp_path / "img" / "f.png").read_bytes().startswith(b"\x89PNG")
    assert launch("plot-tok-time", [str(model), *flags, "--n-samples", "2", "-nt"]) == 2
    assert "with 2 samples" in capsys.readouterr().err


def test_files_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write_run(tmp_path / str(n), n) for n in (1, 2)] + [write_run(tmp_path / "again", 2)]
    flags = [flag for file in files for flag in ("--csv", str(file))]
    out = ["--out", str(tmp_path / "f.png")]
    assert launch("plot-tok-time", ["m", *flags, *out]) == 2
    assert "tell them apart with --label" in capsys.readouterr().err
    labels = ["--label", "a", "--label", "b"]
    assert launch("plot-tok-time", ["m", *flags, *out, *labels]) == 2
    assert "expected as often" in capsys.readouterr().err
    assert launch("plot-tok-time", ["m", *flags, *out, *labels, "--label", "c", "-nt", "--detail", "0"]) == 0
    assert launch("plot-tok-time", ["m", *flags, *out, "--detail", "-1"]) == 2


def test_the_figure_has_the_lines_and_the_detail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mdi_tools.plots

    drawn = []
    save = mdi_tools.plots.save_figure
    monkeypatch.setattr(
        mdi_tools.plots, "save_figure", lambda figure, path: (drawn.append(figure), save(figure, path))[1]
    )
    series = {"1 node": [(1.0 * i, i) for i in range(1, 101)], "2 nodes": [(0.5 * i, i) for i in range(1, 101)]}
    plot_time_over_tokens(tmp_path / "f.png", series, "$title$")
    (axes,) = drawn[0].axes
    assert [line.get_label() for line in axes.lines] == ["1 node", "2 nodes"]
    assert list(axes.lines[1].get_xdata()[:3]) == [0, 1, 2] and list(axes.lines[1].get_ydata()[:3]) == [0.0, 0.5, 1.0]
    (detail,) = axes.child_axes
    assert detail.get_xlim() == (0, 10) and 10 <= detail.get_ylim()[1] <= 11
