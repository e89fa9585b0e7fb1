"""`echelon gpus` as it is typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from fake_nvml import (
    GIB,
    NOBODY_HERE,
    FakeDriver,
    MakeDriver,
    gpu,
    mig_slice,
    process,
    run_idle_process,
)

from echelon.cli import run_and_report_faults, run_command
from echelon.errors import ExitCode
from echelon.gpus.availability import describe_other_users
from echelon.gpus.command import get_current_user

ME = os.getpid()
EXAMPLE = Path(__file__).parents[2] / "examples" / "display-gpu-info.sh"
COMMAND = [sys.executable, "-m", "echelon", "gpus"]


class GpusCommand:
    """Runs `echelon gpus` in this process; returns exit code, standard output and error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        def run() -> int:
            try:
                return run_command(["gpus", *words])
            except SystemExit as error:  # argparse's
                return int(error.code or 0)

        code = run_and_report_faults(run)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def gpus(capsys: pytest.CaptureFixture[str]) -> GpusCommand:
    return GpusCommand(capsys)


# --- what cannot be done ---


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("init 9", "no GPU: the NVIDIA driver is not loaded (try `nvidia-smi`, or reboot)"),
        ("init 4", "no GPU: the NVIDIA driver denies access (may you read /dev/nvidiactl?)"),
        ("", "no GPU: the NVIDIA driver is there, but no GPU"),
    ],
)
def test_no_gpu_is_one_line_and_a_code_of_its_own(
    make_driver: MakeDriver, gpus: GpusCommand, line: str, words: str
) -> None:
    make_driver(line)
    assert gpus() == (ExitCode.NO_GPU, "", f"{words}\n")
    assert gpus("--watch") == (ExitCode.NO_GPU, "", f"{words}\n")
    assert gpus("--free") == (ExitCode.NO_GPU, "", f"{words}\n")
    code, out, _ = gpus("--json")
    assert code == ExitCode.NO_GPU
    assert json.loads(out)["nodes"][0]["gpus"] == []


def test_no_driver(gpus: GpusCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.gpus.nvml.LIBRARY", "libnothing.so")
    code, out, err = gpus()
    assert (code, out) == (ExitCode.NO_GPU, "")
    assert err == "no GPU: there is no NVIDIA driver (libnvidia-ml.so.1 is not found)\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--gpu", "0,x,-1"], ExitCode.USAGE, "--gpu 0,x,-1: 'x', '-1' is not an index"),
        (["--gpu", "0,,1"], ExitCode.USAGE, "'' is not an index"),
        (["--gpu", "1-"], ExitCode.USAGE, "'1-' is not an index"),
        (["--gpu", "²"], ExitCode.USAGE, "'²' is not an index"),
        (["--gpu", ""], ExitCode.USAGE, "'' is not an index"),
        (["--gpu", "3-1"], ExitCode.USAGE, "'3-1' is not an index"),
        (["--gpu", "0-99999999"], ExitCode.USAGE, "'0-99999999' is not an index"),
        (["--gpu", "0-9999"], ExitCode.NOT_FOUND, "there is no GPU 2, 3, 4, 5, 6, 7, 8, 9, … here"),
        (
            ["--gpu", "0,2,7"],
            ExitCode.NOT_FOUND,
            "there is no GPU 2, 7 here\n  hint: there are 0 to 1",
        ),
        (["--watch", "0"], ExitCode.USAGE, "'0' is not an interval: give 0.1 to 86400 s"),
        (["--watch", "1e9"], ExitCode.USAGE, "'1e9' is not an interval"),
        (["--watch", "nan"], ExitCode.USAGE, "'nan' is not an interval"),
        (["--watch", "often"], ExitCode.USAGE, "'often' is not an interval"),
        (["--free", "0"], ExitCode.USAGE, "'0' is not a number of GPUs"),
        (["--free", "--watch"], ExitCode.USAGE, "--free is about all GPUs of this machine, once"),
        (
            ["--free", "--hosts", "a"],
            ExitCode.USAGE,
            "--free is about all GPUs of this machine, once",
        ),
        (["--hosts", ""], ExitCode.USAGE, "'' is not a host"),
        (["--hosts", "a,-oProxyCommand=x"], ExitCode.USAGE, "'-oProxyCommand=x' is not a host"),
        (["--hosts", "a", "--ssh", "'"], ExitCode.USAGE, "is not a command: no closing quotation"),
        (["--user", "roott"], ExitCode.NOT_FOUND, "did you mean 'root'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(
    make_driver: MakeDriver, gpus: GpusCommand, words: list[str], code: ExitCode, message: str
) -> None:
    make_driver(gpu(0), gpu(1))
    got, out, err = gpus(*words)
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


# --- what is chosen ---


def test_users(make_driver: MakeDriver, gpus: GpusCommand) -> None:
    make_driver(
        gpu(0), gpu(1), gpu(2), process(ME, on=1), process(NOBODY_HERE, on=1), process(1, on=2)
    )
    code, out, _ = gpus("--user", "me")
    assert code == ExitCode.OK
    assert [line[:5] for line in out.splitlines()][:2] == ["GPU 1", "GPU 1"]
    assert f"pid {ME} " in out
    assert "?" not in out
    code, out, _ = gpus("--user", "daemon")
    assert (code, out) == (ExitCode.OK, "no process of daemon on a GPU\n")


def test_only_some_gpus(make_driver: MakeDriver, gpus: GpusCommand) -> None:
    make_driver(*(gpu(i) for i in range(6)))
    code, out, _ = gpus("--gpu", "0,3-4")
    assert code == ExitCode.OK
    assert [line[4] for line in out.splitlines()] == ["0", "3", "4"]


def test_json_has_everything(make_driver: MakeDriver, gpus: GpusCommand) -> None:
    make_driver(gpu(0, use=7), process(ME, gib=2))
    document = json.loads(gpus("--json")[1])
    assert document["version"] == 1
    [node] = document["nodes"]
    [seen] = node["gpus"]
    assert (seen["use_percent"], seen["fan_percent"], seen["idle"]) == (7, None, False)
    assert seen["processes"][0]["pid"] == ME
    assert seen["processes"][0]["memory_bytes"] == 2 * GIB


def test_grep_finds_all_of_a_process_in_its_line(
    make_driver: MakeDriver, gpus: GpusCommand
) -> None:
    with run_idle_process("/usr/bin/python train.py") as pid:
        make_driver(gpu(0), gpu(1), process(pid, on=1, gib=57.25))
        [found] = [line for line in gpus()[1].splitlines() if get_current_user() in line]
    assert found == _format_process_line(1, pid, "57.2 GiB", found)


def _format_process_line(index: int, pid: int, memory: str, seen: str) -> str:
    """The line of `python train.py`, with the age that was seen: a busy machine takes its time."""
    [age] = re.findall(r" GiB( +\d+[smh]\S*)  ", seen)
    return f"GPU {index}  pid {pid}  {get_current_user()}  {memory}{age}  python train.py"


def test_a_title_is_shown_whole(make_driver: MakeDriver, gpus: GpusCommand) -> None:
    """As setproctitle leaves it: all in the first word, with paths further on."""
    with run_idle_process("/opt/bin/ray::train /data/shard-1 on 3") as pid:
        make_driver(gpu(0), process(pid))
        assert gpus()[1].endswith("  ray::train /data/shard-1 on 3\n")


# --- free ones ---


def test_free(make_driver: MakeDriver, gpus: GpusCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    make_driver(gpu(0), gpu(1, use=99), gpu(2), gpu(3, code=15), gpu(4), process(ME, on=4))
    assert gpus("--free") == (ExitCode.OK, "0,2\n", "")
    assert gpus("--free", "1") == (ExitCode.OK, "0\n", "")
    assert gpus("--free", "1", "--gpu", "1-4") == (ExitCode.OK, "2\n", "")
    assert json.loads(gpus("--free", "--json")[1]) == {"version": 1, "free": ["0", "2"]}
    code, out, err = gpus("--free", "3")
    assert (code, out) == (ExitCode.BUSY, "")
    assert err == "3 are wanted, but only 2 are idle; `echelon gpus` shows who uses them\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    assert gpus("--free") == (ExitCode.OK, "2\n", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    code, out, err = gpus("--free")
    assert (code, out) == (ExitCode.BUSY, ""), "an empty list would hide all GPUs from CUDA"
    among = "among those that CUDA_VISIBLE_DEVICES allows"
    assert err == f"none is idle {among}; `echelon gpus` shows who uses them\n"


def test_free_where_cuda_counts_otherwise(
    make_driver: MakeDriver, gpus: GpusCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_driver(gpu(0, name="NVIDIA T4", uuid="GPU-a"), gpu(1, uuid="GPU-b"))
    assert gpus("--free")[1] == "GPU-a,GPU-b\n"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpus("--free")[1] == "0,1\n"


def test_free_slices(make_driver: MakeDriver, gpus: GpusCommand) -> None:
    parts = [mig_slice(0, 0, uuid="MIG-a"), mig_slice(0, 1, uuid="MIG-b")]
    make_driver(gpu(0, mig=1), *parts, process(ME, slice=0))
    assert gpus("--free")[1] == "MIG-b\n"


# --- again and again ---


@pytest.fixture
def watching() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(driver: FakeDriver, *words: str, **options: Any) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*COMMAND, *words],
                env=driver.environment(TERM="xterm", LC_ALL="C.UTF-8"),
                stdout=subprocess.PIPE,
                text=True,
                **options,
            )
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def _lines(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def test_watching_as_json_is_a_line_for_each_reading(
    make_driver: MakeDriver, watching: Callable[..., subprocess.Popen[str]]
) -> None:
    driver = make_driver(gpu(0, use=1))
    process = watching(driver, "--watch", "0.1", "--json")
    first = json.loads(_lines(process).readline())
    driver.set(gpu(0, use=2))
    readings = (json.loads(line) for line in _lines(process))
    later = next(
        reading for reading in readings if reading["nodes"][0]["gpus"][0]["use_percent"] == 2
    )
    assert first["time"] < later["time"]
    process.send_signal(signal.SIGINT)
    process.stdout = None
    assert process.wait(timeout=300) == ExitCode.OK


def test_watching_through_a_pipe(
    make_driver: MakeDriver, watching: Callable[..., subprocess.Popen[str]]
) -> None:
    process = watching(make_driver(gpu(0)), "--watch", "0.1")
    assert [_lines(process).readline()[:5] for _ in range(3)] == ["GPU 0"] * 3


# --- other machines ---

PRETENDED_SSH = """\
#!/bin/sh
# Takes ssh's words; every host is this machine, with a driver of its own.
while [ "$1" != "--" ]; do shift; done
host=$2
shift 2
cd {folder}/"$host" 2>/dev/null || {{ echo "ssh: connect to host $host: No route" >&2; exit 255; }}
echo "Welcome to $host"
LD_LIBRARY_PATH=$PWD exec sh -c "$*"
"""


@pytest.fixture
def hosts(tmp_path: Path, make_driver: MakeDriver) -> str:
    """Two machines, and a way to them."""
    make_driver()
    ssh = tmp_path / "ssh"
    ssh.write_text(PRETENDED_SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    FakeDriver(tmp_path / "a", gpu(0, use=11), process(NOBODY_HERE))
    FakeDriver(tmp_path / "b", "init 9")
    return str(ssh)


def test_other_machines(hosts: str, gpus: GpusCommand) -> None:
    code, out, err = gpus("--hosts", "a,b,c", "--ssh", hosts)
    assert (code, err) == (ExitCode.OK, "")
    assert out.splitlines() == [
        "a  GPU 0  NVIDIA H200  use 11%  memory 0.00/140 GiB  temperature 34°C  power 76/700 W",
        "a  GPU 0  pid ?  ?  1.0 GiB      ?  a process that is not visible from here",
        "b  the NVIDIA driver is not loaded (try `nvidia-smi`, or reboot)",
        "c  cannot be reached: ssh: connect to host c: No route",
    ]
    code, out, err = gpus("--hosts", "b,c", "--ssh", hosts)
    assert (code, out) == (ExitCode.NO_GPU, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["b", "c"]


def test_a_machine_without_our_python(
    hosts: str, gpus: GpusCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    code, out, _ = gpus("--hosts", "a", "--ssh", hosts)
    assert code == ExitCode.OK
    assert "use 11%" in out


OLD_PYTHON = """\
#!/bin/sh
now="import sys; sys.version_info = (3, 8, 18); sys.version = '3.8.18 (default)'; $2"
shift 2
exec {python} -c "$now" "$@"
"""


def test_a_machine_whose_python_is_too_old(
    hosts: str, gpus: GpusCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "python3.8"
    old.write_text(OLD_PYTHON.format(python=sys.executable))
    old.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(old))
    code, _, err = gpus("--hosts", "a", "--ssh", hosts)
    assert code == ExitCode.NO_GPU
    assert err == "a: no GPU: cannot be reached: Python 3.9 or later is needed, there is 3.8.18\n"


@pytest.mark.slow
def test_a_lost_connection_is_stale_and_comes_back(
    hosts: str, tmp_path: Path, watching: Callable[..., subprocess.Popen[str]]
) -> None:
    there, driver = tmp_path / "a", FakeDriver(tmp_path / "here")
    process = watching(driver, "--hosts", "a", "--ssh", hosts, "--watch", "0.2", "--json")
    readings = (json.loads(line)["nodes"][0] for line in _lines(process))
    assert next(node for node in readings if node["gpus"])["stale_s"] is None
    there.rename(tmp_path / "cut")
    for pid in _list_child_pids(process.pid):
        os.kill(pid, signal.SIGKILL)
    stale = next(node for node in readings if node["stale_s"])
    assert stale["stale_s"] > 1
    assert stale["gpus"][0]["use_percent"] == 11, "what was seen last"
    assert "cannot be reached" in stale["fault"]
    (tmp_path / "cut").rename(there)
    assert next(node for node in readings if node["stale_s"] is None)["gpus"]


def _list_child_pids(pid: int) -> list[int]:
    """Return the child processes of a process: its connections."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in children for child in file.read_text().split()]


# --- the seed's script, and a launch beside somebody ---


def test_the_example(make_driver: MakeDriver) -> None:
    with run_idle_process("python train.py") as pid:
        driver = make_driver(gpu(0), process(pid, gib=3))
        env = driver.environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        words = f"{EXAMPLE} | grep {get_current_user()}"
        done = subprocess.run(["sh", "-c", words], env=env, capture_output=True, text=True)
    [found] = done.stdout.splitlines()
    assert found == _format_process_line(0, pid, "3.0 GiB", found)


def test_a_launch_warns_of_other_users(make_driver: MakeDriver) -> None:
    with run_idle_process("python train.py") as pid:
        lines = [gpu(0), gpu(1), gpu(2), process(1, on=1, gib=3), process(NOBODY_HERE, on=2)]
        make_driver(*lines, process(ME), process(pid, on=1, gib=50))
        assert describe_other_users(["cuda:0"], {}) == [], "itself"
        [one] = describe_other_users(["cuda:0", "cuda:1"], {})
        assert describe_other_users(["cuda:1"], {"CUDA_VISIBLE_DEVICES": "2,0"}) == []
        assert len(describe_other_users(["cuda:0"], {"CUDA_VISIBLE_DEVICES": "2,0"})) == 1
        assert describe_other_users(["cpu"], {}) == []
    assert one.startswith("GPU 1 is in use: ")
    make_driver(gpu(0, used=9 * GIB, use=50), gpu(1))
    [unseen] = describe_other_users(["cuda:0", "cuda:1"], {})
    assert unseen.startswith("GPU 0 is in use: by a process that is not visible, 9.0 GiB; ")


@pytest.mark.parametrize("shared", [False, True])
def test_another_training_of_the_same_shell_is_another_user(
    make_driver: MakeDriver, shared: bool
) -> None:
    """Unless they are ranks that share a device on purpose."""
    ask = "from echelon.gpus.availability import describe_other_users; "
    ask += f"print(len(describe_other_users(['cuda:0'], {{}}, has_sibling_ranks={shared})))"
    with run_idle_process("python train.py") as beside:
        env = make_driver(gpu(0), process(beside, gib=3)).environment()
        done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True)
    assert done.stdout == f"{0 if shared else 1}\n"
