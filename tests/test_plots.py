import struct
import sys

import pytest

from mdi.errors import UsageError
from mdi.metrics import SampleMetrics
from mdi_tools.plots import plot_memory, plot_tokens_over_time, sample_series


def sample(*times_s):
    return SampleMetrics.from_times("p", "t", range(len(times_s)), [1], "length", times_s)


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_series_are_the_total_and_each_sample():
    series = sample_series([sample(0.1, 0.3), sample(0.2)])
    assert series == {
        "total": [(0.1, 1), (0.2, 2), (0.3, 3)],
        "sample 0": [(0.1, 1), (0.3, 2)],
        "sample 1": [(0.2, 1)],
    }
    assert list(sample_series([sample(0.5)])) == ["total"]


@pytest.mark.parametrize("n_samples", [0, 1, 3, 30])
def test_draws_a_png_and_makes_its_folder(tmp_path, n_samples):
    path = tmp_path / "img" / "run.png"
    series = sample_series([sample(0.1 * (i + 1), 0.2 * (i + 1)) for i in range(n_samples)])
    assert plot_tokens_over_time(path, series, "a run") == path
    assert png_size(path) == (1200, 750)
    assert [p.name for p in path.parent.iterdir()] == ["run.png"]


def test_draws_nothing_at_all_and_odd_names(tmp_path):
    plot_tokens_over_time(tmp_path / "none.png", {})
    plot_tokens_over_time(tmp_path / "odd.png", {"$x": [], "_y": [(1.0, 1)]}, "\u6f22 $ 5 $\\frac")
    assert png_size(tmp_path / "odd.png")


def test_leaves_pyplot_and_its_backend_alone(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    plot_tokens_over_time(tmp_path / "a.png", {"total": [(1.0, 1)]})
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_says_that_matplotlib_is_missing(tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as caught:
        plot_tokens_over_time(tmp_path / "a.png", {})
    assert caught.value.code == "library"


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as e:
        plot_tokens_over_time(tmp_path / "file" / "a.png", {})
    assert "a.png" in str(e.value)
    (tmp_path / "dir.png").mkdir()
    with pytest.raises(UsageError) as e:
        plot_tokens_over_time(tmp_path / "dir.png", {})
    assert "dir.png" in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dir.png", "file"]


def n_pixels(path, color, alpha):
    """Pixels of a colour that was laid over white."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    seen = [alpha * c + 1 - alpha for c in to_rgb(color)]
    return int((abs(imread(path)[:, :, :3] - seen) < 0.01).all(axis=2).sum())


def test_samples_that_keep_pace_are_all_seen(tmp_path):
    same = [0.1 * i for i in range(1, 30)]
    path = plot_tokens_over_time(tmp_path / "same.png", sample_series([sample(*same) for _ in range(3)]))
    counts = [n_pixels(path, f"C{i}", 0.6) for i in (1, 2, 3)]
    assert min(counts) > 10_000 and max(counts) < 1.5 * min(counts)


def test_the_legend_of_the_memory_covers_no_line(tmp_path):
    """The lines fall at the end of every run, where a legend inside the picture would lie."""
    points = [(float(t), 1e9 if t < 90 else 1e8 * (100 - t)) for t in range(100)]
    path = plot_memory(tmp_path / "m.png", {"RSS": points, "PSS": [(t, b * 0.9) for t, b in points]})
    from matplotlib.image import imread

    picture = imread(path)[:, :, :3]
    blue = (abs(picture - [31 / 255, 119 / 255, 180 / 255]) < 0.05).all(axis=2)
    assert blue[300:, 1000:1190].sum() > 300, "the falling end of the line, at the right"
    rows = (abs(picture - 0) < 0.05).all(axis=2).sum(axis=1).nonzero()[0]
    axis = max(row for row in range(600, 750) if (picture[row, 200:1100].max(axis=1) < 0.2).all())
    assert blue[axis + 20 :].any() and rows.max() > axis, "the legend is below the axis"
