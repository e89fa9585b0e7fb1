"""`echelon notify`: news of runs, and whether it arrives."""

from __future__ import annotations

import os

from echelon.commands.arguments import make_parser
from echelon.errors import EchelonError, Fault

_HELP = """\
News of a run is asked for with the run, or for all runs in
~/.config/echelon/echelon.yaml (notify: [mail]):
  echelon train notify=mail notify.mail.to=me@example.org …
  echelon train launch=slurm launch.nodes=4 notify=[slack,mail] …
  echelon sweep sweep.yml notify=slack          once for the whole sweep

channels, and what they need (all settings: echelon train --help notify):
  webhook  ECHELON_WEBHOOK_URL     gets JSON, see below
  slack    ECHELON_SLACK_URL       an incoming webhook of Slack or Mattermost
  mail     notify.mail.to, notify.mail.server=HOST:PORT (else sendmail), and
           notify.mail.user with ECHELON_SMTP_PASSWORD where a login is needed
  desktop  notify-send, where you are logged in to a desktop

The variables hold secrets. Put them into the environment, or as KEY=VALUE lines
into a file of mode 0600 that launch.secrets names. They are in no
configuration, log or command line.

events (notify.events, by default all but best):
  started finished stopped    of the run, or of the whole sweep
  failed                      with its one root cause
  nan                         a number is not finite
  stalled                     no progress for notify.stalled_minutes
  requeued                    started again notify.requeues times within a day
  queued                      notify.queued_minutes in Slurm's queue
  lost                        ranks or machines
  best                        a better value, at most once an hour

Each is sent once, also over restarts: RUN/news.jsonl says what was sent. It is
sent by a process beside the one that leads the run, which also tells that its
leader was killed. A server that is down costs a warning, never the training.

A job in the queue has no process. So `queued` is told by --wait, `echelon
attach` and `echelon jobs --watch`, while one of them runs. They also tell of a
job that went down with its machine. Slurm can do that by mail:
  echelon train launch=slurm 'launch.sbatch=[--mail-type=FAIL]' …

A webhook receives a POST of JSON; redirects are not followed:
  {version: 1, event, run, subject, lines: […], time, host, folder, launcher,
   job, step, total_steps, metric: {name, value},
   failure: {rank, host, step, summary, exit}}
What is not known is null. A test and a sweep have fewer fields.

examples:
  echelon notify test notify=slack
  echelon notify test notify=mail notify.mail.to=me@example.org \\
    notify.mail.server=smtp.example.org:587 notify.mail.user=me"""


def notify(words: list[str]) -> int:
    """`echelon notify test`: send a test message."""
    parser = make_parser("notify", "News of runs for your phone: try whether it arrives.", _HELP)
    parser.add_argument("verb", choices=["test"], help="send a test message over the channels")
    parser.add_argument("override", nargs="*", help="notify=[CHANNEL,…] and other settings")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    wrong = [w for w in given.override if not w.startswith(("notify", "launch.secrets="))]
    if wrong:
        raise EchelonError(
            *(Fault(f"{w!r} is not a setting of news", "write notify=…") for w in wrong)
        )
    from echelon.config.defaults_files import read_secrets
    from echelon.entrypoint import compose_config
    from echelon.notify.registry import require_channels
    from echelon.notify.trial_message import send_test_message

    config = compose_config(given.override, program=["true"])
    env = dict(os.environ)
    if config.launch.secrets:
        env |= read_secrets(config.launch.secrets)
    require_channels(config.notify, env)
    return send_test_message(config, env, given.json)
