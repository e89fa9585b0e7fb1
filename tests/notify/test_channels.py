"""Every channel, with real servers that are well, slow, wrong, or not there."""

from __future__ import annotations

import email
import json
import os
import stat
from pathlib import Path

import pytest
from news_servers import DIRECTLY, LOOPBACK, make_certificate, refusing_port, serve_mail, serve_web
from run_folders import echelon

from echelon.config.compose import compose
from echelon.config.defaults_files import load_defaults
from echelon.config.schema import MailConfig, NotifyConfig
from echelon.notify import channel, deliver, http_post, mail
from echelon.notify.deliver import Delivery
from echelon.notify.message import Message, make_message

CANARY = "c4nary-of-a-secret"
MESSAGE = make_message("failed", "a", "a failed", ["rank 0: out of memory", "host here"])


@pytest.fixture(autouse=True)
def _directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DIRECTLY.items():
        monkeypatch.setenv(name, value)


def send(config: NotifyConfig, message: Message = MESSAGE, **env: str) -> Delivery:
    (found,) = deliver.deliver(message, config, {"PATH": os.environ["PATH"], **env}, tries=1)
    assert CANARY not in found.text
    return found


def mail_to(port: int, user: str | None = None) -> NotifyConfig:
    server = f"{LOOPBACK}:{port}"
    return NotifyConfig(to=["mail"], mail=MailConfig(["me@here.org"], server=server, user=user))


def test_a_webhook_gets_the_documented_body() -> None:
    with serve_web() as sink:
        sent = send(NotifyConfig(to=["webhook"]), ECHELON_WEBHOOK_URL=f"{sink.url}/{CANARY}")
    assert sent == ("webhook", True, LOOPBACK)
    (body,) = sink.received
    assert (body["version"], body["event"], body["run"]) == (1, "failed", "a")
    assert (body["subject"], body["lines"]) == (MESSAGE.subject, list(MESSAGE.lines))


def test_slack_gets_text_in_which_nothing_is_a_command() -> None:
    message = make_message("failed", "a", "a <!channel>", ["x & <y>"])
    with serve_web() as sink:
        sent = send(NotifyConfig(to=["slack"]), message, ECHELON_SLACK_URL=f"{sink.url}/{CANARY}")
    assert sent.is_sent
    assert sink.received == [{"text": "*a &lt;!channel&gt;*\nx &amp; &lt;y&gt;"}]


@pytest.mark.parametrize("status", [301, 302, 307, 308, 404, 500])
def test_a_server_that_does_not_take_it_is_named(status: int) -> None:
    with serve_web() as elsewhere, serve_web(status=status, location=elsewhere.url) as sink:
        sent = send(NotifyConfig(to=["webhook"]), ECHELON_WEBHOOK_URL=f"{sink.url}/{CANARY}")
    assert not sent.is_sent
    assert str(status) in sent.text
    assert elsewhere.received == []


def test_a_server_that_is_down_or_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http_post, mail, channel):
        monkeypatch.setattr(module, "TRY_S", 0.5)
    with refusing_port() as port:
        url = f"http://{LOOPBACK}:{port}/{CANARY}"
        assert "refused" in send(NotifyConfig(to=["webhook"]), ECHELON_WEBHOOK_URL=url).text
        assert "refused" in send(mail_to(port)).text
    with serve_web(is_stuck=True) as sink:
        url = f"{sink.url}/{CANARY}"
        said = send(NotifyConfig(to=["webhook"]), ECHELON_WEBHOOK_URL=url)
        assert said == ("webhook", False, f"{LOOPBACK}: no answer within 0.5 s")
        sink.released.set()


def test_mail_is_encrypted_where_the_server_offers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serve_mail(certificate=certificate, password=CANARY) as sink:
        sent = send(mail_to(sink.port, user="me"), ECHELON_SMTP_PASSWORD=CANARY)
    assert sent == ("mail", True, f"me@here.org by {LOOPBACK}")
    assert (sink.was_encrypted, sink.recipients) == ([True], [["me@here.org"]])
    received = email.message_from_string(sink.mails[0])
    assert received["Subject"] == "a failed"
    assert received.get_payload() == "rank 0: out of memory\nhost here"


def test_mail_may_be_encrypted_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serve_mail(certificate=certificate, is_tls_from_start=True) as sink:
        monkeypatch.setattr(mail, "_TLS_PORT", sink.port)
        assert send(mail_to(sink.port)).is_sent
    assert sink.was_encrypted == [True]


def test_a_certificate_that_is_not_trusted_gets_no_mail(tmp_path: Path) -> None:
    with serve_mail(certificate=make_certificate(tmp_path), password=CANARY) as sink:
        sent = send(mail_to(sink.port, user="me"), ECHELON_SMTP_PASSWORD=CANARY)
    assert "not trusted" in sent.text
    assert sink.mails == []


def test_a_wrong_password_is_said_and_not_shown() -> None:
    with serve_mail(password="another one") as sink:  # it answers with what it was given
        sent = send(mail_to(sink.port, user="me"), ECHELON_SMTP_PASSWORD=CANARY)
    assert sent.text == f"{LOOPBACK} refuses the name or the password (535)"


def test_a_password_does_not_leave_this_machine_unencrypted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mail, "_is_this_machine", lambda server: False)
    with serve_mail(password=CANARY) as sink:
        sent = send(mail_to(sink.port, user="me"), ECHELON_SMTP_PASSWORD=CANARY)
    assert "offers no encryption" in sent.text
    assert not [line for line in sink.commands if line.startswith("AUTH")]


def test_a_name_cannot_add_a_header() -> None:
    name = "a\r\nBcc: all@here.org\n\nhello\x1b[2J"
    message = make_message("failed", name, f"{name} failed", [f"line of {name}", "\n.\n"])
    with serve_mail() as sink:
        assert send(mail_to(sink.port), message).is_sent
    received = email.message_from_string(sink.mails[0])
    assert "Bcc" not in received
    assert sink.recipients == [["me@here.org"]]
    assert received["Subject"].startswith("a Bcc: all@here.org hello")
    assert "\x1b" not in sink.mails[0]


def test_a_message_fits_a_phone() -> None:
    message = make_message("failed", "a", "word " * 100, ["x" * 1000] * 20)
    assert len(message.subject) <= 78
    assert len(message.lines) <= 6
    assert max(map(len, message.lines)) <= 200


def test_sendmail_gets_the_mail(tmp_path: Path) -> None:
    _write_program(tmp_path / "sendmail", f'printf "%s " "$@" > {tmp_path}/to; cat > {tmp_path}/in')
    config = NotifyConfig(to=["mail"], mail=MailConfig(["me@here.org", "you"]))
    assert send(config, PATH=f"{tmp_path}:{os.environ['PATH']}").is_sent
    assert (tmp_path / "to").read_text() == "-i -- me@here.org you "
    assert email.message_from_string((tmp_path / "in").read_text())["Subject"] == "a failed"


def test_a_desktop_gets_subject_and_text(tmp_path: Path) -> None:
    _write_program(tmp_path / "notify-send", f'printf "%s|" "$@" > {tmp_path}/words')
    config = NotifyConfig(to=["desktop"])
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert send(config, PATH=path, DISPLAY=":0").is_sent
    assert (tmp_path / "words").read_text() == (
        "--app-name=echelon|--|a failed|rank 0: out of memory\nhost here|"
    )
    assert "no desktop session" in send(config, PATH=path).text


def _write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_secret_in_a_text_is_hidden() -> None:
    other = "another-of-a-tracker"
    facts = {"failure": {"summary": f"KeyError: {CANARY}", "lines": [f"{other}!"]}}
    message = make_message("failed", "a", "a failed", [f"KeyError: {CANARY} {other}"], facts)
    secrets = {"ECHELON_SLACK_URL": f"https://slack/{CANARY}", "WANDB_API_KEY": other}
    with serve_web() as sink:
        send(NotifyConfig(to=["webhook"]), message, ECHELON_WEBHOOK_URL=sink.url, **secrets)
    assert sink.received[0]["lines"] == ["KeyError: *** ***"]
    assert sink.received[0]["failure"] == {"summary": "KeyError: ***", "lines": ["***!"]}


# --- echelon notify test ------------------------------------------------------------------------


def test_the_command_says_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with serve_web() as sink:
        monkeypatch.setenv("ECHELON_WEBHOOK_URL", f"{sink.url}/{CANARY}")
        monkeypatch.setenv("ECHELON_SLACK_URL", f"{sink.url}/{CANARY}")
        code, out, err = echelon(capsys, "notify", "test", "notify=[webhook,slack]")
        assert (code, out) == (0, f"webhook  sent to {LOOPBACK}\nslack    sent to {LOOPBACK}\n")
        sink.status = 500
        code, out, _ = echelon(capsys, "notify", "test", "notify=webhook", "--json")
        assert code == 1
        answered = f"{LOOPBACK} answered 500"
        found = [{"channel": "webhook", "is_sent": False, "text": answered}]
        assert json.loads(out) == {"version": 1, "channels": found}
    assert CANARY not in out + err
    assert sink.events == ["test", "test"]


def test_secrets_come_from_a_file_of_ones_own_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    secrets = tmp_path / "secrets"
    with serve_web() as sink:
        secrets.write_text(f"ECHELON_WEBHOOK_URL={sink.url}/{CANARY}\n")
        secrets.chmod(0o644)
        (tmp_path / "echelon.yaml").write_text(f"notify: webhook\nsecrets: {secrets}\n")
        code, _, err = echelon(capsys, "notify", "test")
        assert (code, "chmod 600" in err) == (2, True)
        secrets.chmod(0o600)
        assert echelon(capsys, "notify", "test")[0] == 0
    assert len(sink.received) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["notify=webhook"], "ECHELON_WEBHOOK_URL is not set"),
        (["notify=[webhook,phone]"], "'phone' is not one of its choices"),
        (["notify=mail", "notify.mail.to=['a@b>\\nBcc: c@d']"], "is not an address"),
        (["notify=mail", "notify.mail.server=http://here/"], "is not HOST or HOST:PORT"),
        (["notify='https://here/SECRET'"], "has an address, where names belong"),
        (["notify.stalled_minutes=0"], "is not above 0"),
        ([], "no channel is chosen"),
        (["trainer.epochs=2"], "is not a setting of news"),
    ],
)
def test_mistakes_are_faults(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = echelon(capsys, "notify", "test", *words)
    assert code == 2
    assert says in err
    assert "hint:" in err
    assert "SECRET" not in err


@pytest.mark.parametrize(
    ("file", "words", "kind", "channels"),
    [
        ("notify: [mail, desktop]", [], "local", ["mail", "desktop"]),
        ("notify: [mail, desktop]", [], "slurm", ["mail"]),  # a job has no desktop
        ("notify: mail", ["notify=[]"], "local", []),
        ("notify: mail", ["notify=none"], "local", []),
        ("notify:\n  to: slack", ["notify=[webhook]"], "local", ["webhook"]),
        ("notify:\n  mail:\n    to: me@here.org", ["notify=mail"], "local", ["mail"]),
    ],
)
def test_what_is_typed_wins_over_echelon_yaml(
    file: str, words: list[str], kind: str, channels: list[str], tmp_path: Path
) -> None:
    (tmp_path / "echelon.yaml").write_text(file)
    defaults = load_defaults({}, [tmp_path])
    config = compose([f"launch={kind}", *words], defaults=defaults)
    assert config.notify.to == channels
    if "me@" in file:
        assert config.notify.mail.to == ["me@here.org"]


def test_an_address_that_is_none_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (f"file:///{CANARY}", f"https://a b/{CANARY}", CANARY, f"https://h:x/{CANARY}"):
        monkeypatch.setenv("ECHELON_WEBHOOK_URL", value)
        code, _, err = echelon(capsys, "notify", "test", "notify=webhook")
        assert (code, "not an address" in err, CANARY in err) == (2, True, False)
