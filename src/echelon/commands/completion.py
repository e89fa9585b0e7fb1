"""`echelon completion`: what completes command lines in a shell."""

from __future__ import annotations

from importlib.resources import files


def completion(words: list[str]) -> int:
    """`echelon completion SHELL`: print what a shell reads to complete `echelon` lines."""
    if words[:1] == ["--answer"]:  # a shell waits for it: no parser is imported
        from echelon.completion.shell_lines import print_answer

        return print_answer(words[1:])
    from echelon.commands.arguments import make_parser
    from echelon.completion.shell_lines import SHELLS

    parser = make_parser(
        "completion",
        "Print what completes command lines of echelon at the Tab key: commands, options, settings "
        "and their values, runs, sweeps, snapshots, hosts of ssh's configuration, files.",
        """\
To have it in every new shell, type one of these once:

  mkdir -p ~/.local/share/bash-completion/completions
  echelon completion bash > ~/.local/share/bash-completion/completions/echelon

  mkdir -p ~/.zfunc && echelon completion zsh > ~/.zfunc/_echelon
  (and before `compinit` in ~/.zshrc: fpath+=~/.zfunc)

  mkdir -p ~/.config/fish/completions
  echelon completion fish > ~/.config/fish/completions/echelon.fish

In this shell alone: source <(echelon completion bash), the same with zsh, and in fish
echelon completion fish | source

examples:
  echelon train trainer.sch<TAB>             trainer.schedule=
  echelon train trainer.schedule=<TAB>       constant, cosine, linear
  echelon train experiment=my.py:net <TAB>   settings that the file declares
  echelon show <TAB>                         runs in ./runs, or in --dir""",
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(words).shell
    print((files("echelon.completion") / f"echelon.{shell}").read_text("utf-8"), end="")
    return 0
