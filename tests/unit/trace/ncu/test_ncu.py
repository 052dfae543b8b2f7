"""What ncu prints, in every form it comes: pages, releases, locales, units, NVTX cells that break the csv."""

import importlib.util
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvprof_kit._trace.ncu.schema import KERNELS, NcuReport
from nvprof_kit._trace.open import open_ncu
from nvprof_kit.errors import CaptureError, NvprofKitError, ToolError

DATA = Path(__file__).parents[3] / "data/ncu"
NEEDS_READER = pytest.mark.skipif(importlib.util.find_spec("ncu_report") is None, reason="no ncu-report")

PUSH = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
STOP = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
IDENTITY = ["ID", "Process ID", "Process Name", "Host Name"]
NVTX = [PUSH, STOP]
BEHIND = ["Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC"]
OURS = ["1", "7", "(128, 1, 1)", "(64, 2, 1)", "0", "9.0"]


def line(cells: list[str]) -> str:
    """A line as ncu writes it: every field in quotes, quotes in it doubled."""
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells) + "\n"


def cell(*names: str, tid: int = 557, domain: str = "nvprof_kit") -> str:
    ranges = (f'"{domain}:{name}:none:none:RGB:0xff:REGISTERED:{name}"' for name in names)
    return f"{tid}  {'  '.join(ranges)} "


def raw(metrics, *, nvtx=None, kernel="gemm(int)", noise=""):
    """A raw page of one result: name to unit and value of each metric."""
    names = [*IDENTITY, *(NVTX if nvtx is not None else []), *BEHIND]
    units = line([""] * len(names) + [unit for unit, _ in metrics.values()])
    values = ["0", "557", "python3", "127.0.0.1", *([nvtx, ""] if nvtx is not None else []), kernel, *OURS]
    return noise + line([*names, *metrics]) + units + line([*values, *(value for _, value in metrics.values())])


def read(tmp_path: Path, text: str, **options: str) -> NcuReport:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    return open_ncu(path, **options)


TIME = {"gpu__time_duration.sum": ("ns", "9600")}


def test_units_are_brought_to_base(tmp_path):
    report = read(
        tmp_path,
        raw(
            {
                "gpu__time_duration.sum": ("usecond", "31.872000"),
                "dram__bytes.sum": ("Mbyte", "50.33"),
                "dram__bytes.sum.per_second": ("Gbyte/second", "204.36"),
                "sm__cycles_elapsed.avg.per_second": ("cycle/nsecond", "1.01"),
                "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "16.38"),
                "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "46.5"),
            }
        ),
    )
    assert report.metrics.iloc[0].to_list() == pytest.approx([31872.0, 50.33e6, 204.36e9, 1.01e9, 16380.0, 46.5])
    assert list(report.units.values()) == ["ns", "byte", "byte/s", "hz", "byte/block", "%"]


def test_a_word_among_numbers_costs_its_own_cell(tmp_path):
    rows = [raw({**TIME, "sm__x.sum": ("%", value)}) for value in ("4", "(!) n/a", "6")]
    text = rows[0] + "".join(row.splitlines(keepends=True)[-1] for row in rows[1:])
    report = read(tmp_path, text)
    assert report.metrics["sm__x.sum"].to_list() == pytest.approx([4, float("nan"), 6], nan_ok=True)
    assert "1 of 3 values of sm__x.sum are no numbers, as '(!) n/a': left out" in report.warnings
    assert list(report.texts) == []


@pytest.mark.parametrize("german", [False, True])
def test_a_number_in_any_locale_is_the_same_number(german, tmp_path):
    values = [0.0, 0.25, 7.5, 999.99, 1234.56, 12345.67, 1e6, 98765432.1, 1e15, 3e-5]
    texts = [f"{value:,.2f}" if value != 3e-5 else "3.00e-05" for value in values]
    if german:
        texts = [text.translate(str.maketrans(",.", ".,")) for text in texts]
    texts += ["1 234", "2\u202f500", "7 (3; 4)", "no data"]
    report = read(tmp_path, raw({f"m{number}": ("", text) for number, text in enumerate(texts)}))
    expected = [*values, 1234, 2500, 7, float("nan")]
    assert report.metrics.iloc[0].tolist() == pytest.approx(expected, nan_ok=True)
    assert not any("does not tell for sure" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("text", "tid", "ranges"),
    [
        ("", -1, {"": ()}),
        (cell("step 0", "model.layers.0"), 557, {"nvprof_kit": ("step 0", "model.layers.0"), "": ()}),
        (
            '7  "own:step 0:Int64:0:RGB:0xff:REGISTERED:step 0"  "<default domain>:f:none:none:none:none:ASCII:f" ',
            7,
            {"own": ("step 0",), "default": ("f",)},
        ),
        # colons in domain and name; quotes and colons in a JSON payload
        ('1  "a:b:c:d:Json:{"x":"y:none:none"}:none:none:ASCII:c:d" ', 1, {"a:b": ("c:d",)}),
        ('1  "a:b:b:none:none:none:none:ASCII:b" ', 1, {"a:b": ("b",)}),
        ('1  "d:na"me:none:none:none:none:ASCII:na"me" ', 1, {"d": ('na"me',)}),
        # no message: six fields from the right
        ('1  "d:foo:bar:none:none:none:none:none:none" ', 1, {"d": ("foo:bar",)}),
    ],
)
def test_nvtx_cells(text, tid, ranges, tmp_path):
    for domain, names in ranges.items():
        kernels = read(tmp_path, raw(TIME, nvtx=text), domain=domain).kernels
        assert (kernels["tid"].tolist(), kernels["stack"].tolist()) == ([tid], [names])


_NAMES = st.text(
    st.characters(blacklist_characters='"', min_codepoint=33, max_codepoint=0x2FFF), min_size=1, max_size=20
)


@given(names=st.lists(_NAMES, max_size=4), domain=st.sampled_from(["nvprof_kit", "a:b", "NCCL"]))
def test_any_name_is_read_back(tmp_path_factory, names, domain):
    text = raw(TIME, nvtx=cell(*names, domain=domain))
    report = read(tmp_path_factory.getbasetemp(), text, domain=domain)
    assert report.kernels["stack"].tolist() == [tuple(names)]


@pytest.mark.parametrize("name", ['na"me', 'x","y', 'x","(1, 2, 3)","y', '{"k":"v","n":1}', 'a", "b'])
def test_a_quote_in_a_range_shifts_nothing(name, tmp_path):
    """ncu doubles the quotes around a range, and not those in it."""
    text = raw({**TIME, "dram__bytes.sum": ("byte", "12")}, nvtx=cell("MARK"))
    broken = read(tmp_path, text.replace("MARK", name))
    assert broken.metrics.to_dict("list") == {"gpu__time_duration.sum": [9600.0], "dram__bytes.sum": [12.0]}
    assert broken.kernels["kernel"].tolist() == ["gemm(int)"]
    assert broken.kernels["stack"].tolist() == [(name,)]


def test_a_row_that_cannot_be_read_is_counted(tmp_path):
    text = raw(TIME) + '"1","557","python3","127.0.0.1","gemm"\n'
    report = read(tmp_path, text)
    assert len(report.kernels) == 1
    assert report.warnings[:1] == ("1 rows cannot be read (lines 4): their fields do not fit the header",)


def test_details_page(tmp_path):
    head = [*IDENTITY, *BEHIND, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    rules = ["Rule Name", "Rule Type", "Rule Description"]
    who = lambda id_: [id_, "557", "python3", "127.0.0.1", "gemm(int)", *OURS]  # noqa: E731
    rule = line([*who("0"), "SourceCounters", "", "", "", "Rule", "OPT", 'This "kernel", badly\nwritten'])
    text = (
        line([*head, *rules])
        + line([*who("0"), "GPU Speed Of Light Throughput", "Duration", "usecond", "2.50"]).strip() + ",\n"
        + line([*who("0"), "GPU Speed Of Light Throughput", "Memory Throughput", "%", "46.36"]).strip() + ",\n"
        + line([*who("0"), "Memory Workload Analysis", "Memory Throughput", "Gbyte/second", "204.36"])
        + rule
        + line([*who("1"), "GPU Speed Of Light Throughput", "Duration", "usecond", "5.00"])
    )  # fmt: skip
    report = read(tmp_path, text)
    assert report.kernels["id"].tolist() == [0, 1]
    assert report.metrics["gpu__time_duration.sum"].tolist() == pytest.approx([2500.0, 5000.0])
    assert report.metrics["gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"][0] == 46.36
    assert report.metrics["dram__bytes.sum.per_second"][0] == pytest.approx(204.36e9)
    without_values = read(tmp_path, line([*head, *rules]) + rule)
    assert (without_values.kernels["id"].tolist(), [*without_values.metrics]) == ([0], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("loss 3.1\n", "no page of ncu in it (no header that begins with ID); needed what `ncu --import"),
        ("==WARNING== No kernels were profiled.\n", "ncu measured no kernel"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== Failed to prepare kernel\n", "ncu failed: Failed to prepare kernel"),
        (line([*IDENTITY, *BEHIND, "Section Name", "Metric Name", "Metric Unit", "Minimum"]), "a summary page"),
        (line([*IDENTITY, *BEHIND]), "a page of ncu without a result"),
    ],
)
def test_bad_input_is_one_line(text, message, tmp_path):
    with pytest.raises(NvprofKitError) as error:
        read(tmp_path, text)
    assert message in str(error.value) and "a.csv" in str(error.value) and "\n" not in str(error.value)


def test_packed(tmp_path):
    path = tmp_path / "a.csv.xz"
    path.write_bytes(lzma.compress(raw(TIME).encode()))
    assert len(open_ncu(path).kernels) == 1
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CaptureError, match="cut off or damaged"):
        open_ncu(path)
    with pytest.raises(CaptureError, match="no such file"):
        open_ncu(tmp_path / "none.csv")


def test_a_report_needs_a_reader(tmp_path, monkeypatch):
    path = tmp_path / "a.ncu-rep"
    path.write_bytes(b"NVR\x00damaged")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("NCU", raising=False)
    with pytest.raises(ToolError, match=r'pip install "nvprof-kit\[ncu\]"'):
        open_ncu(path)


@NEEDS_READER
def test_a_report_by_nvidia_s_reader():
    """The same run as its raw page: launches, ranges, units, and every number to the digits that the page has."""
    report, page = (open_ncu(DATA / f"own-2025.3.{form}.xz") for form in ("ncu-rep", "csv"))
    assert report.kernels["stack"].tolist() == [("step 0", "Model", f"layers.{number}") for number in (0, 1)]
    told = [name for name in KERNELS if name not in ("pid", "tid")]  # these are not in the reader's interface
    assert report.kernels[told].to_dict("list") == page.kernels[told].to_dict("list")
    assert report.metrics["gpu__time_duration.sum"].tolist() == [86_752, 11_904]
    both = [name for name in page.metrics if name in report.metrics]
    assert len(both) == 561 and set(report.metrics) == set(both)
    assert {name: report.units[name] for name in both} == {name: page.units[name] for name in both}
    np.testing.assert_allclose(report.metrics[both], page.metrics[both], rtol=1e-6, atol=0.0051)


@NEEDS_READER
def test_a_damaged_report(tmp_path):
    path = tmp_path / "a.ncu-rep"
    path.write_bytes(b"NVR\x00damaged")
    with pytest.raises(CaptureError, match="no result in it"):
        open_ncu(path)


@pytest.mark.parametrize(
    ("noise", "launches"),
    [
        ("==nvprof_kit== launches: 1|60|145\n", (1, 60, 145)),
        ("loss 1\n==nvprof_kit== launches: 1\n==PROF== x\n", (1,)),
        ("==nvprof_kit== launches: many\n", ()),
        ("", ()),
    ],
)
def test_a_plan_says_which_launches_it_measured(noise, launches, tmp_path):
    assert read(tmp_path, raw(TIME, noise=noise)).invocations == launches
