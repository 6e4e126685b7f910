import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.data import LengthDistribution, LengthTable, read_length_file

SHARED = Path(__file__).parents[3] / "shared" / "data" / "lengths"


def write(folder, text, name="lengths.csv"):
    path = folder / name
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "wt") as stream:
        stream.write(text)
    return path


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.csv.gz"])
def test_reads_plain_and_gzipped_files(tmp_path, name):
    table = read_length_file(write(tmp_path, "length,count\n7,1\n4,2\n7,3\n", name))
    assert table.lengths.tolist() == [4, 7]
    assert table.counts.tolist() == [2, 4]
    assert table.counts.sum() == 6


def test_samples_in_proportion_to_the_counts():
    table = LengthTable(np.array([4, 100, 5000]), np.array([70, 29, 1]))
    drawn = table.sample(100_000, np.random.default_rng(0))
    lengths, counts = np.unique(drawn, return_counts=True)
    assert lengths.tolist() == [4, 100, 5000]
    # Four standard deviations of a share of 0.7 among 100,000 are 0.006.
    np.testing.assert_allclose(counts / 100_000, [0.7, 0.29, 0.01], atol=0.006)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the project's length files")
def test_a_real_file_is_sampled_with_its_median_and_tail():
    table = read_length_file(SHARED / "wikipedia.csv.gz")
    assert table.counts.sum() == 1_000_000
    drawn = table.sample(100_000, np.random.default_rng(1))
    assert np.median(drawn) == pytest.approx(347, rel=0.03)
    assert np.quantile(drawn, 0.99) == pytest.approx(10_919, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: expected the header 'length,count', found None"),
        ("4,2\n", r"line 1: .* found \['4', '2'\]"),
        ("length,count\n", "no line of numbers"),
        ("length,count\n4,2\n5\n", r"line 3: expected two positive integers .* found '5'"),
        ("length,count\n4,2,1\n", "line 2: .* found '4,2,1'"),
        ("length,count\n4,x\n", "line 2: .* found '4,x'"),
        ("length,count\n4,1.5\n", "line 2: .* found '4,1.5'"),
        ("length,count\n0,1\n", "line 2: .* found '0,1'"),
        ("length,count\n4,1\n\n-3,1\n", "line 4: .* found '-3,1'"),
        ("length,count\n99999999999999999999,1\n", "above 2"),
    ],
)
def test_names_the_line_that_is_wrong(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        read_length_file(path)


def test_refuses_what_is_no_file_and_no_gzip(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_length_file(tmp_path / "missing.csv")
    (tmp_path / "fake.csv.gz").write_text("length,count\n4,2\n")
    with pytest.raises(ValueError, match=r"fake.csv.gz cannot be read"):
        read_length_file(tmp_path / "fake.csv.gz")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary.csv cannot be read"):
        read_length_file(tmp_path / "binary.csv")


DISTRIBUTIONS = [
    LengthDistribution("uniform", 3, 90),
    LengthDistribution("lognormal", 3, 90),
    LengthDistribution("lognormal", 3, 90, median=10.0, sigma=2.0),
    LengthDistribution("bimodal", 3, 90, long_fraction=0.2),
    LengthDistribution("constant", 17),
    LengthDistribution("long_tail", 1024, 16384),
    LengthDistribution(),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), fewer=st.integers(0, 40), more=st.integers(40, 80))
def test_lengths_are_in_range_and_a_smaller_draw_is_a_prefix(distribution, seed, fewer, more):
    drawn = distribution.sample(more, np.random.default_rng(seed))
    assert drawn.dtype == np.int64
    assert len(drawn) == more
    assert drawn.min() >= distribution.low
    assert drawn.max() <= distribution.longest
    again = distribution.sample(fewer, np.random.default_rng(seed))
    assert again.tolist() == drawn[:fewer].tolist()


def draw(distribution):
    return distribution.sample(100_000, np.random.default_rng(3))


def test_shapes_of_the_distributions():
    uniform = draw(LengthDistribution("uniform", 1, 4))
    np.testing.assert_allclose(np.bincount(uniform)[1:] / 100_000, 0.25, atol=0.006)
    assert np.median(
        draw(LengthDistribution("lognormal", 1, 10**6, median=500.0))
    ) == pytest.approx(500, rel=0.03)
    bimodal = draw(LengthDistribution("bimodal", 100, 500, long_fraction=0.2))
    assert np.mean(bimodal >= 400) == pytest.approx(0.2, abs=0.006)
    assert np.mean(bimodal <= 200) == pytest.approx(0.8, abs=0.006)
    tail = draw(LengthDistribution("long_tail", 1024, 16384, alpha=1.2))
    assert np.mean(tail > 4096) == pytest.approx(4**-1.2, abs=0.006)
    assert np.mean(tail == 16384) == pytest.approx(16**-1.2, abs=0.006)
    assert set(draw(LengthDistribution("constant", 9))) == {9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "normal"}, "kind='normal' is none of uniform"),
        ({"low": 0}, "low=0"),
        ({"low": 9, "high": 8}, "high=8 is below low=9"),
        ({"kind": "constant", "low": 8, "high": 9}, "kind='constant' with low=8 and high=9"),
        ({"low": 4, "high": 8, "median": 9.0}, r"median=9.0 is outside \[low, high\] = \[4, 8\]"),
        ({"sigma": 0.0}, "sigma=0.0 and alpha=1.2"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"long_fraction": 1.5}, "long_fraction=1.5"),
    ],
)
def test_refuses_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        LengthDistribution(**options)
