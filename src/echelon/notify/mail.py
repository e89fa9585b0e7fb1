"""Mail: by an SMTP server, encrypted as the server offers it, or by the machine's sendmail."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import shutil
import smtplib
import socket
import ssl
import subprocess
from collections.abc import Mapping
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from echelon.config.schema import MailConfig, NotifyConfig
from echelon.errors import Fault
from echelon.notify.channel import TRY_S, ChannelError
from echelon.notify.message import Message

PASSWORD_VARIABLE = "ECHELON_SMTP_PASSWORD"
_DEFAULT_PORT, _TLS_PORT = 587, 465
_SENDMAIL_FOLDERS = "/usr/sbin:/usr/lib:/sbin"


class Mail:
    """A plain text mail. A password leaves this machine encrypted or not at all."""

    name = "mail"
    secret_variables: tuple[str, ...] = (PASSWORD_VARIABLE,)

    def find_fault(self, config: NotifyConfig, env: Mapping[str, str]) -> Fault | None:
        mail = config.mail
        if mail.server is None:
            if _find_sendmail(env) is None:
                return Fault(
                    "notify has mail, but no server is set, and this machine has no `sendmail`",
                    "set notify.mail.server=HOST:PORT and notify.mail.to=[me@example.org]",
                )
            return None
        if not mail.to:
            return Fault(
                f"notify.mail.server={mail.server}, but nobody is to get the mail",
                "set notify.mail.to=[me@example.org]",
            )
        if mail.user is not None and not env.get(PASSWORD_VARIABLE):
            return Fault(
                f"notify.mail.user={mail.user}, but {PASSWORD_VARIABLE} is not set",
                f"put {PASSWORD_VARIABLE}=… into the environment, or into the file of "
                "launch.secrets",
            )
        return None

    def send(self, message: Message, config: NotifyConfig, env: Mapping[str, str]) -> str:
        mail = config.mail
        composed = _compose(message, mail)
        recipients = mail.to or [getpass.getuser()]
        if mail.server is None:
            _pipe_to_sendmail(composed, recipients, env)
            return f"{', '.join(recipients)} by sendmail"
        host, port = split_server(mail.server)
        try:
            _send_by_server(composed, mail, host, port, env.get(PASSWORD_VARIABLE, ""))
        except smtplib.SMTPAuthenticationError as error:
            why = f"refuses the name or the password ({error.smtp_code})"
            raise ChannelError(f"{host} {why}") from None
        except smtplib.SMTPRecipientsRefused as error:
            refused = [f"{to} ({code})" for to, (code, _) in error.recipients.items()]
            raise ChannelError(f"{host} refuses {', '.join(refused)}") from None
        except smtplib.SMTPResponseException as error:
            may_pass = 400 <= error.smtp_code < 500  # SMTP's word for "later"
            raise ChannelError(f"{host} answered {error.smtp_code}", may_pass) from None
        except ssl.SSLCertVerificationError as error:
            why = f"has a certificate that is not trusted: {error.verify_message}"
            raise ChannelError(f"{host} {why}") from None
        except TimeoutError:
            raise ChannelError(f"{host}: no answer within {TRY_S:g} s", may_pass=True) from None
        except (OSError, smtplib.SMTPException) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise ChannelError(f"{host}: {why}", may_pass=True) from None
        return f"{', '.join(recipients)} by {host}"


def split_server(server: str) -> tuple[str, int]:
    """Return host and port of HOST, HOST:PORT or [ADDRESS]:PORT."""
    bracketed = server.startswith("[")
    host, colon, port = server.rpartition(":")
    if not colon or (bracketed and server.endswith("]")):
        return server.strip("[]"), _DEFAULT_PORT
    return host.strip("[]"), int(port)


def _send_by_server(
    composed: EmailMessage, mail: MailConfig, host: str, port: int, password: str
) -> None:
    tls = ssl.create_default_context()
    with _connect(host, port, tls) as server:
        server.ehlo()
        is_encrypted = port == _TLS_PORT
        if not is_encrypted and server.has_extn("starttls"):
            server.starttls(context=tls)
            server.ehlo()
            is_encrypted = True
        if mail.user is not None:
            if not is_encrypted and not _is_this_machine(server):
                raise ChannelError(
                    f"{host} offers no encryption, so the password is not sent to it"
                )
            server.login(mail.user, password)
        server.send_message(composed, to_addrs=mail.to)


def _connect(host: str, port: int, tls: ssl.SSLContext) -> smtplib.SMTP:
    # The name is given, as smtplib would look its own up, which may take longer than the mail.
    name = "localhost" if not socket.gethostname().isascii() else socket.gethostname()
    if port == _TLS_PORT:
        return smtplib.SMTP_SSL(host, port, name, timeout=TRY_S, context=tls)
    return smtplib.SMTP(host, port, name, timeout=TRY_S)


def _is_this_machine(server: smtplib.SMTP) -> bool:
    """Return whether the other end of the connection is on this machine."""
    if server.sock is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(server.sock.getpeername()[0]).is_loopback
    return False


def _compose(message: Message, mail: MailConfig) -> EmailMessage:
    """Return the mail. The package `email` refuses line ends in headers, and a message has none."""
    host = socket.gethostname()
    composed = EmailMessage()
    composed["Subject"] = message.subject
    user_address = mail.user if mail.user and "@" in mail.user else None
    composed["From"] = mail.sender or user_address or f"{getpass.getuser()}@{host}"
    composed["To"] = ", ".join(mail.to or [getpass.getuser()])
    composed["Date"] = formatdate(localtime=True)
    composed["Message-ID"] = make_msgid(domain="echelon")
    composed["Auto-Submitted"] = "auto-generated"  # so that nobody's holiday note answers
    composed.set_content(message.text + "\n")
    return composed


def _find_sendmail(env: Mapping[str, str]) -> str | None:
    return shutil.which("sendmail", path=f"{env.get('PATH', os.defpath)}:{_SENDMAIL_FOLDERS}")


def _pipe_to_sendmail(
    composed: EmailMessage, recipients: list[str], env: Mapping[str, str]
) -> None:
    program = _find_sendmail(env)
    if program is None:
        raise ChannelError("this machine has no `sendmail`")
    try:
        done = subprocess.run(
            [program, "-i", "--", *recipients],
            input=bytes(composed),
            capture_output=True,
            timeout=TRY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChannelError(f"sendmail: {type(error).__name__}") from None
    if done.returncode:
        raise ChannelError(f"sendmail ended with {done.returncode}")
