"""launch=ssh on real sshd: what is started, what is refused, what is left.

Beside the cluster's hosts there are two that share less with this machine: `apart` has a file
system of its own where the test is, `bare` has no Python. Both are sshds in mount namespaces.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_nvml
import pytest
from command_line import FAULTY, REGRESSION, START_S, CommandLine, curve
from command_runner import children, is_a_sentence_and_a_hint, until
from sshd import HIDE, start_sshd

from echelon.config.compose import compose
from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, ExitCode
from echelon.launch.ssh.file_transfer import list_code_files
from echelon.launch.ssh.host_list import list_hosts
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

WORDS = ("train", "launch=ssh", "run.name=a", "trainer.log_steps=1", "launch.threads=1")
SHORT = (REGRESSION, "trainer.batch_size=6", "trainer.steps=12")
LONG = (FAULTY, "trainer.batch_size=8", "trainer.steps=1000000")
OURS = os.environ.get("PYTHONPATH", "")
NASTY = """it's "a" $(touch oops) folder"""


def ssh(command_line: CommandLine) -> str:
    return f"launch.ssh='ssh -F {command_line.cluster.ssh_config}'"


def two(command_line: CommandLine) -> tuple[str, ...]:
    return ssh(command_line), f"launch.hosts=[{','.join(command_line.cluster.nodes[:2])}]"


@pytest.fixture
def nasty(command_line: CommandLine) -> CommandLine:
    command_line.folder = command_line.folder / NASTY
    command_line.folder.mkdir()
    return command_line


# --- as it should be ----------------------------------------------------------------------------


def test_two_hosts_give_the_curve_of_one_machine(nasty: CommandLine) -> None:
    command_line, (first, second, _) = nasty, nasty.cluster.nodes
    hostfile = command_line.folder / "my hosts"
    hostfile.write_text(f"# two each\n{first} slots=2\n\n{second} slots=2  # the other\n")
    done = command_line.type(*WORDS, *SHORT, ssh(command_line), "launch.hostfile='my hosts'")
    assert done.code == ExitCode.OK, done.err
    assert done.left == []
    assert all(line.startswith((f"{first} │", f"{second} │")) for line in done.err.splitlines())
    assert f"{first} │ run a: 12 steps" in done.err
    assert [path.name for path in command_line.folder.iterdir() if path.name == "oops"] == []
    status = command_line.run().read_status_file()
    assert (status["state"], status["launcher"], status["world"]) == ("finished", "ssh", 4)
    assert status["hosts"] == [first, second]
    there = curve(command_line.run())
    local = command_line.type(*WORDS, *SHORT, "launch=local", "launch.procs=4", "run.name=b")
    assert local.code == ExitCode.OK, local.err
    assert there == curve(command_line.run("b"))


def test_secrets_arrive_and_are_nowhere_to_be_read(command_line: CommandLine) -> None:
    canary = secrets.token_hex(16)
    script = "printenv CANARY | wc -c; sleep 2; sleep 1001 & setsid sleep 1002 & exit 3"
    words = ("run", "launch=ssh", "run.name=a", *two(command_line), "launch.carry=[CANARY]")
    command = command_line.start(*words, "--", "sh", "-c", script, CANARY=canary)
    seen = 0
    while command.process.poll() is None:
        seen += canary in _all_command_lines()
        time.sleep(0.1)
    done = command.wait()
    assert seen == 0
    assert "│ 33" in done.out, done.err
    assert done.code == 3, done.err
    assert done.left == [], "not even what a program put into the background"
    texts = [path.read_bytes() for path in command_line.folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if canary.encode() in text]
    assert canary not in done.out + done.err


def _all_command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue  # it has ended
    return "\n".join(found)


# --- hosts that cannot take part ----------------------------------------------------------------


def test_names_that_are_options_reach_no_ssh(tmp_path: Path) -> None:
    option = "-oProxyCommand=touch oops"
    file = tmp_path / "hosts"
    file.write_text(f"n1\n{option}\nn2 slots=many\n\nn3 slots=2 # fine\n")
    with pytest.raises(EchelonError, match=option.split()[0]):
        compose(["launch=ssh", f"launch.hosts=['{option}']"])
    with pytest.raises(EchelonError) as caught:
        list_hosts(LaunchConfig(kind="ssh", hostfile=str(file)))
    assert [fault.what.partition(": ")[0] for fault in caught.value.faults] == [
        f"{file}, line 2",
        f"{file}, line 3",
    ]
    with pytest.raises(EchelonError, match="cannot be read: no such file or directory"):
        list_hosts(LaunchConfig(kind="ssh", hostfile="nowhere"))


def test_all_faults_of_all_hosts_are_told_at_once(nasty: CommandLine, tmp_path: Path) -> None:
    command_line, first = nasty, nasty.cluster.nodes[0]
    with extended(command_line, tmp_path) as config:
        torch, gpus = tmp_path / "torch", tmp_path / "gpus"
        metadata = "Metadata-Version: 2.1\\nName: torch\\nVersion: 9.9.9\\n"
        _write(config, torch / "torch-9.9.9.dist-info" / "METADATA", metadata)
        _write(config, gpus / "scene", "\\n".join(map(fake_nvml.gpu, range(4))))
        _send(config, gpus / fake_nvml.NAME, fake_nvml.build_library())
        words = (*WORDS, *SHORT, f"launch.ssh='ssh -F {config}'")
        there = f"launch.hosts=[{first},gone,liar,new,bare,apart]"
        done = command_line.type(*words, there, PYTHONPATH=f"{torch}:{OURS}")
        unequal = command_line.type(
            *words, f"launch.hosts=[{first},apart]", LD_LIBRARY_PATH=str(gpus)
        )
    assert f"the hosts differ in their visible devices: {first} 0, apart 4" in unequal.err
    assert done.code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(done.err), done.err
    gone, liar, new, bare, apart = (x for x in done.err.splitlines() if x.startswith("error: "))
    assert gone.startswith("error: gone cannot be reached: ssh: connect to host")
    assert liar.startswith("error: liar shows another host key than the one that ssh has in")
    assert new.startswith("error: ssh has never seen new: its host key is in no known_hosts")
    assert bare.startswith(f"error: {sys.executable} is not there on bare:")
    assert apart.startswith("error: torch is 9.9.9 on apart, but")
    assert list((command_line.folder / "runs").iterdir()) == [], "no run, and no token left"
    assert done.left == []


def _write(config: str, path: Path, text: str) -> None:
    """On the host apart."""
    command = f"mkdir -p {path.parent} && printf '{text}' > {path}"
    subprocess.run(["ssh", "-F", config, "apart", command], check=True, timeout=300)


def _send(config: str, path: Path, file: Path) -> None:
    with file.open("rb") as source:
        words = ["ssh", "-F", config, "apart", f"cat > {path}"]
        subprocess.run(words, stdin=source, check=True, timeout=300)


# --- hosts that do not share the folder ---------------------------------------------------------

NEIGHBOUR = "SAMPLES = 24\n"
EXPERIMENT = """\
import torch, echelon, neighbour

def experiment(cfg):
    x = torch.arange(float(neighbour.SAMPLES))[:, None] / neighbour.SAMPLES
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("built from", __file__)
    return echelon.Experiment(model, optimizer, torch.nn.functional.mse_loss, (x, 2 * x))
"""


def test_a_host_apart_is_sent_the_code_and_gives_back_the_run(
    nasty: CommandLine, tmp_path: Path
) -> None:
    command_line = nasty
    (command_line.folder / "neighbour.py").write_text(NEIGHBOUR)
    (command_line.folder / "mine.py").write_text(EXPERIMENT)
    (command_line.folder / ".git").mkdir()
    (command_line.folder / ".git" / "big").write_bytes(bytes(1000))
    words = (*WORDS, "experiment=mine.py:experiment", "trainer.batch_size=6")
    with extended(command_line, tmp_path) as config:
        words = (*words, f"launch.ssh='ssh -F {config}'")  # type: ignore[assignment]
        hosts = f"launch.hosts=[apart,twin,{command_line.cluster.nodes[0]}]"
        done = command_line.type(*words, hosts, "trainer.steps=8")
        assert done.code == ExitCode.OK, done.err
        run = command_line.run()
        assert f"apart │ built from {run.get_code_folder(0)}/mine.py" in done.out
        assert not list(run.folder.glob("code-*")), "they are over there"
        assert (run.read_status_file()["state"], run.read_status_file()["step"]) == ("finished", 8)
        assert run.find_newest_step() == 8
        assert [run.get_rank_log_file(rank).exists() for rank in range(3)] == [True] * 3
        again = command_line.type(*words, "launch.hosts=[twin,apart]", "trainer.steps=12")
        assert again.code == ExitCode.OK, again.err
        assert "resuming run a after step 8" in again.err
        assert [step for step, _ in curve(run)] == list(range(1, 13))
        listed = subprocess.run(
            ["ssh", "-F", config, "apart", f"find '{tmp_path}' -path '*/code-*'"],
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout
    assert "code-1/neighbour.py" in listed
    assert ".git" not in listed


def test_ranks_on_hosts_apart_say_where_they_stand(
    command_line: CommandLine, tmp_path: Path
) -> None:
    """Neither this machine nor the hosts share the folder in which node 0 is asked."""
    second = command_line.cluster.nodes[0]
    with extended(command_line, tmp_path) as config:
        words = (*WORDS, *LONG, f"launch.ssh='ssh -F {config}'", f"launch.hosts=[apart,{second}]")
        command_line.start(*words, "fault=sleep", "on=1", "at=5")

        def ask() -> str:
            done = command_line.type("stacks", "a")
            assert is_a_sentence_and_a_hint(done.err) or done.code == ExitCode.OK, done.err
            return done.out if "rank 1 is not in all_reduce #" in done.out else ""

        text = str(until(ask, START_S, "both ranks stand where they will stay"))
    assert "in _sleep_for_ever" in text
    assert second in text.splitlines()[0]


def test_too_much_code_is_not_sent(tmp_path: Path) -> None:
    for folder in ("data", "runs", "wandb"):
        (tmp_path / folder).mkdir()
        with (tmp_path / folder / "much").open("wb") as file:
            file.truncate(200_000_000)
    (tmp_path / "wandb" / "__init__.py").touch()
    config = Config(experiment={"entry": f"{tmp_path / 'mine.py'}:experiment"})
    with pytest.raises(EchelonError) as caught:
        list_code_files(config, Run(tmp_path / "elsewhere" / "a"))
    said = str(caught.value)
    assert "more than 100 MB: " in said
    assert "data (200 MB)" in said, "and what is big"
    assert "wandb (200 MB)" in said, "a package"
    assert "runs (" not in said
    (tmp_path / "data" / "much").unlink()
    (tmp_path / "wandb" / "much").unlink()
    assert list(list_code_files(config, Run(tmp_path / "elsewhere" / "a"))) == ["wandb/__init__.py"]


# --- ends ---------------------------------------------------------------------------------------


def test_what_is_printed_is_run_and_nothing_is_left_when_it_is_killed(nasty: CommandLine) -> None:
    command_line, hosts = nasty, nasty.cluster.nodes[:2]
    words = (*WORDS, *LONG, *two(command_line), "launch.procs=2")
    plan = json.loads(command_line.type(*words, "--dry-run", "--json").out)
    assert [place["host"] for place in plan["places"]] == [hosts[0]] * 2 + [hosts[1]] * 2
    for host, command in zip(hosts, plan["commands"], strict=True):
        assert command[command.index("--") + 1 : -1] == [host]
    launcher = command_line.start(*words).process
    command_line.wait_for_step(3)
    sessions = [_words(pid) for pid in children(launcher.pid)]
    assert sorted(sessions) == sorted(plan["commands"])
    launcher.kill()
    command_line.require_nothing_left()


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def test_a_silent_link_ends_the_host_and_the_run(command_line: CommandLine) -> None:
    """A halted ssh is one, and disturbs nobody else on these hosts."""
    second = command_line.cluster.nodes[1]
    ends = "launch.max_replacements=0"  # see test_node_survival.py
    command = command_line.start(*WORDS, *LONG, *two(command_line), ends)
    command_line.wait_for_step(3)
    (session,) = [pid for pid in children(command.process.pid) if second in _words(pid)]
    os.kill(session, signal.SIGSTOP)
    command_line.require_nothing_left(second)
    done = command.wait()
    assert done.code == ExitCode.NODE_LOST, done.err
    assert f"node 1 ({second}, rank 1) closed its connection" in done.last_lines
    status = command_line.run().read_status_file()
    assert (status["state"], status["failure"]["exit"]) == ("failed", ExitCode.NODE_LOST)
    assert done.left == []


def test_one_interrupt_saves_and_two_stop_at_once(command_line: CommandLine) -> None:
    carry = "launch.carry=[ECHELON_TEST_PAUSE_S,ECHELON_TEST_FAULT]"
    endless = (REGRESSION, "trainer.batch_size=6", "trainer.steps=1000000")
    words = (*WORDS, *endless, *two(command_line), carry, "trainer.save.epochs=null")
    command = command_line.start(*words, ECHELON_TEST_PAUSE_S="0.1")
    command_line.wait_for_step(3)
    command.process.send_signal(signal.SIGINT)
    done = command.wait()
    assert done.code == ExitCode.PREEMPTED, done.err
    saved = command_line.run().find_newest_step()
    assert saved == command_line.run().read_status_file()["step"] >= 3
    assert "stopped by SIGINT" in done.err
    assert done.left == []

    command = command_line.start(*words, ECHELON_TEST_FAULT="0:5:wait")
    command_line.wait_for_step(saved + 4)
    command.process.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C again stops at once" in command.read_output(), 300, "the first is heard")
    command.process.send_signal(signal.SIGINT)
    done = command.wait()
    assert done.code == ExitCode.INTERRUPTED, done.err
    assert done.last_lines.endswith("stopped at once; the last snapshot is intact")
    assert command_line.run().find_newest_step() == saved
    assert done.left == []


# --- hosts of our own ---------------------------------------------------------------------------


@contextmanager
def extended(command_line: CommandLine, hidden: Path) -> Iterator[str]:
    """A configuration of ssh that knows `apart` and its `twin`, where `hidden` is another folder,
    `bare`, which has no Python, `gone`, which is not there, `liar` with another's key, and
    `new`, which ssh has never seen."""
    host = command_line.cluster.nodes[-1]
    with (
        start_sshd(command_line.cluster, host, [2222, 2224], HIDE, hidden) as apart,
        start_sshd(command_line.cluster, host, [2223], HIDE, Path(sys.executable).parent) as bare,
    ):
        first = command_line.cluster.addresses[command_line.cluster.nodes[0]]
        nobody = first.rpartition(".")[0] + ".99"
        aliases = f"""
Host apart
  HostName {apart}
  Port 2222
  HostKeyAlias {host}
Host twin
  HostName {apart}
  Port 2224
  HostKeyAlias {host}
Host bare
  HostName {bare}
  Port 2223
  HostKeyAlias {host}
Host gone
  HostName {nobody}
Host liar
  HostName {first}
  HostKeyAlias {host}
Host new
  HostName {first}
  HostKeyAlias never-seen
Host *
"""
        common = command_line.cluster.ssh_config.read_text()
        options = [x for x in common.splitlines() if x.split()[0] not in _OF_A_HOST]
        config = command_line.cluster.kind.folder / "ssh" / f"config-{secrets.token_hex(4)}"
        config.write_text(common + aliases + "\n".join(dict.fromkeys(options)) + "\n")
        try:
            yield str(config)
        finally:
            config.unlink()


_OF_A_HOST = ("Host", "HostName", "HostKeyAlias")
