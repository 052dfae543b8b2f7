"""Odd captures of real Nsight Systems: ranges as it recorded them, with kernels laid into them, for lack of a GPU."""

import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from support.captures.nsys_file import KERNEL_TABLE
from support.nsys import run_nsys

import nvprof_kit

pytestmark = pytest.mark.nsys

PROGRAM = r"""
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static nvtxDomainHandle_t domain;
static nvtxRangeId_t handed;

static void wait_a_bit(void) { struct timespec t = {0, 3000000}; nanosleep(&t, NULL); }

static nvtxEventAttributes_t called(const char *text) {  /* not registered: the text travels with the event */
    nvtxEventAttributes_t event = {0};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = text;
    return event;
}
static void push(const char *text) { nvtxEventAttributes_t e = called(text); nvtxDomainRangePushEx(domain, &e); }
static void pop(void) { nvtxDomainRangePop(domain); }
static nvtxRangeId_t start(const char *text) {
    nvtxEventAttributes_t e = called(text);
    return nvtxDomainRangeStartEx(domain, &e);
}
static void *take_over(void *unused) {
    push("layers.other");
    wait_a_bit();
    pop();
    nvtxDomainRangeEnd(domain, handed);
    return unused;
}

int main(int count, char **words) {
    if (count > 1) {  /* in this process the domain's id is another one */
        nvtxDomainCreateA("a domain of the child alone");
        domain = nvtxDomainCreateA("odd");
        push("layers.child");
        wait_a_bit();
        pop();
        return 0;
    }
    domain = nvtxDomainCreateA("odd");
    pid_t child = fork();
    if (child == 0)
        execl(words[0], words[0], "child", NULL);
    waitpid(child, NULL, 0);
    nvtxEventAttributes_t mark = called("a mark is no range");
    nvtxDomainMarkEx(domain, &mark);
    for (int length = 60000; length <= 70000; length += 10000) {
        char *text = calloc(length + 1, 1);
        memset(text, length == 60000 ? 'x' : 'y', length);
        push(text);
        wait_a_bit();
        pop();
    }
    nvtxRangeId_t a = start("layers.0"), b;
    wait_a_bit();
    b = start("layers.1");
    wait_a_bit();
    nvtxDomainRangeEnd(domain, a);
    wait_a_bit();
    nvtxDomainRangeEnd(domain, b);
    handed = start("layers.handed");
    pthread_t thread;
    pthread_create(&thread, NULL, take_over, NULL);
    pthread_join(thread, NULL);
    nvtxRangePushA("in the default domain");
    wait_a_bit();
    nvtxRangePop();
    push("layers.open");
    wait_a_bit();
    return 0;
}
"""


@pytest.fixture
def capture(nsys: str, tmp_path: Path) -> Path:
    """The export of a capture of the program."""
    compiler = shutil.which("cc")
    headers = next(Path(nsys).resolve().parents[1].glob("**/nvtx/include"), None)
    if not (compiler and headers):
        pytest.skip("no C compiler, or an nsys without NVTX headers")
    source, program, report = tmp_path / "odd.c", tmp_path / "odd", tmp_path / "odd.nsys-rep"
    source.write_text(PROGRAM)
    subprocess.run([compiler, f"-I{headers}", source, "-o", program, "-ldl", "-pthread"], check=True)
    run_nsys(nsys, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "-o", report, program)
    exported = tmp_path / "odd.sqlite"
    run_nsys(nsys, "export", "--type=sqlite", "-o", exported, report)
    return exported


def lay_kernels(path: Path) -> dict[str, int]:
    """Launch one kernel in the middle of each range of the program; returns their lengths, each another power of two,
    by the first letters of the range's text.
    """
    db = sqlite3.connect(path)
    ranges = db.execute(
        'SELECT coalesce(s.value, n.text), n.start, n."end", n.globalTid FROM NVTX_EVENTS AS n '
        "LEFT JOIN StringIds AS s ON s.id = n.textId "
        "WHERE n.eventType IN (59, 60) AND coalesce(s.value, n.text) <> 'gc' ORDER BY n.start"
    ).fetchall()
    last = max(end or start for _, start, end, _ in ranges)
    db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)")
    db.execute(KERNEL_TABLE)
    columns = "start, [end], deviceId, correlationId, globalPid, demangledName"
    db.execute("INSERT INTO StringIds (id, value) VALUES (1000000, 'cudaLaunchKernel_v7000')")
    lengths = {}
    for number, (text, start, end, tid) in enumerate(ranges):
        moment = (start + (end or last + 2_000_000)) // 2
        call = (moment, moment + 1, tid, 7, 1_000_000)  # correlation ids mean something only with the process
        if tid & ~0xFFFFFF == ranges[-1][3] & ~0xFFFFFF:
            call = (*call[:3], 100 + number, call[4])
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)
        lengths[text[:13]] = 1 << number
        kernel = (last + 1000 * number, last + 1000 * number + (1 << number), 0, call[3], tid & ~0xFFFFFF, 1_000_000)
        db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES (?, ?, ?, ?, ?, ?)", kernel)
    db.commit()
    db.close()
    return lengths


def table(path: Path, domain: str) -> tuple[dict[str, int], nvprof_kit.Layers]:
    result = nvprof_kit.open(path, domain=domain).layers()
    rows = result.rows[result.rows["gpu_self_ns"] > 0]
    return {layer[:13]: ns for layer, ns in zip(rows["layer"], rows["gpu_self_ns"], strict=True)}, result


@pytest.mark.every_nsys
def test_an_odd_capture(capture):
    lengths = lay_kernels(capture)
    # launched in the middle of layers.0, where layers.1 has just begun or is about to: either may hold it
    crossed = lengths.pop("layers.0"), lengths.pop("layers.1")
    outside = lengths.pop("in the defaul")
    found, result = table(capture, "odd")
    assert found.pop("layers.0", 0) + found.pop("layers.1", 0) == sum(crossed)
    assert found == {**lengths, "(none)": outside}
    told = {"layers.child", "layers.handed", "layers.other", "layers.open", "x" * 13}
    assert set(lengths) - {"y" * 13} == told  # a text over 64 kB is lost with its range, or kept
    assert result.info.processes == 2
    assert any("1 ranges ended on another thread" in warning for warning in result.warnings)
    assert "x" * 60_000 in set(result.rows["layer"])
    rest = sum(found.values()) - outside + sum(crossed)
    assert table(capture, "default")[0] == {"in the defaul": outside, "(none)": rest}
