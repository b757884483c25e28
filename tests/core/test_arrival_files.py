"""Files of arrivals as people have them are read rightly and said, or refused with the line."""

from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core.arrival_files import read_arrivals

MINUTES = ",".join(str(i) for i in range(1, 1441))
AZURE_FUNCTIONS = f"HashOwner,HashApp,HashFunction,Trigger,{MINUTES}\n" + "".join(
    f"o,a,f{i},http,{','.join(str(i * (m % 2)) for m in range(1440))}\n" for i in (1, 2, 3)
)
AZURE_LLM = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0782500,110,27
"""
MANY = "timestamp,rps\n" + "".join(f"{60 * i},8.3\n" for i in range(600))


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "arrivals.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("content", "rates", "interval_s", "said"),
    [
        (AZURE_FUNCTIONS, [0, 0.1] * 720, 60, "1,440 intervals of 60 s, 0.05 requests/s on ave"),
        (MANY, [8.3] * 600, 60, "600 intervals of 60 s, 8.3 requests/s on average (from 'time"),
        ("timestamp,rps\n0,5\n1,7\n", [5, 7], 1, "from 'timestamp' and 'rps'"),
        ("rps,timestamp\n5,1700000000\n7,1700000060\n", [5, 7], 60, "from 'timestamp' and 'rps'"),
        ("time\trate\n0\t5.5\n60\t6\n", [5.5, 6], 60, "from 'time' and 'rate'"),
        ("time;rps\n0;8,3\n1;12,25\n", [8.3, 12.25], 1, "with decimal commas"),
        ("sep=;\r\ntime;rps\r\n0,0;8,3\r\n0,5;9\r\n", [8.3, 9], 0.5, "with decimal commas"),
        ("\ufefftimestamp,rps\n0,5\n1,7\n", [5, 7], 1, "times taken as s"),
        ("time\trps\n0\t1,5\n1\t2,5\n".encode("utf-16"), [1.5, 2.5], 1, "with decimal commas"),
        ("timestamp rps\n2024-05-10 00:00:00 1\n2024-05-10 00:01:00 2\n", [1, 2], 60, "from"),
        ("timestamp_ms,requests\n0,30\n60000,60\n", [0.5, 1], 60, "'requests'"),
        ("ts,x\tx,count\n1700000000000,,6\n1700000010000,,7\n", [0.6, 0.7], 10, "taken as ms"),
        ("minute,Requests/min\n0,60\n1,90\n2,30\n", [1, 1.5, 0.5], 60, "'Requests/min'"),
        ('"Time (s)","Requests per second"\n0,5\n2,7\n', [5, 7], 2, "'Requests per second'"),
        ("time,rps\n2,7\n1,6\n0,5\n", [5, 6, 7], 1, "sorted by time"),
        ("# second, rate\n0,5\n1,7\n", [5, 7], 1, "from 'second' and 'rate'"),
        ("5\n# between\n\n7\n", [5, 7], 1, "a line is taken as 1 s"),
        ("rps\n8,3\n9,1\n", [8.3, 9.1], 1, "with decimal commas"),
    ],
)
def test_rates(file, content, rates, interval_s, said):
    found = read_arrivals(file(content))
    assert found.rates.tolist() == pytest.approx(rates)
    assert found.interval_s == interval_s
    assert said in found.said


@pytest.mark.parametrize(
    ("content", "times_s", "said"),
    [
        (AZURE_LLM, [0, 0.052, 0.09829], "3 requests in 0.09829 s, 30.5 requests/s on average"),
        ("arrival_s,done_s,latency_s\n0.5,1,0.5\n0.75,2,1\n", [0.5, 0.75], "from 'arrival_s'"),
        ("intended_s,sent_s,done_s\n0.5,1,0.5\n0.75,2,1\n", [0.5, 0.75], "from 'intended_s'"),
        ("start time;tokens\n2024/01/01 00:00:01,5;7\n2024/01/01 00:00:00;9\n", [0, 1.5], "sorted"),
        ("2024-05-10T00:00:00.25+00:00\n2024-05-10T02:00:01+0200\n", [0, 0.75], "2 requests"),
        ("timestamp\n1700000000000000000\n1700000001000000000\n", [0, 1], "times taken as ns"),
    ],
)
def test_times(file, content, times_s, said):
    found = read_arrivals(file(content))
    assert found.times_s.tolist() == pytest.approx(times_s)
    assert said in found.said


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        ("0,5\n1,6\n", 1, "it has 2 values without names, and which of them are rates is unclear"),
        ("8,3\n9,1\n", 1, "decimal commas need another separator"),
        ("a,b\n1,2\n", 1, "none of its columns ('a', 'b') is known; name the columns: 'timestamp'"),
        ("time;rps\n0;1,234\n1;2,345\n", 2, "'1,234' may have a mark of thousands; write 1234 or"),
        ("time;count\n0;1.234\n1;2.345\n", 2, "'1.234' may have a mark of thousands; write 1234 o"),
        ("time;rps\n0;1,5\n1;2.5\n", 2, "'1,5' has a comma, and '2.5' in line 3 a point"),
        ('time,rps\n0,"1,234,567"\n1,5\n', 2, "may have a mark of thousands; write 1234567"),
        ("timestamp,count\n0,1\n60,2\n180,3\n", 4, "120 s after the one before it, and others"),
        ("timestamp,model,rps\n0,a,1\n0,b,2\n1,a,3\n", 3, "it is 0 s after the one before it"),
        ("requests\n1\n2\n", 1, "nothing says how long that is; add a column 'timestamp', or say"),
        ("app,1,2,3\nx,4,5,6\n", 1, "its columns 1 to 3 are intervals, and nothing says how long"),
        ("Time,Value\n0,1\n60,2\n120,2\n", 1, "are 60 s apart, so they may be intervals"),
        ("timestamp;rps\n16.11.2023 18:17;5\n", 2, "'16.11.2023 18:17' is no time; write seconds"),
        ("timestamp,rps\n2023-13-16 18:17,5\n", 2, "'2023-13-16 18:17' is no time"),
        ("time,rps\n0,1\n1\n", 3, "it has 1 values where the first line has 2"),
        ("rps\n1\n-2\n", 3, "must be a number of at least 0 and at most 1e+19, got '-2'"),
        ("rps\n1\n1e300\n", 3, "and at most 1e+19, got '1e300'"),
        ("date\n2020-01-01\n9999-12-31\n", 3, "'9999-12-31' is no time"),
        ("rps\n1\nnan\n", 3, "must be a number of at least 0 and at most 1e+19, got 'nan'"),
        ("time,rps\n0,\n1,3\n", 2, "must be a number of at least 0 and at most 1e+19, got ''"),
        ("time,rps,qps\n0,1,2\n", 1, "'rps' and 'qps' both have rates or counts; leave one"),
        ("rps,name\n1,x\n", 1, "columns beside 'rps', and none of them is a time"),
        ("time,rps\n0,5\n", 2, "one time does not say how long its interval is"),
        (AZURE_FUNCTIONS.replace("f2,http,0,2,", "f2,http,0,?,"), 3, "at most 1e+19, got '?'"),
        ("timestamp,size\n0,1\ngröße,2\n".encode("latin-1"), 3, "it is not text; save the file"),
        (b"\x1f\x8b\x08\x00", 1, "it is not text"),
        (b"PK\x03\x04\x00\x00", 1, "it is not text"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_line(file, content, line, said):
    path = file(content)
    with pytest.raises(ValueError) as refused:
        read_arrivals(path)
    assert str(refused.value).startswith(f"{path}: line {line}: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it has no lines; name the columns"),
        ("time,rps\n", "it has a head, and no lines below it"),
        ("0\n0\n", "every rate is 0"),
        ("HashApp,1,2\nx,4,5\n", "the columns 1 to 2 are minutes, got an interval of 1 s"),
        (MANY, "its times are 60 s apart, got an interval of 1 s; leave the interval out"),
    ],
)
def test_a_file_that_does_not_fit_as_a_whole(file, content, said):
    path = file(content)
    with pytest.raises(ValueError) as refused:
        read_arrivals(path, interval_s=1)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)


def test_an_interval_is_taken_where_the_file_has_none(file):
    found = read_arrivals(file("requests\n30\n60\n"), interval_s=60)
    assert (found.rates.tolist(), found.interval_s) == ([0.5, 1.0], 60)
    found = read_arrivals(file("app,1,2\nx,4,5\ny,6,5\n"), interval_s=10)
    assert (found.rates.tolist(), found.interval_s) == ([1.0, 1.0], 10)


# Any stream, written in any dialect, is read back the same.

EPOCH = datetime(2023, 11, 16, 18, 17, 3, tzinfo=timezone.utc)
FORMS = {  # head, function of milliseconds from the start
    "time_s": lambda ms, mark: f"{ms // 1000}{mark}{ms % 1000:03}",
    "start_ms": lambda ms, mark: str(ms),
    "Timestamp": lambda ms, mark: str(int(EPOCH.timestamp() * 1000) + ms),
    "timestamp": lambda ms, mark: str(EPOCH + timedelta(milliseconds=ms)),
    "datetime": lambda ms, mark: (
        (EPOCH + timedelta(milliseconds=ms))
        .astimezone(timezone(timedelta(hours=-3, minutes=-30)))
        .strftime("%Y-%m-%dT%H:%M:%S.%f%z")
    ),
}
dialects = st.tuples(
    st.sampled_from([(",", "."), (";", ","), (";", "."), ("\t", "."), ("\t", ",")]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(["\n", "\r\n"]),
    st.permutations(["time", "value", "note"]),
)


def written(tmp_path_factory, dialect, times_ms, name, values):
    (separator, mark), encoding, form, end, order = dialect
    lines = [{"time": form, "value": name, "note": "note"}]
    for i, (ms, value) in enumerate(zip(times_ms, values, strict=True)):
        shown = {"time": FORMS[form](ms, mark), "value": value.replace(".", mark), "note": f"n{i}"}
        lines.append(shown)
    text = end.join(separator.join(line[column] for column in order) for line in lines)
    path = tmp_path_factory.mktemp("dialect") / "stream"
    path.write_bytes((text + end).encode(encoding))
    return path


@given(dialects, st.lists(st.floats(0, 1e6), min_size=2, max_size=20), st.integers(1, 100_000))
def test_rates_in_any_dialect(tmp_path_factory, dialect, rates, interval_ms):
    rates[0] = 0.5  # one mark that cannot be of thousands
    times = [i * interval_ms for i in range(len(rates))]
    path = written(tmp_path_factory, dialect, times, "rps", [f"{r:.6f}" for r in rates])
    found = read_arrivals(path)
    assert np.allclose(found.rates, rates, atol=1e-6)
    assert found.interval_s == pytest.approx(interval_ms / 1000)


@given(dialects, st.lists(st.integers(0, 10**7), min_size=2, max_size=20))
def test_times_in_any_dialect(tmp_path_factory, dialect, times_ms):
    times_ms = [*sorted([0, 1, *times_ms]), 10**7 + 17]  # at uneven distances
    path = written(tmp_path_factory, dialect, times_ms, "tokens", ["7"] * len(times_ms))
    assert np.allclose(read_arrivals(path).times_s, np.array(times_ms) / 1e3, atol=1e-6)
